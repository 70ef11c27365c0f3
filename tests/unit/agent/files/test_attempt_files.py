"""Old attempts go, living and unacknowledged ones stay; how old one is no wall clock says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distributed_grid.agent.files.attempt_files import KEEP_MS, remove_expired
from distributed_grid.agent.files.job_dir import AGE, CONTROL, EXIT, LIVE, make_root

DAY_MS = 86_400_000


def an_attempt(root: Path, name: str, *, ended: bool = True, live: bool = False) -> Path:
    make_root(str(root))
    folder, control = root / name, root / CONTROL / name
    for path in (folder, control):
        path.mkdir()
    (folder / "stdout").write_text("output")
    if ended:
        (control / EXIT).write_text("{}")
    if live:
        (root / LIVE / name).touch()
    return folder


def test_what_ended_over_thirty_days_ago_is_removed(tmp_path: Path) -> None:
    old = an_attempt(tmp_path, "old.1")
    assert remove_expired(tmp_path, age_ms=5 * DAY_MS) == 0
    new = an_attempt(tmp_path, "new.1")
    assert remove_expired(tmp_path, age_ms=7 * DAY_MS) == 0
    assert remove_expired(tmp_path, age_ms=35 * DAY_MS) == 0
    assert remove_expired(tmp_path, age_ms=36 * DAY_MS) == 1
    assert not old.exists()
    assert not (tmp_path / CONTROL / "old.1").exists()
    assert new.exists()


@pytest.mark.parametrize("days", [40, 365, -40, -365, 20_000])
def test_the_time_of_a_file_says_nothing_about_its_age(tmp_path: Path, days: int) -> None:
    folder = an_attempt(tmp_path, "odd.1")
    path = tmp_path / CONTROL / "odd.1" / EXIT
    moment = path.stat().st_mtime - days * 86_400
    os.utime(path, (moment, moment))
    assert remove_expired(tmp_path, age_ms=DAY_MS) == 0
    assert remove_expired(tmp_path, age_ms=2 * DAY_MS) == 0
    assert folder.exists()
    assert remove_expired(tmp_path, age_ms=2 * DAY_MS + KEEP_MS) == 1


def test_an_age_that_is_lost_damaged_or_to_come_begins_anew(tmp_path: Path) -> None:
    an_attempt(tmp_path, "odd.1")
    path = tmp_path / CONTROL / "odd.1" / AGE
    remove_expired(tmp_path, age_ms=9 * DAY_MS)
    written = path.read_bytes()
    for spoilt in (b"", b"0", written.replace(b"777600000", b"077600000"), None):
        assert spoilt != written
        if spoilt is None:
            path.unlink()
        else:
            path.write_bytes(spoilt)
        assert remove_expired(tmp_path, age_ms=60 * DAY_MS) == 0
    assert remove_expired(tmp_path, age_ms=DAY_MS) == 0, "the clock has begun anew"
    assert remove_expired(tmp_path, age_ms=30 * DAY_MS) == 0
    assert remove_expired(tmp_path, age_ms=32 * DAY_MS) == 1


def test_what_runs_or_was_not_acknowledged_stays(tmp_path: Path) -> None:
    running = an_attempt(tmp_path, "running.1", ended=False, live=True)
    unheard = an_attempt(tmp_path, "unheard.1", live=True)
    for age_ms in (1, 90 * DAY_MS):
        assert remove_expired(tmp_path, age_ms=age_ms) == 0
    assert running.exists()
    assert unheard.exists()


def test_a_root_that_is_not_there_is_clean(tmp_path: Path) -> None:
    assert remove_expired(tmp_path / "nowhere", age_ms=90 * DAY_MS) == 0
