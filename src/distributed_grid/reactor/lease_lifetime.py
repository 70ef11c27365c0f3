"""Deciders of leases that change by time or with their node: expired, reclaimed, lost, recovered.

A recovered lease, which a new ledger reads from elsewhere, is never refused: an impossible one ends at once, with the
reason. It counts against its node from the first moment and is confirmed when the node was heard and has room for it.
It keeps its fence, and new fences on its node stay above it.
"""

from __future__ import annotations

from itertools import takewhile

from msgspec.structs import replace

from distributed_grid.domain.events import (
    AttemptEnded,
    CopyUnwanted,
    LeaseLost,
    LeaseReclaimed,
    LeaseRecovered,
    LeasesRecovered,
    TimePassed,
)
from distributed_grid.domain.followups import CheckClaims, ScanQueue, SettleDue
from distributed_grid.domain.indexes.node_claims import NodeClaims, shared_though_exclusive
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.leases import Lease, epoch_of, is_plausible_epoch, node_above_fence
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import Counter, Row
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState, NodeState, Step, advance
from distributed_grid.reactor.block_copies import overdue
from distributed_grid.reactor.blocks import release
from distributed_grid.reactor.decision import Decision
from distributed_grid.reactor.engines import expire_lost_nodes
from distributed_grid.reactor.jobs import expire_missing, give_up_waiting, is_untaken, requeue_unstarted, stop_job
from distributed_grid.reactor.lease_transitions import FENCE, binding_for, cancel_dependents, end_lease, lease_record
from distributed_grid.reactor.node_liveness import check_liveness
from distributed_grid.reactor.offloading.moves import due_moves
from distributed_grid.reactor.reruns import is_awaiting_checkpoint
from distributed_grid.reactor.workers.host_leases import give_host_back
from distributed_grid.scheduling.queue import reasons


def on_reclaimed(ledger: Ledger, event: LeaseReclaimed, now: int) -> Decision:
    """Return a lease to its node: a job is stopped and requeued, a copy of a block moves, any other lease ends."""
    lease = ledger.leases.get(event.lease_id)
    if lease is None or not lease.holds:
        return Decision()
    if lease.request.block:
        return Decision(follow=[CopyUnwanted(lease.request.block, lease.id, event.detail)])
    if lease.request.worker in ledger.workers:
        return give_host_back(lease, event.detail)
    job = ledger.jobs.get(lease.job)
    if job is None:
        return end_lease(ledger, lease, LeaseEnd.RECLAIMED, event.detail, now)
    if lease.awaits:
        return requeue_unstarted(ledger, job, LeaseEnd.RECLAIMED, event.detail, now)
    if job.state is JobState.STOPPING:
        return Decision()
    decision = stop_job(ledger, job, Ending.RECLAIMED, event.detail, now)
    decision.answer = None
    return decision


def on_lost(ledger: Ledger, event: LeaseLost, now: int) -> Decision:
    """End a lease on a node that is gone; the outcome of its attempt is unknown."""
    lease = ledger.leases.get(event.lease_id)
    if lease is None or not lease.holds:
        return Decision()
    job = ledger.jobs.get(lease.job)
    if job is None:
        return end_lease(ledger, lease, LeaseEnd.LOST, event.detail, now)
    if lease.awaits or is_untaken(ledger, job) or is_awaiting_checkpoint(job):
        return requeue_unstarted(ledger, job, LeaseEnd.LOST, event.detail, now)
    attempt = job.attempt
    assert attempt is not None
    outcome = Outcome(Ending.LOST, detail=event.detail)
    return Decision(follow=[AttemptEnded(uid=job.uid, number=attempt.number, fence=attempt.fence, outcome=outcome)])


CLAIMS_READ = "claims_read"
"""Counter of a ledger that has recovered leases from elsewhere."""


def on_read(ledger: Ledger, event: LeasesRecovered, now: int) -> Decision:
    """Record all recovered leases, once: from then on the ledger is complete."""
    if CLAIMS_READ in ledger.counters:
        return Decision()
    return Decision([Counter(CLAIMS_READ, 1)], follow=[*event.claims])


def on_claimed(ledger: Ledger, event: LeaseRecovered, now: int) -> Decision:
    """Hold a recovered lease until its node confirms it; a lease that the ledger has is left as it is."""
    request = event.request
    if request.id in ledger.leases or request.id in ledger.by_request:
        return Decision()
    lease = Lease(
        id=request.id, request=request, asked_at_ms=event.granted_at_ms, node=event.node, ends_at_ms=event.ends_at_ms
    )
    node = ledger.nodes.get(event.node)
    problem = request.problem() or (None if node is not None else f"{event.node} is not a node of this grid")
    if not is_plausible_epoch(epoch_of(event.fence), ledger.counters.get("epoch", 0)):
        problem = "its fence cannot be one of this grid"
    if problem is not None or node is None:
        return end_lease(ledger, lease, LeaseEnd.FAILED, f"recovered, but {problem}", now)
    lease = replace(
        lease,
        state=advance(lease.state, Step.GRANT),
        claim=event.claim,
        fence=event.fence,
        granted_at_ms=event.granted_at_ms,
        recovered=True,
    )
    record = lease_record("recovered", lease, None, "a claim until its node was heard")
    heard = node.state is NodeState.ALIVE
    raised = node_above_fence(node, event.fence, ledger.counters.get(FENCE, 0) + 1)
    rows: list[Row] = [lease] if raised is node else [raised, lease]
    return Decision(rows, [record], follow=[CheckClaims(node.name)] if heard else [])


def check_claims(ledger: Ledger, check: CheckClaims, now: int) -> Decision:
    """Settle the oldest recovered lease on a node, then check again."""
    node = ledger.nodes.get(check.node)
    claims = [lease for lease in ledger.leases_of(check.node) if lease.recovered] if node is not None else []
    if node is None or not claims:
        return Decision()
    lease = min(claims, key=lambda lease: (lease.granted_at_ms, lease.id))
    others = (other for other in ledger.leases_of(node.name) if not other.recovered)
    held = [holder.claim for holder in (*others, lease) if holder.claim is not None]
    excess = NodeClaims(held).excess_over(node.lendable) or shared_though_exclusive(held, node.lendable)
    if excess is None:
        record = lease_record("confirmed", lease, None, f"{node.name} was heard and has it")
        if node.engine:  # which reserves it first
            bound = replace(lease, recovered=False, engine=node.engine)
            decision = Decision([bound, binding_for(ledger, bound, bound.fence, now, again=True)], [record])
        else:
            active = replace(lease, recovered=False, state=advance(lease.state, Step.BIND))
            decision = Decision([active], [record])
    else:
        problem = f"recovered, but {node.name} cannot have lent it: {excess}"
        decision = end_lease(ledger, replace(lease, recovered=False), LeaseEnd.FAILED, problem, now)
    decision.follow.append(check)
    return decision


MAX_EXPIRED_PER_STEP = 256
"""Leases that expire in one step, so that it stays short; the next step follows at once."""
MAX_REASONS_PER_STEP = 32
"""Different requests that expire in one step with a reason for each node; the others name no nodes."""
NO_ROOM = "no node had room for it"


def on_time_passed(ledger: Ledger, _: TimePassed, now: int) -> Decision:
    return settle_due(ledger, SettleDue(), now)


def settle_due(ledger: Ledger, order: SettleDue, now: int) -> Decision:
    """Settle the leases that are due, a bounded number in one step; then nodes, offers and blocks, and scan the queue
    once."""
    due = [ledger.leases[lease_id] for lease_id in ledger.due_by(now, MAX_EXPIRED_PER_STEP - order.expired)]
    if due:  # end all waits that are due next, or one held lease; the rest follows
        waits = list(takewhile(lambda lease: lease.state is LeaseState.ASKED, due))
        reopened = [lease for lease in waits if not 0 < lease.wait_until_ms <= now]
        if reopened:
            rows: list[Row] = []
            for lease in reopened:
                closed = tuple((node, until_ms) for node, until_ms in lease.request.closed if until_ms > now)
                rows.append(replace(lease, request=replace(lease.request, closed=closed)))
            return Decision(rows, follow=[SettleDue(order.expired + len(reopened))])
        if waits and order.freed:  # what has come free is offered to the queue before anybody gives up
            return Decision(follow=[ScanQueue(), SettleDue(order.expired)])
        lease, over = due[0], "the lease's term is over"
        if waits:
            decision = _withdraw(ledger, waits, now)
        elif lease.request.block:
            block = ledger.blocks[lease.request.block]
            decision = release(ledger, block, LeaseEnd.EXPIRED, "its time is over", now)
        elif (job := ledger.jobs.get(lease.job)) is not None:
            decision = stop_job(ledger, job, Ending.EXPIRED, over, now)
        else:
            decision = end_lease(ledger, lease, LeaseEnd.EXPIRED, over, now)
        decision.follow = [cause for cause in decision.follow if not isinstance(cause, ScanQueue)]
        decision.follow.append(SettleDue(order.expired + max(len(waits), 1), not waits))
        return decision
    decision = check_liveness(ledger, now)
    missing = [expire_missing(ledger, seen, now) for seen in ledger.observations.values() if seen.missing]
    for lost in (*missing, expire_lost_nodes(ledger, now)):
        decision.changes += lost.changes
        decision.follow += lost.follow
        decision.later += lost.later
    orphaned = [lease_id for lease_id in ledger.dependents if lease_id not in ledger.leases]
    decision.follow += [event for lease_id in orphaned for event in cancel_dependents(ledger, lease_id)]
    if ledger.blocks:
        decision.follow += overdue(ledger, now)
    decision.follow += due_moves(ledger, now)
    if ledger.waiting:
        decision.follow.append(ScanQueue())
    if ledger.due_by(now, 1):
        decision.later.append(TimePassed())
    return decision


def _withdraw(ledger: Ledger, waits: list[Lease], now: int) -> Decision:
    """Withdraw requests that have waited for too long. They hold no resources, so their order does not matter."""
    decision = Decision()
    texts: dict[object, str] = {}
    for lease in waits:
        key = reasons.reason_key(ledger, lease.request)
        if key not in texts and len(texts) < MAX_REASONS_PER_STEP:
            texts[key] = "; ".join(map(str, reasons.why_not_now(ledger, lease.request, now)))
        detail, job = reasons.timeout_reason(lease, texts.get(key, NO_ROOM), now), ledger.jobs.get(lease.job)
        if job is not None:
            ended = give_up_waiting(ledger, job, detail, now)
        else:
            ended = end_lease(ledger, lease, LeaseEnd.WITHDRAWN, detail, now)
        decision.changes += ended.changes
        decision.records += ended.records
        decision.follow += ended.follow
    return decision
