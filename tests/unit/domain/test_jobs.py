"""Jobs and attempts: outcomes within bounds, retries, the next limit, and no secrets in a log."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.jobs import MAX_DETAIL_CHARS, MAX_RUN_MS, Command, Ending, JobEstimate, Outcome
from tests.support.builders import GB, an_exit
from tests.unit.domain.sample_rows import ATTEMPT, JOB


def test_the_attempt_of_a_job_is_the_one_that_has_not_ended():
    assert JOB.attempt is ATTEMPT
    assert replace(JOB, attempts=()).attempt is None
    assert replace(JOB, attempts=(replace(ATTEMPT, outcome=an_exit()),)).attempt is None


@pytest.mark.parametrize(
    ("outcome", "succeeded", "retried"),
    [
        (an_exit(0), True, False),
        (an_exit(1), False, True),
        (Outcome(Ending.SIGNALLED, signal=9), False, True),
        (Outcome(Ending.LOST), False, True),
        (Outcome(Ending.TIMED_OUT), False, True),
        (Outcome(Ending.CANCELLED), False, False),
        (Outcome(Ending.CANCELLED, exit_code=0), False, False),
        (Outcome(Ending.PREEMPTED), False, False),
        (Outcome(Ending.OVER_LIMIT), False, False),
        (Outcome(Ending.EXPIRED), False, False),
        (Outcome(Ending.NEVER_STARTED), False, False),
        (Outcome(Ending.WAITED_TOO_LONG), False, False),
    ],
)
def test_only_what_failed_by_itself_may_be_retried(outcome, succeeded, retried):
    assert (outcome.succeeded, outcome.may_be_retried) == (succeeded, retried)


@given(
    detail=st.text(max_size=40) | st.just("x" * (MAX_DETAIL_CHARS + 1)),
    status=st.none() | st.integers(-(2**70), 2**70),
    amount=st.integers(-(2**70), 2**70),
)
def test_an_outcome_is_within_its_bounds_whoever_makes_it(detail, status, amount):
    made = Outcome(Ending.EXITED, status, status, detail, cpu_ms=amount, max_memory_bytes=amount, wall_ms=amount)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Outcome) == made
    assert (made.exit_code is None) == (status is None)


def test_an_outcome_within_its_bounds_stays_as_it_is_and_a_long_detail_shows_that_it_was_cut():
    assert (Outcome(Ending.EXITED, -3, wall_ms=MAX_RUN_MS).exit_code, an_exit().detail) == (-3, "")
    cut = Outcome(Ending.EXITED, detail="x" * 9_000).detail
    assert (len(cut), cut[-1]) == (MAX_DETAIL_CHARS, "…")


def test_the_values_of_a_commands_variables_are_not_shown():
    shown = repr(Command(("train",), env=(("TOKEN", "geheim"),), cwd="/data"))
    assert "geheim" not in shown
    assert "TOKEN" in shown
    assert "/data" in shown


def test_a_secret_in_a_command_is_not_shown():
    shown = repr(Command(("sh", "-c", "PGPASSWORD=geheim psql work"), cwd="/data"))
    assert "geheim" not in shown
    assert "psql work" in shown


def test_each_run_over_the_limit_gets_the_next_one_and_a_job_without_an_estimate_what_it_asked_for():
    job = replace(JOB, estimate=JobEstimate(memory_limits=(GB, 2 * GB, 4 * GB)))
    for overruns, limit in enumerate((GB, 2 * GB, 4 * GB)):
        again = replace(job, overruns=overruns)
        assert again.given_limit_bytes == again.sized_request.ask.memory_bytes == limit
        assert replace(again.sized_request.ask, memory_bytes=0) == replace(JOB.request.ask, memory_bytes=0)
    assert (JOB.given_limit_bytes, JOB.sized_request) == (0, JOB.request)
    assert replace(job, estimate=JobEstimate()).sized_request is JOB.request
