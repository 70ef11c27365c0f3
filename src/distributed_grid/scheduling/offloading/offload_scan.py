"""Scan of all nodes by the thresholds of `auto_offload`, and what is tracked from look to look.

A flicker moves nothing: a level must have been above its threshold at two looks in a row, and as long as the policy
waits. A node rests after a move, whether it gave or took, so that the next look sees what the last move did.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import OffloadRules, OffloadWatch
from distributed_grid.domain.rebalancing import (
    SPREAD,
    WATCHED_RESOURCES,
    PressureReading,
    RebalanceRules,
    RebalanceSchedule,
)
from distributed_grid.domain.resources import ResourceType
from distributed_grid.scheduling.rebalancing.pressure import PressureScan, chance_above, percent, scan_pressure

LOW_MARGIN_MILLI = 100
"""The low mark of a threshold is so far below it: what was done because of it is undone there."""
HOUR_MS = 3_600_000
"""A job is moved at most once within this time."""
MAX_RELIEVED = 100
"""Nodes that are relieved at one look."""
SURE_MILLI = 800
"""A forecast is believed that is so sure."""


class OffloadScan(Struct, frozen=True):
    """All nodes at one moment, by the thresholds of `auto_offload`. `targets` could take a job, least loaded first."""

    pressure: PressureScan
    offload: OffloadRules
    targets: tuple[str, ...] = ()

    @property
    def ledger(self) -> Ledger:
        return self.pressure.ledger

    @property
    def now(self) -> int:
        return self.pressure.now

    def watch(self, node: str) -> OffloadWatch:
        """What is remembered of a node; one that is new here rests as if the last move had been its own."""
        known = self.ledger.offload_watches.get(node)
        return known or OffloadWatch(node, moved_at_ms=self.ledger.auto_offload.moved_at_ms)

    def is_above(self, node: str, resource: ResourceType) -> bool:
        level = self.pressure.reading(node).level(resource)
        return level is not None and level > high_mark(self.offload, resource)

    def has_lasted(self, since_ms: int | None) -> bool:
        """Whether it was so at two looks in a row, and as long as the policy waits; looks are never quite on time."""
        return since_ms is not None and self.now - since_ms >= self.dwell_ms - self.offload.interval_ms // 2

    @property
    def dwell_ms(self) -> int:
        rules = self.pressure.rules
        return max(rules.policy.act_after * rules.interval_ms, self.offload.interval_ms)

    def rests(self, node: str) -> bool:
        """Whether a node has given or taken something too recently."""
        moved_at_ms = self.watch(node).moved_at_ms
        return moved_at_ms > 0 and self.now - moved_at_ms < self.offload.cooldown_ms


def high_mark(rules: OffloadRules, resource: ResourceType) -> int:
    """The threshold of a resource, in thousandths."""
    if resource is ResourceType.MEMORY:
        return rules.memory_high
    return rules.cpu_high if resource is ResourceType.CPU else rules.gpu_high


def low_mark(rules: OffloadRules, resource: ResourceType) -> int:
    """Below this the shortage of a resource is over."""
    return max(high_mark(rules, resource) - LOW_MARGIN_MILLI, 0)


def scan_offload(
    ledger: Ledger, readings: tuple[PressureReading, ...], rules: RebalanceRules, offload: OffloadRules, now: int
) -> OffloadScan:
    """A scan of all nodes, and those of them that could take a job."""
    pressure = scan_pressure(ledger, readings, rules, now)
    scan = OffloadScan(pressure, offload)
    able = sorted((pressure.reading(name).score or 0, name) for name in ledger.nodes if _could_take(scan, name))
    targets = tuple(name for _, name in able)
    return replace(scan, targets=targets, pressure=replace(pressure, schedule=RebalanceSchedule((), targets)))


def _could_take(scan: OffloadScan, node: str) -> bool:
    if node in scan.ledger.degraded or node in scan.ledger.moves_at or scan.rests(node):
        return False
    return scan.pressure.has_headroom(node) and not any(scan.is_above(node, one) for one in WATCHED_RESOURCES)


def track_offload(scan: OffloadScan) -> list[OffloadWatch]:
    """The watches of all nodes after one more look."""
    return [_tracked(scan, name, scan.watch(name)) for name in scan.ledger.nodes]


def _tracked(scan: OffloadScan, node: str, old: OffloadWatch) -> OffloadWatch:
    since = {
        f"{resource}_since_ms": (old.since_ms(resource) if old.since_ms(resource) is not None else scan.now)
        if scan.is_above(node, resource)
        else None
        for resource in WATCHED_RESOURCES
    }
    memory = scan.pressure.reading(node).memory
    is_low = memory is not None and memory < low_mark(scan.offload, ResourceType.MEMORY)
    spread = scan.now if old.spread_since_ms is None else old.spread_since_ms
    return replace(
        old,
        **since,
        spread_since_ms=spread if _is_spread(scan, node) else None,
        low_since_ms=(scan.now if old.low_since_ms is None else old.low_since_ms) if is_low else None,
        tried=tuple(one for one in old.tried if scan.now - one[1] < HOUR_MS),
        looked_at_ms=scan.now,
        reason="",
        considered=(),
    )


def _is_spread(scan: OffloadScan, node: str) -> bool:
    """Whether a node works so much harder than one elsewhere that they should be evened out."""
    rules, score = scan.pressure.rules, scan.pressure.reading(node).score
    if not rules.evens_out or score is None:
        return False
    other = next(scan.pressure.lenders(node), None)
    return other is not None and score - (scan.pressure.reading(other).score or 0) > rules.policy.spread_milli


def nodes_to_relieve(scan: OffloadScan, watches: list[OffloadWatch]) -> tuple[str, ...]:
    """The nodes above a threshold, memory first, then the hardest working ones; those that are degraded already come
    last. At one look so many: the others have their turn at the next."""
    above = [one for one in watches if any(one.since_ms(cause) is not None for cause in (*WATCHED_RESOURCES, SPREAD))]
    degraded, reading = scan.ledger.degraded, scan.pressure.reading

    def urgency(one: OffloadWatch) -> tuple[bool, bool, int, str]:
        return one.node in degraded, one.memory_since_ms is None, -(reading(one.node).score or 0), one.node

    return tuple(one.node for one in sorted(above, key=urgency)[:MAX_RELIEVED])


def will_be_short_of_memory(scan: OffloadScan, node: str) -> bool:
    """Whether a node is below its threshold of memory, and surely will not be soon."""
    reading, high = scan.pressure.reading(node), scan.offload.memory_high
    if reading.memory is None or reading.memory > high or reading.memory_ahead is None:
        return False
    is_near = reading.memory >= low_mark(scan.offload, ResourceType.MEMORY) // 2
    return is_near and chance_above(reading.memory_ahead, high) >= SURE_MILLI


def excess_bytes(scan: OffloadScan, node: str) -> int:
    """How much memory a node has to lose to be at its low mark, or would have to when the forecast comes true."""
    reading = scan.pressure.reading(node)
    level = reading.memory or 0
    if reading.memory_ahead is not None and will_be_short_of_memory(scan, node):
        level = max(level, reading.memory_ahead.level)
    low = low_mark(scan.offload, ResourceType.MEMORY)
    return max(scan.ledger.nodes[node].capacity.memory_bytes * (level - low) // 1000, 0)


def describe_pressure(scan: OffloadScan, node: str, cause: str) -> str:
    """What a node is short of, with its numbers."""
    reading = scan.pressure.reading(node)
    if cause == SPREAD:
        other = next(scan.pressure.lenders(node), "")
        there, most = scan.pressure.reading(other).score or 0, scan.pressure.rules.policy.spread_milli
        here = f"{node} works at {percent(reading.score or 0)}"
        return f"{here}, {other or 'others'} at {percent(there)}, may differ by {percent(most)}"
    resource = ResourceType(cause)
    high = high_mark(scan.offload, resource)
    return f"{resource} at {percent(reading.level(resource) or 0)}, above the threshold of {percent(high)}"
