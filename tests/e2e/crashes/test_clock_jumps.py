"""The wall clock jumps while the daemon runs (libfaketime): times are shown by it, and nothing is decided by it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.crashes.conftest import call, daemon_pid, environment_of, kill_nine, submission
from tests.lab import skewed_clocks
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

HOUR = 3600
LOOSE = 20.0  # seconds of doubt about what the clock said; a jump is hours


class FakedClock:
    """The wall clock that the daemon sees; commands see the real one (libfaketime breaks their sleeps)."""

    def __init__(self, grid: Shell, library: Path, offset: Path) -> None:
        self._grid = grid
        self._offset = offset
        skewed_clocks.build(library)
        self._env = skewed_clocks.environment(library, offset, fresh=True)

    def set(self, hours: int) -> None:
        """Move it so many hours away from the real one."""
        aside = self._offset.with_suffix(".new")
        aside.write_text(f"{hours:+d}h\n")
        aside.replace(self._offset)

    def start_daemon(self) -> int:
        """A daemon that lives by this clock; its pid."""
        pid: int = self._grid.json("daemon", "start", env=self._env)["pid"]
        assert environment_of(pid)["LD_PRELOAD"] == self._env["LD_PRELOAD"]
        return pid


@pytest.fixture(scope="module", autouse=True)
def no_segments_are_left() -> Iterator[None]:
    """libfaketime leaves its shared memory behind when the process that made it is killed."""

    def segments() -> set[Path]:
        return {path for path in Path("/dev/shm").glob("*faketime_*") if path.is_file()}

    before = segments()
    yield
    for path in segments() - before:
        path.unlink(missing_ok=True)


@pytest.fixture
def clock(grid: Shell, tmp_path: Path) -> FakedClock:
    if reason := skewed_clocks.problem():
        pytest.skip(reason)
    faked = FakedClock(grid, tmp_path / "sleep.so", tmp_path / "offset")
    faked.set(0)
    return faked


def seconds_from_now(text: str) -> float:
    """How far a time that was shown is from the real wall clock."""
    return (datetime.fromisoformat(text) - datetime.now(UTC)).total_seconds()


def a_lease(grid: Shell, **changes: Any) -> dict[str, Any]:
    asked = {"request_id": uuid.uuid4().hex, "resource_type": "cpu", "amount": 0.5} | changes
    lease: dict[str, Any] = call(grid, "request_lease", **asked)["allocation"]
    return lease


def held(grid: Shell) -> dict[str, dict[str, Any]]:
    return {lease["allocation_id"]: lease for lease in call(grid, "get_status")["allocations"]}


def lasts(grid: Shell, lease: dict[str, Any], seconds: float, asked: float) -> None:
    """A lease of so many seconds is held until then, and no longer."""
    wait_until(lambda: lease["allocation_id"] not in held(grid), seconds + LOOSE)
    assert time.monotonic() >= asked + seconds, "ended early"


def test_a_wall_clock_that_jumps_changes_what_is_shown_and_nothing_else(grid: Shell, clock: FakedClock) -> None:
    daemon = clock.start_daemon()
    cores = grid.json("status")["nodes"][0]["cpu_cores"]
    began = time.monotonic()
    lasting = a_lease(grid, duration_seconds=60)
    short = a_lease(grid, duration_seconds=4)
    assert abs(seconds_from_now(lasting["expires_at"]) - 60) < LOOSE
    waiting = call(grid, "submit_job", **submission(grid, "exit 5", amount=cores, wait_seconds=60))["job"]["uid"]

    clock.set(+2)
    seen = held(grid)
    assert set(seen) == {lasting["allocation_id"], short["allocation_id"]}
    assert abs(seconds_from_now(seen[lasting["allocation_id"]]["expires_at"]) - 60 - 2 * HOUR) < LOOSE
    later = call(grid, "submit_job", **submission(grid, "exit 6"))["job"]
    assert abs(seconds_from_now(later["submitted_at"]) - 2 * HOUR) < LOOSE
    assert grid.job(waiting)["state"] == "queued"
    lasts(grid, short, 4, began)
    assert lasting["allocation_id"] in held(grid)

    clock.set(-2)
    asked = time.monotonic()
    brief = a_lease(grid, duration_seconds=2)
    assert abs(seconds_from_now(brief["expires_at"]) - 2 + 2 * HOUR) < LOOSE
    lasts(grid, brief, 2, asked)
    assert grid.job(waiting)["state"] == "queued"
    assert daemon_pid(grid) == daemon

    kill_nine(grid)  # and a daemon that first sees the light two hours ago goes on, too
    clock.start_daemon()
    left = held(grid)
    assert set(left) == {lasting["allocation_id"]}
    remaining = seconds_from_now(left[lasting["allocation_id"]]["expires_at"]) + 2 * HOUR
    assert abs(remaining - (60 - (time.monotonic() - began))) < 5
    assert grid.job(waiting)["state"] == "queued"

    grid("daemon", "stop", check=0)
    clock.set(+2)
    clock.start_daemon()
    assert set(held(grid)) == {lasting["allocation_id"]}
    call(grid, "release_lease", allocation_id=lasting["allocation_id"])
    assert grid("jobs", "wait", waiting, "--timeout", "20").returncode == 5
    assert abs(seconds_from_now(grid.job(waiting)["ended_at"]) - 2 * HOUR) < LOOSE
    assert grid("jobs", "wait", later["uid"], "--timeout", "20").returncode == 6


def test_a_wait_ends_by_its_own_time_though_the_clock_goes_back(grid: Shell, clock: FakedClock) -> None:
    clock.start_daemon()
    cores = grid.json("status")["nodes"][0]["cpu_cores"]
    a_lease(grid, duration_seconds=300, amount=cores)
    began = time.monotonic()
    waiting = call(grid, "submit_job", **submission(grid, "exit 5", wait_seconds=2))["job"]["uid"]
    clock.set(-2)
    job = wait_until(lambda: (job := grid.job(waiting))["state"] == "ended" and job, 2 + LOOSE)
    assert time.monotonic() >= began + 2
    assert job["outcome"] == "waited_too_long"


DAYS = 24


def jump_of(grid: Shell) -> str | None:
    jumped: str | None = grid.json("status")["nodes"][0]["clock_jump"]
    return jumped


def test_forty_days_ahead_for_a_moment_delete_nothing(grid: Shell, clock: FakedClock, tmp_path: Path) -> None:
    clock.start_daemon()
    script = "echo kept; echo result > $GRID_JOB_DIR/result.txt"
    job = grid("run-shared", "--detach", "--isolated", "-a", "0.5", "sh", "-c", script, check=0).stdout.strip()
    grid("jobs", "wait", job, "--timeout", "30", check=0)

    grid("daemon", "stop", check=0)
    clock.set(40 * DAYS)
    clock.start_daemon()  # what is old is removed at the start, and every hour
    jumped = wait_until(lambda: jump_of(grid), LOOSE)
    assert "jumped by +40 d; nothing is deleted by age there for" in jumped
    assert "grid daemon clock --confirm" in grid("status", check=0).stdout
    assert "jumped by +40 d" in grid("daemon", "status", check=0).stdout
    (row,) = grid.json("daemon", "clock")["clocks"]
    assert row["node_id"] is None
    assert abs(row["jumped_seconds"] - 40 * DAYS * HOUR) < LOOSE
    assert grid.json("events", "--type", "clock-jumped")["reason"].startswith("the wall clock jumped")

    clock.set(0)
    wait_until(lambda: jump_of(grid) is None, LOOSE)
    assert grid.json("daemon", "clock")["clocks"] == [{"node_id": None, "jumped_seconds": None, "waits_seconds": None}]
    assert grid("jobs", "logs", job, check=0).stdout == "kept\n"
    assert grid.job(job)["state"] == "ended"

    clock.set(-365 * DAYS)
    assert "jumped by -365 d" in wait_until(lambda: jump_of(grid), LOOSE)
    confirmed = grid("daemon", "clock", "--confirm", check=0).stdout
    assert confirmed.split("\n")[1].split() == ["control", "plane", "-", "-"]
    wait_until(lambda: jump_of(grid) is None, LOOSE)
    assert grid.json("events", "--type", "clock-confirmed")["user"]

    kill_nine(grid)
    clock.start_daemon()
    assert jump_of(grid) is None, "a confirmed clock stays confirmed"
    grid("jobs", "fetch", job, "--to", str(tmp_path / "back"), check=0)
    assert (tmp_path / "back" / "result.txt").read_text() == "result\n"
