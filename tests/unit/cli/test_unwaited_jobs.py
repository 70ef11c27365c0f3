"""Detached jobs that no command has shown the end of: kept in order, bounded, whole after a killed command."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed_grid.cli.unwaited_jobs import MAX_FILE_BYTES, MAX_JOBS, UnwaitedJobs
from distributed_grid.state_dir import StateDir


@pytest.fixture
def state_dir(tmp_path: Path) -> StateDir:
    found = StateDir(tmp_path / "state")
    found.create()
    return found


def uid(number: int) -> str:
    return f"{number:032x}"


def test_jobs_are_kept_until_they_are_reported(state_dir: StateDir) -> None:
    jobs = UnwaitedJobs(state_dir)
    assert jobs.read() == []
    jobs.remove([uid(1)])
    for number in (3, 1, 2):
        jobs.add(uid(number))
    assert jobs.read() == [uid(3), uid(1), uid(2)]
    jobs.remove({uid(1), uid(9)})
    assert jobs.read() == [uid(3), uid(2)]
    jobs.remove([uid(3), uid(2)])
    assert jobs.read() == []
    assert state_dir.unwaited_jobs.stat().st_mode & 0o777 == 0o600


def test_partial_line_of_a_killed_command_is_no_job(state_dir: StateDir) -> None:
    jobs = UnwaitedJobs(state_dir)
    jobs.add(uid(1))
    with state_dir.unwaited_jobs.open("a") as file:
        file.write(f"{uid(2)[:9]}\n\x00\xff\n{uid(1)}\n")
    assert jobs.read() == [uid(1)]


def test_of_too_many_jobs_the_newest_are_kept(state_dir: StateDir) -> None:
    count = MAX_FILE_BYTES // 33 + 1
    state_dir.unwaited_jobs.write_text("".join(f"{uid(number)}\n" for number in range(count)))
    UnwaitedJobs(state_dir).add(uid(count))
    kept = UnwaitedJobs(state_dir).read()
    assert kept == [uid(number) for number in range(count - MAX_JOBS, count + 1)]
