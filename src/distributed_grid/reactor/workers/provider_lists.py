"""Comparison of workers with the lists of their providers.

A list lags: a gap in it counts only when it was requested long enough after the call that would have changed it, and
only the second time. A worker whose node is heard is there, whatever a list says.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import ListedInstance, StrayInstanceFound, WorkerBooted, WorkersListed
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import NodeState, WorkerState
from distributed_grid.domain.workers import Spending, Worker
from distributed_grid.reactor.decision import Decision, Record
from distributed_grid.reactor.workers.lifecycle import (
    MAX_WORKERS_PER_STEP,
    QUEUED,
    add_to,
    end_worker,
    on_booted,
    prove_gone,
    terminate,
    worker_record,
)
from distributed_grid.scheduling.scaling.budget import charge_unseen, settle

PROOF_LISTINGS = 2
"""Lists without a machine that prove it gone, once its termination was accepted."""
WAIT_KNOWN_MS = 30_000
"""How often it is stored that a worker still waits in a queue: what it may have run since then is charged for."""
END_TOLERANCE_MS = 10_000
"""By how much the end that a provider gives a machine may differ from one list to the next."""


def on_listed(ledger: Ledger, event: WorkersListed, now: int) -> Decision:
    """Compare the workers of a provider with its list, so many in one step."""
    listed: dict[str, list[ListedInstance]] = {}
    for instance in event.instances:
        listed.setdefault(instance.worker_id, []).append(instance)
    spending = settle(ledger, event.provider, now, event.wall_ms)
    decision = Decision()
    changed = 0
    for worker in ledger.workers.values():
        if worker.provider != event.provider or worker.state is WorkerState.WANTED:
            continue
        if worker.listed_at_ms >= event.asked_at_ms or worker.called_at_ms >= event.asked_at_ms:
            continue  # counted already, or asked for while the list was made
        one = _compare(ledger, worker, listed.get(worker.id, []), event, spending, now)
        if one is None:
            continue
        add_to(decision, one)
        spending = next((row for row in reversed(one.changes) if isinstance(row, Spending)), spending)
        changed += 1
        if changed >= MAX_WORKERS_PER_STEP:
            decision.later.append(event)
            break
    return decision


def _compare(
    ledger: Ledger,
    worker: Worker,
    machines: list[ListedInstance],
    event: WorkersListed,
    spending: Spending,
    now: int,
) -> Decision | None:
    """Decision about one worker by a list; None if it has no news."""
    rules = ledger.worker_rules
    if machines:
        return _compare_listed(ledger, worker, machines, event, spending, now)
    if worker.state is WorkerState.ASKED:
        return None
    effective_at = worker.called_at_ms + (rules.call_ms if worker.unanswered else 0)
    if event.asked_at_ms < max(effective_at, worker.booted_at_ms, worker.accepted_at_ms) + rules.consistency_ms:
        return None
    if worker.state is WorkerState.TERMINATING:
        if not worker.accepted_at_ms:
            return None
        if worker.missing + 1 >= PROOF_LISTINGS:
            return end_worker(ledger, worker, "its provider lists it no more", now, event.wall_ms, spending)
    else:
        node = ledger.nodes.get(worker.node)
        if node is not None and node.state is NodeState.ALIVE:
            return None  # it was heard just now, whatever the list says
        if worker.missing + 1 >= PROOF_LISTINGS:
            return terminate(ledger, worker, "its provider does not list it", now)
    return Decision([replace(worker, missing=worker.missing + 1, listed_at_ms=event.asked_at_ms)])


def _compare_listed(
    ledger: Ledger,
    worker: Worker,
    machines: list[ListedInstance],
    event: WorkersListed,
    spending: Spending,
    now: int,
) -> Decision | None:
    """Decision about a listed worker, by the state of its most alive machine."""
    found = min(machines, key=lambda one: _ALIVE_FIRST.get(one.state, 0))
    if found.state == "gone":
        return prove_gone(ledger, worker, "its provider says that it is gone", now, event.wall_ms, spending)
    if found.state == "stopping":
        if worker.state is not WorkerState.TERMINATING:
            return terminate(ledger, worker, found.detail or "its provider says that it is ending", now)
        return Decision([replace(worker, missing=0)]) if worker.missing else None
    running = [one.instance for one in machines if one.state not in _ALIVE_FIRST and not one.waits]
    if len(running) > 1 and worker.state is not WorkerState.TERMINATING:
        reason = f"its provider has {len(running)} machines of it: {', '.join(running)}"
        if not ledger.leases_on.get(worker.node):
            return terminate(ledger, worker, reason, now)
        if worker.problem == reason:
            return None
        return Decision([replace(worker, problem=reason)], [worker_record("worker-problem", worker, reason)])
    if worker.state is WorkerState.ASKED or (found.instance and not worker.instance):
        booted = WorkerBooted(worker.id, found.instance, ends_in_ms=found.ends_in_ms, waits=found.waits)
        return on_booted(ledger, booted, now)
    seen = replace(worker, missing=0, ends_at_ms=_ends_at_ms(worker, found, event.asked_at_ms))
    if worker.state in (WorkerState.BOOTING, WorkerState.TERMINATING):
        seen = _moved_in_queue(seen, found, event.asked_at_ms, now)
    if seen == worker:
        return None
    if seen.waits or not worker.waits:
        return Decision([seen])
    began_at = event.asked_at_ms + found.ends_in_ms - worker.lifetime_ms if found.ends_in_ms is not None else 0
    return Decision([seen, charge_unseen(spending, worker, now, began_at)])


def _ends_at_ms(worker: Worker, found: ListedInstance, asked_at_ms: int) -> int:
    """When a machine ends as far as is known now: sooner than was said before, or later where it is there beyond it."""
    known = worker.ends_at_ms
    if found.ends_in_ms is None:
        return max(known, asked_at_ms) if known else 0
    says = asked_at_ms + max(found.ends_in_ms, 0)
    if not known or says < known - END_TOLERANCE_MS:
        return says
    return max(says, known) if known <= asked_at_ms else known


def _moved_in_queue(worker: Worker, found: ListedInstance, asked_at_ms: int, now: int) -> Worker:
    """A worker with what is new about its place in its provider's queue; once it has left that, it boots from now."""
    is_ending = worker.state is WorkerState.TERMINATING
    if found.waits:
        is_news = not worker.waits or asked_at_ms - worker.waited_until_ms >= WAIT_KNOWN_MS
        waited_until = asked_at_ms if is_news else worker.waited_until_ms
        reason = worker.why if is_ending else found.detail or QUEUED
        return replace(worker, waits=True, why=reason, waited_until_ms=waited_until)
    if not worker.waits:
        return worker
    return replace(worker, waits=False, booted_at_ms=now, why=worker.why if is_ending else "it boots")


_ALIVE_FIRST = {"stopping": 1, "gone": 2}


def on_stray_found(ledger: Ledger, event: StrayInstanceFound, now: int) -> Decision:
    """Record that a machine without a worker is ended."""
    reason = f"{event.provider} has {event.instance}, which no worker stands for: it is terminated"
    return Decision(records=[Record("worker-stray", "", event.worker_id, "", reason)])
