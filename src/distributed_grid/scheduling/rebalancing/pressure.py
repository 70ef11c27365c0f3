"""Pressure of all nodes at one moment: who is above or below its watermarks, and for how long.

A node that is not heard has no level. A forecast counts as if the high watermark were crossed already, but only from
the low one on, so that nothing is borrowed at a level at which it would be returned. Nodes on one machine share its
load: they lend each other nothing, and one of them borrows for all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from msgspec import Struct

from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
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
"""Standard deviations on each side of what holds nine of ten."""
RETRY_UNUSED = 6
"""A loan that went back unused is asked for again after so many times as long as it was unused."""
_UNKNOWN = PressureReading("")


def automatic_leases(ledger: Ledger) -> list[Lease]:
    """The leases that the grid holds for its nodes, oldest first; those that end already are left out."""
    mine = (ledger.leases[lease_id] for lease_id in ledger.leases_by_user.get(GRID_USER, ()))
    return [lease for lease in mine if lease.state is LeaseState.ACTIVE and is_automatic(lease.request)]


def is_in_use(ledger: Ledger, lease: Lease) -> bool:
    """Whether a command runs with what a lease holds, or Ray's tasks in its placement group."""
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
) -> PressureScan:
    """A scan of all nodes; what the grid holds for each is added up."""
    leases = automatic_leases(ledger)
    held: Counter[tuple[str, str]] = Counter()
    for lease in leases:
        resource = resource_of(lease.request.ask)
        held[lease.request.target, resource] += claimed_amount(lease, resource)
    nodes = ledger.nodes
    known = {reading.node: reading for reading in readings if _can_share(nodes.get(reading.node))}
    return PressureScan(ledger, known, rules, now, leases, held, schedule or RebalanceSchedule(()), {})


MAX_WAITING_GROUPS = 256
"""Groups of equal waiting requests that are compared with the nodes."""


class PressureScan(Struct, frozen=True):
    """All nodes at one moment: readings, rules, schedule, and the automatic leases with what they hold for whom.

    Of a node that is not alive any more, or has no agent, nothing is known.
    `max_surplus` is the most that any node can spare of a resource, once all were compared.
    """

    ledger: Ledger
    readings: dict[str, PressureReading]
    rules: RebalanceRules
    now: int
    leases: list[Lease]
    held: Counter[tuple[str, str]]
    schedule: RebalanceSchedule
    max_surplus: dict[str, int]

    def reading(self, node: str) -> PressureReading:
        return self.readings.get(node, _UNKNOWN)

    def waiting(self) -> Iterator[Request]:
        """The first waiting requests, one of each group of equal ones."""
        return (lease.request for lease in islice(self.ledger.oldest_waiting(), MAX_WAITING_GROUPS))

    def state(self, node: str) -> RebalanceState:
        return self.ledger.rebalance_states.get(node) or RebalanceState(node)

    def is_above(self, node: str, resource: ResourceType) -> bool:
        """Whether a node is above its high watermark, or surely will be."""
        level = self.reading(node).level(resource)
        if level is None:
            return False
        return level > self.rules.watermarks(resource).high or self.will_be_above(node, resource)

    def is_below(self, node: str, resource: ResourceType) -> bool:
        """Whether a node is below its low watermark, and no forecast says otherwise."""
        level = self.reading(node).level(resource)
        return (
            level is not None
            and level < self.rules.watermarks(resource).low
            and not self._forecast_above(node, resource)
        )

    def will_be_above(self, node: str, resource: ResourceType) -> bool:
        """Whether a level between the watermarks will surely rise above them."""
        level = self.reading(node).level(resource)
        return (
            level is not None and level >= self.rules.watermarks(resource).low and self._forecast_above(node, resource)
        )

    def _forecast_above(self, node: str, resource: ResourceType) -> bool:
        forecast, policy = self.reading(node).ahead(resource), self.rules.policy
        if forecast is None or not policy.ahead:
            return False
        return chance_above(forecast, self.rules.watermarks(resource).high) >= policy.sure_milli

    def has_headroom(self, node: str) -> bool:
        """Whether a node is known and above none of its high watermarks."""
        known = self.reading(node)
        return known.score is not None and not any(self.is_above(node, resource) for resource in WATCHED_RESOURCES)

    def has_lasted(self, since_ms: int | None) -> bool:
        """Whether something has been so for as many rounds as the policy waits."""
        return since_ms is not None and self._rounds(since_ms, self.rules.policy.act_after)

    def has_cooled_down(self, at_ms: int | None) -> bool:
        """Whether the cool-down since a moment is over."""
        return at_ms is None or self._rounds(at_ms, self.rules.policy.cool_down)

    def is_unused(self, at_ms: int | None) -> bool:
        """Whether what is held has been used for the last time so many rounds ago that it goes back."""
        return at_ms is not None and self._rounds(at_ms, self.rules.policy.unused_after)

    def may_retry_unused(self, at_ms: int | None) -> bool:
        """Whether what went back unused at a moment may be asked for again although no work calls for it."""
        return at_ms is None or self._rounds(at_ms, RETRY_UNUSED * self.rules.policy.unused_after)

    def _rounds(self, since_ms: int, rounds: int) -> bool:
        """Rounds are never quite on time: half of one is not counted."""
        wanted_ms = rounds * self.rules.interval_ms - self.rules.interval_ms // 2
        return self.now - since_ms >= max(wanted_ms, 0)

    def other_machines(self, node: str) -> Iterator[str]:
        """The nodes on other machines."""
        own = machine_of(self.ledger.nodes[node])
        return (name for name, other in self.ledger.nodes.items() if machine_of(other) != own)

    def lenders(self, node: str) -> Iterator[str]:
        """The nodes on other machines with headroom, least loaded first."""
        nodes = self.ledger.nodes
        own = machine_of(nodes[node])
        return (name for name in self.schedule.with_headroom if name in nodes and machine_of(nodes[name]) != own)

    def borrows_for_machine(self, node: str) -> bool:
        """Whether this node is the one of its machine that borrows: the head, or else the first by name."""
        nodes = self.ledger.nodes
        own = machine_of(nodes[node])
        return own == node or node == first_node(one for one in nodes.values() if machine_of(one) == own)


def _can_share(node: Node | None) -> bool:
    """Whether a node may lend and borrow: it is alive, and has an agent."""
    return node is not None and node.state is NodeState.ALIVE and not node.is_pull


def machine_of(node: Node) -> str:
    """The machine of a node: local nodes are on one, unless they are simulated or have thresholds of their own."""
    return "" if node.host == "local" and not node.simulated and node.thresholds is None else node.name


def chance_above(forecast: Forecast, mark: int) -> int:
    """How likely a later measurement is above a mark, in thousandths."""
    if forecast.reach <= 0:
        return 1000 if forecast.level > mark else 0
    distance = Z_90 * (forecast.level - mark) / forecast.reach
    return round(500 * (1 + math.erf(distance / math.sqrt(2))))


def percent(milli: int) -> str:
    """A level in words."""
    return f"{milli / 10:g} %"
