"""Guard of the budgets of workers as time passes: what a day does not pay for any longer is drained, then terminated.

A worker that runs past midnight was within yesterday's budget, not today's: shortly before the money or the core-hours
of a day are spent, those that cost some are drained, and then terminated. What is over a budget even so can only be a
termination that its provider does not answer, and is said loudly.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from distributed_grid.domain.events import Event, WorkerDrainRequested, WorkersChecked, WorkerTerminationRequested
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.rows import Counter
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Worker
from distributed_grid.reactor.decision import Decision, Record
from distributed_grid.reactor.workers.lifecycle import MAX_WORKERS_PER_STEP
from distributed_grid.scheduling.scaling.budget import (
    BudgetState,
    CoreHours,
    budget_state,
    core_budget_key,
    core_hours,
    cost_micro,
    settle,
    usd,
)

SETTLE_MS = 60_000
"""How often what was spent is stored."""
DRAIN_LEAD_MS, TERMINATE_LEAD_MS = 600_000, 300_000
"""For how long there must be money left before workers are drained, and terminated."""
DAY_ALARM, HOUR_ALARM = "budget_day_exceeded", "budget_hour_exceeded"


def core_alarm(provider: str) -> str:
    """The counter that says on which day the core-hours of a provider were exceeded."""
    return f"core_hours_exceeded_{provider}"


def settle_all(ledger: Ledger, decision: Decision, now: int, wall_ms: int) -> None:
    """Store what was spent, once in a while and when a day has begun."""
    for row in ledger.spending.values():
        settled = settle(ledger, row.provider, now, wall_ms)
        is_due = settled.day != row.day or now - row.as_of_ms >= SETTLE_MS
        if is_due and (settled.spent_micro, settled.core_ms) != (row.spent_micro, row.core_ms):
            decision.changes.append(settled)


class _DayLimit(Struct, frozen=True):
    """What a day may cost: `spent` of `limit`, at `rate` an hour, for the workers that `counts` says."""

    spent: int
    limit: int
    rate: int
    why: str
    counts: Callable[[Worker], bool]

    def is_short(self, lead_ms: int, until_midnight_ms: int) -> bool:
        """Whether it would be spent within this time, or before midnight if that is sooner."""
        return self.spent + cost_micro(self.rate, min(lead_ms, until_midnight_ms)) > self.limit


def guard_budgets(ledger: Ledger, decision: Decision, now: int, wall_ms: int) -> None:
    """Drain and terminate what the day's budgets do not pay for any longer, and raise an alarm beyond them."""
    state = budget_state(ledger, now, wall_ms)
    _raise_alarms(ledger, state, decision)
    follow: dict[str, Event] = {}
    for limit in _day_limits(state):
        if not limit.rate:
            continue
        counted = [worker for worker in ledger.workers.values() if limit.counts(worker)]
        if limit.is_short(TERMINATE_LEAD_MS, state.until_midnight_ms):
            for worker in counted:
                if worker.state is not WorkerState.TERMINATING:
                    order = WorkerTerminationRequested(worker.id, GRID_USER, limit.why, wall_ms, force=True)
                    follow[worker.id] = order
        elif limit.is_short(DRAIN_LEAD_MS, state.until_midnight_ms):
            for worker in counted:
                if worker.state is WorkerState.JOINED:
                    follow.setdefault(worker.id, WorkerDrainRequested(worker.id, GRID_USER, limit.why, force=True))
    decision.follow += list(follow.values())[:MAX_WORKERS_PER_STEP]
    if len(follow) > MAX_WORKERS_PER_STEP:
        decision.later.append(WorkersChecked(wall_ms))


def _day_limits(state: BudgetState) -> list[_DayLimit]:
    limits = [_core_limit(one) for one in state.cores]
    if state.per_day_micro is not None:
        left = usd(max(state.per_day_micro - state.spent_micro, 0))
        why = f"scaling.budget_per_day of {usd(state.per_day_micro)} is spent but for {left}"
        money = _DayLimit(
            state.spent_micro, state.per_day_micro, state.rate_micro, why, lambda worker: bool(worker.price_micro)
        )
        limits.insert(0, money)
    return limits


def _core_limit(one: CoreHours) -> _DayLimit:
    left = core_hours(max(one.limit_ms - one.used_ms, 0))
    why = f"{core_budget_key(one.provider)} of {one.limit_milli / 1000:g} is used but for {left:g}"
    rate_ms = 3_600 * one.rate_milli
    return _DayLimit(one.used_ms, one.limit_ms, rate_ms, why, lambda worker: worker.provider == one.provider)


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
    for one in state.cores:
        if one.used_ms > one.limit_ms and ledger.counters.get(core_alarm(one.provider)) != state.day:
            key, limit = core_budget_key(one.provider), one.limit_milli / 1000
            why = f"{core_hours(one.used_ms):g} core-hours used today, and {key} is {limit:g}"
            decision.changes.append(Counter(core_alarm(one.provider), state.day))
            decision.records.append(Record("budget-exceeded", GRID_USER, "budget_core_hours", "", why))
