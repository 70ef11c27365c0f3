"""The outbox: reports are kept until they are acknowledged, and a start that is over at once is told with its end."""

from __future__ import annotations

from collections.abc import Callable

from distributed_grid.agent.outbox import SHORT_MS, Outbox, Report
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.states import MoveState
from distributed_grid.wire import AttemptEndedReport, AttemptPausedReport, AttemptStartedReport

DONE = Outcome(Ending.EXITED, exit_code=0)


class Sent:
    """An outbox, its sent messages, and its later calls."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.later: list[tuple[int, Callable[[], None]]] = []
        self.outbox = Outbox(self.reports.append, lambda ms, call: self.later.append((ms, call)))

    def pass_time(self) -> None:
        calls, self.later = self.later, []
        for _, call in calls:
            call()


def test_a_start_is_reported_in_a_moment() -> None:
    sent = Sent()
    sent.outbox.started("a.1", 7, 123, (0, 1))
    assert (sent.reports, [ms for ms, _ in sent.later]) == ([], [SHORT_MS])
    sent.pass_time()
    assert sent.reports == [AttemptStartedReport(seq=1, lease_id="a.1", fence=7, pid=123, cores=(0, 1))]


def test_the_start_of_what_is_over_at_once_is_reported_with_its_end() -> None:
    sent = Sent()
    sent.outbox.started("a.1", 7, 123, (0,))
    sent.outbox.ended("a.1", 7, DONE, 5)
    sent.pass_time()
    assert sent.reports == [
        AttemptEndedReport(seq=1, lease_id="a.1", fence=7, outcome=DONE, pid=123, cores=(0,), mark_age_ms=5)
    ]


def test_a_start_that_is_known_anew_is_reported_once_with_its_last_fence() -> None:
    sent = Sent()
    sent.outbox.started("a.1", 7, 123)
    sent.outbox.started("a.1", 8, 123)
    sent.pass_time()
    assert [report.fence for report in sent.reports] == [8]


def test_what_is_not_acknowledged_is_sent_again_and_what_is_acknowledged_is_forgotten_once() -> None:
    sent = Sent()
    sent.outbox.paused("a.1", 7, True, "its owner is back")
    sent.outbox.ended("b.1", 8, DONE)
    assert sent.outbox.unacknowledged_ends() == ["b.1"]
    first, second = sent.reports
    assert isinstance(first, AttemptPausedReport)
    assert sent.outbox.acknowledged(first.seq) is first
    assert sent.outbox.acknowledged(first.seq) is None
    sent.outbox.resend()
    assert sent.reports == [first, second, second]


def test_after_the_stop_no_start_is_reported() -> None:
    sent = Sent()
    sent.outbox.started("a.1", 7, 123)
    sent.outbox.stop()
    sent.outbox.stop()
    sent.pass_time()
    assert sent.reports == []


def test_an_end_that_is_known_already_is_sent_again_under_its_number() -> None:
    sent = Sent()
    for _ in range(3):
        sent.outbox.ended("a.1", 7, DONE)
    sent.outbox.ended("a.1", 7, Outcome(Ending.LOST))
    assert [report.seq for report in sent.reports] == [1, 1, 1, 2]
    for seq in (1, 2):
        assert sent.outbox.acknowledged(seq) is not None
    assert sent.outbox.unacknowledged_ends() == []
    sent.outbox.ended("a.1", 7, DONE)
    assert sent.reports[-1].seq == 3


def test_a_step_of_a_move_is_kept_until_it_is_acknowledged_and_repeated_under_its_number() -> None:
    sent = Sent()
    sent.outbox.moved("move-1", MoveState.FROZEN, left_ms=900)
    sent.outbox.moved("move-1", MoveState.FROZEN, left_ms=800)
    sent.outbox.moved("move-1", MoveState.DECIDED, frozen_ms=100)
    assert [report.seq for report in sent.reports] == [1, 1, 2]
    sent.outbox.resend()
    assert sent.reports[3:] == sent.reports[1:3]
    assert sent.outbox.acknowledged(1) == sent.reports[1]
    sent.outbox.forget_move("move-1")
    sent.outbox.forget_move("move-1")
    assert sent.outbox.is_empty
    assert sent.outbox.acknowledged(2) is None


def test_a_delayed_end_is_kept_at_once_and_sent_later_unless_it_was_acknowledged_meanwhile() -> None:
    sent = Sent()
    sent.outbox.ended("a.1", 7, DONE, delay_ms=500)
    sent.outbox.ended("b.1", 7, DONE, delay_ms=500)
    assert (sent.reports, sent.outbox.unacknowledged_ends()) == ([], ["a.1", "b.1"])
    sent.outbox.acknowledged(2)
    assert [ms for ms, _ in sent.later] == [500, 500]
    sent.pass_time()
    assert sent.reports == [AttemptEndedReport(seq=1, lease_id="a.1", fence=7, outcome=DONE)]
