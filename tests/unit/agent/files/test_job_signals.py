"""Checkpoint marks as an agent sees them: files, their times, and what is reported of them how often."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from distributed_grid.agent.files.job_signals import REPORT_EVERY_MS, CheckpointMarks, give_notice, withdraw_notice
from distributed_grid.wire import MAX_MARKS, CheckpointAge
from tests.support import odd_files


class Clock:
    """The time since boot, as far as a test lets it pass."""

    def __init__(self) -> None:
        self.ms = 5_000_000

    def __call__(self) -> int:
        return self.ms


class Attempts:
    """Attempts `a.1`, `a.2`, … on one node, whose checkpoint files a test writes."""

    def __init__(self, root: Path, count: int = 2) -> None:
        self.root = root
        self.clock = Clock()
        self.marks = CheckpointMarks(str(root), self.clock)
        self.running = [(f"a.{number}", 10 + number, "gpu1") for number in range(1, count + 1)]
        for attempt_id, _, _ in self.running:
            (root / attempt_id).mkdir()

    def mark(self, attempt_id: str, *, ago_s: float = 0) -> None:
        path = self.root / attempt_id / "checkpoint"
        path.touch()
        when = time.time() - ago_s
        os.utime(path, (when, when))

    def beat(self, *, node: str = "gpu1", later_ms: int = 2_000, confirmed: bool = True) -> list[tuple[str, int]]:
        """One heartbeat; the attempts it reports, with their fences."""
        self.clock.ms += later_ms
        self.marks.observe(self.running)
        reported = self.marks.take_unreported(node, self.clock.ms)
        if confirmed:
            self.marks.confirm(self.clock.ms)
        return [(mark.lease_id, mark.fence) for mark in reported]


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    return Attempts(tmp_path)


def test_who_never_marked_is_not_told_of(attempts: Attempts) -> None:
    assert attempts.beat() == []
    assert attempts.marks.age_ms("a.1") is None


def test_a_mark_is_told_once_with_its_age_and_fence(attempts: Attempts) -> None:
    attempts.mark("a.2", ago_s=30)
    attempts.marks.observe(attempts.running)
    (reported,) = attempts.marks.take_unreported("gpu1", 1)
    attempts.marks.confirm(1)
    assert (reported.lease_id, reported.fence) == ("a.2", 12)
    assert 30_000 <= reported.age_ms < 60_000
    for _ in range(20):
        assert attempts.beat() == []


def test_a_mark_of_the_future_counts_as_now(attempts: Attempts) -> None:
    attempts.mark("a.1", ago_s=-3600)
    attempts.marks.observe(attempts.running)
    assert attempts.marks.take_unreported("gpu1", 1) == (CheckpointAge("a.1", 11, 0),)
    assert attempts.marks.age_ms("a.1") == 0


def test_an_attempt_is_told_of_at_most_once_in_ten_seconds(attempts: Attempts) -> None:
    reported = 0
    for number in range(50):
        attempts.mark("a.1", ago_s=100 - number)
        reported += len(attempts.beat(later_ms=1_000))
    assert reported == 50_000 // REPORT_EVERY_MS


def test_a_mark_goes_with_the_heartbeat_of_its_own_node(attempts: Attempts) -> None:
    attempts.mark("a.1")
    assert attempts.beat(node="gpu2") == []
    assert attempts.beat() == [("a.1", 11)]


def test_a_mark_that_was_not_confirmed_is_told_again_later(attempts: Attempts) -> None:
    attempts.mark("a.1", ago_s=1)
    assert attempts.beat(confirmed=False) == [("a.1", 11)]
    assert attempts.beat() == []
    assert attempts.beat(later_ms=REPORT_EVERY_MS) == [("a.1", 11)]
    assert attempts.beat(later_ms=REPORT_EVERY_MS) == []


def test_on_a_new_link_marks_are_told_again_at_once(attempts: Attempts) -> None:
    attempts.mark("a.1", ago_s=1)
    attempts.mark("a.2", ago_s=2)
    assert len(attempts.beat()) == 2
    attempts.marks.report_again()
    assert len(attempts.beat()) == 2


def test_nothing_is_remembered_of_those_who_are_gone(attempts: Attempts) -> None:
    attempts.mark("a.1", ago_s=1)
    assert attempts.beat() == [("a.1", 11)]
    gone = attempts.running.pop(0)
    assert attempts.beat() == []
    attempts.running.append(gone)
    assert attempts.beat() == [("a.1", 11)]


def test_a_link_to_a_file_elsewhere_says_nothing_of_that_file(attempts: Attempts, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    os.utime(elsewhere, (0, 0))
    (tmp_path / "a.1/checkpoint").symlink_to(elsewhere)
    age_ms = attempts.marks.age_ms("a.1")
    assert age_ms is not None
    assert age_ms < 3_600_000


@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_a_notice_replaces_whatever_a_job_put_there(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.1").mkdir()
    odd_files.put(kind, tmp_path / "a.1" / "notice")
    odd_files.put(kind, tmp_path / f"a.1/.notice.{os.getpid()}")
    assert give_notice(str(tmp_path), "a.1", "why", 5000) == 5000
    assert json.loads((tmp_path / "a.1/notice").read_text())["reason"] == "why"
    odd_files.put(kind, tmp_path / "a.1" / "notice")
    withdraw_notice(str(tmp_path), "a.1")
    withdraw_notice(str(tmp_path), "a.2")


@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_a_mark_is_a_name_whatever_has_it(attempts: Attempts, kind: str) -> None:
    odd_files.put(kind, attempts.root / "a.1" / "checkpoint")
    attempts.beat()


def test_marks_beyond_what_a_heartbeat_carries_come_with_the_next(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, MAX_MARKS + 5)
    for attempt_id, _, _ in attempts.running:
        attempts.mark(attempt_id)
    first = attempts.beat()
    assert len(first) == MAX_MARKS
    assert len(attempts.beat()) == 5
    assert attempts.beat() == []
