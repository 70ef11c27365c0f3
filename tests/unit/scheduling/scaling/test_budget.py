"""Budget of workers: to the end that a provider gives a machine, in core-hours, and what goes on without a control
plane."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Spending, Worker, WorkerResources, WorkerRules
from distributed_grid.scheduling.scaling.budget import (
    DAY_MS,
    END_GRACE_MS,
    HOUR_MS,
    alone_ms,
    budget_state,
    charge_unseen,
    counted_until_ms,
    settle,
)

DAY = 20_000
NOON = DAY * DAY_MS + 12 * HOUR_MS
DOLLAR = 1_000_000
RULES = WorkerRules(budget_per_day_micro=3 * DOLLAR, core_hour_budgets={"slurm": 10_000})


def a_worker(worker_id: str = "w1", **fields: Any) -> Worker:
    usual = {"price_micro": DOLLAR, "state": WorkerState.JOINED, "booted_at_ms": NOON, "joined_at_ms": NOON}
    return Worker(
        id=worker_id,
        provider="slurm",
        worker_type="cpu",
        resources=WorkerResources(2000, 1 << 30),
        created_at_ms=NOON,
        **{**usual, **fields},
    )


def a_ledger(*workers: Worker, rules: WorkerRules = RULES) -> Ledger:
    return Ledger([rules, Spending(provider="slurm", day=DAY, spent_micro=0, as_of_ms=NOON), *workers])


def test_a_machine_with_an_end_is_counted_until_a_minute_after_it() -> None:
    ledger = a_ledger(a_worker(lifetime_ms=HOUR_MS, ends_at_ms=NOON + HOUR_MS))
    state = budget_state(ledger, NOON, NOON)
    assert state.day_micro == DOLLAR + DOLLAR // 60 + 1
    later = budget_state(ledger, NOON + 5 * HOUR_MS, NOON + 5 * HOUR_MS)
    assert later.day_micro == later.spent_micro == state.day_micro
    assert later.rate_micro == DOLLAR, "it is not proven gone"


def test_one_without_an_end_is_counted_until_midnight() -> None:
    state = budget_state(a_ledger(a_worker()), NOON, NOON)
    assert state.day_micro == 12 * DOLLAR


@pytest.mark.parametrize(
    ("fields", "until"),
    [
        ({}, NOON + 2 * HOUR_MS),
        ({"booted_at_ms": 0, "joined_at_ms": 0, "state": WorkerState.ASKED}, NOON + 3 * HOUR_MS + 60_000),
        (
            {"booted_at_ms": 0, "joined_at_ms": 0, "state": WorkerState.TERMINATING, "called_at_ms": NOON},
            NOON + 2 * HOUR_MS + 60_000,
        ),
    ],
)
def test_before_its_end_is_known_its_lifetime_counts_from_when_it_may_exist(fields: Any, until: int) -> None:
    worker = a_worker(lifetime_ms=2 * HOUR_MS, **fields)
    assert counted_until_ms(worker, RULES, NOON + HOUR_MS) == until + END_GRACE_MS


def test_a_worker_that_ends_before_midnight_is_within_a_budget_that_would_not_pay_for_the_day() -> None:
    state = budget_state(a_ledger(), NOON, NOON)
    assert state.refusal(a_worker(lifetime_ms=2 * HOUR_MS)) is None
    assert "by midnight UTC" in (state.refusal(a_worker()) or "")


def test_core_hours_of_a_provider_are_refused_by_name_and_others_are_not() -> None:
    state = budget_state(a_ledger(), NOON, NOON)
    short = a_worker(price_micro=0, lifetime_ms=2 * HOUR_MS)
    state = state.with_workers(short, 2)
    assert state.refusal(short) == (
        "a cpu worker of slurm with 2 cores for up to 2 h would make 12.2 core-hours today (0 used), "
        "and providers.slurm.budget_core_hours is 10"
    )
    other = Worker(
        id="w2",
        provider="docker_local",
        worker_type="cpu",
        resources=WorkerResources(8000),
        created_at_ms=NOON,
        price_micro=0,
    )
    assert state.refusal(other) is None


def test_a_worker_that_has_not_begun_needs_its_whole_lifetime_also_shortly_before_midnight() -> None:
    night = (DAY + 1) * DAY_MS - 60_000
    long = a_worker(price_micro=0, lifetime_ms=6 * HOUR_MS)
    assert "core-hours today" in (budget_state(a_ledger(), night, night).refusal(long) or "")


def test_used_core_time_is_settled_and_begins_anew_on_the_next_day() -> None:
    ledger = a_ledger(a_worker(price_micro=0))
    (cores,) = budget_state(ledger, NOON + HOUR_MS, NOON + HOUR_MS).cores
    assert cores.used_ms == 2 * HOUR_MS
    tomorrow = (DAY + 1) * DAY_MS + HOUR_MS
    assert settle(ledger, "slurm", tomorrow, tomorrow).core_ms == 2 * HOUR_MS


def test_a_machine_goes_on_without_a_control_plane_until_its_agent_or_its_boot_ends_it() -> None:
    grace = END_GRACE_MS
    assert alone_ms(a_worker(), RULES, NOON, 0) == RULES.exit_ms + grace
    booting = a_worker(joined_at_ms=0, state=WorkerState.BOOTING)
    assert alone_ms(booting, RULES, NOON + 60_000, 0) == RULES.launch_ms + RULES.join_ms - 60_000 + grace
    ending = a_worker(lifetime_ms=HOUR_MS, ends_at_ms=NOON + 60_000)
    assert alone_ms(ending, RULES, NOON, 300_000) == 60_000 + grace


def test_unseen_run_after_the_queue_is_charged_up_to_its_lifetime() -> None:
    worker = a_worker(waits=True, queue_ms=DAY_MS, waited_until_ms=NOON, lifetime_ms=HOUR_MS)
    spent = Spending(provider="slurm", day=DAY, spent_micro=0, as_of_ms=NOON)
    assert charge_unseen(spent, worker, NOON + 60_000).core_ms == 120_000
    assert charge_unseen(spent, worker, NOON + 9 * HOUR_MS).core_ms == 2 * (HOUR_MS + END_GRACE_MS)
    began = charge_unseen(spent, worker, NOON + HOUR_MS, NOON + HOUR_MS // 2)
    assert (began.core_ms, began.spent_micro) == (HOUR_MS, DOLLAR // 2)


def a_day_with_spending() -> Ledger:
    ledger = a_ledger(rules=WorkerRules(budget_per_day_micro=3 * DOLLAR))
    ledger.apply([Spending(provider="slurm", day=DAY, spent_micro=2 * DOLLAR, as_of_ms=NOON)])
    return ledger


@pytest.mark.parametrize("days", [40, 365, -40, -365])
def test_a_look_at_a_wrong_clock_refuses_no_worker_afterwards_and_forgets_no_spending(days: int) -> None:
    ledger = a_day_with_spending()
    wrong = NOON + 1_000 + days * DAY_MS
    ledger.apply([settle(ledger, "slurm", NOON + 1_000, wrong)])
    assert ledger.spending["slurm"].day == DAY + days
    state = budget_state(ledger, NOON + 20_000, NOON + 20_000)
    assert (state.day, state.spent_micro) == (DAY, 2 * DOLLAR)
    assert state.until_midnight_ms == 12 * HOUR_MS - 20_000
    assert state.refusal(a_worker(price_micro=DOLLAR // 20)) is None
    assert state.refusal(a_worker(price_micro=DOLLAR)) is not None


def test_turning_the_clock_to_and_fro_pays_for_no_second_day() -> None:
    ledger, now = a_day_with_spending(), NOON
    for days in (40, 0, 365, 366, 0, -40, -41, 0):
        now += 10_000
        ledger.apply([settle(ledger, "slurm", now, now + days * DAY_MS)])
        if days == 0:
            assert budget_state(ledger, now, now).spent_micro == 2 * DOLLAR


def test_a_clock_a_day_ahead_begins_the_next_day_once() -> None:
    ledger, now = a_day_with_spending(), NOON
    for days in (1, 0, 1, 0):
        now += 10_000
        ledger.apply([settle(ledger, "slurm", now, now + days * DAY_MS)])
        assert ledger.spending["slurm"].day == DAY + 1
    ledger.apply([charge_unseen(ledger.spending["slurm"], a_worker(), NOON + HOUR_MS)])
    tomorrow = (DAY + 1) * DAY_MS + HOUR_MS
    assert settle(ledger, "slurm", tomorrow, tomorrow).spent_micro == DOLLAR


def test_a_boot_under_a_wrong_clock_and_a_midnight_there_forget_nothing() -> None:
    ledger, year = a_day_with_spending(), 365 * DAY_MS
    booted = NOON + year  # the grid's time has followed the wall clock
    ledger.apply([settle(ledger, "slurm", booted, booted)])
    midnight = (DAY + 366) * DAY_MS + 60_000
    ledger.apply([settle(ledger, "slurm", midnight, midnight)])
    assert ledger.spending["slurm"].spent_micro == 0
    right = settle(ledger, "slurm", midnight + 1_000, NOON + 60_000)
    assert (right.day, right.spent_micro) == (DAY, 2 * DOLLAR)


def test_a_day_that_an_earlier_version_left_a_year_ahead_comes_back() -> None:
    ledger = a_ledger(rules=WorkerRules(budget_per_day_micro=3 * DOLLAR))
    ledger.apply([Spending(provider="slurm", day=DAY + 365, spent_micro=2 * DOLLAR, as_of_ms=NOON)])
    state = budget_state(ledger, NOON + 1_000, NOON + 1_000)
    assert (state.day, state.spent_micro) == (DAY, 2 * DOLLAR)
    assert state.refusal(a_worker(price_micro=DOLLAR // 20)) is None
