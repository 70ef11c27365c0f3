"""A state directory on a disk that fills up: refused in one line, nothing acknowledged is lost, and it goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.errors import StoreFailed
from tests.e2e.crashes.conftest import (
    a_gate,
    call,
    daemon_pid,
    kill_nine,
    lines,
    mount,
    needs_root,
    one_line,
    open_gate,
    submission,
    unmount,
)
from tests.support.processes import is_running
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e
RESERVE_BYTES = 6 * 2**20 // 16
"""Free pages in the database of a disk of six megabytes."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of six megabytes."""
    needs_root("mount a small disk")
    place = tmp_path / "disk"
    place.mkdir()
    mount("-t", "tmpfs", "-o", "size=6m,mode=700", "tmpfs", str(place))
    yield place

    def gone() -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            unmount(place)
            return True
        return False

    wait_until(gone)


@pytest.fixture
def cramped(small_disk: Path, new_grid: Callable[..., Shell]) -> Iterator[Shell]:
    """A grid on the small disk."""
    grid = new_grid(small_disk / "state")
    yield grid
    _free(small_disk)


def _fill(disk: Path) -> None:
    with open(disk / "ballast", "ab", buffering=0) as ballast:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    ballast.write(bytes(size))
    assert os.statvfs(disk).f_bavail == 0


def _free(disk: Path) -> None:
    (disk / "ballast").unlink(missing_ok=True)


def _submits(grid: Shell, request: dict[str, Any]) -> bool:
    """Whether it was acknowledged; a refusal has to be the one of a store that cannot write."""
    try:
        call(grid, "submit_job", **request)
    except StoreFailed:
        return False
    return True


def test_a_full_disk_refuses_in_one_line_and_loses_nothing_it_acknowledged(cramped: Shell, small_disk: Path) -> None:
    gate = a_gate(cramped, "gate")
    before = call(cramped, "submit_job", **submission(cramped, "read x < gate; echo done >> marks; exit 6"))["job"]
    wait_until(lambda: cramped.job(before["uid"])["state"] == "running")
    daemon = daemon_pid(cramped)
    _fill(small_disk)

    accepted: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    while len(refused) < 3 and len(accepted) < 200:
        request = submission(cramped, "exit 8")
        (accepted if _submits(cramped, request) else refused).append(request)
    assert len(refused) == 3, "the disk was never too full"
    said = one_line(cramped("run-shared", "true"))
    assert "nothing was changed" in said
    assert "disk is full" in said
    cramped("status", check=0)  # looking needs no room
    open_gate(gate)  # it ends while its end cannot be written down
    wait_until(lambda: lines(cramped.cwd / "marks") == ["done"])

    _free(small_disk)
    assert cramped("jobs", "wait", before["uid"], "--timeout", "20").returncode == 6
    assert cramped("run-shared", "sh", "-c", "exit 7").returncode == 7
    wait_until(lambda: not cramped.observe("status")["jobs"])
    jobs = {job["uid"]: job for job in cramped.json("jobs", "list", "--all")}
    assert not {request["request_id"] for request in refused} & set(jobs)
    for request in accepted:
        job = jobs[request["request_id"]]
        could_not = job["outcome"] == "never_started" and "No space left" in job["detail"]
        assert job["exit_code"] == 8 or could_not, job
    for request in refused:  # and what was refused can be asked for again, under the same id
        assert call(cramped, "submit_job", **request)["job"]["uid"] == request["request_id"]
        assert cramped("jobs", "wait", request["request_id"], "--timeout", "20").returncode == 8
    assert daemon_pid(cramped) == daemon
    assert lines(cramped.cwd / "marks") == ["done"]


def test_on_a_full_disk_jobs_end_and_are_cancelled(cramped: Shell, small_disk: Path) -> None:
    gate = a_gate(cramped, "gate")
    ends = call(cramped, "submit_job", **submission(cramped, "read x < gate; exit 6"))["job"]["uid"]
    cancelled = call(cramped, "submit_job", **submission(cramped, "exec sleep 1000"))["job"]["uid"]
    pid = wait_until(lambda: cramped.job(cancelled)["attempts"][-1]["pid"])
    wait_until(lambda: cramped.job(ends)["state"] == "running")
    wait_until(lambda: (cramped.host_dir / "grid.db").stat().st_size > RESERVE_BYTES)
    _fill(small_disk)

    cramped("jobs", "cancel", cancelled, check=0)
    wait_until(lambda: cramped.job(cancelled)["outcome"] == "cancelled")
    assert not is_running(pid)
    open_gate(gate)
    assert cramped("jobs", "wait", ends, "--timeout", "20").returncode == 6
    said = one_line(cramped("run-shared", "true"))
    assert "the control plane's disk is full: only stops, cancels and ends are recorded" in said
    assert os.statvfs(small_disk).f_bavail == 0, "all of it was recorded on a full disk"

    _free(small_disk)
    assert cramped("run-shared", "sh", "-c", "exit 7").returncode == 7


def test_a_job_that_ends_on_a_full_disk_without_a_daemon_keeps_its_exit_code(cramped: Shell, small_disk: Path) -> None:
    gate = a_gate(cramped, "gate")
    job = call(cramped, "submit_job", **submission(cramped, "read x < gate; exit 6"))["job"]["uid"]
    pid = wait_until(lambda: cramped.job(job)["attempts"][-1]["pid"])
    kill_nine(cramped)
    _fill(small_disk)
    said = one_line(cramped("status"))
    assert "full" in said or "No space left" in said
    open_gate(gate)
    wait_until(lambda: not is_running(pid))

    _free(small_disk)
    assert cramped("jobs", "wait", job, "--timeout", "20").returncode == 6
    assert cramped.job(job)["outcome"] == "exited"
