"""Old attempts go, living and unacknowledged ones stay."""

from __future__ import annotations

import os
from pathlib import Path

from distributed_grid.agent.files.attempt_files import remove_expired
from distributed_grid.agent.files.job_dir import CONTROL, EXIT, LIVE, make_root

DAY = 86_400.0
NOW = 100 * DAY


def an_attempt(root: Path, name: str, *, ended_days_ago: float | None, live: bool = False) -> Path:
    make_root(str(root))
    folder, control = root / name, root / CONTROL / name
    for path in (folder, control):
        path.mkdir()
    (folder / "stdout").write_text("output")
    if ended_days_ago is not None:
        (control / EXIT).write_text("{}")
        moment = NOW - ended_days_ago * DAY
        os.utime(control / EXIT, (moment, moment))
    if live:
        (root / LIVE / name).touch()
    return folder


def test_what_ended_over_thirty_days_ago_is_removed(tmp_path: Path) -> None:
    old = an_attempt(tmp_path, "old.1", ended_days_ago=31)
    new = an_attempt(tmp_path, "new.1", ended_days_ago=29)
    assert remove_expired(tmp_path, now=NOW) == 1
    assert not old.exists()
    assert not (tmp_path / CONTROL / "old.1").exists()
    assert new.exists()


def test_what_runs_or_was_not_acknowledged_stays(tmp_path: Path) -> None:
    running = an_attempt(tmp_path, "running.1", ended_days_ago=None, live=True)
    unheard = an_attempt(tmp_path, "unheard.1", ended_days_ago=90, live=True)
    assert remove_expired(tmp_path, now=NOW) == 0
    assert running.exists()
    assert unheard.exists()


def test_a_root_that_is_not_there_is_clean(tmp_path: Path) -> None:
    assert remove_expired(tmp_path / "nowhere", now=NOW) == 0
