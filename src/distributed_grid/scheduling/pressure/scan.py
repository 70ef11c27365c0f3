"""Pressure of all nodes at one moment: levels, forecasts, marks, and for how long a node has been beyond one.

A silent node has no level. A forecast counts as if the high watermark were crossed already, but only from the low one
on, so that nothing is borrowed at a level at which it would be returned. Nodes on one machine share its load: they lend
each other nothing, and one of them borrows for all.

There are two sets of marks: watermarks (`resource_sharing`) call for loans, thresholds (`auto_offload`) for moves of
jobs. A flicker moves nothing: a level must have been above its threshold at two evaluations in a row, and for as long
as the policy waits. A node rests after a move, whether it gave or took, so that the next evaluation sees the effect.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import OffloadRules, OffloadWatch
from distributed_grid.domain.nodes import Node, first_node
from distributed_grid.domain.rebalancing import (
    GRID_USER,
    WATCHED_RESOURCES,
    Forecast,
    PressureReading,
    RebalanceRules,
    RebalanceSchedule,
    RebalanceState,
    claimed_amount,
    is_automatic,
    resource_of,
)
from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.states import LeaseState, NodeState

Z_90 = 1.6449
"""Standard deviations on each side of an interval that holds nine of ten."""
RETRY_UNUSED = 6
"""A loan that was returned unused is asked for again after this multiple of the time for which it was unused."""
MAX_WAITING_GROUPS = 256
"""Groups of equal waiting requests that are compared with the nodes."""
LOW_MARGIN_MILLI = 100
"""Distance of a low mark below its threshold: measures taken because of the threshold are undone there."""
SURE_MILLI = 800
"""Certainty from which on a forecast of memory is believed."""
_UNKNOWN = PressureReading(node="")


def automatic_leases(ledger: Ledger) -> list[Lease]:
    """The leases that the grid holds for its nodes, oldest first, without those being released."""
    mine = (ledger.leases[lease_id] for lease_id in ledger.leases_by_user.get(GRID_USER, ()))
    return [lease for lease in mine if lease.state is LeaseState.ACTIVE and is_automatic(lease.request)]


def is_in_use(ledger: Ledger, lease: Lease) -> bool:
    """Whether a command runs within a lease, or Ray's tasks in its placement group."""
    binding = ledger.binding_of(lease)
    return lease.id in ledger.dependents or (binding is not None and binding.in_use)


def idle_automatic_leases(ledger: Ledger) -> list[Lease]:
    """The automatic leases that no command and no Ray task uses."""
    return [lease for lease in automatic_leases(ledger) if not is_in_use(ledger, lease)]


def scan_pressure(
    ledger: Ledger,
    readings: Iterable[PressureReading],
    rules: RebalanceRules,
    now: int,
    schedule: RebalanceSchedule | None = None,
    offload: OffloadRules | None = None,
) -> PressureScan:
    """A scan of all nodes; the amounts that the grid holds for each are added up."""
    leases = automatic_leases(ledger)
    held: Counter[tuple[str, str]] = Counter()
    for lease in leases:
        resource = resource_of(lease.request.ask)
        held[lease.request.target, resource] += claimed_amount(lease, resource)
    known = {}
    for reading in readings:
        node = ledger.nodes.get(reading.node)
        if node is not None and node.state is NodeState.ALIVE and not node.is_pull:
            known[reading.node] = reading
    return PressureScan(
        ledger=ledger,
        readings=known,
        rules=rules,
        now=now,
        leases=leases,
        held=held,
        schedule=schedule or RebalanceSchedule(()),
        max_surplus={},
        offload=offload or OffloadRules(),
    )


def scan_with_lenders(
    ledger: Ledger,
    readings: Iterable[PressureReading],
    rules: RebalanceRules,
    now: int,
    offload: OffloadRules | None = None,
) -> PressureScan:
    """A scan that knows the nodes with headroom; with `offload`, of these only those that could take a job."""
    scan = scan_pressure(ledger, readings, rules, now, None, offload)
    names = (name for name in scan.by_headroom() if offload is None or scan.could_take_job(name))
    return replace(scan, schedule=RebalanceSchedule((), tuple(names)))


class PressureScan(Struct, frozen=True, kw_only=True):
    """All nodes at one moment. Nothing is known of a node that is not alive, or has no agent."""

    ledger: Ledger
    readings: dict[str, PressureReading]
    rules: RebalanceRules
    now: int
    leases: list[Lease]  # the automatic ones
    held: Counter[tuple[str, str]]  # amounts that they hold, by borrower and resource
    schedule: RebalanceSchedule
    max_surplus: dict[str, int]  # the largest surplus of any node by resource, once all were compared
    offload: OffloadRules

    def reading(self, node: str) -> PressureReading:
        return self.readings.get(node, _UNKNOWN)

    def waiting(self) -> Iterator[Request]:
        """The first waiting requests, one of each group of equal ones."""
        return (lease.request for lease in islice(self.ledger.oldest_waiting(), MAX_WAITING_GROUPS))

    # ------------------------------------------------------------------ watermarks

    def state(self, node: str) -> RebalanceState:
        return self.ledger.rebalance_states.get(node) or RebalanceState(node=node)

    def is_above(self, node: str, resource: ResourceType) -> bool:
        """Whether a node is above its high watermark, or surely will be."""
        level = self.reading(node).level(resource)
        if level is None:
            return False
        return level > self.rules.watermarks(resource).high or self.will_be_above(node, resource)

    def is_below(self, node: str, resource: ResourceType) -> bool:
        """Whether a node is below its low watermark, and no forecast says otherwise."""
        level, low = self.reading(node).level(resource), self.rules.watermarks(resource).low
        return level is not None and level < low and not self._forecast_above(node, resource)

    def will_be_above(self, node: str, resource: ResourceType) -> bool:
        """Whether a level between the watermarks will surely rise above them."""
        level, low = self.reading(node).level(resource), self.rules.watermarks(resource).low
        return level is not None and level >= low and self._forecast_above(node, resource)

    def _forecast_above(self, node: str, resource: ResourceType) -> bool:
        forecast, policy = self.reading(node).ahead(resource), self.rules.policy
        if forecast is None or not policy.ahead:
            return False
        return chance_above(forecast, self.rules.watermarks(resource).high) >= policy.sure_milli

    def has_headroom(self, node: str) -> bool:
        """Whether a node is known and above none of its high watermarks."""
        is_known = self.reading(node).score is not None
        return is_known and not any(self.is_above(node, resource) for resource in WATCHED_RESOURCES)

    def by_headroom(self) -> list[str]:
        """The nodes with headroom, least loaded first."""
        scores = sorted((self.reading(name).score or 0, name) for name in self.ledger.nodes if self.has_headroom(name))
        return [name for _, name in scores]

    def has_lasted(self, since_ms: int | None) -> bool:
        """Whether as many rounds have passed since a moment as the policy waits."""
        return since_ms is not None and self._rounds(since_ms, self.rules.policy.act_after)

    def has_cooled_down(self, at_ms: int | None) -> bool:
        return at_ms is None or self._rounds(at_ms, self.rules.policy.cool_down)

    def is_unused(self, at_ms: int | None) -> bool:
        """Whether the last use of a loan is so long ago that it is returned."""
        return at_ms is not None and self._rounds(at_ms, self.rules.policy.unused_after)

    def may_retry_unused(self, at_ms: int | None) -> bool:
        """Whether a loan that was returned unused at a moment may be asked for again although no work calls for it."""
        return at_ms is None or self._rounds(at_ms, RETRY_UNUSED * self.rules.policy.unused_after)

    def _rounds(self, since_ms: int, rounds: int) -> bool:
        """Rounds are never quite on time: half of one is not counted."""
        return self.now - since_ms >= max(rounds * self.rules.interval_ms - self.rules.interval_ms // 2, 0)

    # ------------------------------------------------------------------ thresholds

    def watch(self, node: str) -> OffloadWatch:
        """The watch over a node; one that is new here rests as if the last move had been its own."""
        known = self.ledger.offload_watches.get(node)
        return known or OffloadWatch(node=node, moved_at_ms=self.ledger.auto_offload.moved_at_ms)

    def threshold(self, resource: ResourceType) -> int:
        """The level from which on jobs leave a node, in thousandths."""
        if resource is ResourceType.MEMORY:
            return self.offload.memory_high
        return self.offload.cpu_high if resource is ResourceType.CPU else self.offload.gpu_high

    def low_mark(self, resource: ResourceType) -> int:
        """The level below which the shortage of a resource is over."""
        return max(self.threshold(resource) - LOW_MARGIN_MILLI, 0)

    def is_above_threshold(self, node: str, resource: ResourceType) -> bool:
        level = self.reading(node).level(resource)
        return level is not None and level > self.threshold(resource)

    @property
    def dwell_ms(self) -> int:
        """Time above a threshold after which a job leaves: two evaluations, or as long as the policy waits."""
        return max(self.rules.policy.act_after * self.rules.interval_ms, self.offload.interval_ms)

    def has_dwelt(self, since_ms: int | None) -> bool:
        """Evaluations are never quite on time: half of an interval is not counted."""
        return since_ms is not None and self.now - since_ms >= self.dwell_ms - self.offload.interval_ms // 2

    def rests(self, node: str) -> bool:
        """Whether a node has given or taken a job too recently."""
        moved_at_ms = self.watch(node).moved_at_ms
        return moved_at_ms > 0 and self.now - moved_at_ms < self.offload.cooldown_ms

    def could_take_job(self, node: str) -> bool:
        """Whether a node with headroom is a target: not degraded, without a move, at rest, and below its thresholds."""
        if node in self.ledger.degraded or node in self.ledger.moves_at or self.rests(node):
            return False
        return not any(self.is_above_threshold(node, resource) for resource in WATCHED_RESOURCES)

    def will_be_short_of_memory(self, node: str) -> bool:
        """Whether a node is below its threshold of memory, and surely will not be soon."""
        reading, high = self.reading(node), self.offload.memory_high
        if reading.memory is None or reading.memory > high or reading.memory_ahead is None:
            return False
        is_near = reading.memory >= self.low_mark(ResourceType.MEMORY) // 2
        return is_near and chance_above(reading.memory_ahead, high) >= SURE_MILLI

    def excess_bytes(self, node: str) -> int:
        """The memory that a node has to lose to be at its low mark, or would have to when the forecast comes true."""
        reading = self.reading(node)
        level = reading.memory or 0
        if reading.memory_ahead is not None and self.will_be_short_of_memory(node):
            level = max(level, reading.memory_ahead.level)
        low = self.low_mark(ResourceType.MEMORY)
        return max(self.ledger.nodes[node].capacity.memory_bytes * (level - low) // 1000, 0)

    # ------------------------------------------------------------------ machines

    def other_machines(self, node: str) -> Iterator[str]:
        """The nodes on other machines."""
        own = machine_of(self.ledger.nodes[node])
        return (name for name, other in self.ledger.nodes.items() if machine_of(other) != own)

    def lenders(self, node: str) -> Iterator[str]:
        """The nodes of the schedule on other machines with headroom, least loaded first."""
        nodes = self.ledger.nodes
        own = machine_of(nodes[node])
        return (name for name in self.schedule.with_headroom if name in nodes and machine_of(nodes[name]) != own)

    def borrows_for_machine(self, node: str) -> bool:
        """Whether this node is the one of its machine that borrows: the head, or else the first by name."""
        nodes = self.ledger.nodes
        own = machine_of(nodes[node])
        return own == node or node == first_node(one for one in nodes.values() if machine_of(one) == own)


def machine_of(node: Node) -> str:
    """The machine of a node: local nodes are on one, unless they are simulated or have thresholds of their own."""
    return "" if node.host == "local" and not node.simulated and node.thresholds is None else node.name


def chance_above(forecast: Forecast, mark: int) -> int:
    """The probability that a later measurement is above a mark, in thousandths."""
    if forecast.reach <= 0:
        return 1000 if forecast.level > mark else 0
    distance = Z_90 * (forecast.level - mark) / forecast.reach
    return round(500 * (1 + math.erf(distance / math.sqrt(2))))


def percent(milli: int) -> str:
    """A level as text."""
    return f"{milli / 10:g} %"
