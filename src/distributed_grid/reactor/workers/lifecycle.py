"""Deciders of workers: wanted, asked for, booted, joined, drained, terminated, proven gone; budgets and deadlines.

- A worker counts as spending from its row until it is proven gone: its provider says so, never had it, or has not
  listed it twice after it took the termination on, and long enough after any creation may have taken effect.
- What a refusal proves depends on what was asked before: after a creation without an answer it proves nothing.
- Nothing is given up: a termination that fails is ordered again and again, and said openly.
"""

from __future__ import annotations

import zlib

from msgspec.structs import replace

from distributed_grid.domain.events import (
    NodeDrained,
    NodeForgotten,
    NodeResumed,
    NodeStopped,
    WorkerAsked,
    WorkerBooted,
    WorkerCallFailed,
    WorkerDrainRequested,
    WorkerGone,
    WorkerJoined,
    WorkerRefused,
    WorkerRequested,
    WorkerResumed,
    WorkerRulesSet,
    WorkerTerminationAccepted,
    WorkerTerminationRequested,
)
from distributed_grid.domain.followups import Cause
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.rows import Counter, Row
from distributed_grid.domain.states import Step, WorkerState, advance
from distributed_grid.domain.workers import SCALED_DOWN, SCALED_UP, Spending, Worker
from distributed_grid.errors import Conflict, NotFound, Refused
from distributed_grid.reactor.decision import Decision, Record, RecordType, WorkerAnswer
from distributed_grid.reactor.workers.host_leases import lease_host, release_host
from distributed_grid.scheduling.scaling.budget import budget_state, charge_unseen, settle
from distributed_grid.scheduling.scaling.worker_availability import close_scope, place_of, with_host

FIRST_PAUSE_MS, MAX_PAUSE_MS = 1_000, 60_000
QUEUED = "it waits in the queue of its provider"
MAX_WORKERS_PER_STEP = 100
"""Workers that change in one step, so that it does not take long; the next follows at once."""


def on_rules_set(ledger: Ledger, event: WorkerRulesSet, now: int) -> Decision:
    """Set the budgets and times of workers."""
    return Decision([event.rules] if event.rules != ledger.worker_rules else [])


def known_worker(ledger: Ledger, worker_id: str) -> Worker:
    worker = ledger.workers.get(worker_id)
    if worker is None:
        raise NotFound(f"no worker {worker_id}, or it is gone")
    return worker


def worker_record(kind: RecordType, worker: Worker, reason: str = "", by: str = "") -> Record:
    data = {"provider": worker.provider, "worker_type": worker.worker_type, "offer": worker.offer}
    return Record(
        kind, by or worker.by, worker.id, worker.node, reason, data={**data, "price_micro": worker.price_micro}
    )


def on_requested(ledger: Ledger, event: WorkerRequested, now: int) -> Decision:
    """Want a worker, within the budget; the same one again is answered with how it stands."""
    worker = event.worker
    known = ledger.workers.get(worker.id)
    if known is not None:
        is_same = known.resources == worker.resources or known.warning  # it was given less than was asked for
        if (known.provider, known.offer) != (worker.provider, worker.offer) or not is_same:
            raise Conflict(f"worker {worker.id} is another one already")
        return Decision(answer=WorkerAnswer(known))
    if worker.id in ledger.nodes:
        raise Conflict(f"a node is called {worker.id} already")
    refusal = budget_state(ledger, now, event.wall_ms).refusal(worker)
    if refusal is not None:
        raise Refused(refusal)
    wanted = replace(with_host(ledger, worker), state=WorkerState.WANTED, created_at_ms=now)
    decision = lease_host(ledger, wanted, now)
    decision.changes += [settle(ledger, worker.provider, now, event.wall_ms), wanted]
    decision.records.append(worker_record("worker-wanted", wanted, wanted.why or wanted.warning))
    decision.answer = WorkerAnswer(wanted)
    return decision


def on_asked(ledger: Ledger, event: WorkerAsked, now: int) -> Decision:
    """Record that a creation is about to be asked for: from here on only a proof says that there is nothing."""
    worker = ledger.workers.get(event.worker_id)
    if worker is None or worker.state not in (WorkerState.WANTED, WorkerState.ASKED):
        raise Refused(f"worker {event.worker_id} is not to be created any more")
    asked = replace(worker, unanswered=worker.unanswered + 1, called_at_ms=now)
    if worker.state is WorkerState.WANTED:
        asked = replace(asked, state=advance(worker.state, Step.ASK), asked_at_ms=now)
    return Decision([asked], answer=WorkerAnswer(asked))


def on_booted(ledger: Ledger, event: WorkerBooted, now: int) -> Decision:
    """Record that the machine exists; of one that is further already only its name there is news."""
    worker = ledger.workers.get(event.worker_id)
    if worker is None:
        return Decision()
    warning = event.warning or worker.warning
    ends_at = worker.ends_at_ms if event.ends_in_ms is None else now + event.ends_in_ms
    booted = replace(worker, instance=event.instance or worker.instance, warning=warning, ends_at_ms=ends_at)
    if worker.state is not WorkerState.TERMINATING:
        booted = replace(booted, problem="", tries=0, next_call_at_ms=0)
    if not worker.instance:
        booted = replace(booted, unanswered=max(worker.unanswered - 1, 0))
    records = []
    if worker.state is WorkerState.ASKED:
        reason = QUEUED if event.waits else "it boots"
        booted = replace(booted, state=advance(worker.state, Step.BOOT), booted_at_ms=now, why=reason)
        booted = replace(booted, waits=event.waits, waited_until_ms=now if event.waits else 0)
        records.append(worker_record("worker-booting", booted, event.instance))
    return Decision([booted] if booted != worker else [], records)


def on_joined(ledger: Ledger, event: WorkerJoined, now: int) -> Decision:
    """Record that the agent of a worker was heard; one that is on its way out stays so."""
    worker = ledger.workers.get(event.worker_id)
    if worker is None:
        return Decision()
    if worker.state not in (WorkerState.ASKED, WorkerState.BOOTING):
        return Decision([replace(worker, unheard_since_ms=0)] if worker.unheard_since_ms else [])
    joined = replace(
        worker,
        state=advance(worker.state, Step.JOIN),
        joined_at_ms=now,
        booted_at_ms=now if worker.waits else worker.booted_at_ms or now,
        why="",
        problem="",
        tries=0,
        next_call_at_ms=0,
        waits=False,
    )
    more: list[Row] = [Counter(SCALED_UP, now)] if worker.by == GRID_USER else []
    if worker.waits and worker.provider in ledger.spending:
        more.append(charge_unseen(ledger.spending[worker.provider], worker, now))
    return Decision([joined, *more], [worker_record("worker-joined", joined)])


def on_call_failed(ledger: Ledger, event: WorkerCallFailed, now: int) -> Decision:
    """Have the identical call made again after a pause, which grows; the last error is shown with the worker."""
    worker = ledger.workers.get(event.worker_id)
    if worker is None:
        return Decision()
    failed = replace(_paused(worker, now), problem=event.why)
    if not event.was_lost:
        failed = replace(failed, unanswered=max(worker.unanswered - 1, 0))
    is_news = event.why != worker.problem
    return Decision([failed], [worker_record("worker-problem", failed, event.why)] if is_news else [])


def _paused(worker: Worker, now: int) -> Worker:
    tries = worker.tries + 1
    return replace(worker, tries=tries, next_call_at_ms=now + pause_ms(worker.id, tries))


def pause_ms(worker_id: str, tries: int) -> int:
    """How long to wait after so many calls: twice as long each time, spread by the id of the worker."""
    longest = min(FIRST_PAUSE_MS << min(tries - 1, 16), MAX_PAUSE_MS)
    return longest // 2 + zlib.crc32(f"{worker_id} {tries}".encode()) % (longest // 2 + 1)


def on_refused(ledger: Ledger, event: WorkerRefused, now: int) -> Decision:
    """End a worker that its provider will not make. Where an earlier call was not answered it is terminated instead:
    that one may have made it. An offer without capacity is closed for a while, and another may be tried; so is one that
    is refused to scaling, which would ask for it again and again."""
    worker = ledger.workers.get(event.worker_id)
    if worker is None:
        return Decision()
    decision = Decision()
    if event.scope or worker.by == GRID_USER:
        until = now + ledger.worker_rules.closed_ms
        decision = close_offer(ledger, worker, place_of(worker).scope_like(event.scope), until, event.why)
    if worker.unanswered > 1 or worker.instance or worker.joined_at_ms:
        if worker.state is WorkerState.TERMINATING:
            decision.changes.append(replace(worker, unanswered=max(worker.unanswered - 1, 0)))
        else:
            add_to(decision, terminate(ledger, worker, event.why, now))
    else:
        add_to(decision, end_worker(ledger, worker, event.why, now, event.wall_ms))
    other = event.instead
    if other is None or other.on_this_machine:  # it would run on the same machine
        return decision
    is_gone = any(isinstance(row, Worker) and row.is_over for row in decision.changes)
    refusal = budget_state(ledger, now, event.wall_ms, without=worker.id if is_gone else "").refusal(other)
    if refusal is not None:
        decision.records.append(worker_record("worker-problem", worker, f"nothing instead: {refusal}"))
        return decision
    wanted = replace(other, state=WorkerState.WANTED, created_at_ms=now, why=f"instead of {worker.id}")
    decision.changes += [settle(ledger, other.provider, now, event.wall_ms), wanted]
    decision.records.append(worker_record("worker-wanted", wanted, wanted.why))
    return decision


def close_offer(ledger: Ledger, worker: Worker, scope: str, until_ms: int, why: str) -> Decision:
    """Have offers of a worker's provider not tried until then."""
    closure = close_scope(ledger, worker.provider, scope, until_ms, why)
    return Decision([closure], [worker_record("offer-closed", worker, f"{scope}: {why}")])


def add_to(decision: Decision, more: Decision) -> None:
    """Add what is decided about one worker to a decision about several."""
    decision.changes += more.changes
    decision.records += more.records
    decision.follow += more.follow


def terminate(ledger: Ledger, worker: Worker, why: str, now: int, by: str = "") -> Decision:
    """Have a machine ended; its node lends nothing more, and what it lent is given back."""
    ending = replace(
        worker,
        state=advance(worker.state, Step.TERMINATE),
        why=why,
        terminate_at_ms=now,
        tries=0,
        next_call_at_ms=0,
        missing=0,
    )
    drained = [NodeDrained(worker.node, why, cooling=True)] if worker.node in ledger.nodes else []
    return Decision([ending], [worker_record("worker-terminating", ending, why, by)], WorkerAnswer(ending), [*drained])


def end_worker(
    ledger: Ledger, worker: Worker, why: str, now: int, wall_ms: int, spending: Spending | None = None
) -> Decision:
    """A worker that is proven gone: its cost ends, and its node is forgotten. `spending` is what was spent until now,
    where that is known already."""
    gone = replace(worker, state=advance(worker.state, Step.END), why=why, ended_at_ms=now)
    spent = spending or settle(ledger, worker.provider, now, wall_ms)
    changes: list[Row] = [charge_unseen(spent, worker, now) if worker.waits else spent, gone]
    if worker.surplus or worker.end_requested:
        changes.append(Counter(SCALED_DOWN, now))
    follow: list[Cause] = [*release_host(ledger, worker)]
    if worker.node in ledger.nodes:
        follow += [NodeStopped(worker.node), NodeForgotten(worker.node)]
    return Decision(changes, [worker_record("worker-gone", gone, why)], WorkerAnswer(gone), follow)


def on_drain_requested(ledger: Ledger, event: WorkerDrainRequested, now: int) -> Decision:
    """Cordon and drain a worker, unless it has a lease; blocks of the memory pool move. A second time is harmless."""
    worker = known_worker(ledger, event.worker_id)
    if worker.state is WorkerState.DRAINING:
        return Decision(answer=WorkerAnswer(worker))
    held = [lease for lease in ledger.leases_of(worker.node) if not lease.request.block]
    if held and not event.force:
        raise Refused(f"worker {worker.id} has {len(held)} leases, the first is {held[0].id}; end them, or force it")
    state, requested = advance(worker.state, Step.DRAIN), event.by != GRID_USER
    draining = replace(worker, state=state, why=event.why, end_requested=requested)
    record = worker_record("worker-draining", draining, event.why, event.by)
    node = [NodeDrained(worker.node, event.why, cooling=True)] if worker.node in ledger.nodes else []
    return Decision([draining], [record], WorkerAnswer(draining), [*node])


def on_resumed(ledger: Ledger, event: WorkerResumed, now: int) -> Decision:
    """Use a draining worker again; one that does not drain, or will be taken away, is left as it is."""
    worker = known_worker(ledger, event.worker_id)
    if worker.state is not WorkerState.DRAINING or worker.notice is not None:
        return Decision(answer=WorkerAnswer(worker))
    joined = replace(worker, state=advance(worker.state, Step.RESUME), why=event.why, end_requested=False)
    node = [NodeResumed(worker.node)] if worker.node in ledger.nodes else []
    record = worker_record("worker-resumed", joined, event.why, event.by)
    return Decision([joined], [record], WorkerAnswer(joined), [*node])


def on_termination_requested(ledger: Ledger, event: WorkerTerminationRequested, now: int) -> Decision:
    """End a worker, unless it has a lease; one that was never asked for is gone at once. A second time is harmless."""
    worker = known_worker(ledger, event.worker_id)
    if worker.state is WorkerState.TERMINATING:
        return Decision(answer=WorkerAnswer(worker))
    held = list(ledger.leases_of(worker.node))
    if held and not event.force:
        raise Refused(f"worker {worker.id} has {len(held)} leases, the first is {held[0].id}; end them, or force it")
    if worker.state is WorkerState.WANTED:
        return end_worker(ledger, worker, event.why, now, event.wall_ms)
    if event.by != GRID_USER and worker.state in (WorkerState.JOINED, WorkerState.DRAINING):
        worker = replace(worker, end_requested=True)
    return terminate(ledger, worker, event.why, now, event.by)


def on_termination_accepted(ledger: Ledger, event: WorkerTerminationAccepted, now: int) -> Decision:
    """Record that the provider has taken the termination on. Until it is proven gone it is ordered again."""
    worker = ledger.workers.get(event.worker_id)
    if worker is None or worker.state is not WorkerState.TERMINATING:
        return Decision()
    paused = _paused(worker, now)
    return Decision([replace(paused, accepted_at_ms=worker.accepted_at_ms or now, problem=event.problem)])


def on_gone(ledger: Ledger, event: WorkerGone, now: int) -> Decision:
    """Record the proof that a machine is gone; a second time is harmless."""
    worker = ledger.workers.get(event.worker_id)
    if worker is None or worker.state is WorkerState.WANTED:
        return Decision()
    return prove_gone(ledger, worker, event.why, now, event.wall_ms)


def prove_gone(
    ledger: Ledger, worker: Worker, why: str, now: int, wall_ms: int, spending: Spending | None = None
) -> Decision:
    """A provider says that a machine is gone. While a creation without an answer may still take effect it is ended once
    more after that: the provider may not remember that it had made it."""
    is_settled = not worker.unanswered or now > worker.called_at_ms + ledger.worker_rules.call_ms
    if is_settled and worker.state is not WorkerState.ASKED:
        return end_worker(ledger, worker, why, now, wall_ms, spending)
    if worker.state is WorkerState.TERMINATING:
        return on_termination_accepted(ledger, WorkerTerminationAccepted(worker.id), now)
    return terminate(ledger, worker, why, now)
