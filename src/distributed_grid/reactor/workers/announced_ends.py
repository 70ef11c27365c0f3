"""Deciders of announced ends: a machine of a provider that will be taken away, by its agent's word or by its lifetime.

- From the announcement on nothing new is placed there. What runs may go on until it has to stop in time; copies of
  blocks move at once.
- An announcement may come earlier, never later, than a known one or than the provider's own end of the machine. An
  agent speaks about its own machine only, and is believed once in a while.
- What scaling added is taken away: a replacement does not wait for its cooldown.
- When the time is over the machine is terminated, so that it is proven gone.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import LeaseReclaimed, NodeDrained, NodeResumed, WorkerEndAnnounced
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import Counter, Row
from distributed_grid.domain.states import Step, WorkerState, advance
from distributed_grid.domain.workers import MAX_NOTICE_MS, SCALED_UP, EndNotice, Worker, stop_margin_ms
from distributed_grid.reactor.decision import MAX_LEASES_PER_STEP, Decision
from distributed_grid.reactor.nodes import is_being_returned
from distributed_grid.reactor.workers.lifecycle import terminate, worker_record

BLOCK_RETRY_MS = 5_000
"""How long after a copy could not be moved it is tried again."""
BELIEVED_EVERY_MS = 5_000
"""How often the announcements of an agent may change anything but say for the first time when its machine ends."""
EARLIER_MS = 2_000
"""By how much an end must be earlier than the known one to be news."""
LIFETIME_LEAD_MS = 600_000
"""How long before its provider ends a machine that is announced, at most; of a short life its twentieth part."""
_HERE = (WorkerState.JOINED, WorkerState.DRAINING)


def on_announced(ledger: Ledger, event: WorkerEndAnnounced, now: int) -> Decision:
    """Record the end of a machine that its agent announced; a known one changes nothing."""
    worker = ledger.workers.get(event.worker_id)
    if worker is None or worker.state not in _HERE:
        return Decision()
    is_urgent = event.ends_in_ms is not None and not event.withdrawn and not worker.leaving_at_ms
    if worker.notice_at_ms and now - worker.notice_at_ms < BELIEVED_EVERY_MS and not is_urgent:
        return Decision()
    heard = replace(worker, notice_at_ms=now)
    if event.withdrawn:
        notice = worker.notice
        if notice is None or (worker.ends_at_ms and notice.ends_at_ms >= worker.ends_at_ms):
            return Decision()  # an agent cannot withdraw the lifetime that its provider has set
        stays = replace(heard, notice=None, why=event.why)
        decision = Decision([stays], [worker_record("end-withdrawn", heard, event.why, worker.node)])
        if notice.drained:  # it did not drain before it was announced to end
            decision.changes = [replace(stays, state=advance(worker.state, Step.RESUME))]
            decision.follow = [NodeResumed(worker.node)] if worker.node in ledger.nodes else []
        return decision
    if event.ends_in_ms is None:
        return _cordon(ledger, heard, EndNotice(event.why), now) if worker.notice is None else Decision()
    ends_at = now + min(max(event.ends_in_ms, 0), MAX_NOTICE_MS)
    if worker.ends_at_ms:
        ends_at = min(ends_at, worker.ends_at_ms)
    return announce(ledger, heard, ends_at, event.why, now)


def announce(ledger: Ledger, worker: Worker, ends_at_ms: int, why: str, now: int) -> Decision:
    """Have a machine end then: it takes nothing new, and what it has lent comes back in time."""
    known = worker.leaving_at_ms
    if known and ends_at_ms > known - EARLIER_MS:
        return Decision()
    ends_at_ms = max(ends_at_ms, now, 1)
    left = ends_at_ms - now
    return _cordon(ledger, worker, EndNotice(why, ends_at_ms, ends_at_ms - stop_margin_ms(left)), now)


def _cordon(ledger: Ledger, worker: Worker, notice: EndNotice, now: int) -> Decision:
    """Place nothing new there, and begin to take back what has to be taken back."""
    is_first = worker.state is WorkerState.JOINED
    drained = is_first or (worker.notice is not None and worker.notice.drained)
    state = advance(worker.state, Step.DRAIN) if is_first else worker.state
    leaving = replace(worker, state=state, why=notice.why, notice=replace(notice, drained=drained), surplus=False)
    changes: list[Row] = [leaving]
    if notice.ends_at_ms and SCALED_UP in ledger.counters and worker.provider == ledger.scaling.provider:
        changes.append(Counter(SCALED_UP, now - ledger.scaling.up_cooldown_ms))
    left_s = (notice.ends_at_ms - now) / 1000
    when = f"it ends in {left_s:.0f} s" if notice.ends_at_ms else "it takes nothing new"
    decision = Decision(changes, [worker_record("end-announced", leaving, f"{when}: {notice.why}", worker.node)])
    if worker.node in ledger.nodes:
        decision.follow.append(NodeDrained(worker.node, notice.why, cooling=True, reclaims=False))
    reclaim_in_time(ledger, leaving, decision, now)
    return decision


def check_end(ledger: Ledger, worker: Worker, now: int) -> Decision | None:
    """Decision that is due about the end of one machine; None if none is."""
    if worker.state not in _HERE:
        return None
    ends_at = worker.ends_at_ms
    is_news = not worker.is_leaving or ends_at <= worker.leaving_at_ms - EARLIER_MS
    if ends_at and is_news and now >= ends_at - _lead_ms(ledger, worker):
        return announce(ledger, worker, ends_at, "its lifetime at the provider is over then", now)
    if not worker.is_leaving:
        return None
    notice = worker.notice
    assert notice is not None
    if now >= notice.ends_at_ms:
        return terminate(ledger, worker, f"its time is over: {notice.why}", now)
    decision = Decision()
    reclaim_in_time(ledger, worker, decision, now)
    return decision if decision.follow else None


def _lead_ms(ledger: Ledger, worker: Worker) -> int:
    """How long before the end of its lifetime a machine is announced to end: also enough for the longest grace there,
    within half of its life."""
    lifetime = worker.lifetime_ms or max(worker.ends_at_ms - worker.created_at_ms, 0)
    usual = min(LIFETIME_LEAD_MS, lifetime // 20)
    graces = [_grace_ms(ledger, lease) for lease in ledger.leases_of(worker.node) if lease.job]
    longest = max(graces, default=0)
    return max(usual, min(longest + 2 * stop_margin_ms(lifetime), lifetime // 2))


def reclaim_in_time(ledger: Ledger, worker: Worker, decision: Decision, now: int) -> None:
    """Reclaim the leases of a machine whose time has come, so many in one step."""
    if not worker.leaving_at_ms:
        return
    due = [lease for lease in ledger.leases_of(worker.node) if lease.holds and _is_due(ledger, worker, lease, now)]
    reason = worker.notice.why if worker.notice is not None else ""
    why = f"{worker.node} is taken away: {reason}"
    decision.follow += [LeaseReclaimed(lease.id, why) for lease in due[:MAX_LEASES_PER_STEP]]


def _is_due(ledger: Ledger, worker: Worker, lease: Lease, now: int) -> bool:
    """Whether a lease has to be given back now: copies of blocks at once, jobs so that their grace is over in time."""
    assert worker.notice is not None
    if is_being_returned(ledger, lease):
        return False
    block = ledger.blocks.get(lease.request.block)
    if block is not None:
        return now - block.tried_at_ms >= BLOCK_RETRY_MS
    return now >= stop_at_ms(ledger, worker.notice, lease)


def stop_at_ms(ledger: Ledger, notice: EndNotice, lease: Lease) -> int:
    """When what runs under a lease is told to stop, so that its grace is over in time."""
    return notice.stop_at_ms(_grace_ms(ledger, lease))


def _grace_ms(ledger: Ledger, lease: Lease) -> int:
    job = ledger.jobs.get(lease.job)
    return job.command.grace_ms if job is not None else 0
