"""Node snapshots, the cluster summary and pressure readings, computed from the ledger.

A node without a recent heartbeat has no measurements at all (None): it is neither idle nor full. In the summary,
total = used + idle + unknown for each resource, and pressure is that of the known nodes only.
"""

from __future__ import annotations

from collections import Counter

from distributed_grid.api.answers.common import gigabytes, utc
from distributed_grid.api.answers.metrics import (
    ClusterSummary,
    PressureSummary,
    ResourceSnapshot,
    ResourceSum,
    UnknownNode,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, NodeObservation, Usage, cpu_part, gpu_part, memory_part, pressure
from distributed_grid.domain.rebalancing import PressureReading
from distributed_grid.domain.resources import GB
from distributed_grid.domain.states import NodeState
from distributed_grid.reactor.node_liveness import SUSPECT_AFTER_MS

_HEARD = frozenset({NodeState.ALIVE, NodeState.DRAINING})


def fresh_usage(node: Node, seen: NodeObservation | None, now: int) -> Usage | None:
    """The latest measurement of a node; None if it is unknown."""
    if seen is None or node.state not in _HEARD or now - seen.at_ms > SUSPECT_AFTER_MS:
        return None
    return seen.usage


def heartbeat_age_seconds(seen: NodeObservation | None, now: int) -> float | None:
    """Age of a node's last heartbeat; None without one since the start."""
    return (now - seen.at_ms) / 1000 if seen is not None and seen.at_ms else None


def snapshots(ledger: Ledger, now: int, offset_ms: int = 0) -> list[ResourceSnapshot]:
    """All nodes of the ledger; `offset_ms` is the lead of the wall clock over the grid's time."""
    rows: list[ResourceSnapshot] = []
    for node in ledger.nodes.values():
        seen = ledger.observations.get(node.name)
        usage = fresh_usage(node, seen, now)
        claims, has = ledger.claims_on(node.name), node.capacity
        measured = usage is not None and bool(usage.gpus)
        gpu = gpu_part(usage) if usage is not None else None
        row = ResourceSnapshot(
            node_id=node.name,
            state=str(node.state),
            known=usage is not None,
            timestamp=utc(seen.at_ms + offset_ms) if seen is not None and seen.at_ms else None,
            seconds_since_heard=heartbeat_age_seconds(seen, now),
            cpu_cores=has.cpu_milli / 1000,
            memory_gb=gigabytes(has.memory_bytes),
            gpus=len(has.gpus),
            cpu_percent=round(100 * cpu_part(usage), 1) if usage is not None else None,
            cpu_outside_percent=usage.cpu_outside_milli / 10 if usage is not None else None,
            memory_percent=round(100 * memory_part(has, usage), 1) if usage is not None else None,
            memory_used_gb=gigabytes(usage.memory_bytes) if usage is not None else None,
            memory_outside_gb=gigabytes(usage.memory_outside_bytes) if usage is not None else None,
            gpu_percent=round(100 * gpu, 1) if gpu is not None else None,
            gpu_memory_used_gb=gigabytes(sum(g.in_use_bytes for g in usage.gpus)) if usage and measured else None,
            pressure=pressure(has, usage) if usage is not None else None,
            cpu_lent=claims.cpu_milli / 1000,
            memory_lent_gb=gigabytes(claims.memory_bytes),
            gpus_lent=sum(claims.gpu_milli.values()) / 1000,
        )
        rows.append(row)
    return rows


class _ResourceTotal:
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

    def in_unit(self, unit: int) -> ResourceSum:
        idle = self.total - self.used - self.unknown
        numbers = (round(size / unit, 3) for size in (self.total, self.used, idle, self.unknown, self.lent))
        total, used, idle_, unknown, lent = numbers
        return {"total": total, "used": used, "idle": idle_, "unknown": unknown, "lent": lent}


def summarise(ledger: Ledger, now: int) -> ClusterSummary:
    cpu, memory, gpu = _ResourceTotal(), _ResourceTotal(), _ResourceTotal()
    pressures: dict[str, float] = {}
    silent: list[UnknownNode] = []
    for node in ledger.nodes.values():
        seen = ledger.observations.get(node.name)
        usage = fresh_usage(node, seen, now)
        claims, has = ledger.claims_on(node.name), node.capacity
        cpu.add(
            has.cpu_milli, None if usage is None else usage.cpu_busy_milli * has.cpu_milli // 1000, claims.cpu_milli
        )
        memory.add(has.memory_bytes, None if usage is None else usage.memory_bytes, claims.memory_bytes)
        # A device that a known node does not measure is idle, as it is for lending.
        busy = {device.index: device.in_use_milli for device in usage.gpus} if usage is not None else {}
        for device in node.capacity.gpus:
            gpu.add(1000, None if usage is None else busy.get(device.index, 0), 0)
        gpu.lent += sum(claims.gpu_milli.values())
        if usage is not None:
            pressures[node.name] = pressure(has, usage)
        else:
            age = heartbeat_age_seconds(seen, now)
            silent.append({"node_id": node.name, "state": str(node.state), "seconds_since_heard": age})
    known = len(pressures)
    states = Counter(str(node.state) for node in ledger.nodes.values())
    total = states.total()
    pressure_summary: PressureSummary | None = None
    if pressures:
        hardest = max(pressures, key=pressures.__getitem__)
        mean = round(sum(pressures.values()) / len(pressures), 3)
        pressure_summary = {"mean": mean, "max": pressures[hardest], "max_node": hardest}
    return {
        "nodes": {"total": total, "known": known, "unknown": total - known, "by_state": dict(states)},
        "cpu": cpu.in_unit(1000),
        "memory_gb": memory.in_unit(GB),
        "gpu": gpu.in_unit(1000),
        "pressure": pressure_summary,
        "unknown_nodes": silent,
    }


def pressure_readings(ledger: Ledger, now: int) -> tuple[PressureReading, ...]:
    """The pressure on every node in thousandths, the unit of rebalancing; an unknown node has no numbers."""
    readings = []
    for name, node in ledger.nodes.items():
        usage = fresh_usage(node, ledger.observations.get(name), now)
        if usage is None:
            readings.append(PressureReading(node=name))
            continue
        has, gpu = node.capacity, gpu_part(usage)
        readings.append(
            PressureReading(
                node=name,
                score=round(1000 * pressure(has, usage)),
                memory=round(1000 * memory_part(has, usage)) if has.memory_bytes else None,
                cpu=round(1000 * cpu_part(usage)),
                gpu=round(1000 * gpu) if gpu is not None else None,
            )
        )
    return tuple(readings)
