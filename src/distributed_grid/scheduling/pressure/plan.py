"""Plan of a round: the watches over all nodes, the nodes to visit, and the next action for one: return, renew, borrow.

Actions are taken one at a time, so that each sees the effect of the last one. A loan is returned when its node is below
the low watermark, when the lender is above its high one, when a user waits for it, when nothing has used it for some
rounds, or when the rules forbid it; but not while a command runs with it. One that was returned unused is asked for
again when work of its node arrives or waits, when its pressure has fallen, and at a slow pace otherwise. Loans have a
term and are renewed while their node is known, so that a forgotten one ends by itself. Borrowing comes before advice.

Automatic offloading evaluates the same scan by its own thresholds, at its own interval, and moves jobs (`relief`).
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import OffloadWatch
from distributed_grid.domain.rebalancing import (
    SPREAD,
    WATCHED_RESOURCES,
    Advice,
    PressureWatch,
    RebalanceSchedule,
    RebalanceState,
    belongs_to,
    is_automatic,
    resource_of,
)
from distributed_grid.domain.resources import ResourceType
from distributed_grid.scheduling.placement.explanation import duration
from distributed_grid.scheduling.placement.placement import unmet_constraint
from distributed_grid.scheduling.pressure.loans import Borrow, Deny, asked_amount, may_borrow, plan_borrow
from distributed_grid.scheduling.pressure.relief import HOUR_MS, advice_for, still_applies
from distributed_grid.scheduling.pressure.scan import (
    PressureScan,
    idle_automatic_leases,
    is_in_use,
    machine_of,
    percent,
)

QUEUE_ENTRY = ""
"""The first entry of a schedule: the queue."""
QUEUE_SCAN_LIMIT = 100
"""Waiting requests that are compared with the automatic leases."""
MAX_RELIEVED = 100
"""Nodes that are relieved at one evaluation; the others follow at the next."""
_CAUSES = (*WATCHED_RESOURCES, SPREAD)


class ReturnLease(Struct, frozen=True):
    """A lease that is not needed or not allowed any more, or that nothing has used for `unused_ms`."""

    lease: Lease
    reason: str
    unused_ms: int = 0


class Renew(Struct, frozen=True):
    """A lease that is still needed when its term ends."""

    lease: Lease
    extra_ms: int


class Advise(Struct, frozen=True):
    """Work of a node that should move."""

    node: str
    advice: Advice


RebalanceAction = ReturnLease | Renew | Borrow | Deny | Advise


# ------------------------------------------------------------------ watches


def track_nodes(scan: PressureScan) -> list[RebalanceState]:
    """The states of the nodes after one more reading, where they have changed."""
    nodes = scan.ledger.nodes
    scores = sorted((score, name) for name in nodes if (score := scan.reading(name).score) is not None)
    lowest = scores[:1]  # the least loaded node that is known, and the least loaded one of another machine
    lowest += [entry for entry in scores[1:] if machine_of(nodes[entry[1]]) != machine_of(nodes[scores[0][1]])][:1]
    changed = []
    for name in nodes:
        old = scan.state(name)
        new = replace(
            old,
            memory=_track_resource(scan, name, ResourceType.MEMORY, old.memory),
            cpu=_track_resource(scan, name, ResourceType.CPU, old.cpu),
            gpu=_track_resource(scan, name, ResourceType.GPU, old.gpu),
            spread=_track_spread(scan, name, lowest, old.spread),
            advice=old.advice if old.advice is not None and still_applies(scan, name, old.advice) else None,
        )
        if new != old:
            changed.append(new)
    return changed


def _track_resource(scan: PressureScan, node: str, resource: ResourceType, old: PressureWatch) -> PressureWatch:
    above = below = None
    is_below, holds_loan = scan.is_below(node, resource), scan.held[node, resource]
    if scan.is_above(node, resource):
        above = scan.now if old.above_since_ms is None else old.above_since_ms
    elif holds_loan and is_below:
        below = scan.now if old.below_since_ms is None else old.below_since_ms
    used_at_ms = old.used_at_ms if holds_loan else None
    if holds_loan:  # a loan from before this was watched counts anew
        loans = (lease for lease in scan.leases if lease.request.target == node)
        loans = (lease for lease in loans if resource_of(lease.request.ask) is resource)
        if used_at_ms is None or any(is_in_use(scan.ledger, lease) for lease in loans):
            used_at_ms = scan.now
    watch = PressureWatch(
        above_since_ms=above,
        below_since_ms=below,
        acted_at_ms=old.acted_at_ms,
        refused=old.refused and not is_below,
        used_at_ms=used_at_ms,
    )
    if not old.unused_amount or is_below or scan.may_retry_unused(old.acted_at_ms):
        return watch
    if any(node in belongs_to(request) and asked_amount(request.ask, resource) for request in scan.waiting()):
        return replace(watch, acted_at_ms=None)
    return replace(watch, unused_amount=old.unused_amount, unused_ms=old.unused_ms)


def _track_spread(scan: PressureScan, node: str, lowest: list[tuple[int, str]], old: PressureWatch) -> PressureWatch:
    """Since when a node works so much harder than the least loaded one elsewhere that they should be evened out."""
    score, nodes = scan.reading(node).score, scan.ledger.nodes
    if not scan.rules.evens_out or score is None or len(lowest) < 2:
        return PressureWatch()
    least, _ = lowest[0] if machine_of(nodes[lowest[0][1]]) != machine_of(nodes[node]) else lowest[1]
    if score - least <= scan.rules.policy.spread_milli:
        return PressureWatch()
    return PressureWatch(above_since_ms=scan.now if old.above_since_ms is None else old.above_since_ms)


def states_after_arrival(ledger: Ledger, request: Request) -> list[RebalanceState]:
    """The states of the nodes whose work has arrived: loans that they returned unused may be asked for again."""
    if is_automatic(request):
        return []
    changed = []
    for name in dict.fromkeys(belongs_to(request)):
        state = ledger.rebalance_states.get(name)
        if state is None:
            continue
        asked = (resource for resource in WATCHED_RESOURCES if asked_amount(request.ask, resource))
        watches = {
            str(resource): replace(state.watch(resource), unused_amount=0, unused_ms=0, acted_at_ms=None)
            for resource in asked
            if state.watch(resource).unused_amount
        }
        if watches:
            changed.append(replace(state, **watches))
    return changed


def track_offload(scan: PressureScan) -> list[OffloadWatch]:
    """The watches of automatic offloading over all nodes after one more evaluation."""
    watches, rules = [], scan.rules
    for node in scan.ledger.nodes:
        old, reading = scan.watch(node), scan.reading(node)
        since = {
            f"{resource}_since_ms": (old.since_ms(resource) if old.since_ms(resource) is not None else scan.now)
            if scan.is_above_threshold(node, resource)
            else None
            for resource in WATCHED_RESOURCES
        }
        is_low = reading.memory is not None and reading.memory < scan.low_mark(ResourceType.MEMORY)
        is_spread = False
        if rules.evens_out and reading.score is not None:
            target = next(scan.lenders(node), None)
            distance = reading.score - (scan.reading(target).score or 0) if target is not None else 0
            is_spread = distance > rules.policy.spread_milli
        watch = replace(
            old,
            **since,
            spread_since_ms=(scan.now if old.spread_since_ms is None else old.spread_since_ms) if is_spread else None,
            low_since_ms=(scan.now if old.low_since_ms is None else old.low_since_ms) if is_low else None,
            tried=tuple((job, at_ms) for job, at_ms in old.tried if scan.now - at_ms < HOUR_MS),
            looked_at_ms=scan.now,
            reason="",
            considered=(),
        )
        watches.append(watch)
    return watches


# ------------------------------------------------------------------ nodes to visit


def schedule_round(scan: PressureScan, tracked: Iterable[RebalanceState]) -> RebalanceSchedule:
    """The nodes to visit in this round after this reading, and the possible lenders."""
    states = {**scan.ledger.rebalance_states, **{state.node: state for state in tracked}}
    above = {
        name
        for name, state in states.items()
        if any(state.watch(cause).above_since_ms is not None for cause in _CAUSES)
    }
    borrowers = dict.fromkeys(lease.request.target for lease in scan.leases)
    others = tuple(name for name in borrowers if name not in above)
    if not above:
        return RebalanceSchedule((QUEUE_ENTRY, *others))
    pressed = sorted(above, key=lambda name: (-(scan.reading(name).score or 0), name))
    contested: set[str] = set()  # by users: the grid does not get in their way
    for request in scan.waiting():
        contested.update(kind for kind in WATCHED_RESOURCES if asked_amount(request.ask, kind))
        if len(contested) == len(WATCHED_RESOURCES):
            break
    nodes = (QUEUE_ENTRY, *others, *pressed)
    return RebalanceSchedule(nodes, tuple(scan.by_headroom()), frozenset(contested))


def nodes_to_relieve(scan: PressureScan, watches: list[OffloadWatch]) -> tuple[str, ...]:
    """The nodes above a threshold, memory first, then the hardest working ones; degraded ones come last."""
    above = [watch for watch in watches if any(watch.since_ms(cause) is not None for cause in _CAUSES)]

    def urgency(watch: OffloadWatch) -> tuple[bool, bool, int, str]:
        score, is_degraded = scan.reading(watch.node).score or 0, watch.node in scan.ledger.degraded
        return is_degraded, watch.memory_since_ms is None, -score, watch.node

    return tuple(watch.node for watch in sorted(above, key=urgency)[:MAX_RELIEVED])


def pressed_nodes(scan: PressureScan) -> list[str]:
    """The nodes above a watermark, the hardest pressed first."""
    above = [name for name in scan.ledger.nodes if any(scan.is_above(name, kind) for kind in WATCHED_RESOURCES)]
    return sorted(above, key=lambda name: (-(scan.reading(name).score or 0), name))


# ------------------------------------------------------------------ actions


def next_action(scan: PressureScan, node: str) -> RebalanceAction | None:
    """The next action for an entry of the schedule, or None."""
    if node == QUEUE_ENTRY:
        return _blocking_lease(scan) if scan.leases and scan.ledger.waiting else None
    loans = [lease for lease in scan.leases if lease.request.target == node]
    action: RebalanceAction | None = _return(scan, loans) or _renew(scan, loans)
    if action is not None or node not in scan.ledger.nodes:
        return action
    for resource in WATCHED_RESOURCES if scan.rules.shares else ():
        if may_borrow(scan, node, resource) and (plan := plan_borrow(scan, node, resource)) is not None:
            return plan
    state = scan.state(node)
    if state.advice is None and scan.has_cooled_down(state.advised_at_ms):
        for cause in _CAUSES:
            if scan.has_lasted(state.watch(cause).above_since_ms):
                advice = advice_for(scan, node, cause)
                if advice is not None:
                    return Advise(node, advice)
    return None


def _blocking_lease(scan: PressureScan) -> ReturnLease | None:
    """An automatic lease that, alone or with others on its node, keeps a waiting request from being granted."""
    ledger = scan.ledger
    nodes = dict.fromkeys(lease.node for lease in scan.leases)
    for _, _, lease_id in ledger.waiting[:QUEUE_SCAN_LIMIT]:
        request = ledger.leases[lease_id].request
        for node in nodes:
            leases = _blocking_leases(ledger, request, node)
            if leases:
                return ReturnLease(leases[0], f"{request.user} waits for it: request {request.id}")
    return None


def _blocking_leases(ledger: Ledger, request: Request, node: str) -> list[Lease]:
    """The automatic leases on a node that alone keep a request from fitting there."""
    blocking = {
        lease.id: lease
        for lease in idle_automatic_leases(ledger)
        if lease.node == node and asked_amount(request.ask, resource_of(lease.request.ask))
    }
    lends = ledger.lends(node)
    if not blocking or ledger.claims_on(node).claim_for(request.ask, lends) is not None:
        return []
    if unmet_constraint(ledger, request, node) is not None:
        return []
    staying = (lease for lease in ledger.leases_of(node) if lease.id not in blocking)
    claims = NodeClaims(lease.claim for lease in staying if lease.claim is not None)
    return list(blocking.values()) if claims.claim_for(request.ask, lends) is not None else []


def _return(scan: PressureScan, loans: list[Lease]) -> ReturnLease | None:
    """A loan that is too many, not needed or not allowed any more."""
    most, idle = scan.rules.policy.leases_max, [lease for lease in loans if not is_in_use(scan.ledger, lease)]
    if len(loans) > most and idle:
        return ReturnLease(idle[-1], f"{most} leases for one node are enough")
    for lease in idle:
        reason = _return_reason(scan, lease)
        if reason:
            return ReturnLease(lease, reason)
        if scan.is_unused(scan.state(lease.request.target).watch(resource_of(lease.request.ask)).used_at_ms):
            unused_ms = scan.rules.policy.unused_after * scan.rules.interval_ms
            return ReturnLease(lease, f"unused for {duration(unused_ms)}", unused_ms=unused_ms)
    return None


def _return_reason(scan: PressureScan, lease: Lease) -> str:
    """Why a lease is not needed or not allowed any more; empty where it is."""
    target, resource = lease.request.target, resource_of(lease.request.ask)
    if not scan.rules.shares:
        return f"the mode is {scan.rules.mode}"
    marks = scan.rules.watermarks(resource)
    level = scan.reading(lease.node).level(resource)
    if level is not None and scan.has_lasted(scan.state(lease.node).watch(resource).above_since_ms):
        return f"{lease.node} needs it itself: {resource} at {percent(level)}, mark {percent(marks.high)}"
    watch, level = scan.state(target).watch(resource), scan.reading(target).level(resource)
    if level is None or not scan.has_lasted(watch.below_since_ms):
        return ""
    if not (scan.has_cooled_down(watch.acted_at_ms) or watch.acted_at_ms == scan.now):
        return ""
    return f"{resource} of {target} at {percent(level)}, below the mark of {percent(marks.low)}"


def _renew(scan: PressureScan, loans: list[Lease]) -> Renew | None:
    policy, interval_ms = scan.rules.policy, scan.rules.interval_ms
    for lease in loans:
        target, resource = lease.request.target, resource_of(lease.request.ask)
        left_ms = lease.ends_at_ms - scan.now
        if left_ms > policy.renew_at * interval_ms:
            continue
        is_needed = scan.reading(target).level(resource) is not None and not scan.is_below(target, resource)
        if is_needed or is_in_use(scan.ledger, lease):
            return Renew(lease, policy.term * interval_ms - left_ms)
    return None
