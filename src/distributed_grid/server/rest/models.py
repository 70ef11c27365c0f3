"""The shapes of the answers, for OpenAPI: the same fields that `--json` prints. Answers may have more than these."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Shape(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(extra="allow")


class ErrorBody(Shape):
    type: str
    message: str
    reasons: list[str] = []


class Error(Shape):
    """Whatever went wrong."""

    error: ErrorBody


class Health(Shape):
    status: str = "ok"


class Node(Shape):
    node_id: str
    host: str
    role: str
    state: str
    cooling: bool
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


class Nodes(Shape):
    nodes: list[Node]


class OneNode(Shape):
    node: Node


class Offer(Shape):
    node_id: str
    resource_type: str
    amount: float
    generation: int
    expires_at: str | None


class Offers(Shape):
    offers: list[Offer]


class Recommendation(Shape):
    node_id: str
    job_id: str | None
    source_node: str
    target_node: str
    cause: str
    reason: str
    since: str | None


class Recommendations(Shape):
    recommendations: list[Recommendation]


class Allocation(Shape):
    allocation_id: str
    request_id: str
    job_id: str | None
    node_id: str | None
    target_node: str | None
    gang_id: str | None
    gang_nodes: list[str]
    resource_type: str
    amount: float
    resources: dict[str, Any]
    user: str
    priority: str
    state: str
    fence: int
    requested_at: str | None
    allocated_at: str | None
    expires_at: str | None
    reason: str | None
    detail: str | None


class Allocations(Shape):
    allocations: list[Allocation]


class Boost(Shape):
    boost_id: str
    source_node: str | None
    target_node: str
    resource_type: str
    amount: float
    user: str
    priority: str
    state: str
    is_active: bool
    recovered: bool = Field(description="Known only from a file: a claim until its node was heard.")
    allocated_at: str | None
    expires_at: str | None
    enforced_by: str = Field(description="`ray`, or `grid` alone.")
    placement_group: str | None
    reason: str | None
    detail: str | None


class Boosts(Shape):
    active_boosts: int
    totals: dict[str, float] = Field(description="What is active, by type: cores, GPUs, GB.")
    boosts: list[Boost]
    persistence_file: str
    warnings: list[str]


class OneBoost(Shape):
    boost: Boost | None = Field(description="None for a dry run.")


class Alternative(Shape):
    node_id: str
    score: int
    why: str


class Decision(Shape):
    node_id: str | None
    strategy: str
    confidence: float = Field(description="The probability that the choice is still right at the end of its term.")
    reasoning: list[str]
    alternatives: list[Alternative]
    estimated_start: str | None


class OneAllocation(Shape):
    allocation: Allocation
    reasons: list[str] = Field(default=[], description="Why it waits, node by node.")
    decision: Decision | None = Field(default=None, description="Where it goes and why; told when it is asked for.")


class Outcome(Shape):
    outcome: str | None
    exit_code: int | None
    signal: int | None
    detail: str | None


class Attempt(Outcome):
    number: int
    allocation_id: str
    node_id: str
    fence: int
    pid: int | None
    cores: list[int]
    assigned_at: str | None
    started_at: str | None
    checkpoint_at: str | None
    ended_at: str | None


class Job(Outcome):
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
    priority: str
    submitted_at: str | None
    ended_at: str | None
    attempts: list[Attempt]
    retries_left: int


class Jobs(Shape):
    jobs: list[Job]


class OneJob(Shape):
    job: Job
    reasons: list[str] = Field(default=[], description="Why it waits, node by node.")
    decision: Decision | None = Field(default=None, description="Where it goes and why; told when it is submitted.")


class Neighbour(Shape):
    allocation_id: str
    job_id: str | None
    user: str
    priority: str
    asked: str
    waited_seconds: float


class Reason(Shape):
    node_id: str | None
    why: str


class Waiting(Shape):
    since: str | None
    waited_seconds: float
    gives_up_at: str | None
    position: int | None
    of: int | None
    ahead: list[Neighbour]
    for_: list[Neighbour] = Field(alias="for", description="Who has to go first, where its place is decided.")
    estimated_start: str | None
    start_reason: str
    reasons: list[Reason]


class Placed(Shape):
    number: int
    allocation_id: str
    node_id: str
    assigned_at: str | None
    started_at: str | None
    ended_at: str | None
    outcome: str | None
    detail: str | None
    waited_seconds: float | None
    decision: Decision | None
    displaced: list[str]
    made_room_for: dict[str, Any] | None


class Event(Shape):
    seq: int
    time: str | None
    type: str
    user: str | None
    subject: str
    job_id: str | None
    node_id: str | None
    reason: str | None
    data: dict[str, Any]


class Explanation(Shape):
    """Why it waits, why it is there, why it was stopped, when it will start."""

    kind: str
    id: str
    state: str
    waiting: Waiting | None
    placements: list[Placed]
    stopping: str | None
    refusal: dict[str, Any] | None
    end: dict[str, Any] | None
    events: list[Event]


class Lent(Shape):
    leases: int
    core_hours: float
    gb_hours: float
    gpu_hours: float
    held_leases: int
    held_cores: float
    held_gb: float
    held_gpus: float


class LentRow(Lent):
    node_id: str | None = None
    user: str | None = None
    target_node: str | None = None
    day: str | None = None


class LendingLedger(Shape):
    since: str | None
    until: str | None
    by: str | None
    rows: list[LentRow]
    lenders: list[LentRow]
    borrowers: list[LentRow]
    total: Lent


class Joined(Shape):
    node: str
    joined_at: str | None
