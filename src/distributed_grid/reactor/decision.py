"""Decision of a decider: changed rows, audit records with their details, answer, follow-ups."""

from __future__ import annotations

from typing import Any, Literal, get_args

from msgspec import Struct, field

from distributed_grid.domain.blocks import Block
from distributed_grid.domain.followups import Cause
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.moves import Move
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.rows import Row
from distributed_grid.domain.workers import ScalingPlan, Worker
from distributed_grid.scheduling.placement.explanation import Choice

RecordType = Literal[
    "requested", "queued", "granted", "refused", "withdrawn", "started", "stopping", "stopped", "preempted", "requeued",
    "paused", "resumed", "released", "expired", "extended", "recovered", "confirmed", "late-report", "bound",
    "found-bound", "rebinding", "engine-registered", "engine-session", "engine-found", "engine-lost", "engine-removed",
    "node-declared", "node-alive", "node-suspect", "node-lost", "node-draining", "node-resumed", "node-stopped",
    "node-kept", "node-forgotten", "node-epoch", "agent-rejected", "reports-omitted", "alert-raised", "alert-cleared",
    "rebalanced", "recommended", "block-moving", "block-moved", "block-not-moved", "copy-lost", "block-lost",
    "block-released", "block-expired", "block-named", "worker-wanted", "worker-booting", "worker-joined",
    "worker-draining", "worker-resumed", "worker-terminating", "worker-gone", "worker-problem", "worker-stray",
    "offer-closed", "budget-exceeded", "outputs-kept", "not-scaled", "end-announced", "end-withdrawn",
    "move-requested", "move-advanced", "move-ended", "move-consent", "auto-offload", "node-degraded", "node-restored",
    "checkpoint-shipped", "files-delivered", "files-not-delivered", "files-fetched", "detached", "clock-jumped",
    "clock-confirmed", "clock-steady", "grown", "not-grown", "reduced",
]  # fmt: skip
RECORD_TYPES: tuple[str, ...] = get_args(RecordType)

MAX_LEASES_PER_STEP = 100
"""Leases of a node that are ended or reclaimed in one step, so that it does not take long; the next follows at once."""


class Record(Struct, frozen=True):
    """One record of the audit trail: what happened to whom, where and why; `data` is JSON."""

    type: RecordType
    user: str
    subject: str
    node: str = ""
    reason: str = ""
    data: dict[str, Any] = field(default_factory=dict)


class LeaseAnswer(Struct, frozen=True):
    """A lease as it stands after the event."""

    lease: Lease
    reasons: tuple[str, ...] = ()  # of its wait
    choice: Choice | None = None  # of its place


class JobAnswer(Struct, frozen=True):
    """A job as it stands after the event."""

    job: Job
    lease: Lease | None = None
    reasons: tuple[str, ...] = ()  # of its wait
    choice: Choice | None = None  # of its place


class BlockAnswer(Struct, frozen=True):
    block: Block


class WorkerAnswer(Struct, frozen=True):
    worker: Worker


class MoveAnswer(Struct, frozen=True):
    move: Move


class ScalingAnswer(Struct, frozen=True):
    plan: ScalingPlan


Answer = LeaseAnswer | JobAnswer | BlockAnswer | WorkerAnswer | ScalingAnswer | MoveAnswer | None


class Decision(Struct):
    """Outcome of one decider."""

    changes: list[Row] = field(default_factory=list)  # rows in their new state
    records: list[Record] = field(default_factory=list)
    answer: Answer = None
    follow: list[Cause] = field(default_factory=list)  # events and follow-ups of the same step
    choice: Choice | None = None  # reason of a placement
    later: list[Cause] = field(default_factory=list)  # for a later step; a tick finds all of it again if it is lost


AuditData = dict[str, str | int | list[str]]


def request_details(request: Request, now: int, *, retries: int = 0) -> AuditData:
    """The request in numbers, without defaults."""
    ask = request.ask
    data: AuditData = {
        "cpu_milli": ask.cpu_milli,
        "memory_bytes": ask.memory_bytes,
        "gpu_milli": ask.gpu_milli,
        "gpu_memory_bytes": ask.gpu_memory_bytes,
        "gpu_models": [*ask.gpu_models],
        "custom": _pairs(ask.custom),
        "duration_ms": request.duration_ms,
        "expects_ms": request.expects_ms,
        "deadline_in_ms": max(request.deadline_ms - now, 0),
        "strategy": str(request.strategy or ""),
        "team": request.team,
        "target": request.target,
        "prefer": [*request.prefer],
        "require": [*request.require],
        "labels": [f"{key}={value}" for key, value in request.labels],
        "affinity": [*request.affinity],
        "anti_affinity": [*request.anti_affinity],
        "group": request.group,
        "gang": request.gang if request.gang > 1 else 0,
        "retries": retries,
    }
    usual = {name: value for name, value in data.items() if value}
    return {**usual, "priority": request.priority.name.lower(), "wait_ms": request.wait_ms}


def capacity_details(capacity: Capacity) -> AuditData:
    """The capacity of a node in numbers."""
    data: AuditData = {
        "cpu_milli": capacity.cpu_milli,
        "memory_bytes": capacity.memory_bytes,
        "gpus": [device.name for device in capacity.gpus],
        "gpu_memory_bytes": max((device.memory_bytes for device in capacity.gpus), default=0),
        "custom": _pairs(capacity.custom),
    }
    return {name: value for name, value in data.items() if value}


def _pairs(custom: tuple[tuple[str, int], ...]) -> list[str]:
    return [f"{name}={count}" for name, count in custom]
