"""Rebalancing plan: what is tracked from round to round, which nodes a round visits, and the next move for one.

Moves are made one at a time, so that each sees what the last one did. A loan is returned when its node is below the low
watermark, when the lender is above its high one, when a user waits for it, when nothing has used it for some rounds, or
when the rules forbid it; but not while a command runs with it. One that went back unused is asked for again when work
of its node arrives or waits, when its pressure has fallen, and at a slow pace otherwise. Loans have a term and are
renewed while their node is known, so that a forgotten one ends by itself. Borrowing comes before advice.

Advice says which job to move off a node, and where to; nothing is moved here. A job is only sent where it may run, fits
and can be spared room. Evening out never reverses the order of two nodes, so that nobody advises the way back. Advice
stands until its cause is clearly over, or its job or target is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import (
    SPREAD,
    WATCHED_RESOURCES,
    Advice,
    PressureWatch,
    RebalanceSchedule,
    RebalanceState,
    belongs_to,
    claimed_amount,
    is_automatic,
    resource_of,
)
from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.states import JobState, LeaseState
from distributed_grid.scheduling.placement.explanation import duration
from distributed_grid.scheduling.placement.placement import find_placement, unmet_constraint
from distributed_grid.scheduling.rebalancing.loans import (
    UNITS,
    Borrow,
    Deny,
    asked_amount,
    describe,
    may_borrow,
    plan_borrow,
    surplus,
    surpluses,
    total_of,
)
from distributed_grid.scheduling.rebalancing.pressure import (
    PressureScan,
    idle_automatic_leases,
    is_in_use,
    machine_of,
    percent,
)

QUEUE_ENTRY = ""
"""The first entry of a schedule: the queue."""
MAX_JOBS = 20
"""Jobs of a node that are tried."""
MAX_TARGETS = 32
"""Nodes with room that are compared, least loaded first."""


def advice_for(scan: PressureScan, node: str, cause: str) -> Advice | None:
    """The best recommendation for a node, or None where nothing can be moved anywhere."""
    places = list(scan.lenders(node))
    for job, lease in _movable(scan, node, cause):
        for to in places:
            if (cause != SPREAD or _evens_out(scan, lease, to)) and _can_go(scan, job, lease, to):
                reason = f"{_why(scan, node, to, cause)}; job {job.id} holds {_held(lease, cause)}"
                return Advice(str(cause), job.uid, to, reason, scan.now)
    if cause == SPREAD or not scan.borrows_for_machine(node):
        return None
    resource = ResourceType(cause)
    room, to = max(islice(surpluses(scan, node, resource, UNITS[resource]), MAX_TARGETS), default=(0, ""))
    if not room:
        return None
    return Advice(str(cause), "", to, f"{_why(scan, node, to, cause)}, {describe(resource, room)} to spare", scan.now)


def still_applies(scan: PressureScan, node: str, advice: Advice) -> bool:
    """Whether advice is still valid."""
    reading = scan.reading(node)
    if not scan.has_headroom(advice.to) or reading.score is None:
        return False
    if advice.job:
        job = scan.ledger.jobs.get(advice.job)
        if job is None or job.attempt is None or job.attempt.node != node:
            return False
    if advice.cause == SPREAD:
        distance = reading.score - (scan.reading(advice.to).score or 0)
        return scan.rules.evens_out and distance > scan.rules.policy.spread_milli // 2
    resource = ResourceType(advice.cause)
    level = reading.level(resource)
    if level is None:
        return False
    return level > scan.rules.watermarks(resource).middle or scan.will_be_above(node, resource)


def _movable(scan: PressureScan, node: str, cause: str) -> Iterator[tuple[Job, Lease]]:
    """The jobs that run on a node and would relieve it: the least important first, then the largest."""
    found = []
    for lease in scan.ledger.leases_of(node):
        job = scan.ledger.jobs.get(lease.job)
        if job is None or job.state is not JobState.RUNNING or lease.state is not LeaseState.ACTIVE or lease.gang:
            continue
        size = _shift(scan, lease, node) if cause == SPREAD else claimed_amount(lease, ResourceType(cause))
        if size:
            found.append((int(lease.request.priority), -size, job.uid, job, lease))
    for *_, job, lease in sorted(found, key=lambda entry: entry[:3])[:MAX_JOBS]:
        yield job, lease


def _can_go(scan: PressureScan, job: Job, lease: Lease, to: str) -> bool:
    """Whether a job may run on a node that has room for it and can spare that."""
    request = job.request
    if request.require and to not in request.require:
        return False
    if any(
        claimed_amount(lease, resource) > surplus(scan, to, resource)
        for resource in WATCHED_RESOURCES
        if claimed_amount(lease, resource)
    ):
        return False
    return find_placement(scan.ledger, replace(request, require=(to,), prefer=())) is not None


def _evens_out(scan: PressureScan, lease: Lease, to: str) -> bool:
    """Whether two nodes differ much, and the one that gives still works at least as hard after the move."""
    gives, takes = scan.reading(lease.node).score or 0, scan.reading(to).score or 0
    if gives - takes <= scan.rules.policy.spread_milli:
        return False
    return takes + _shift(scan, lease, to) <= gives - _shift(scan, lease, lease.node)


def _shift(scan: PressureScan, lease: Lease, node: str) -> int:
    """How much of a node a lease is at most, in thousandths."""
    capacity = scan.ledger.nodes[node].capacity
    parts = ((claimed_amount(lease, resource), total_of(capacity, resource)) for resource in WATCHED_RESOURCES)
    return max((1000 * size // total if total else 1000 for size, total in parts if size), default=0)


def _held(lease: Lease, cause: str) -> str:
    kinds = WATCHED_RESOURCES if cause == SPREAD else (ResourceType(cause),)
    return ", ".join(describe(kind, claimed_amount(lease, kind)) for kind in kinds if claimed_amount(lease, kind))


def _why(scan: PressureScan, node: str, to: str, cause: str) -> str:
    here, there = scan.reading(node), scan.reading(to)
    if cause == SPREAD:
        most = percent(scan.rules.policy.spread_milli)
        return f"{node} works at {percent(here.score or 0)}, {to} at {percent(there.score or 0)}, may differ by {most}"
    resource = ResourceType(cause)
    high = scan.rules.watermarks(resource).high
    level, other = here.level(resource) or 0, there.level(resource)
    if level <= high and (ahead := here.ahead(resource)) is not None:
        words = f"{resource} at {percent(level)}, expected at {percent(ahead.level)}"
    else:
        words = f"{resource} at {percent(level)}"
    return f"{words}, above the mark of {percent(high)}; {to} is at {percent(other or 0)}"


def track_nodes(scan: PressureScan) -> list[RebalanceState]:
    """The states of the nodes after one more reading, where they have changed."""
    changed = []
    least = _two_least(scan)
    for name in scan.ledger.nodes:
        old = scan.state(name)
        new = replace(
            old,
            memory=_track_resource(scan, name, ResourceType.MEMORY, old.memory),
            cpu=_track_resource(scan, name, ResourceType.CPU, old.cpu),
            gpu=_track_resource(scan, name, ResourceType.GPU, old.gpu),
            spread=_track_spread(scan, name, least, old.spread),
            advice=old.advice if old.advice is not None and still_applies(scan, name, old.advice) else None,
        )
        if new != old:
            changed.append(new)
    return changed


def _track_resource(scan: PressureScan, node: str, resource: ResourceType, old: PressureWatch) -> PressureWatch:
    above = below = None
    is_below = scan.is_below(node, resource)
    if scan.is_above(node, resource):
        above = scan.now if old.above_since_ms is None else old.above_since_ms
    elif scan.held[node, resource] and is_below:
        below = scan.now if old.below_since_ms is None else old.below_since_ms
    watch = PressureWatch(
        above, below, old.acted_at_ms, old.refused and not is_below, _used_at_ms(scan, node, resource, old)
    )
    if not old.unused_amount or is_below or scan.may_retry_unused(old.acted_at_ms):
        return watch
    if _work_waits(scan, node, resource):
        return replace(watch, acted_at_ms=None)
    return replace(watch, unused_amount=old.unused_amount, unused_ms=old.unused_ms)


def states_after_arrival(ledger: Ledger, request: Request) -> list[RebalanceState]:
    """The states of the nodes whose work has arrived: what they gave back unused may be borrowed for them again."""
    if is_automatic(request):
        return []
    changed = []
    for name in dict.fromkeys(belongs_to(request)):
        state = ledger.rebalance_states.get(name)
        if state is None:
            continue
        asked = (resource for resource in WATCHED_RESOURCES if asked_amount(request.ask, resource))
        watches = {str(resource): state.watch(resource) for resource in asked if state.watch(resource).unused_amount}
        if watches:
            fresh = {
                kind: replace(one, unused_amount=0, unused_ms=0, acted_at_ms=None) for kind, one in watches.items()
            }
            changed.append(replace(state, **fresh))
    return changed


def _used_at_ms(scan: PressureScan, node: str, resource: ResourceType, old: PressureWatch) -> int | None:
    """When something of what a node has borrowed was last used; what was lent before this was watched counts anew."""
    if not scan.held[node, resource]:
        return None
    mine = (one for one in scan.leases if one.request.target == node and resource_of(one.request.ask) is resource)
    return scan.now if old.used_at_ms is None or any(is_in_use(scan.ledger, one) for one in mine) else old.used_at_ms


def _work_waits(scan: PressureScan, node: str, resource: ResourceType) -> bool:
    """Whether work of a node waits for a resource."""
    return any(node in belongs_to(request) and asked_amount(request.ask, resource) for request in scan.waiting())


def _two_least(scan: PressureScan) -> list[tuple[int, str]]:
    """The least loaded node that is known, and the least loaded one of another machine."""
    nodes = scan.ledger.nodes
    found: list[tuple[int, str]] = []
    scores = ((scan.reading(name).score, name) for name in nodes)
    for score, name in sorted((score, name) for score, name in scores if score is not None):
        if not found:
            found.append((score, name))
        elif machine_of(nodes[name]) != machine_of(nodes[found[0][1]]):
            return [*found, (score, name)]
    return []


def _track_spread(scan: PressureScan, node: str, least: list[tuple[int, str]], old: PressureWatch) -> PressureWatch:
    """Since when a node works so much harder than the least loaded one elsewhere that they should be evened out."""
    score, nodes = scan.reading(node).score, scan.ledger.nodes
    if not scan.rules.evens_out or score is None or not least:
        return PressureWatch()
    lowest, _ = least[0] if machine_of(nodes[least[0][1]]) != machine_of(nodes[node]) else least[1]
    if score - lowest <= scan.rules.policy.spread_milli:
        return PressureWatch()
    return PressureWatch(scan.now if old.above_since_ms is None else old.above_since_ms)


def schedule_round(scan: PressureScan, tracked: Iterable[RebalanceState]) -> RebalanceSchedule:
    """Who has to be looked at in this round, by what has just been tracked, and who could help."""
    states = {**scan.ledger.rebalance_states, **{state.node: state for state in tracked}}
    above = {name for name, state in states.items() if _is_tracked_above(state)}
    holding = dict.fromkeys(lease.request.target for lease in scan.leases)
    pressed = sorted((-(scan.reading(name).score or 0), name) for name in above)
    others = tuple(name for name in holding if name not in above)
    if not pressed:
        return RebalanceSchedule((QUEUE_ENTRY, *others))
    with_headroom = sorted(
        (scan.reading(name).score or 0, name) for name in scan.ledger.nodes if scan.has_headroom(name)
    )
    return RebalanceSchedule(
        (QUEUE_ENTRY, *others, *(name for _, name in pressed)),
        tuple(name for _, name in with_headroom),
        _contested_resources(scan),
    )


def _is_tracked_above(state: RebalanceState) -> bool:
    return any(state.watch(cause).above_since_ms is not None for cause in (*WATCHED_RESOURCES, SPREAD))


def _contested_resources(scan: PressureScan) -> frozenset[str]:
    """The resources that users wait for: the grid does not get in their way."""
    kinds: set[str] = set()
    for request in scan.waiting():
        kinds.update(kind for kind in WATCHED_RESOURCES if asked_amount(request.ask, kind))
        if len(kinds) == len(WATCHED_RESOURCES):
            break
    return frozenset(kinds)


QUEUE_SCAN_LIMIT = 100
"""Waiting requests that are compared with the automatic leases."""


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


RebalanceMove = ReturnLease | Renew | Borrow | Deny | Advise


def next_move(scan: PressureScan, node: str) -> RebalanceMove | None:
    """The next move for a node of the schedule, or None."""
    if node == QUEUE_ENTRY:
        return _blocking_users(scan) if scan.leases and scan.ledger.waiting else None
    mine = [lease for lease in scan.leases if lease.request.target == node]
    return _return(scan, mine) or _renew(scan, mine) or _borrow(scan, node) or _advise(scan, node)


def _blocking_users(scan: PressureScan) -> ReturnLease | None:
    """An automatic lease that, alone or with others, keeps a waiting request from being granted."""
    ledger = scan.ledger
    nodes = dict.fromkeys(lease.node for lease in scan.leases)
    for _, _, lease_id in ledger.waiting[:QUEUE_SCAN_LIMIT]:
        request = ledger.leases[lease_id].request
        for node in nodes:
            held = _blocking_leases(scan, request, node)
            if held:
                return ReturnLease(held[0], f"{request.user} waits for it: request {request.id}")
    return None


def _blocking_leases(scan: PressureScan, request: Request, node: str) -> list[Lease]:
    """The leases of the grid on a node that alone keep a request from fitting there."""
    ledger, ask = scan.ledger, request.ask
    mine = {
        lease.id: lease
        for lease in idle_automatic_leases(ledger)
        if lease.node == node and asked_amount(ask, resource_of(lease.request.ask))
    }
    lends = ledger.lends(node)
    if not mine or ledger.claims_on(node).claim_for(ask, lends) is not None:
        return []
    if unmet_constraint(ledger, request, node) is not None:
        return []
    staying = NodeClaims(
        lease.claim for lease in ledger.leases_of(node) if lease.id not in mine and lease.claim is not None
    )
    return list(mine.values()) if staying.claim_for(ask, lends) is not None else []


def _return(scan: PressureScan, mine: list[Lease]) -> ReturnLease | None:
    """A lease that is too many, not needed or not allowed any more."""
    most, idle = scan.rules.policy.leases_max, [lease for lease in mine if not is_in_use(scan.ledger, lease)]
    if len(mine) > most and idle:
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


def _renew(scan: PressureScan, mine: list[Lease]) -> Renew | None:
    policy, interval_ms = scan.rules.policy, scan.rules.interval_ms
    for lease in mine:
        target, resource = lease.request.target, resource_of(lease.request.ask)
        left_ms = lease.ends_at_ms - scan.now
        if left_ms > policy.renew_at * interval_ms:
            continue
        is_needed = scan.reading(target).level(resource) is not None and not scan.is_below(target, resource)
        if is_needed or is_in_use(scan.ledger, lease):
            return Renew(lease, policy.term * interval_ms - left_ms)
    return None


def _borrow(scan: PressureScan, node: str) -> Borrow | Deny | None:
    if not scan.rules.shares or node not in scan.ledger.nodes:
        return None
    for resource in WATCHED_RESOURCES:
        if may_borrow(scan, node, resource):
            move = plan_borrow(scan, node, resource)
            if move is not None:
                return move
    return None


def _advise(scan: PressureScan, node: str) -> Advise | None:
    """One piece of advice at a time, for the first resource that a node is short of."""
    state = scan.state(node)
    if state.advice is not None or not scan.has_cooled_down(state.advised_at_ms) or node not in scan.ledger.nodes:
        return None
    for cause in (*WATCHED_RESOURCES, SPREAD):
        if scan.has_lasted(state.watch(cause).above_since_ms):
            advice = advice_for(scan, node, cause)
            if advice is not None:
                return Advise(node, advice)
    return None
