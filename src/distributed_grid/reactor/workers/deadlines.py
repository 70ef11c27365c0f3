"""Deadlines of workers as time passes: launches and joins that take too long, ends, silence; closures that are over."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import WorkersChecked
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import NodeState, WorkerState
from distributed_grid.domain.workers import Worker, WorkerRules
from distributed_grid.reactor.decision import Decision
from distributed_grid.reactor.workers.announced_ends import check_end
from distributed_grid.reactor.workers.budget_guard import guard_budgets, settle_all
from distributed_grid.reactor.workers.host_leases import lost_host
from distributed_grid.reactor.workers.lifecycle import (
    MAX_WORKERS_PER_STEP,
    add_to,
    close_offer,
    end_worker,
    terminate,
)
from distributed_grid.scheduling.scaling.worker_availability import place_of


def on_checked(ledger: Ledger, event: WorkersChecked, now: int) -> Decision:
    """Do what the time calls for, for so many workers in one step."""
    decision = Decision()
    for worker in ledger.workers.values():
        one = _overdue(ledger, worker, now, event.wall_ms)
        if one is None:
            continue
        decision.changes += one.changes
        decision.records += one.records
        decision.follow += one.follow
        if max(len(decision.records), len(decision.follow)) >= MAX_WORKERS_PER_STEP:
            decision.later.append(event)
            return decision
    decision.changes += [
        replace(closure, opened=True) for closure in ledger.offer_closures.values() if closure.until_ms <= now
    ]
    if ledger.workers:
        settle_all(ledger, decision, now, event.wall_ms)
        guard_budgets(ledger, decision, now, event.wall_ms)
    return decision


def _overdue(ledger: Ledger, worker: Worker, now: int, wall_ms: int) -> Decision | None:
    """What is due for one worker; None where that is nothing."""
    rules = ledger.worker_rules
    if worker.state is not WorkerState.TERMINATING and (lost := lost_host(ledger, worker)):
        if worker.state is WorkerState.WANTED:
            return end_worker(ledger, worker, lost, now, wall_ms)
        return terminate(ledger, worker, lost, now)
    if worker.state is WorkerState.WANTED and now - worker.created_at_ms > rules.launch_ms:
        return end_worker(ledger, worker, f"not asked for within {rules.launch_ms / 1000:g} s", now, wall_ms)
    if worker.state is WorkerState.ASKED and now - worker.asked_at_ms > rules.launch_ms:
        why = f"not launched within {rules.launch_ms / 1000:g} s"
        return terminate(ledger, worker, f"{why}: {worker.problem}" if worker.problem else why, now)
    if worker.state is WorkerState.BOOTING and (why := _not_joined(worker, rules, now)):
        decision = terminate(ledger, worker, why, now)
        until_ms = now + rules.set_aside_ms
        add_to(decision, close_offer(ledger, worker, place_of(worker).scopes()[0], until_ms, f"{worker.id} {why}"))
        return decision
    if worker.state not in (WorkerState.JOINED, WorkerState.DRAINING):
        return None
    if (ending := check_end(ledger, worker, now)) is not None:
        return ending
    node = ledger.nodes.get(worker.node)
    if node is not None and node.state is not NodeState.LOST:
        return Decision([replace(worker, unheard_since_ms=0)]) if worker.unheard_since_ms else None
    if not worker.unheard_since_ms:
        return Decision([replace(worker, unheard_since_ms=now)])
    if now - worker.unheard_since_ms > rules.exit_ms:
        return terminate(ledger, worker, f"its agent was not heard for {rules.exit_ms / 1000:g} s", now)
    return None


def _not_joined(worker: Worker, rules: WorkerRules, now: int) -> str:
    """Why a worker that boots has taken too long; empty where it has not. It boots once it has left its provider's
    queue, and the time for that counts from when it was asked for, however often it is put back."""
    if worker.waits:
        queue_ms = max(worker.queue_ms, rules.join_ms)
        is_late = now - worker.asked_at_ms > queue_ms
        return f"still waited in the queue of its provider after {queue_ms / 1000:g} s" if is_late else ""
    return f"did not join within {rules.join_ms / 1000:g} s" if now - worker.booted_at_ms > rules.join_ms else ""
