"""The cluster as one: what there is, what is used, idle and lent, and about whom nothing is known.

Rule 1: of each resource, total = used + idle + unknown; what an unheard node has is unknown.
Rule 2: pressure is about known nodes only; where there is none, there is no pressure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypedDict

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.monitoring.pressure import pressure
from distributed_grid.monitoring.snapshots import GB, fresh_usage, silence_seconds


class ResourceSum(TypedDict):
    """One resource of the whole cluster, in cores, GB or GPUs."""

    total: float
    used: float
    idle: float
    unknown: float
    lent: float


class UnknownNode(TypedDict):
    """A node nobody has heard of late; `seconds_since_heard` is None where it never was since the start."""

    node_id: str
    state: str
    seconds_since_heard: float | None


class PressureSummary(TypedDict):
    """Over the known nodes."""

    mean: float
    max: float
    max_node: str


class NodeCounts(TypedDict):
    """How many nodes there are, and in which state."""

    total: int
    known: int
    unknown: int
    by_state: dict[str, int]


class ClusterSummary(TypedDict):
    """What `get_cluster_summary` returns."""

    nodes: NodeCounts
    cpu: ResourceSum
    memory_gb: ResourceSum
    gpu: ResourceSum
    pressure: PressureSummary | None
    unknown_nodes: list[UnknownNode]


class _Sum:
    """Adds up one resource, in base units; a use of None is not known."""

    def __init__(self) -> None:
        self.total = self.used = self.unknown = self.lent = 0

    def add(self, has: int, uses: int | None, lent: int) -> None:
        self.total += has
        self.lent += lent
        if uses is None:
            self.unknown += has
        else:
            self.used += min(max(uses, 0), has)

    def shown(self, unit: int) -> ResourceSum:
        idle = self.total - self.used - self.unknown
        numbers = (round(size / unit, 3) for size in (self.total, self.used, idle, self.unknown, self.lent))
        total, used, idle_, unknown, lent = numbers
        return {"total": total, "used": used, "idle": idle_, "unknown": unknown, "lent": lent}


def summarise(ledger: Ledger, now: int) -> ClusterSummary:
    """The cluster at this moment."""
    cpu, memory, gpu = _Sum(), _Sum(), _Sum()
    pressures: dict[str, float] = {}
    silent: list[UnknownNode] = []
    for node in ledger.nodes.values():
        seen = ledger.sightings.get(node.name)
        usage = fresh_usage(node, seen, now)
        book, has = ledger.book(node.name), node.capacity
        cpu.add(has.cpu_milli, None if usage is None else usage.cpu_busy_milli * has.cpu_milli // 1000, book.cpu_milli)
        memory.add(has.memory_bytes, None if usage is None else usage.memory_bytes, book.memory_bytes)
        _add_gpus(gpu, node, usage, sum(book.gpu_milli.values()))
        if usage is not None:
            pressures[node.name] = pressure(has, usage)
        else:
            heard = silence_seconds(seen, now)
            silent.append({"node_id": node.name, "state": str(node.state), "seconds_since_heard": heard})
    return {
        "nodes": _counts(ledger.nodes.values(), known=len(pressures)),
        "cpu": cpu.shown(1000),
        "memory_gb": memory.shown(GB),
        "gpu": gpu.shown(1000),
        "pressure": _pressures(pressures),
        "unknown_nodes": silent,
    }


def _add_gpus(gpu: _Sum, node: Node, usage: Usage | None, lent: int) -> None:
    """A device that a known node does not measure is idle, as it is for lending."""
    busy = {device.index: device.in_use_milli for device in usage.gpus} if usage is not None else {}
    for device in node.capacity.gpus:
        gpu.add(1000, None if usage is None else busy.get(device.index, 0), 0)
    gpu.lent += lent


def _counts(nodes: Iterable[Node], *, known: int) -> NodeCounts:
    states = Counter(str(node.state) for node in nodes)
    total = states.total()
    return {"total": total, "known": known, "unknown": total - known, "by_state": dict(states)}


def _pressures(pressures: dict[str, float]) -> PressureSummary | None:
    if not pressures:
        return None
    hardest = max(pressures, key=pressures.__getitem__)
    mean = round(sum(pressures.values()) / len(pressures), 3)
    return {"mean": mean, "max": pressures[hardest], "max_node": hardest}
