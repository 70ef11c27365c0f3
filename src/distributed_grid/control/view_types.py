"""Types of the JSON answers: the one description of what `--json` prints, REST returns and the façades return.

`docs/reference/api.md` explains the fields. Answers may have more than these; these do not go away. REST
derives its OpenAPI schemas from them.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from distributed_grid.domain.rebalancing import SharingPolicy
from distributed_grid.monitoring.scheduling_metrics import SchedulingFigures
from distributed_grid.monitoring.snapshots import ClusterSummary


class UnusedBorrowing(TypedDict):
    """A resource that was borrowed for a node and went back after this time because nothing had used it."""

    resource_type: str
    amount: float
    unused_seconds: float


class NodeRow(TypedDict):
    """A node as it is now."""

    node_id: str
    host: str
    role: str
    state: str
    simulated: bool
    cooling: bool
    stopped: bool
    cpu_cores: float
    memory_gb: float
    gpus: int
    custom: dict[str, int]
    cpu_lent: float
    memory_lent_gb: float
    gpus_lent: float
    open: bool
    cpu_free: float
    memory_free_gb: float
    gpus_free: float
    leases: int
    priority: float
    speed: float
    cost_per_hour: float
    labels: dict[str, str]
    tags: list[str]
    keeps: list[str]
    pressure: float | None
    cpu_percent: float | None
    memory_used_gb: float | None
    seconds_since_heard: float | None
    rejected: str | None
    degraded: str | None
    unused_borrowing: list[UnusedBorrowing]
    clock_jump: str | None


class OfferRow(TypedDict):
    """What a node would lend of one kind; of a paused one nothing new is lent before `returns_at` at the earliest."""

    node_id: str
    resource_type: str
    amount: float
    generation: int
    expires_at: str | None
    state: str
    mark_percent: float | None
    measured_percent: float | None
    returns_at: str | None


class NodeList(TypedDict):
    nodes: list[NodeRow]
    omitted: int


class NodeDetail(TypedDict):
    node: NodeRow


class OfferList(TypedDict):
    offers: list[OfferRow]
    omitted: int


class AllocationRow(TypedDict):
    """A lease, alive or ended. `carved_from` are the automatic leases of its node that gave some of it."""

    allocation_id: str
    request_id: str
    job_id: str | None
    node_id: str | None
    target_node: str | None
    resource_type: str
    amount: float
    resources: dict[str, Any]
    gang_id: str | None
    gang_nodes: list[str]
    user: str
    priority: str
    state: str
    fence: int
    requested_at: str | None
    allocated_at: str | None
    expires_at: str | None
    carved_from: list[str]
    reason: str | None
    detail: str | None


class DecisionAlternative(TypedDict):
    """A node that could have been chosen."""

    node_id: str
    score: int
    why: str


class DecisionScore(TypedDict):
    """What a node's score was made of: the strategy's criterion, then room and priority as parts of a node."""

    node_id: str
    score: int
    criterion: str | None
    room: float
    priority: float


class DecisionRow(TypedDict):
    """Where a request goes and why. `confidence` is the probability that the choice is right until its term ends."""

    node_id: str | None
    strategy: str
    confidence: float
    reasoning: list[str]
    alternatives: list[DecisionAlternative]
    scores: list[DecisionScore]
    estimated_start: str | None


class AllocationList(TypedDict):
    allocations: list[AllocationRow]
    omitted: int


class AllocationDetail(TypedDict):
    """One lease; when it is requested also why it waits, node by node, and the decision about it."""

    allocation: AllocationRow
    reasons: NotRequired[list[str]]
    decision: NotRequired[DecisionRow | None]
    already_ended_at: NotRequired[str | None]


class BoostRow(TypedDict):
    """What one node lends to another, alive or ended.

    `recovered`: known only from a file, a claim until its node reports. `enforced_by`: `ray`, or `grid` alone.
    `automatic`: rebalancing asked for it; `amount` is what is left of it and `used_amount` what was used (else None).
    """

    boost_id: str
    source_node: str | None
    target_node: str
    resource_type: str
    amount: float
    user: str
    priority: str
    state: str
    is_active: bool
    recovered: bool
    allocated_at: str | None
    expires_at: str | None
    enforced_by: str
    placement_group: str | None
    automatic: bool
    used_amount: float | None
    reason: str | None
    detail: str | None


class BoostStatus(TypedDict):
    """The boosts that hold something. `totals` is what is active, by type: cores, GPUs, GB."""

    active_boosts: int
    totals: dict[str, float]
    boosts: list[BoostRow]
    persistence_file: str
    warnings: list[str]


class BoostDetail(TypedDict):
    """One boost; None for a dry run. The note, of a new one, says why the preferred source does not lend it."""

    boost: BoostRow | None
    note: NotRequired[str | None]
    already_ended_at: NotRequired[str | None]


class OutcomeRow(TypedDict):
    """How a job or an attempt ended."""

    outcome: str | None
    exit_code: int | None
    signal: int | None
    detail: str | None


class AttemptRow(OutcomeRow):
    """One run of a job's command on one node. `growths` is how often its lease has grown, of which the memory was
    learned; `growth_refused` why it could not when the job last held more."""

    number: int
    allocation_id: str
    node_id: str
    fence: int
    pid: int | None
    cores: list[int]
    memory_limit_gb: float | None
    growths: int
    growth_refused: str | None
    assigned_at: str | None
    started_at: str | None
    checkpoint_at: str | None
    ended_at: str | None


class SizingRow(TypedDict):
    """The memory that the grid gave a job without stated needs, that of its reruns, and how it was found. A job that
    `may_outgrow` it has it as a lease that grows; `reduced_from_gb` is what was learned where the job got what was free
    after a long wait."""

    memory_gb: float
    limits_gb: list[float]
    tier: str
    confidence: float
    samples: int
    overruns: int
    may_outgrow: bool
    reduced_from_gb: float | None


class CheckpointRow(TypedDict):
    """What the next attempt of a job finds in its checkpoint directory, and which attempt left it; None where nothing.
    `awaited_attempt` is the one whose directory is being brought first, `problem` why the last could not be."""

    attempt: int | None
    files: int
    bytes: int
    awaited_attempt: int | None
    problem: str | None


class DeliveryRow(TypedDict):
    """Files of a job that are brought into a directory of its user."""

    state: str
    patterns: list[str]
    directory: str | None
    files: int
    bytes: int
    unchanged: int
    in_place: bool
    beside: dict[str, str]
    protected: list[str]
    executable: list[str]
    skipped: list[str]
    problem: str | None
    ended_at: str | None


class JobRow(OutcomeRow):
    """A job, alive or ended; `result` is what a task has reported, `moved_at` when it was last moved, `detached_at`
    when the command that followed it left it running. `wait_seconds` is how long it waits for its first start; None:
    until it starts or is cancelled."""

    job_id: str
    uid: str
    command: str
    cwd: str | None
    environment_names: list[str]
    user: str
    state: str
    node_id: str | None
    resource_type: str
    amount: float
    resources: dict[str, Any]
    sizing: SizingRow | None
    expected_seconds: float | None
    priority: str
    wait_seconds: float | None
    submitted_at: str | None
    ended_at: str | None
    attempts: list[AttemptRow]
    checkpoint: CheckpointRow | None
    retries_left: int
    restartable: bool
    moved_at: str | None
    detached_at: str | None
    detached_reason: str | None
    result: Any


class JobList(TypedDict):
    """Jobs; `more`: some that ended before are kept, but not listed. `total` counts all that are kept, in any state;
    `omitted`: so many that fit are left out for length."""

    jobs: list[JobRow]
    more: bool
    total: int
    omitted: int


class JobDetail(TypedDict):
    """One job, with the files that are brought back; when it is submitted also why it waits, node by node, and the
    decision about it."""

    job: JobRow
    delivery: NotRequired[DeliveryRow | None]
    reasons: NotRequired[list[str]]
    decision: NotRequired[DecisionRow | None]
    note: NotRequired[str | None]


class RecommendationRow(TypedDict):
    """Work that should move from one node to another."""

    node_id: str
    job_id: str | None
    source_node: str
    target_node: str
    cause: str
    reason: str
    since: str | None


class RecommendationList(TypedDict):
    recommendations: list[RecommendationRow]
    omitted: int


class EventRecord(TypedDict):
    """One event of the audit trail."""

    seq: int
    time: str | None
    type: str
    user: str | None
    subject: str
    job_id: str | None
    node_id: str | None
    reason: str | None
    data: dict[str, Any]


class QueuedRequest(TypedDict):
    """A request in the queue, or one whose end is waited for."""

    allocation_id: str
    job_id: str | None
    user: str
    priority: str
    asked: str
    waited_seconds: float


class WaitReason(TypedDict):
    node_id: str | None
    why: str


_WaitsFor = TypedDict("_WaitsFor", {"for": list[QueuedRequest]})


class WaitingRow(_WaitsFor):
    """Why a request waits. `for` are the leases that have to end first, where its placement is decided."""

    since: str | None
    waited_seconds: float
    gives_up_at: str | None
    position: int | None
    of: int | None
    ahead: list[QueuedRequest]
    estimated_start: str | None
    start_reason: str
    reasons: list[WaitReason]


class PlacementRow(TypedDict):
    """One placement of a job or a lease, and why it was chosen."""

    number: int
    allocation_id: str
    node_id: str
    assigned_at: str | None
    started_at: str | None
    ended_at: str | None
    outcome: str | None
    detail: str | None
    waited_seconds: float | None
    decision: DecisionRow | None
    displaced: list[str]
    made_room_for: dict[str, Any] | None


class MachineEndRow(TypedDict):
    """The announced end of the machine that something is on, and when it has to stop; None: nobody knows when."""

    at: str | None
    stops_at: str | None
    reason: str


class Explanation(TypedDict):
    """Why it waits, why it is there, why it was stopped, when it will start."""

    kind: str
    id: str
    state: str
    waiting: WaitingRow | None
    placements: list[PlacementRow]
    machine_end: MachineEndRow | None
    stopping: str | None
    refusal: dict[str, Any] | None
    end: dict[str, Any] | None
    offloading: dict[str, Any] | None
    events: list[EventRecord]
    moves: NotRequired[list[MoveRow]]
    move: NotRequired[MoveRow]
    unused_borrowing: NotRequired[list[UnusedBorrowing]]


class LentTotals(TypedDict):
    """What was lent, and of that what is still held."""

    leases: int
    core_hours: float
    gb_hours: float
    gpu_hours: float
    held_leases: int
    held_cores: float
    held_gb: float
    held_gpus: float


class LendingRow(LentTotals):
    """Totals of one lender, borrower, pair of them, or day."""

    node_id: NotRequired[str | None]
    user: NotRequired[str | None]
    target_node: NotRequired[str | None]
    day: NotRequired[str | None]


class LendingReport(TypedDict):
    """Who lent whom how much."""

    since: str | None
    until: str | None
    by: str | None
    rows: list[LendingRow]
    lenders: list[LendingRow]
    borrowers: list[LendingRow]
    total: LentTotals


class WorkerRow(TypedDict):
    """A worker of a provider; `price_per_hour` in dollars, None where it is not known.

    `machine_type` is what the provider calls its kind of machine. `ends_at` is when its machine ends by itself or is
    taken away, as far as is known.
    """

    worker_id: str
    provider: str
    worker_type: str
    offer: str
    machine_type: str
    zone: str | None
    market: str | None
    state: str
    node_id: str
    instance_id: str | None
    cpu_cores: float
    memory_gb: float
    gpus: int
    price_per_hour: float | None
    age_seconds: float
    created_at: str | None
    joined_at: str | None
    ended_at: str | None
    ends_at: str | None
    user: str
    reason: str | None
    problem: str | None
    warning: str | None


class ProposalRow(TypedDict):
    """Work on a node, whether and by which way it could run elsewhere, and why. `pid` is None for a job, `job_id` for a
    process. `movable`: it could be moved now, at most its user's consent is missing. `confidence` is from 0 to 1.
    `process` is everything that is known of a process (`domain/processes.py`)."""

    node_id: str
    pid: int | None
    job_id: str | None
    command: str
    process_type: str
    user: str
    cpu_cores: float
    memory_gb: float
    gpu_memory_gb: float
    age_seconds: float
    movable: bool
    recommended: bool
    way: str | None
    target_node: str | None
    confidence: float
    reasons: list[str]
    obstacles: list[str]
    needs_consent: bool
    shape: str | None
    process: dict[str, Any] | None


class ProposalList(TypedDict):
    """Work that could run elsewhere, and the nodes that could not be asked, with the reasons."""

    proposals: list[ProposalRow]
    problems: list[str]


class MoveRow(TypedDict):
    """A move; `waits_for` says what it is waiting for, `end` how it ended (None while it goes on)."""

    move_id: str
    user: str
    source_node: str
    target_node: str
    way: str
    state: str
    waits_for: str | None
    reason: str
    automatic: bool
    pid: int | None
    job_id: str | None
    command: str
    requested_at: str | None
    state_since: str | None
    shipped_bytes: int
    left_out_files: list[str]
    frozen_seconds: float | None
    problem: str | None
    end: str | None
    ended_at: str | None
    result: str | None
    returned_files: int
    kept_files: list[str]
    notes: list[str]


class MoveList(TypedDict):
    """Moves; `more`: some that ended before are kept, but not listed."""

    moves: list[MoveRow]
    more: bool


class MoveDetail(TypedDict):
    move: MoveRow


class ConsentRow(TypedDict):
    """A command shape whose processes in this directory their user allows to be restarted elsewhere, with these
    variables of theirs. Without a directory it was given to an earlier version, and covers nothing."""

    user: str
    shape: str
    directory: str | None
    variables: list[str]
    given_at: str | None


class ConsentList(TypedDict):
    consents: list[ConsentRow]


class ConsideredJob(TypedDict):
    """A job that automatic offloading has looked at, and why it was moved or left."""

    job_id: str
    reason: str


class AutoOffloadLook(TypedDict):
    """What the last look of automatic offloading at a node decided, and why."""

    node_id: str
    at: str | None
    reason: str
    jobs: list[ConsideredJob]


class AutoOffloadView(TypedDict):
    """Whether work moves by itself, by whose word, and what became of it; `stopped` says why it stopped itself."""

    enabled: bool
    configured: bool
    set_by: str | None
    set_at: str | None
    stopped: str | None
    failures: int
    last_move_at: str | None
    thresholds: dict[str, float]
    check_interval_seconds: float
    cooldown_seconds: float
    degraded: dict[str, str]
    nodes: list[AutoOffloadLook]


class AutoOffloadStatus(TypedDict):
    auto_offload: AutoOffloadView


class CommandAdvice(TypedDict):
    """Where a command had better start: `elsewhere` on `target_node`, or here; and why."""

    elsewhere: bool
    target_node: str | None
    reason: str


class CoreHourBudget(TypedDict):
    """The core-hours that workers of a provider have used today (UTC) and may by midnight, and the limit."""

    core_hours_today: float
    by_midnight: float
    budget_core_hours: float


class WorkerBudget(TypedDict):
    """What workers cost an hour, have cost today (UTC) and will by midnight, in dollars, and the limits.

    `core_hours` has the providers with a budget of core-hours.
    """

    per_hour: float
    spent_today: float
    by_midnight: float
    budget_per_hour: float | None
    budget_per_day: float | None
    core_hours: dict[str, CoreHourBudget]


class WorkerList(TypedDict):
    """Workers, and what they cost; in a list `more`: some that were proven gone before are kept, but not listed."""

    workers: list[WorkerRow]
    budget: WorkerBudget
    more: NotRequired[bool]


class WorkerOfferRow(TypedDict):
    """What a provider can start; `closed` says why it is not tried at present."""

    provider: str
    offer: str
    worker_type: str
    cpu_cores: float
    memory_gb: float
    gpus: int
    price_per_hour: float | None
    zone: str | None
    market: str | None
    closed: str | None


class ScalingDemand(TypedDict):
    """Waiting requests that a worker would serve, how many of them nothing serves that is there or comes, and those
    that do not count, by the reason."""

    requests: int
    unmet: int
    not_counted: dict[str, int]


class ProviderSpending(TypedDict):
    """What the workers of one provider cost an hour, and have cost today (UTC), in dollars and in core-hours.

    `budget_core_hours` is what a day may use of them, None where that is not limited.
    """

    provider: str
    workers: int
    per_hour: float
    spent_today: float
    core_hours_today: float
    budget_core_hours: float | None


class ScalingStatus(TypedDict):
    """How scaling stands; utilization is the mean of the window, above 1 where more waits than there is.

    A cooldown is how many seconds are left of it; `idle` says for how many seconds each idle worker has been so.
    `expected_load` is counted in workers, None where none is forecast; `warm_workers` are kept because of it.
    """

    provider: str | None
    problem: str | None
    min_workers: int
    max_workers: int
    workers: dict[str, int]
    idle: dict[str, float]
    window_seconds: float
    utilization: dict[str, float]
    demand: ScalingDemand
    scale_up_cooldown: float
    scale_down_cooldown: float
    expected_load: float | None
    warm_workers: int
    budget: WorkerBudget
    spending: list[ProviderSpending]


class WorkerNeeds(TypedDict):
    """What each new worker has."""

    cpu_cores: float
    memory_mb: int
    gpu_count: int


class ScalingDecisionRow(TypedDict):
    """What scaling does or would do: start `count` workers of a type, or give back those of `worker_ids`.

    With `scale_up`, `worker_ids` are draining workers that are kept. Prices are in dollars.
    """

    action: str
    reason: str
    count: int
    worker_ids: list[str]
    utilization: float
    bottleneck: str
    worker_type: str | None
    offer: str | None
    resource_requirements: WorkerNeeds | None
    provider: str | None
    price_per_hour: float | None


class ScalingPlanView(TypedDict):
    """A decision, what it costs an hour and until midnight (UTC), and what all workers cost then."""

    decision: ScalingDecisionRow
    cost_per_hour: float | None
    cost_until_midnight: float | None
    budget: WorkerBudget


class JoinAnswer(TypedDict):
    """The name under which a node joined."""

    node: str
    joined_at: str | None


class Health(TypedDict):
    status: str


class ErrorBody(TypedDict):
    type: str
    message: str
    reasons: list[str]


class ErrorAnswer(TypedDict):
    """Why a request failed."""

    error: ErrorBody


class ResourceStatus(TypedDict):
    """What `ResourceSharingManager.get_resource_status` returns."""

    enabled: bool
    mode: str
    policy: SharingPolicy
    offers: list[OfferRow]
    allocations: list[AllocationRow]
    waiting: int


class SchedulingStatus(SchedulingFigures):
    """What `IntelligentScheduler.get_scheduling_status` returns: the figures, and what is going on."""

    strategy: str
    open_nodes: list[str]
    allocations: list[AllocationRow]
    running_jobs: int
    waiting: int


class ClusterStatus(TypedDict):
    """What `ResourceSharingOrchestrator.get_cluster_status` returns."""

    name: str
    enabled: bool
    mode: str
    policy: SharingPolicy
    nodes: list[NodeRow]
    offers: list[OfferRow]
    allocations: list[AllocationRow]
    jobs: list[JobRow]
    recommendations: list[RecommendationRow]
    waiting: int
    summary: ClusterSummary
    scheduling: SchedulingFigures


class BlockRow(TypedDict):
    """A block of the memory pool."""

    block_id: str
    name: str
    size: int
    user: str
    state: str
    copies: int
    nodes: list[str]
    on_disk: bool
    generation: int
    created_at: str
    expires_at: str
    term_seconds: float
    session: bool
    meta: str
    detail: str


class LenderRow(TypedDict):
    """What a node lends to the memory pool."""

    node: str
    blocks: int
    bytes: int
    free_bytes: int
    serving: bool
    address: str


class MemoryStats(TypedDict):
    """What `DistributedMemoryPool.stats` returns."""

    blocks: int
    bytes: int
    bytes_on_disk: int
    moving: int
    lost: int
    nodes: list[LenderRow]
    transfers: dict[str, float]


class PredictionRow(TypedDict):
    """What the next run of a task needs, of its `key`, by which runs are told apart; None is not known.

    Memory is the limit that a job without stated needs gets, and `rerun_memory_mb` are those of its reruns should it
    run over; the run time is the median, and the cores are those that a run keeps busy.
    """

    key: str
    user: str
    tier: str
    confidence: float
    tier_confidences: dict[str, float]
    samples: int
    memory_mb: float | None
    rerun_memory_mb: list[float]
    cpu_cores: float | None
    gpu_memory_mb: float | None
    run_seconds: float | None
    why: list[str]


class TaskTypeRow(TypedDict):
    """A type of task that has a history; the tier is None where its predictor is not in memory, and `trained_at` where
    it was not trained since it is there."""

    key: str
    user: str
    samples: int
    last_run_at: str | None
    tier: str | None
    confidence: float | None
    trained_at: str | None


class TrainingRow(TypedDict):
    """A type that was trained: its tier and held-out coverage, and those before where its predictor was in memory."""

    key: str
    user: str
    samples: int
    tier_before: str | None
    confidence_before: float | None
    tier: str
    confidence: float


class TrainingReport(TypedDict):
    """What was trained, and what was folded into summaries."""

    trained: list[TrainingRow]
    folded_runs: int
    seconds: float


class ExecutionRecord(TypedDict):
    """A run that was recorded; `known` where it was recorded before."""

    task_id: str
    attempt: int
    key: str
    known: bool
    samples: int


class BatchScaling(TypedDict):
    """Factors of what a task takes with another batch size; with `defaults` nothing is known, and they are in
    proportion to the batch."""

    key: str
    tier: str
    samples: int
    memory: float
    run_time: float
    cpu_time: float


class ClockRow(TypedDict):
    """The wall clock of the control plane (`node_id` is None) or of a node; None: no jump is pending."""

    node_id: str | None
    jumped_seconds: float | None
    waits_seconds: float | None


class ClockList(TypedDict):
    """The wall clocks of the grid."""

    clocks: list[ClockRow]
