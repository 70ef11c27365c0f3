"""Types of the JSON answers that are no structs yet, and of the dictionaries that façades return."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from distributed_grid.api.answers.metrics import ClusterSummary, SchedulingFigures
from distributed_grid.domain.rebalancing import SharingPolicy

# As façades return them, with the fields of the answers of these names.
AllocationRow = dict[str, Any]
BoostRow = dict[str, Any]
BoostStatus = dict[str, Any]
JobRow = dict[str, Any]
NodeRow = dict[str, Any]
OfferRow = dict[str, Any]
RecommendationRow = dict[str, Any]


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
