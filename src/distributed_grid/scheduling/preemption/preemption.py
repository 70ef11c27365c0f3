"""Preemption: the fewest and cheapest victims for an urgent request, over all nodes.

Only strictly lower priorities are preempted, and never a higher one where lower ones are enough; then as few leases as
possible, then those that lose the least work. A gang goes as a whole and is weighed so. Leases that are being released
already are waited for first. Automatic leases that no command uses make room for any request, however urgent, except
another automatic one.
Only nodes that are alive and that the request may use are considered. Where the machine of simulated nodes lacks
memory for it, jobs on all of them may have to go, and are waited for.
"""

from __future__ import annotations

from msgspec import Struct

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import is_automatic
from distributed_grid.domain.resources import Claim, Priority
from distributed_grid.domain.states import NodeState
from distributed_grid.scheduling.placement.machine_limits import MachineShortage, shortage_after_leaving, used_bytes
from distributed_grid.scheduling.placement.placement import unmet_constraint
from distributed_grid.scheduling.preemption.victims import (
    NOT_PREFERRED,
    Cost,
    CostBound,
    PreemptionCandidates,
    PreemptionSite,
    VictimGroup,
    cost_bounds,
    lightest_victims,
    victim_weight,
    work_lost,
)
from distributed_grid.scheduling.pressure.scan import idle_automatic_leases

_NO_CLAIMS = NodeClaims()
_NO_LIMIT = 1 << 200


class PreemptionPlan(Struct, frozen=True):
    """A claim on a node, the victims to stop for it, and all leases that must be gone first."""

    node: str
    claim: Claim
    victims: tuple[str, ...]
    awaits: tuple[str, ...]


def plan_preemption(
    ledger: Ledger, request: Request, now: int, cost: Cost = work_lost, *, avoid: frozenset[str] = frozenset()
) -> PreemptionPlan | None:
    """The cheapest preemption for an urgent request, or None; never for a gang, never on a node to avoid."""
    if request.priority < Priority.URGENT or request.gang > 1:
        return None
    candidates = PreemptionCandidates(ledger, request, now, cost)
    shortage = shortage_after_leaving(ledger, request)
    best: PreemptionPlan | None = None
    below = _NO_LIMIT
    for bound in cost_bounds(ledger, request, candidates):
        if bound.weight >= below:
            break
        if bound.node in avoid:
            continue
        not_preferred = 0 if bound.node in request.prefer else NOT_PREFERRED
        short = shortage if ledger.nodes[bound.node].simulated else None
        victims = _victims(ledger, request, bound, candidates, below - not_preferred, short)
        plan = None if victims is None else _plan_on_node(ledger, request, bound.node, victims, short)
        if victims is not None and plan is not None:
            best, below = plan, not_preferred + sum(group.weight for group in victims)
    return best


def _victims(
    ledger: Ledger,
    request: Request,
    bound: CostBound,
    candidates: PreemptionCandidates,
    below: int,
    shortage: MachineShortage | None,
) -> list[VictimGroup] | None:
    """The lightest victims on a node, and on the machine's other nodes where memory is short; None if none lighter than
    `below` are enough."""
    lends, claims = ledger.lends(bound.node), ledger.claims_on(bound.node)
    if _NO_CLAIMS.claim_for(request.ask, lends) is None:
        return None
    if shortage is None and claims.claim_for(request.ask, lends) is not None:
        return None
    if bound.node in ledger.running.leaving:
        claims = NodeClaims(lease.claim for lease in _staying(ledger, bound.node) if lease.claim is not None)
    groups, missing = _victim_groups(ledger, bound, candidates), 0
    if shortage is not None and shortage.missing_bytes > 0:
        missing = shortage.missing_bytes
        groups += _victims_elsewhere(ledger, bound.node, candidates)
    return lightest_victims(PreemptionSite(lends, claims, groups, missing), request.ask, below)


def _victims_elsewhere(ledger: Ledger, node: str, candidates: PreemptionCandidates) -> list[VictimGroup]:
    """The jobs on the other simulated nodes, of which only the memory of the machine counts; ordered by id."""
    rows, columns, groups = ledger.running.column("node")[candidates.slots], ledger.columns, []
    there = columns.simulated[rows] & (rows != columns.rows[node])
    for slot in candidates.slots[there].tolist():
        lease = ledger.leases[ledger.running.ids[slot]]
        machine_bytes = _machine_bytes(ledger, lease)
        if machine_bytes:
            rank = int(lease.request.priority)
            weight = victim_weight(rank, int(candidates.costs[slot]))
            groups.append(VictimGroup((lease.id,), weight, rank, Claim(), machine_bytes))
    groups.sort()
    return groups


def _machine_bytes(ledger: Ledger, lease: Lease) -> int:
    """Machine memory that a job gives back; jobs within another lease keep it."""
    return used_bytes(ledger, lease) if lease.job else 0


def _staying(ledger: Ledger, node: str) -> list[Lease]:
    """The leases on a node that are not being released."""
    leaving = ledger.running.leaving.get(node, {})
    return [lease for lease in ledger.leases_of(node) if lease.id not in leaving]


def _victim_groups(ledger: Ledger, bound: CostBound, candidates: PreemptionCandidates) -> list[VictimGroup]:
    """The candidates on a node, each with its whole gang, ordered by id."""
    ids, groups = ledger.running.ids, []
    costs = candidates.costs[bound.slots].tolist()
    for slot, cost in zip(bound.slots.tolist(), costs, strict=True):
        lease = ledger.leases[ids[slot]]
        rank = int(lease.request.priority)
        assert lease.claim is not None
        if not lease.gang:
            machine_bytes = _machine_bytes(ledger, lease)
            groups.append(VictimGroup((lease.id,), victim_weight(rank, cost), rank, lease.claim, machine_bytes))
            continue
        gang = [lease.id, *(member for member in ledger.gangs[lease.gang] if member != lease.id)]
        theirs = [ledger.running.slots.get(member, -1) for member in gang]
        if all(slot >= 0 and candidates.able[slot] for slot in theirs):
            weight = sum(victim_weight(rank, int(candidates.costs[slot])) for slot in theirs)
            groups.append(VictimGroup(tuple(gang), weight, rank, lease.claim))
    groups.sort()
    return groups


def _plan_on_node(
    ledger: Ledger, request: Request, node: str, victims: list[VictimGroup], shortage: MachineShortage | None
) -> PreemptionPlan | None:
    """The plan with these victims, after those being released anyway; None where there is nothing to wait for."""
    lends, leaving = ledger.lends(node), ledger.running.leaving.get(node, {})
    gone = {group.leases[0] for group in victims}
    claims = NodeClaims(one.claim for one in _staying(ledger, node) if one.claim is not None and one.id not in gone)
    awaits = []
    for lease_id in leaving:
        lease = ledger.leases[lease_id]
        if lease.preempted_by or lease.claim is None or (shortage is not None and lease_id in shortage.leaving):
            awaits.append(lease_id)
            continue
        claims.add(lease.claim)
        if claims.claim_for(request.ask, lends) is None:
            claims.remove(lease.claim)
            awaits.append(lease_id)
    awaits += [lease_id for lease_id in (shortage.leaving if shortage is not None else ()) if lease_id not in leaving]
    claim = claims.claim_for(request.ask, lends)
    if claim is None or not (victims or awaits):
        return None
    here = tuple(group.leases[0] for group in victims)
    return PreemptionPlan(
        node, claim, tuple(lease_id for group in victims for lease_id in group.leases), (*here, *awaits)
    )


def preempt_automatic_leases(
    ledger: Ledger, request: Request, *, avoid: frozenset[str] = frozenset()
) -> PreemptionPlan | None:
    """The preemption of as few automatic leases as are enough, or None; never on a node to avoid."""
    if is_automatic(request) or request.gang > 1:
        return None
    on: dict[str, list[Lease]] = {}
    for lease in idle_automatic_leases(ledger):
        if lease.node not in avoid:
            on.setdefault(lease.node, []).append(lease)
    plans = (_automatic_plan(ledger, request, node, leases) for node, leases in on.items())
    found = [plan for plan in plans if plan is not None]
    return min(found, key=lambda plan: (plan.node not in request.prefer, len(plan.victims), plan.node), default=None)


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
        claims.add(lease.claim)
        if claims.claim_for(request.ask, lends) is not None:
            going.discard(lease.id)
        else:
            claims.remove(lease.claim)
    claim = claims.claim_for(request.ask, lends)
    if claim is None or not going:
        return None
    gone = tuple(lease.id for lease in mine if lease.id in going)
    return PreemptionPlan(node, claim, gone, gone)
