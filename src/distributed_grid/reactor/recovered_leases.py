"""Deciding about claims: leases that a new ledger learns of from elsewhere, such as the file beside it.

Rule 1: nobody is refused here. A claim that cannot be is a lease that ends at once, with the reason.
Rule 2: a claim counts against its node from the first moment, so nothing else gets what it names. It becomes a lease
        when its node was heard and has room for it, within its limits, beside all that is held there.
Rule 3: fences stay above every claimed one, and a claim keeps its own: whatever was done under it is known by it.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import ClaimsChecked, ClaimsRead, LeaseClaimed
from distributed_grid.domain.indexes.node_claims import NodeClaims, shared_though_exclusive
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.rows import Counter, Row
from distributed_grid.domain.states import LeaseEnd, NodeState, Step, advance_lease
from distributed_grid.reactor.decision import Decision
from distributed_grid.reactor.lease_transitions import FENCE, binding_for, end_lease, record_of

CLAIMS_READ = "claims_read"
"""The counter that says that this ledger has read what there was to claim."""


def on_read(ledger: Ledger, event: ClaimsRead, now: int) -> Decision:
    """Take all claims in, and note that this was done: later the ledger alone knows."""
    if CLAIMS_READ in ledger.counters:
        return Decision()
    return Decision([Counter(CLAIMS_READ, 1)], follow=[*event.claims])


def on_claimed(ledger: Ledger, event: LeaseClaimed, now: int) -> Decision:
    """Hold what is claimed until its node confirms it; what the ledger knows already is left as it is."""
    request = event.request
    if request.id in ledger.leases or request.id in ledger.by_request:
        return Decision()
    fence = max(ledger.counters.get(FENCE, 0), event.fence)
    epoch = max(ledger.counters.get("epoch", 0), fence >> 32)
    counters: list[Row] = [Counter(FENCE, fence), Counter("epoch", epoch)]
    lease = Lease(request.id, request, event.granted_at_ms, node=event.node, ends_at_ms=event.ends_at_ms)
    node = ledger.nodes.get(event.node)
    problem = request.problem() or (None if node is not None else f"{event.node} is not a node of this grid")
    if problem is not None or node is None:
        decision = end_lease(ledger, lease, LeaseEnd.FAILED, f"recovered, but {problem}", now)
        decision.changes += counters
        return decision
    lease = replace(
        lease,
        state=advance_lease(lease.state, Step.GRANT),
        claim=event.claim,
        fence=event.fence,
        granted_at_ms=event.granted_at_ms,
        recovered=True,
    )
    record = record_of("recovered", lease, None, "a claim until its node was heard")
    heard = node.state is NodeState.ALIVE
    return Decision([lease, *counters], [record], follow=[ClaimsChecked(node.name)] if heard else [])


def on_checked(ledger: Ledger, event: ClaimsChecked, now: int) -> Decision:
    """Settle the oldest claim on a node, then look again."""
    node = ledger.nodes.get(event.node)
    claims = [lease for lease in ledger.leases_of(event.node) if lease.recovered] if node is not None else []
    if node is None or not claims:
        return Decision()
    lease = min(claims, key=lambda one: (one.granted_at_ms, one.id))
    problem = _excess(ledger, node, lease)
    if problem is None:
        decision = _confirmed(ledger, node, lease, now)
    else:
        decision = end_lease(ledger, replace(lease, recovered=False), LeaseEnd.FAILED, problem, now)
    decision.follow.append(event)
    return decision


def _excess(ledger: Ledger, node: Node, lease: Lease) -> str | None:
    """Why a node cannot have lent what is claimed of it, beside what it has lent."""
    others = (one for one in ledger.leases_of(node.name) if not one.recovered)
    held = [one.claim for one in (*others, lease) if one.claim is not None]
    excess = NodeClaims(held).excess_over(node.lendable) or shared_though_exclusive(held, node.lendable)
    return None if excess is None else f"recovered, but {node.name} cannot have lent it: {excess}"


def _confirmed(ledger: Ledger, node: Node, lease: Lease, now: int) -> Decision:
    """A lease like any other: active, or reserved by the engine of its node first."""
    record = record_of("confirmed", lease, None, f"{node.name} was heard and has it")
    if node.engine:
        bound = replace(lease, recovered=False, engine=node.engine)
        return Decision([bound, binding_for(ledger, bound, bound.fence, now, again=True)], [record])
    return Decision([replace(lease, recovered=False, state=advance_lease(lease.state, Step.BIND))], [record])
