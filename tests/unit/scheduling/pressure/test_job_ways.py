"""Ways of jobs: restarts, remaining time, lost work, and cost of a move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.jobs import Attempt, Job, JobEstimate
from distributed_grid.domain.moves import Way
from distributed_grid.domain.states import JobState
from distributed_grid.scheduling.pressure.relief import (
    LOSS_AT_FULL_MILLI,
    LOSS_AT_MARK_MILLI,
    left_ms,
    loss_milli,
    lost_work_ms,
    profit_of,
    way_of,
)
from tests.support.builders import NOW, a_command, a_request

MINUTE = 60_000


def a_job(
    *, ran: int, marked_ago: int | None = None, expected: int = 0, said: int = 0, restartable: bool = True
) -> Job:
    """A job that has run for so many milliseconds."""
    started = NOW - ran
    marked = 0 if marked_ago is None else NOW - marked_ago
    attempt = Attempt(
        number=1,
        lease_id="r1.1",
        node="gpu1",
        fence=1,
        assigned_at_ms=started,
        started_at_ms=started,
        pid=7,
        marked_at_ms=marked,
    )
    estimate = JobEstimate(run_ms=expected) if expected else None
    request = replace(a_request("r1", cores=1), expects_ms=said)
    return Job(
        uid="r1",
        id="train",
        command=a_command(),
        request=request,
        submitted_at_ms=started,
        state=JobState.RUNNING,
        attempts=(attempt,),
        lease_id="r1.1",
        estimate=estimate,
        restartable=restartable,
    )


def test_only_who_marks_or_was_declared_may_be_started_again():
    assert way_of(a_job(ran=MINUTE, restartable=False)) is None
    assert way_of(a_job(ran=MINUTE)) is Way.RESTART
    assert way_of(a_job(ran=MINUTE, marked_ago=1, restartable=False)) is Way.CHECKPOINT_RESTART


def test_a_mark_comes_before_a_start_from_the_beginning():
    assert way_of(a_job(ran=MINUTE, marked_ago=1)) is Way.CHECKPOINT_RESTART


def test_what_is_left_is_the_expected_time_less_what_has_passed():
    assert left_ms(a_job(ran=MINUTE, expected=10 * MINUTE), NOW) == (9 * MINUTE, True)
    assert left_ms(a_job(ran=MINUTE, said=5 * MINUTE), NOW) == (4 * MINUTE, True)


@pytest.mark.parametrize("expected", [0, MINUTE // 2], ids=["unknown", "passed"])
def test_what_nobody_knows_is_taken_for_as_long_as_it_has_run(expected):
    assert left_ms(a_job(ran=MINUTE, expected=expected), NOW) == (MINUTE, False)


def test_lost_is_what_was_done_since_the_mark_or_the_start():
    assert lost_work_ms(a_job(ran=10 * MINUTE), NOW) == 10 * MINUTE
    assert lost_work_ms(a_job(ran=10 * MINUTE, marked_ago=1000), NOW) == 1000


def test_the_loss_grows_from_the_threshold_to_a_full_machine():
    assert loss_milli(800, 800) == 0
    assert LOSS_AT_MARK_MILLI <= loss_milli(801, 800) < loss_milli(900, 800) < loss_milli(1000, 800)
    assert loss_milli(1000, 800) == LOSS_AT_FULL_MILLI
    assert loss_milli(1000, 1000) == 0


def test_a_long_job_with_a_fresh_mark_moves_and_one_that_is_nearly_done_does_not():
    loss = loss_milli(900, 800)
    assert profit_of(a_job(ran=60 * MINUTE, marked_ago=1000, expected=120 * MINUTE), loss, NOW).pays
    assert not profit_of(a_job(ran=60 * MINUTE, marked_ago=1000, expected=60 * MINUTE + 3000), loss, NOW).pays


def test_a_restart_from_the_beginning_pays_only_early_in_a_long_job():
    loss = loss_milli(850, 800)
    assert profit_of(a_job(ran=MINUTE, expected=60 * MINUTE), loss, NOW).pays
    assert not profit_of(a_job(ran=40 * MINUTE, expected=60 * MINUTE), loss, NOW).pays


def test_a_slower_node_does_not_pay_though_this_one_is_pressed():
    job, loss = a_job(ran=60 * MINUTE, marked_ago=1000, expected=120 * MINUTE), loss_milli(850, 800)
    assert profit_of(job, loss, NOW).pays
    assert not profit_of(job, loss, NOW, speed_here=1000, speed_there=400).pays


def test_the_words_have_the_numbers():
    text = str(profit_of(a_job(ran=MINUTE, marked_ago=1000, expected=11 * MINUTE), 500, NOW))
    assert text == (
        "about 10 min left, of which 5 min would be saved; a move costs 1 s done again, 0 s of shipping, 5 s to start"
    )
    assert "(as long as it has run)" in str(profit_of(a_job(ran=MINUTE), 500, NOW))


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 1000))
def test_more_to_lose_never_makes_a_move_worth_more(ran, marked_ago, expected, level):
    loss = loss_milli(level, 800)
    marked = a_job(ran=ran, marked_ago=min(marked_ago, ran), expected=expected)
    unmarked = a_job(ran=ran, expected=expected)
    assert not profit_of(unmarked, loss, NOW).pays or profit_of(marked, loss, NOW).pays
    assert not (level <= 800 and profit_of(marked, loss, NOW).pays)
