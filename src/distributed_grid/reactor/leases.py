"""Deciding about leases: asked for, given back, extended, and the line of those who wait."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import LeaseAsked, LeaseExtended, LeaseReleased, QueueLooked, RequestRefused
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import LONGEST_MS, Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.lives import LeaseEnd, LeaseState
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused
from distributed_grid.reactor.decision import Decision, JobAnswer, LeaseAnswer, Record
from distributed_grid.reactor.granting import end_lease, grant, is_urgent, record_of, yield_to
from distributed_grid.scheduling import reasons
from distributed_grid.scheduling.line import kept_from, next_turn
from distributed_grid.scheduling.placement import place
from distributed_grid.scheduling.preemption import displace


def on_asked(ledger: Ledger, event: LeaseAsked, now: int) -> Decision:
    """Grant, queue or refuse; the same request id again gets the same lease."""
    known = ledger.by_request.get(event.request.id)
    if known is not None:
        lease = ledger.leases.get(known)
        if lease is None or lease.request != event.request:
            raise Conflict(f"request {event.request.id} was used before for something else")
        return Decision(answer=LeaseAnswer(lease))
    lease = Lease(event.request.id, event.request, now)
    return admit(ledger, lease, now, job=None)


def on_refused(ledger: Ledger, event: RequestRefused, now: int) -> Decision:
    """Note a refusal."""
    return Decision(records=[Record("refused", event.user, event.request_id, reason=event.reason)])


def admit(ledger: Ledger, lease: Lease, now: int, *, job: Job | None) -> Decision:
    """Find a new ask its place: at once, over others, or in the line; refused where that is hopeless."""
    request = lease.request
    _make_sure_it_makes_sense(ledger, request)
    asked = record_of("requested", lease, job, reasons.amounts(request.ask))
    avoid = kept_from(ledger, request, now) if ledger.waiting else frozenset()
    placement = place(ledger, request, avoid=avoid)
    if placement is not None:
        decision, lease, job = grant(ledger, lease, placement.node, placement.claim, now, job=job)
        return _answered(decision, asked, lease, job)
    _make_sure_it_is_possible(ledger, request)
    displaced = _displace(ledger, lease, job, now)
    if displaced is not None:
        decision, lease, job = displaced
        decision.follow = [QueueLooked()] if ledger.waiting else []
        return _answered(decision, asked, lease, job)
    why = reasons.why_not_now(ledger, request, now)
    if request.wait_ms <= 0:
        raise Refused(no_offers(why), why)
    waiting = record_of("queued", lease, job, "; ".join(why))
    rows = [lease] if job is None else [lease, job]
    answer = LeaseAnswer(lease, why) if job is None else JobAnswer(job, lease, why)
    return Decision([*rows], [asked, waiting], answer)


def no_offers(why: tuple[str, ...]) -> str:
    """The refusal of a request that nobody can serve now."""
    return "No resource offers available: " + ("; ".join(why) or "the grid has no nodes")


def _answered(decision: Decision, asked: Record, lease: Lease, job: Job | None) -> Decision:
    decision.records.insert(0, asked)
    decision.answer = LeaseAnswer(lease) if job is None else JobAnswer(job, lease)
    return decision


def _make_sure_it_makes_sense(ledger: Ledger, request: Request) -> None:
    problem = request.problem()
    if problem is not None:
        raise BadInput(problem)
    unknown = [name for name in (*request.require, *request.prefer) if name not in ledger.nodes]
    if unknown:
        known = ", ".join(sorted(ledger.nodes)) or "none"
        raise Refused(f"no node is called {unknown[0]}; the nodes are: {known}")


def _make_sure_it_is_possible(ledger: Ledger, request: Request) -> None:
    never = reasons.never_fits(ledger, request)
    if never is not None:
        start = "No resource offers available" if not ledger.nodes else "No node can ever lend"
        raise Refused(f"{start} {reasons.amounts(request.ask)}: {'; '.join(never)}", never)


def _displace(ledger: Ledger, lease: Lease, job: Job | None, now: int) -> tuple[Decision, Lease, Job | None] | None:
    way = displace(ledger, lease.request, now)
    if way is None:
        return None
    leaving, awaits = yield_to(ledger, way, lease, now)
    decision, lease, job = grant(ledger, lease, way.node, way.claim, now, job=job, awaits=awaits)
    decision.changes = leaving.changes + decision.changes
    decision.records += leaving.records
    return decision, lease, job


def on_queue_looked(ledger: Ledger, event: QueueLooked, now: int) -> Decision:
    """Serve the first of the line that fits, then look again."""
    turn = next_turn(ledger, now, event.tried)
    if turn is not None:
        job = ledger.jobs.get(turn.lease.job)
        decision, _, _ = grant(ledger, turn.lease, turn.placement.node, turn.placement.claim, now, job=job)
        decision.follow = [QueueLooked(turn.tried)]
        return decision
    for _, _, lease_id in ledger.waiting:
        lease = ledger.leases[lease_id]
        if not is_urgent(lease):
            break
        displaced = _displace(ledger, lease, ledger.jobs.get(lease.job), now)
        if displaced is not None:
            displaced[0].follow = [QueueLooked()]
            return displaced[0]
    return Decision()


def on_released(ledger: Ledger, event: LeaseReleased, now: int) -> Decision:
    """Take a plain lease back; `jobs.on_released` looks after those that a job runs under."""
    lease = held(ledger, event.lease_id)
    end = LeaseEnd.WITHDRAWN if lease.state is LeaseState.ASKED else LeaseEnd.RELEASED
    decision = end_lease(ledger, lease, end, event.detail or f"by {event.by}", now)
    over = decision.changes[0]
    assert isinstance(over, Lease)
    decision.answer = LeaseAnswer(over)
    return decision


def held(ledger: Ledger, lease_id: str) -> Lease:
    """The living lease of this id, or NotFound."""
    lease = ledger.leases.get(lease_id)
    if lease is None:
        raise NotFound(f"no lease {lease_id} is held")
    return lease


def on_extended(ledger: Ledger, event: LeaseExtended, now: int) -> Decision:
    """Give an active lease more time."""
    lease = ledger.leases.get(event.lease_id)
    if lease is None or not lease.ends_at_ms:
        raise NotFound(f"no lease {event.lease_id} with an end is held")
    if not 0 < event.extra_ms <= LONGEST_MS:
        raise BadInput("the extra time must be more than zero and less than 200 years")
    longer = replace(lease, ends_at_ms=lease.ends_at_ms + event.extra_ms)
    record = Record("extended", event.by, lease.id, lease.node, f"{event.extra_ms // 1000} s more")
    return Decision([longer], [record], LeaseAnswer(longer))
