"""Deadlines and budgets of workers as time passes: launches and joins that take too long, silence, money.

A worker that runs past midnight was within yesterday's budget, not today's: shortly before the money of a day is spent,
those that cost some are drained, and then terminated. What is over the budget even so can only be a termination that
its provider does not answer, and is said loudly.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import WorkerDrainRequested, WorkersChecked, WorkerTerminationRequested
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import Counter
from distributed_grid.domain.states import NodeState, WorkerState
from distributed_grid.domain.workers import OfferClosure, Worker, WorkerRules
from distributed_grid.reactor.decision import Decision, Record
from distributed_grid.reactor.workers.host_leases import lost_host
from distributed_grid.reactor.workers.lifecycle import MAX_WORKERS_PER_STEP, end_worker, terminate, worker_record
from distributed_grid.scheduling.scaling.budget import BudgetState, budget_state, cost_micro, settle, usd

SETTLE_MS = 60_000
"""How often what was spent is stored."""
DRAIN_LEAD_MS, TERMINATE_LEAD_MS = 600_000, 300_000
"""For how long there must be money left before workers are drained, and terminated."""
GRID_USER = "grid"
DAY_ALARM, HOUR_ALARM = "budget_day_exceeded", "budget_hour_exceeded"


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
        if len(decision.records) >= MAX_WORKERS_PER_STEP:
            decision.later.append(event)
            return decision
    decision.changes += [
        replace(closure, opened=True) for closure in ledger.offer_closures.values() if closure.until_ms <= now
    ]
    if ledger.workers:
        _settle_all(ledger, decision, now, event.wall_ms)
        _guard_budget(ledger, decision, now, event.wall_ms)
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
        if worker.offer:
            closure = OfferClosure(worker.provider, worker.offer, now + rules.set_aside_ms, f"{worker.id} {why}")
            decision.changes.append(closure)
            decision.records.append(worker_record("offer-closed", worker, f"{worker.offer}: {worker.id} {why}"))
        return decision
    if worker.state not in (WorkerState.JOINED, WorkerState.DRAINING):
        return None
    node = ledger.nodes.get(worker.node)
    if node is not None and node.state is not NodeState.LOST:
        return Decision([replace(worker, unheard_since_ms=0)]) if worker.unheard_since_ms else None
    if not worker.unheard_since_ms:
        return Decision([replace(worker, unheard_since_ms=now)])
    if now - worker.unheard_since_ms > rules.exit_ms:
        return terminate(ledger, worker, f"its agent was not heard for {rules.exit_ms / 1000:g} s", now)
    return None


def _not_joined(worker: Worker, rules: WorkerRules, now: int) -> str:
    """Why a worker that boots has taken too long; empty where it has not. It boots from when it has left the queue of
    its provider; the time in that counts from when it was asked for, however often it is put back."""
    if worker.waits:
        queue_ms = max(worker.queue_ms, rules.join_ms)
        is_late = now - worker.asked_at_ms > queue_ms
        return f"still waited in the queue of its provider after {queue_ms / 1000:g} s" if is_late else ""
    return f"did not join within {rules.join_ms / 1000:g} s" if now - worker.booted_at_ms > rules.join_ms else ""


def _settle_all(ledger: Ledger, decision: Decision, now: int, wall_ms: int) -> None:
    """Store what was spent, once in a while and when a day has begun."""
    for row in ledger.spending.values():
        settled = settle(ledger, row.provider, now, wall_ms)
        is_due = settled.day != row.day or now - row.as_of_ms >= SETTLE_MS
        if is_due and settled.spent_micro != row.spent_micro:
            decision.changes.append(settled)


def _guard_budget(ledger: Ledger, decision: Decision, now: int, wall_ms: int) -> None:
    """Drain and terminate what the day's budget does not pay for any longer, and raise an alarm beyond it."""
    state = budget_state(ledger, now, wall_ms)
    _raise_alarms(ledger, state, decision)
    if state.per_day_micro is None or not state.rate_micro:
        return
    why = f"scaling.budget_per_day of {usd(state.per_day_micro)} is spent but for {usd(_left(state))}"
    if _is_short(state, TERMINATE_LEAD_MS):
        for worker in _paid(ledger):
            if worker.state is not WorkerState.TERMINATING:
                decision.follow.append(WorkerTerminationRequested(worker.id, GRID_USER, why, wall_ms, force=True))
    elif _is_short(state, DRAIN_LEAD_MS):
        for worker in _paid(ledger):
            if worker.state is WorkerState.JOINED:
                decision.follow.append(WorkerDrainRequested(worker.id, GRID_USER, why, force=True))
    if len(decision.follow) > MAX_WORKERS_PER_STEP:
        decision.follow = decision.follow[:MAX_WORKERS_PER_STEP]
        decision.later.append(WorkersChecked(wall_ms))


def _paid(ledger: Ledger) -> list[Worker]:
    return [worker for worker in ledger.workers.values() if worker.price_micro]


def _left(state: BudgetState) -> int:
    return max((state.per_day_micro or 0) - state.spent_micro, 0)


def _is_short(state: BudgetState, lead_ms: int) -> bool:
    """Whether the money of the day would run out within this time, or before midnight if that is sooner."""
    ahead = cost_micro(state.rate_micro, min(lead_ms, state.until_midnight_ms))
    return state.spent_micro + ahead > (state.per_day_micro or 0)


def _raise_alarms(ledger: Ledger, state: BudgetState, decision: Decision) -> None:
    """Say once a day, and once until it has passed, that more is spent than the budgets allow."""
    is_spent = state.per_day_micro is not None and state.spent_micro > state.per_day_micro
    if is_spent and ledger.counters.get(DAY_ALARM) != state.day:
        why = f"{usd(state.spent_micro)} spent today, and scaling.budget_per_day is {usd(state.per_day_micro or 0)}"
        decision.changes.append(Counter(DAY_ALARM, state.day))
        decision.records.append(Record("budget-exceeded", GRID_USER, "budget_per_day", "", why))
    is_over = state.per_hour_micro is not None and state.rate_micro > state.per_hour_micro
    if is_over != bool(ledger.counters.get(HOUR_ALARM)):
        decision.changes.append(Counter(HOUR_ALARM, int(is_over)))
        if is_over:
            why = f"{usd(state.rate_micro)} an hour, and scaling.budget_per_hour is {usd(state.per_hour_micro or 0)}"
            decision.records.append(Record("budget-exceeded", GRID_USER, "budget_per_hour", "", why))
