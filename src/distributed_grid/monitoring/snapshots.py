"""What each node does at this moment, as people are told it: cores, GB, percent, UTC.

A node that was not heard from of late has no measurements at all (None): it is neither idle nor full.
"""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec import Struct

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, NodeObservation, Usage
from distributed_grid.domain.states import NodeState
from distributed_grid.monitoring.pressure import cpu_part, gpu_part, memory_part, pressure
from distributed_grid.reactor.nodes import SUSPECT_AFTER_MS

GB = 1024**3
_HEARD = frozenset({NodeState.ALIVE, NodeState.DRAINING})


class ResourceSnapshot(Struct, frozen=True):
    """One node at one moment; what is measured is None unless the node is known."""

    node_id: str
    state: str
    known: bool
    timestamp: str | None
    seconds_since_heard: float | None
    cpu_cores: float
    memory_gb: float
    gpus: int
    cpu_percent: float | None
    cpu_outside_percent: float | None
    memory_percent: float | None
    memory_used_gb: float | None
    memory_outside_gb: float | None
    gpu_percent: float | None
    gpu_memory_used_gb: float | None
    pressure: float | None
    cpu_lent: float
    memory_lent_gb: float
    gpus_lent: float


def fresh_usage(node: Node, seen: NodeObservation | None, now: int) -> Usage | None:
    """What a node was just measured to do; None where it is unknown."""
    if seen is None or node.state not in _HEARD or now - seen.at_ms > SUSPECT_AFTER_MS:
        return None
    return seen.usage


def silence_seconds(seen: NodeObservation | None, now: int) -> float | None:
    """How long ago a node was heard; None where it never was since the control plane started."""
    return (now - seen.at_ms) / 1000 if seen is not None and seen.at_ms else None


def snapshots(ledger: Ledger, now: int, offset_ms: int = 0) -> list[ResourceSnapshot]:
    """Every node of the ledger; `offset_ms` is how far the wall clock is ahead of the grid's own time."""
    return [_snapshot(ledger, node, now, offset_ms) for node in ledger.nodes.values()]


def _snapshot(ledger: Ledger, node: Node, now: int, offset_ms: int) -> ResourceSnapshot:
    seen = ledger.sightings.get(node.name)
    usage = fresh_usage(node, seen, now)
    book, has = ledger.book(node.name), node.capacity
    measured = usage is not None and bool(usage.gpus)
    gpu = gpu_part(usage) if usage is not None else None
    return ResourceSnapshot(
        node_id=node.name,
        state=str(node.state),
        known=usage is not None,
        timestamp=utc(seen.at_ms + offset_ms) if seen is not None and seen.at_ms else None,
        seconds_since_heard=silence_seconds(seen, now),
        cpu_cores=has.cpu_milli / 1000,
        memory_gb=gigabytes(has.memory_bytes),
        gpus=len(has.gpus),
        cpu_percent=_percent(cpu_part(usage)) if usage is not None else None,
        cpu_outside_percent=usage.cpu_outside_milli / 10 if usage is not None else None,
        memory_percent=_percent(memory_part(has, usage)) if usage is not None else None,
        memory_used_gb=gigabytes(usage.memory_bytes) if usage is not None else None,
        memory_outside_gb=gigabytes(usage.memory_outside_bytes) if usage is not None else None,
        gpu_percent=_percent(gpu) if gpu is not None else None,
        gpu_memory_used_gb=gigabytes(sum(g.in_use_bytes for g in usage.gpus)) if usage and measured else None,
        pressure=pressure(has, usage) if usage is not None else None,
        cpu_lent=book.cpu_milli / 1000,
        memory_lent_gb=gigabytes(book.memory_bytes),
        gpus_lent=sum(book.gpu_milli.values()) / 1000,
    )


def utc(wall_ms: int) -> str:
    """A moment of the wall clock as people write it, in UTC."""
    moment = datetime.fromtimestamp(wall_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def gigabytes(size: int) -> float:
    return round(size / GB, 3)


def _percent(part: float) -> float:
    return round(100 * part, 1)
