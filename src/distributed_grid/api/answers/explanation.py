"""Explanations: why a request waits, was placed, was stopped, and when it starts."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType, field

from distributed_grid.api.answers.common import Answer, AskedResources
from distributed_grid.api.answers.jobs import JobRow
from distributed_grid.api.answers.leases import AllocationRow, DecisionRow
from distributed_grid.api.answers.nodes import UnusedBorrowing
from distributed_grid.api.answers.offloading import AutoOffloadLook, MoveRow
from distributed_grid.api.answers.reports import EventRecord
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.scheduling.queue.reasons import describe_amounts


class QueuedRequest(Answer, frozen=True, kw_only=True):
    """A request in the queue, or one whose end is waited for."""

    allocation_id: str
    job_id: str | None
    user: str
    priority: str
    asked: str
    waited_seconds: float

    @classmethod
    def of(cls, ledger: Ledger, lease: Lease, now: int) -> QueuedRequest:
        job = ledger.jobs.get(lease.job)
        return cls(
            allocation_id=lease.id,
            job_id=job.id if job is not None else None,
            user=lease.request.user,
            priority=lease.request.priority.name.lower(),
            asked=describe_amounts(lease.request.ask),
            waited_seconds=(now - lease.asked_at_ms) / 1000,
        )


class WaitReason(Answer, frozen=True):
    """A reason why one node does not serve a request; that of a quota or a worker has no node."""

    node_id: str | None
    why: str


class WaitingRow(Answer, frozen=True, kw_only=True):
    """Why a request waits."""

    since: str | None
    waited_seconds: float
    for_: list[QueuedRequest] = field(name="for")  # leases that have to end first, where its placement is decided
    gives_up_at: str | None = None
    position: int | None = None
    of: int | None = None
    ahead: list[QueuedRequest] = field(default_factory=list)
    estimated_start: str | None = None
    start_reason: str
    reasons: list[WaitReason] = field(default_factory=list)


class PreemptorRow(Answer, frozen=True):
    """The request that made a lease end; its job and user are unknown where it ended before the kept history."""

    allocation_id: str | None
    job_id: str | None
    user: str | None
    reason: str


class PlacementRow(Answer, frozen=True, kw_only=True):
    """One placement of a job or a lease, and why it was chosen; that of a job has all fields of its attempt."""

    number: int
    allocation_id: str
    node_id: str
    assigned_at: str | None
    started_at: str | None
    ended_at: str | None
    outcome: str | None
    detail: str | None
    waited_seconds: float | None = None
    decision: DecisionRow | None = None
    displaced: list[str] = field(default_factory=list)
    made_room_for: PreemptorRow | None = None
    exit_code: int | UnsetType | None = UNSET
    signal: int | UnsetType | None = UNSET
    cpu_seconds: float | UnsetType = UNSET
    max_memory_gb: float | UnsetType = UNSET
    wall_seconds: float | UnsetType = UNSET
    shell_code: int | UnsetType = UNSET
    fence: int | UnsetType = UNSET
    pid: int | UnsetType | None = UNSET
    cores: list[int] | UnsetType = UNSET
    memory_limit_gb: float | UnsetType | None = UNSET
    growths: int | UnsetType = UNSET
    growth_refused: str | UnsetType | None = UNSET
    checkpoint_at: str | UnsetType | None = UNSET


class MachineEndRow(Answer, frozen=True):
    """The announced end of the machine that something is on, and when it has to stop; None where it is unknown."""

    at: str | None
    stops_at: str | None
    reason: str


class RefusalRow(Answer, frozen=True):
    at: str | None
    reason: str


class EndRow(Answer, frozen=True):
    at: str | None
    reason: str | None
    detail: str | None


class DegradedRow(Answer, frozen=True):
    since: str | None
    why: str


class OffloadingRow(Answer, frozen=True, kw_only=True):
    """The last evaluation of automatic offloading: of a job on its node, or (`look`) of a node."""

    at: str | UnsetType | None = UNSET
    node_id: str | UnsetType = UNSET
    node_reason: str | UnsetType = UNSET
    reason: str | UnsetType | None = UNSET
    look: AutoOffloadLook | UnsetType | None = UNSET
    degraded: str | DegradedRow | None  # of a job: why its node is; of a node: since when


class Explanation(Answer, frozen=True, kw_only=True):
    """Why it waits, why it is there, why it was stopped, when it will start."""

    kind: str  # job, lease, move, node or request (a refused one)
    id: str
    state: str
    request_id: str | UnsetType = UNSET
    user: str | UnsetType | None = UNSET
    team: str | UnsetType | None = UNSET
    asked: str | UnsetType = UNSET
    resources: AskedResources | UnsetType = UNSET
    priority: str | UnsetType = UNSET
    requested_at: str | UnsetType | None = UNSET
    job_id: str | UnsetType | None = UNSET
    job: JobRow | UnsetType = UNSET
    allocation: AllocationRow | UnsetType = UNSET
    move: MoveRow | UnsetType = UNSET
    waiting: WaitingRow | None = None
    placements: list[PlacementRow] = field(default_factory=list)
    machine_end: MachineEndRow | None = None
    stopping: str | None = None
    refusal: RefusalRow | None = None
    end: EndRow | None = None
    offloading: OffloadingRow | None = None
    unused_borrowing: list[UnusedBorrowing] | UnsetType = UNSET
    events: list[EventRecord]
    moves: list[MoveRow] | UnsetType = UNSET

    @classmethod
    def of_request(cls, request: Request, **fields: Any) -> Explanation:
        """With the fields that show the request."""
        return cls(
            request_id=request.id,
            team=request.team or None,
            asked=describe_amounts(request.ask),
            resources=AskedResources.of(request.ask),
            priority=request.priority.name.lower(),
            **fields,
        )
