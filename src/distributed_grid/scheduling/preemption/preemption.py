"""Preemption: the fewest and cheapest victims for an urgent request, over all nodes.

Only strictly lower priorities are preempted, and never a higher one where lower ones are enough; then as few leases as
possible, then those that lose the least work. A gang goes as a whole and is weighed so. Leases that are being released
already are waited for first. Automatic leases make way for any request, however urgent, except another automatic one.
Only nodes that are alive and that the request may use are considered.
"""

from __future__ import annotations

from msgspec import Struct

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import is_automatic
from distributed_grid.domain.resources import Claim, Priority
from distributed_grid.domain.states import NodeState
from distributed_grid.scheduling.placement.placement import unmet_constraint
from distributed_grid.scheduling.preemption.cost_bounds import NOT_PREFERRED, CostBound, cost_bounds, victim_weight
from distributed_grid.scheduling.preemption.victims import (
    Cost,
    PreemptionCandidates,
    PreemptionSite,
    VictimGroup,
    lightest_victims,
    work_lost,
)
from distributed_grid.scheduling.rebalancing.pressure import automatic_leases

_NO_CLAIMS = NodeClaims()
_NO_LIMIT = 1 << 200


class PreemptionPlan(Struct, frozen=True):
    """A place that is made free: the claim there, who must go, and all who must be gone first."""

    node: str
    claim: Claim
    victims: tuple[str, ...]
    awaits: tuple[str, ...]


def plan_preemption(
    ledger: Ledger, request: Request, now: int, cost: Cost = work_lost, *, avoid: frozenset[str] = frozenset()
) -> PreemptionPlan | None:
    """The cheapest way to make room for an urgent request, or None where there is none. Gangs wait in the line;
    nobody goes on a node to avoid."""
    if request.priority < Priority.URGENT or request.gang > 1:
        return None
    yielders = PreemptionCandidates(ledger, request, now, cost)
    best: PreemptionPlan | None = None
    below = _NO_LIMIT
    for floor in cost_bounds(ledger, request, yielders):
        if floor.weight >= below:
            break
        if floor.node in avoid:
            continue
        unwished = 0 if floor.node in request.prefer else NOT_PREFERRED
        victims = _victims(ledger, request, floor, yielders, below - unwished)
        way = None if victims is None else _plan_on_node(ledger, request, floor.node, victims)
        if victims is not None and way is not None:
            best, below = way, unwished + sum(unit.weight for unit in victims)
    return best


def _victims(
    ledger: Ledger, request: Request, floor: CostBound, yielders: PreemptionCandidates, below: int
) -> list[VictimGroup] | None:
    """The lightest victims on a node, or None where nobody lighter than `below` is enough."""
    lends, claims = ledger.lends(floor.node), ledger.claims_on(floor.node)
    if _NO_CLAIMS.claim_for(request.ask, lends) is None or claims.claim_for(request.ask, lends) is not None:
        return None
    if floor.node in ledger.running.leaving:
        claims = NodeClaims(lease.claim for lease in _staying(ledger, floor.node) if lease.claim is not None)
    return lightest_victims(PreemptionSite(lends, claims, _units(ledger, floor, yielders)), request.ask, below)


def _staying(ledger: Ledger, node: str) -> list[Lease]:
    """The leases on a node that are not on their way out."""
    leaving = ledger.running.leaving.get(node, {})
    return [lease for lease in ledger.leases_of(node) if lease.id not in leaving]


def _units(ledger: Ledger, floor: CostBound, yielders: PreemptionCandidates) -> list[VictimGroup]:
    """Who could go on a node, each with those who would go along, in the order of their ids."""
    ids, units = ledger.running.ids, []
    costs = yielders.costs[floor.slots].tolist()
    for slot, cost in zip(floor.slots.tolist(), costs, strict=True):
        lease = ledger.leases[ids[slot]]
        rank = int(lease.request.priority)
        assert lease.claim is not None
        if not lease.gang:
            units.append(VictimGroup((lease.id,), victim_weight(rank, cost), rank, lease.claim))
            continue
        gang = [lease.id, *(member for member in ledger.gangs[lease.gang] if member != lease.id)]
        theirs = [ledger.running.slots.get(member, -1) for member in gang]
        if all(one >= 0 and yielders.able[one] for one in theirs):
            weight = sum(victim_weight(rank, int(yielders.costs[one])) for one in theirs)
            units.append(VictimGroup(tuple(gang), weight, rank, lease.claim))
    units.sort()
    return units


def _plan_on_node(ledger: Ledger, request: Request, node: str, victims: list[VictimGroup]) -> PreemptionPlan | None:
    """What the request gets when these are gone and those who leave anyway; None where there is nobody to wait for."""
    lends, leaving = ledger.lends(node), ledger.running.leaving.get(node, {})
    gone = {unit.leases[0] for unit in victims}
    claims = NodeClaims(one.claim for one in _staying(ledger, node) if one.claim is not None and one.id not in gone)
    awaits = []
    for lease_id in leaving:
        lease = ledger.leases[lease_id]
        if lease.preempted_by or lease.claim is None:
            awaits.append(lease_id)
            continue
        claims.take(lease.claim)
        if claims.claim_for(request.ask, lends) is None:
            claims.give_back(lease.claim)
            awaits.append(lease_id)
    claim = claims.claim_for(request.ask, lends)
    if claim is None or not (victims or awaits):
        return None
    here = tuple(unit.leases[0] for unit in victims)
    return PreemptionPlan(
        node, claim, tuple(lease_id for unit in victims for lease_id in unit.leases), (*here, *awaits)
    )


def preempt_automatic_leases(
    ledger: Ledger, request: Request, *, avoid: frozenset[str] = frozenset()
) -> PreemptionPlan | None:
    """The place that a request gets when automatic leases go, or None where that is not enough; never on a node to
    avoid."""
    if is_automatic(request) or request.gang > 1:
        return None
    on: dict[str, list[Lease]] = {}
    for lease in automatic_leases(ledger):
        if lease.node not in avoid:
            on.setdefault(lease.node, []).append(lease)
    ways = (_automatic_plan(ledger, request, node, leases) for node, leases in on.items())
    found = [way for way in ways if way is not None]
    return min(found, key=lambda way: (way.node not in request.prefer, len(way.victims), way.node), default=None)


def _automatic_plan(ledger: Ledger, request: Request, node: str, mine: list[Lease]) -> PreemptionPlan | None:
    if ledger.nodes[node].state is not NodeState.ALIVE or unmet_constraint(ledger, request, node) is not None:
        return None
    lends, going = ledger.lends(node), {lease.id for lease in mine}
    claims = NodeClaims(
        lease.claim for lease in ledger.leases_of(node) if lease.id not in going and lease.claim is not None
    )
    if claims.claim_for(request.ask, lends) is None:
        return None
    for lease in mine:
        if lease.claim is None:
            continue
        claims.take(lease.claim)
        if claims.claim_for(request.ask, lends) is not None:
            going.discard(lease.id)
        else:
            claims.give_back(lease.claim)
    claim = claims.claim_for(request.ask, lends)
    if claim is None or not going:
        return None
    gone = tuple(lease.id for lease in mine if lease.id in going)
    return PreemptionPlan(node, claim, gone, gone)
