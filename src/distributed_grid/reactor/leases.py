"""Deciders of leases: request, queue scan, release, extension."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import LeaseAsked, LeaseExtended, LeaseReleased, RequestRefused
from distributed_grid.domain.followups import ContinueScan, ScanQueue
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import MAX_DURATION_MS, Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.states import LeaseEnd, LeaseState
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused
from distributed_grid.number_text import plain_number
from distributed_grid.reactor.decision import Decision, JobAnswer, LeaseAnswer, Record, request_details
from distributed_grid.reactor.lease_transitions import end_lease, grant, is_urgent, lease_record, preempt_victims
from distributed_grid.reactor.reduced_sizes import reduce_waiting
from distributed_grid.scheduling.placement.fragmentation import learn_shape
from distributed_grid.scheduling.placement.machine_limits import crowded_nodes, node_ends, outlived_nodes
from distributed_grid.scheduling.placement.placement import Placement
from distributed_grid.scheduling.preemption.preemption import PreemptionPlan, plan_preemption, preempt_automatic_leases
from distributed_grid.scheduling.pressure.plan import states_after_arrival
from distributed_grid.scheduling.queue import reasons
from distributed_grid.scheduling.queue.fairness import Quotas, exceeds_quota_alone
from distributed_grid.scheduling.queue.order import preemption_candidates, with_turn
from distributed_grid.scheduling.queue.queue import (
    fit_key,
    next_grant,
    place_in_automatic_lease,
    place_newcomer,
    reserved_nodes,
)
from distributed_grid.scheduling.scaling.demand import worker_could_serve

MAX_GRANTS_PER_STEP = 64
"""Grants of one scan of the queue, so that no step takes long."""
MAX_EXTENSIONS = 32
"""Extensions that a lease remembers by request id; a retry comes soon or never."""
MAX_PREEMPTION_TRIES = 16
"""Different waiting requests that are tried where automatic leases could make room."""


def on_asked(ledger: Ledger, event: LeaseAsked, now: int) -> Decision:
    """Grant, queue or refuse; the same request id again gets the same lease."""
    known = ledger.by_request.get(event.request.id)
    if known is not None:
        lease = ledger.leases.get(known)
        if lease is None or lease.request != event.request:
            raise Conflict(f"request {event.request.id} was used before for something else")
        return Decision(answer=LeaseAnswer(lease))
    lease = Lease(id=event.request.id, request=event.request, asked_at_ms=now)
    return admit(ledger, lease, now, job=None)


def on_refused(ledger: Ledger, event: RequestRefused, now: int) -> Decision:
    return Decision(records=[Record("refused", event.user, event.request_id, reason=event.reason)])


def admit(ledger: Ledger, lease: Lease, now: int, *, job: Job | None) -> Decision:
    """Grant a new request at once or by preemption, or queue it; refuse one that can never be granted."""
    request = lease.request
    problem = request.problem() or request.naming_problem()
    if problem is not None:
        raise BadInput(problem)
    named = (*request.require, *request.prefer, *((request.target,) if request.target else ()))
    unknown = [name for name in named if name not in ledger.nodes]
    if unknown:
        known = ", ".join(sorted(ledger.nodes)) or "none"
        raise Refused(f"no node is called {unknown[0]}; the nodes are: {known}")
    if request.latest_start_ms and request.latest_start_ms < now:
        needs, left = plain_number(request.expects_ms / 1000), plain_number(max(request.deadline_ms - now, 0) / 1000)
        raise Refused(f"it takes {needs} s, but its deadline is in {left} s")
    asked = lease_record("requested", lease, job, reasons.describe_amounts(request.ask))
    asked.data.update(request_details(request, now, retries=job.retries_left if job is not None else 0))
    lease = with_turn(ledger, lease, now)
    placement = place_newcomer(ledger, lease, now)
    if placement is not None:
        decision, lease, job = grant(ledger, lease, placement, now, job=job)
        decision.follow = [ScanQueue()] if ledger.waiting else []
        return _with_shape(ledger, _with_answer(decision, asked, lease, job), request)
    _check_possible(ledger, request)
    displaced = _preempt(ledger, lease, job, now)
    if displaced is not None:
        decision, lease, job = displaced
        decision.follow = [ScanQueue()] if ledger.waiting else []
        return _with_shape(ledger, _with_answer(decision, asked, lease, job), request)
    reason = reasons.texts(reasons.why_not_now(ledger, request, now))
    if request.wait_ms <= 0:
        raise Refused(no_offers_message(reason), reason)
    waiting = lease_record("queued", lease, job, "; ".join(reason))
    rows = [lease] if job is None else [lease, job]
    answer = LeaseAnswer(lease, reason) if job is None else JobAnswer(job, lease, reason)
    return _with_shape(ledger, Decision([*rows], [asked, waiting], answer), request)


def _with_shape(ledger: Ledger, decision: Decision, request: Request) -> Decision:
    """The decision, with the request counted in the request shapes and noted for its target."""
    decision.changes += states_after_arrival(ledger, request)
    request_shapes = learn_shape(ledger, request)
    if request_shapes is not None:
        decision.changes.append(request_shapes)
    return decision


def no_offers_message(why: tuple[str, ...]) -> str:
    """Refusal of a request that no node can serve now."""
    return "No resource offers available: " + ("; ".join(why) or "the grid has no nodes")


def _with_answer(decision: Decision, asked: Record, lease: Lease, job: Job | None) -> Decision:
    decision.records.insert(0, asked)
    choice = decision.choice
    decision.answer = LeaseAnswer(lease, choice=choice) if job is None else JobAnswer(job, lease, choice=choice)
    return decision


def _check_possible(ledger: Ledger, request: Request) -> None:
    beyond = exceeds_quota_alone(ledger, request) if ledger.policy.quotas else None
    if beyond is not None:
        raise Refused(beyond, (beyond,))
    never = reasons.never_fits(ledger, request)
    if never is not None and not worker_could_serve(ledger, request):
        start, reason = (
            "No resource offers available" if not ledger.nodes else "No node can ever lend",
            reasons.texts(never),
        )
        raise Refused(f"{start} {reasons.describe_amounts(request.ask)}: {'; '.join(reason)}", reason)


def _preempt(ledger: Ledger, lease: Lease, job: Job | None, now: int) -> tuple[Decision, Lease, Job | None] | None:
    if ledger.policy.quotas and Quotas(ledger).exceeded(lease.request) is not None:
        return None
    carved = place_in_automatic_lease(ledger, lease, now, waits=True)
    if carved is not None:
        return grant(ledger, lease, carved, now, job=job)
    plan = _find_preemption(ledger, lease, now)
    if plan is not None and ledger.waiting:
        avoid = reserved_nodes(ledger, lease, now)
        plan = _find_preemption(ledger, lease, now, avoid) if plan.node in avoid else plan
    if plan is None:
        return None
    leaving, awaits = preempt_victims(ledger, plan, lease, now)
    there = Placement(node=plan.node, claim=plan.claim)
    decision, lease, job = grant(ledger, lease, there, now, job=job, awaits=awaits, displaced=plan.awaits)
    decision.changes = leaving.changes + decision.changes
    decision.records += leaving.records
    return decision, lease, job


def _find_preemption(
    ledger: Ledger, lease: Lease, now: int, avoid: frozenset[str] = frozenset()
) -> PreemptionPlan | None:
    """Automatic leases make room for anybody, other leases for urgent requests."""
    request = lease.request
    avoid |= outlived_nodes(request, node_ends(ledger), now) if ledger.workers else frozenset()
    crowded = crowded_nodes(ledger, request)  # where nothing is used of an automatic lease, none gives memory back
    plan = preempt_automatic_leases(ledger, request, avoid=avoid | crowded)
    return plan or plan_preemption(ledger, request, now, avoid=avoid)


def scan_queue(ledger: Ledger, _: ScanQueue, now: int) -> Decision:
    return continue_scan(ledger, ContinueScan(), now)


def continue_scan(ledger: Ledger, scan: ContinueScan, now: int) -> Decision:
    """Grant the next request of the queue, then scan again; after many grants in a later step."""
    if scan.granted == MAX_GRANTS_PER_STEP:
        return Decision(later=[ScanQueue()])
    granted = next_grant(ledger, now, scan.tried)
    if granted is not None:
        job = ledger.jobs.get(granted.lease.job)
        decision, _, _ = grant(ledger, granted.lease, granted.placement, now, job=job)
        known = frozenset[object]() if granted.placement.carved else granted.tried
        decision.follow = [ContinueScan(known, scan.granted + 1)]
        return decision
    tried: set[object] = set()
    for lease in preemption_candidates(ledger, now):
        if not is_urgent(lease) and (GRID_USER not in ledger.held or len(tried) >= MAX_PREEMPTION_TRIES):
            break
        key = (fit_key(lease.request), lease.request.user, lease.request.team)
        if key in tried:
            continue
        tried.add(key)
        displaced = _preempt(ledger, lease, ledger.jobs.get(lease.job), now)
        if displaced is not None:
            displaced[0].follow = [ContinueScan(granted=scan.granted + 1)]
            return displaced[0]
    reduced = reduce_waiting(ledger, now)
    if reduced is not None:
        reduced.follow = [ContinueScan(granted=scan.granted + 1)]
    return reduced or Decision()


def on_released(ledger: Ledger, event: LeaseReleased, now: int) -> Decision:
    """Release a lease without a job; `jobs.on_released` handles the others."""
    lease = held_lease(ledger, event.lease_id)
    end = LeaseEnd.WITHDRAWN if lease.state is LeaseState.ASKED else LeaseEnd.RELEASED
    decision = end_lease(ledger, lease, end, event.detail or f"by {event.by}", now)
    over = decision.changes[0]
    assert isinstance(over, Lease)
    decision.answer = LeaseAnswer(over)
    return decision


def held_lease(ledger: Ledger, lease_id: str) -> Lease:
    """The living lease of this id, or NotFound."""
    lease = ledger.leases.get(lease_id)
    if lease is None:
        raise NotFound(f"no lease {lease_id} is held")
    return lease


def on_extended(ledger: Ledger, event: LeaseExtended, now: int) -> Decision:
    """Extend an active lease; a request that was counted already changes nothing."""
    lease = ledger.leases.get(event.lease_id)
    if lease is None or not lease.ends_at_ms:
        raise NotFound(f"no lease {event.lease_id} with an end is held")
    if not 0 < event.extra_ms <= MAX_DURATION_MS:
        raise BadInput("the extra time must be more than zero and less than 200 years")
    counted = dict(lease.extensions)
    if event.request_id in counted:
        if counted[event.request_id] != event.extra_ms:
            raise Conflict(f"request {event.request_id} was used before for another extension")
        return Decision(answer=LeaseAnswer(lease))
    members = [ledger.leases[member] for member in ledger.gangs.get(lease.gang, ()) if member != lease.id]
    longer, *others = (replace(one, ends_at_ms=one.ends_at_ms + event.extra_ms) for one in (lease, *members))
    if event.request_id:
        kept = (*lease.extensions, (event.request_id, event.extra_ms))[-MAX_EXTENSIONS:]
        longer = replace(longer, extensions=kept)
    record = Record("extended", event.by, lease.id, lease.node, f"{event.extra_ms // 1000} s more")
    follow = [ScanQueue()] if ledger.waiting else []
    return Decision([longer, *others], [record], LeaseAnswer(longer), [*follow])
