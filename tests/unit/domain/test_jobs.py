"""Jobs and attempts: outcomes within bounds, what may be retried, the next limit, and no secrets in a log."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.jobs import Ending, Outcome
from tests.support.builders import an_exit
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
