"""Periodic check of workers: launches and joins that take too long, ends, silence, closures that are over, budgets.

A worker beyond the budget of its day is drained, then terminated. A worker that runs past midnight was within
yesterday's budget, not today's. While there is just enough left for all of them to end by themselves, should the
control plane die now, they are terminated; a few minutes before that they are drained. Only a termination that its
provider does not answer can exceed a budget even so, and raises an alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.events import Event, WallTimePassed, WorkerDrainRequested, WorkerTerminationRequested
from distributed_grid.domain.followups import CheckWorkers
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.rows import Counter
from distributed_grid.domain.states import NodeState, WorkerState
from distributed_grid.domain.workers import Worker, WorkerRules
from distributed_grid.reactor.decision import Decision, Record
from distributed_grid.reactor.workers.announced_ends import check_end
from distributed_grid.reactor.workers.host_leases import lost_host
from distributed_grid.reactor.workers.lifecycle import (
    MAX_WORKERS_PER_STEP,
    add_to,
    close_offer,
    end_worker,
    terminate,
)
from distributed_grid.scheduling.scaling.budget import (
    HOUR_MS,
    BudgetState,
    alone_ms,
    budget_state,
    core_budget_key,
    core_hours,
    core_ms,
    cost_micro,
    settle,
    usd,
)
from distributed_grid.scheduling.scaling.worker_availability import place_of

SETTLE_MS = 60_000
"""How often what was spent is stored."""
DRAIN_LEAD_MS, TERMINATE_LEAD_MS = 300_000, 60_000
"""How long before only that is left workers are drained, and terminated."""
DAY_ALARM, HOUR_ALARM = "budget_day_exceeded", "budget_hour_exceeded"


def on_wall_time_passed(ledger: Ledger, event: WallTimePassed, now: int) -> Decision:
    return check_workers(ledger, CheckWorkers(event.wall_ms), now)


def check_workers(ledger: Ledger, check: CheckWorkers, now: int) -> Decision:
    """Settle deadlines and budgets, for a bounded number of workers in one step."""
    decision = Decision()
    for worker in ledger.workers.values():
        overdue = _overdue(ledger, worker, now, check.wall_ms)
        if overdue is None:
            continue
        add_to(decision, overdue)
        if max(len(decision.records), len(decision.follow)) >= MAX_WORKERS_PER_STEP:
            decision.later.append(check)
            return decision
    decision.changes += [
        replace(closure, opened=True) for closure in ledger.offer_closures.values() if closure.until_ms <= now
    ]
    if ledger.workers:
        for row in ledger.spending.values():  # stored once in a while, and when a day has begun
            settled = settle(ledger, row.provider, now, check.wall_ms)
            is_more = (settled.spent_micro, settled.core_ms) != (row.spent_micro, row.core_ms)
            if settled.day != row.day or (now - row.as_of_ms >= SETTLE_MS and is_more):
                decision.changes.append(settled)
        _guard_budgets(ledger, decision, now, check.wall_ms)
    return decision


def _overdue(ledger: Ledger, worker: Worker, now: int, wall_ms: int) -> Decision | None:
    """Decision that is due for one worker; None if none is."""
    rules = ledger.worker_rules
    if worker.state is not WorkerState.TERMINATING and (lost := lost_host(ledger, worker)):
        if worker.state is WorkerState.WANTED:
            return end_worker(ledger, worker, lost, now, wall_ms)
        return terminate(ledger, worker, lost, now)
    if worker.state is WorkerState.WANTED and now - worker.created_at_ms > rules.launch_ms:
        return end_worker(ledger, worker, f"not asked for within {rules.launch_ms / 1000:g} s", now, wall_ms)
    if worker.state is WorkerState.ASKED and now - worker.asked_at_ms > rules.launch_ms:
        reason = f"not launched within {rules.launch_ms / 1000:g} s"
        return terminate(ledger, worker, f"{reason}: {worker.problem}" if worker.problem else reason, now)
    if worker.state is WorkerState.BOOTING and (reason := _not_joined(worker, rules, now)):
        decision = terminate(ledger, worker, reason, now)
        until_ms = now + rules.set_aside_ms
        add_to(decision, close_offer(ledger, worker, place_of(worker).scopes()[0], until_ms, f"{worker.id} {reason}"))
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


def core_alarm(provider: str) -> str:
    """The counter that says on which day the core-hours of a provider were exceeded."""
    return f"core_hours_exceeded_{provider}"


def _core_price(provider: str, worker: Worker) -> int:
    """Core-milliseconds of an hour of a worker of this provider."""
    return core_ms(worker, HOUR_MS) if worker.provider == provider else 0


class _DayLimit(Struct, frozen=True):
    """Limit of the cost of a day: `spent` of `limit`, and the cost of an hour of a worker."""

    spent: int
    limit: int
    why: str
    price: Callable[[Worker], int]


def _guard_budgets(ledger: Ledger, decision: Decision, now: int, wall_ms: int) -> None:
    """Drain and terminate what the day's budgets do not pay for any longer, and raise an alarm beyond them."""
    state = budget_state(ledger, now, wall_ms)
    _raise_alarms(ledger, state, decision)
    follow: dict[str, Event] = {}
    limits = []
    for core in state.cores:
        left = f"{core_hours(max(core.limit_ms - core.used_ms, 0)):g}"
        reason = f"{core_budget_key(core.provider)} of {core.limit_milli / 1000:g} is used but for {left}"
        price = partial(_core_price, core.provider)
        limits.append(_DayLimit(core.used_ms, core.limit_ms, reason, price))
    if state.per_day_micro is not None:
        left = usd(max(state.per_day_micro - state.spent_micro, 0))
        reason = f"scaling.budget_per_day of {usd(state.per_day_micro)} is spent but for {left}"
        limits.insert(
            0, _DayLimit(state.spent_micro, state.per_day_micro, reason, lambda worker: worker.price_micro or 0)
        )
    for limit in limits:
        counted = [worker for worker in ledger.workers.values() if limit.price(worker)]
        if _is_short(counted, limit, state, now, TERMINATE_LEAD_MS):
            for worker in counted:
                if worker.state is not WorkerState.TERMINATING:
                    order = WorkerTerminationRequested(worker.id, GRID_USER, limit.why, wall_ms, force=True)
                    follow[worker.id] = order
        elif _is_short(counted, limit, state, now, DRAIN_LEAD_MS):
            for worker in counted:
                if worker.state is WorkerState.JOINED:
                    follow.setdefault(worker.id, WorkerDrainRequested(worker.id, GRID_USER, limit.why, force=True))
    decision.follow += list(follow.values())[:MAX_WORKERS_PER_STEP]
    if len(follow) > MAX_WORKERS_PER_STEP:
        decision.later.append(CheckWorkers(wall_ms))


def _is_short(workers: Sequence[Worker], limit: _DayLimit, state: BudgetState, now: int, lead_ms: int) -> bool:
    """Whether the budget would not pay for the end of all of these workers, should the control plane die in so long."""
    times = ((worker, alone_ms(worker, state.rules, now, lead_ms)) for worker in workers)
    ahead = sum(cost_micro(limit.price(worker), min(alone, state.until_midnight_ms)) for worker, alone in times)
    return bool(workers) and limit.spent + ahead > limit.limit


def _raise_alarms(ledger: Ledger, state: BudgetState, decision: Decision) -> None:
    """Say once a day, and once until it has passed, that more is spent than the budgets allow."""
    is_spent = state.per_day_micro is not None and state.spent_micro > state.per_day_micro
    if is_spent and ledger.counters.get(DAY_ALARM) != state.day:
        reason = f"{usd(state.spent_micro)} spent today, and scaling.budget_per_day is {usd(state.per_day_micro or 0)}"
        decision.changes.append(Counter(DAY_ALARM, state.day))
        decision.records.append(Record("budget-exceeded", GRID_USER, "budget_per_day", "", reason))
    is_over = state.per_hour_micro is not None and state.rate_micro > state.per_hour_micro
    if is_over != bool(ledger.counters.get(HOUR_ALARM)):
        decision.changes.append(Counter(HOUR_ALARM, int(is_over)))
        if is_over:
            reason = f"{usd(state.rate_micro)} an hour, and scaling.budget_per_hour is {usd(state.per_hour_micro or 0)}"
            decision.records.append(Record("budget-exceeded", GRID_USER, "budget_per_hour", "", reason))
    for core in state.cores:
        if core.used_ms > core.limit_ms and ledger.counters.get(core_alarm(core.provider)) != state.day:
            key, limit = core_budget_key(core.provider), core.limit_milli / 1000
            reason = f"{core_hours(core.used_ms):g} core-hours used today, and {key} is {limit:g}"
            decision.changes.append(Counter(core_alarm(core.provider), state.day))
            decision.records.append(Record("budget-exceeded", GRID_USER, "budget_core_hours", "", reason))
