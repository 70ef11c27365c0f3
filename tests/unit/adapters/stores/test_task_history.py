"""History of runs in a file of its own: each run once, summaries after 90 days, and never worth an error."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_grid.adapters.stores import task_history
from distributed_grid.adapters.stores.task_history import DAY_MS, FOLD_ROWS, KEPT_MS, TaskHistory, TaskType
from distributed_grid.prediction.task_runs import RunSummary, TaskRun

NOW = 200 * DAY_MS


def a_run(number: int, *, key: str = "sleep #", user: str = "ana", attempt: int = 1, ended_at_ms: int = NOW) -> TaskRun:
    return TaskRun(
        task_id=f"task-{number}",
        attempt=attempt,
        user=user,
        key=key,
        features=(float(number), 0.5),
        input_bytes=number,
        memory_bytes=1000 + number,
        cpu_ms=number,
        run_ms=2 * number,
        gpu_memory_bytes=3,
        ended_at_ms=ended_at_ms,
    )


def test_runs_are_there_after_a_restart_the_oldest_first_and_no_more_than_asked_for(tmp_path: Path) -> None:
    history = TaskHistory(tmp_path / "predictions.db")
    runs = [a_run(i) for i in range(10)]
    assert history.record(runs) == runs
    history.close()
    history.close()
    again = TaskHistory(tmp_path / "predictions.db")
    assert again.runs("ana", "sleep #", 4) == runs[-4:]
    assert again.runs("bo", "sleep #", 4) == []
    assert again.types(10) == [TaskType("ana", "sleep #", 10, NOW)]
    again.close()
    assert (tmp_path / "predictions.db").stat().st_mode & 0o777 == 0o600


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=30))
def test_a_task_and_attempt_is_recorded_once_however_often_it_is_reported(
    tmp_path_factory: pytest.TempPathFactory, reports: list[tuple[int, int]]
) -> None:
    history = TaskHistory(tmp_path_factory.mktemp("history") / "predictions.db")
    new = []
    for number, attempt in reports:
        new += history.record([a_run(number, attempt=attempt)] * 2) or []
    assert [(run.task_id, run.attempt) for run in new] == list(
        dict.fromkeys((f"task-{number}", attempt) for number, attempt in reports)
    )
    assert history.runs("ana", "sleep #", 100) == new
    assert [found.samples for found in history.types(5)] == ([len(new)] if new else [])
    history.close()


def test_the_same_task_of_two_users_is_two(tmp_path: Path) -> None:
    history = TaskHistory(tmp_path / "predictions.db")
    assert len(history.record([a_run(1), a_run(1, user="bo")]) or []) == 2
    history.close()


def test_types_are_listed_by_their_last_run_and_lower_bounds_are_no_samples(tmp_path: Path) -> None:
    history = TaskHistory(tmp_path / "predictions.db")
    history.record([a_run(1, key="b", ended_at_ms=NOW + 1), a_run(2, key="a"), a_run(3, key="c", ended_at_ms=NOW + 2)])
    bound = TaskRun(
        task_id="task-9", attempt=1, user="ana", key="a", memory_bytes=5, ended_at_ms=NOW, is_lower_bound=True
    )
    history.record([bound])
    assert [(found.key, found.samples) for found in history.types(9)] == [("c", 1), ("b", 1), ("a", 1)]
    assert history.runs("ana", "a", 9)[-1] == bound
    assert len(history.types(2)) == 2
    history.close()


def test_runs_of_more_than_90_days_ago_become_a_summary_of_their_type(tmp_path: Path) -> None:
    history = TaskHistory(tmp_path / "predictions.db")
    old = [a_run(i, ended_at_ms=NOW - KEPT_MS - 1 - i) for i in range(FOLD_ROWS + 10)]
    kept = [a_run(i + 10_000, ended_at_ms=NOW - KEPT_MS) for i in range(5)]
    history.record([*old, *kept])
    assert [history.fold(NOW - KEPT_MS), history.fold(NOW - KEPT_MS), history.fold(NOW - KEPT_MS)] == [FOLD_ROWS, 10, 0]
    assert history.runs("ana", "sleep #", 9999) == kept
    assert history.summary("ana", "sleep #") == RunSummary().plus(old)
    assert history.summary("ana", "other") == RunSummary()
    assert history.types(9) == [TaskType("ana", "sleep #", FOLD_ROWS + 15, NOW - KEPT_MS)]
    history.close()


def overwrite(path: Path) -> None:
    path.write_bytes(b"this is no database, and never was one" * 100)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] + b"\xff" * 3000)


def other_version(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 7")
    db.close()


def odd_row(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE runs SET features = 'text'")
    db.close()


@pytest.mark.parametrize("damage", [overwrite, cut_in_half, other_version, odd_row])
def test_a_damaged_file_is_moved_aside_and_begun_anew_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "predictions.db"
    history = TaskHistory(path)
    history.record([a_run(i) for i in range(50)])
    history.close()
    damage(path)
    again = TaskHistory(path)
    assert again.runs("ana", "sleep #", 10) == []
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    assert again.record([a_run(1)]) == [a_run(1)]
    assert again.runs("ana", "sleep #", 10) == [a_run(1)]
    assert (tmp_path / "predictions.db.damaged").exists()
    again.close()


def test_a_file_that_cannot_be_written_is_said_once_and_used_again_when_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    history = TaskHistory(folder / "predictions.db")
    assert history.record([a_run(1)]) is None
    assert history.record([a_run(1)]) is None
    assert history.types(5) == []
    assert len(caplog.records) == 1
    folder.mkdir()
    assert history.record([a_run(1)]) == [a_run(1)]
    history.close()


def test_a_full_file_loses_nothing_that_was_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = TaskHistory(tmp_path / "predictions.db")
    history.record([a_run(1)])
    assert history._db is not None
    history._db.execute("PRAGMA max_page_count = 1")  # as on a full disk: no page can be added
    assert history.record([a_run(i) for i in range(2, 3000)]) is None
    assert len(caplog.records) == 1
    assert history.runs("ana", "sleep #", 10) == [a_run(1)]
    assert history.record([a_run(2)]) == [a_run(2)]
    history.close()


def test_the_oldest_types_are_forgotten_beyond_the_most(tmp_path: Path) -> None:
    history = TaskHistory(tmp_path / "predictions.db")
    history.record([a_run(1, key="old", ended_at_ms=NOW - 5), a_run(2, key="new")])
    db = sqlite3.connect(tmp_path / "predictions.db")
    with db:
        rows = [("ana", f"k{i}", 0, NOW - 1) for i in range(task_history.MAX_TYPES - 1)]
        db.executemany("INSERT INTO types (user, key, samples, last_at_ms) VALUES (?, ?, ?, ?)", rows)
    db.close()
    assert history.fold(NOW - KEPT_MS) == 1
    assert history.runs("ana", "old", 9) == []
    assert history.runs("ana", "new", 9) == [a_run(2, key="new")]
    assert history.fold(NOW - KEPT_MS) == 0
    history.close()
