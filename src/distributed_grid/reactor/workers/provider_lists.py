"""Comparison of workers with what their provider lists.

A list lags: what it lacks counts only when it was asked for long enough after the call that would have changed it, and
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
)
from distributed_grid.scheduling.scaling.budget import settle

PROOF_LISTINGS = 2
"""Lists without a machine that prove it gone, once its termination was accepted."""


def on_listed(ledger: Ledger, event: WorkersListed, now: int) -> Decision:
    """Compare the workers of a provider with its list, so many in one step."""
    listed = {one.worker_id: one for one in event.instances}
    spending = settle(ledger, event.provider, now, event.wall_ms)
    decision = Decision()
    changed = 0
    for worker in ledger.workers.values():
        if worker.provider != event.provider or worker.state is WorkerState.WANTED:
            continue
        if worker.listed_at_ms >= event.asked_at_ms or worker.called_at_ms >= event.asked_at_ms:
            continue  # counted already, or asked for while the list was made
        one = _compare(ledger, worker, listed.get(worker.id), event, spending, now)
        if one is None:
            continue
        add_to(decision, one)
        changed += 1
        if changed >= MAX_WORKERS_PER_STEP:
            decision.later.append(event)
            break
    return decision


def _compare(
    ledger: Ledger,
    worker: Worker,
    found: ListedInstance | None,
    event: WorkersListed,
    spending: Spending,
    now: int,
) -> Decision | None:
    """What a list says about one worker; None where that is nothing new."""
    rules = ledger.worker_rules
    if found is not None and found.state == "gone":
        return prove_gone(ledger, worker, "its provider says that it is gone", now, event.wall_ms, spending)
    if found is not None and found.state == "stopping" and worker.state is not WorkerState.TERMINATING:
        return terminate(ledger, worker, found.detail or "its provider says that it is ending", now)
    if found is not None:
        if worker.state is WorkerState.ASKED or (found.instance and not worker.instance):
            return on_booted(ledger, WorkerBooted(worker.id, found.instance, waits=found.waits), now)
        if worker.state is WorkerState.BOOTING and (moved := _moved_in_queue(worker, found, now)) != worker:
            return Decision([moved])
        return Decision([replace(worker, missing=0)]) if worker.missing else None
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


def _moved_in_queue(worker: Worker, found: ListedInstance, now: int) -> Worker:
    """A worker with what is new about its wait in a queue; once it has left that, it boots from now on."""
    if found.waits:
        return replace(worker, waits=True, why=found.detail or QUEUED, missing=0)
    return replace(worker, waits=False, booted_at_ms=now, why="it boots", missing=0) if worker.waits else worker


def on_stray_found(ledger: Ledger, event: StrayInstanceFound, now: int) -> Decision:
    """Record that a machine without a worker is ended."""
    why = f"{event.provider} has {event.instance}, which no worker stands for: it is terminated"
    return Decision(records=[Record("worker-stray", "", event.worker_id, "", why)])
