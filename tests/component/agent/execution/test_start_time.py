"""A command is not started after its time, whoever stood still; and an attempt that nobody started can be stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.execution.spawner import IDLE_SHIMS
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.limits import process_tree
from distributed_grid.posix.boot_clock import boot_ms
from tests.component.agent.execution.conftest import Driver, a_spec
from tests.support.small_disks import SmallDisk, small_disk

__all__ = ["small_disk"]


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """These processes stand still."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def idle_shims(host: AttemptHost) -> list[int]:
    return [proc.pid for proc in process_tree.read_processes().values() if proc.parent == host.spawner_pid]


@contextmanager
def stopped_shims(driver: Driver) -> Iterator[None]:
    """Every shim of the spawner stands still, also one that is forked while the others are being stopped."""
    held: set[int] = set()
    quiet_since = time.monotonic()

    def all_stopped() -> bool:
        nonlocal quiet_since
        for pid in {*idle_shims(driver.host)} - held:
            os.kill(pid, signal.SIGSTOP)
            held.add(pid)
            quiet_since = time.monotonic()
        return len(held) >= IDLE_SHIMS and time.monotonic() - quiet_since > 0.3

    try:
        driver.until(all_stopped)
        yield
    finally:
        for pid in held:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def see_nothing_start(driver: Driver, trace: Path) -> None:
    """Another attempt runs from start to end after the late one had its turn, which started nothing."""
    assert driver.run("later.1", "true").ending == "exited"
    assert not trace.exists()


def test_what_a_stopped_spawner_has_not_started_in_time_is_ended_and_never_starts(
    driver: Driver, tmp_path: Path
) -> None:
    trace = tmp_path / "ran"
    with stopped(driver.host.spawner_pid):
        spec = a_spec("a.1", "touch", str(trace), start_by_boot_ms=boot_ms() + 300)
        driver.run_coroutine(driver.host.launch(spec))
        assert driver.host.unstarted() == ["a.1"]
        ended = driver.ended("a.1")
        assert (ended.ending, ended.node_fault, ended.detail) == ("never_started", True, "not started in time")
        with JobDir(str(driver.root), "a.1") as job:
            assert job.read_end()["node_fault"], "it is recorded"
    see_nothing_start(driver, trace)


def test_a_shim_that_stood_still_until_its_time_was_over_refuses_to_start(driver: Driver, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    driver.run("warm.1", "true")
    with stopped_shims(driver):
        spec = a_spec("a.1", "touch", str(trace), start_by_boot_ms=boot_ms() + 300)
        driver.run_coroutine(driver.host.launch(spec))
        assert driver.ended("a.1").is_failed_start
    see_nothing_start(driver, trace)


def test_an_attempt_that_a_stopped_spawner_has_not_taken_can_be_stopped_at_once(driver: Driver, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    with stopped(driver.host.spawner_pid):
        driver.run_coroutine(driver.host.launch(a_spec("a.1", "touch", str(trace))))
        assert driver.stop("a.1").ending == "cancelled"
    see_nothing_start(driver, trace)


def test_orders_do_not_wait_for_a_spawner_that_takes_nothing(driver: Driver) -> None:
    with stopped(driver.host.spawner_pid):
        late = boot_ms() + 3_000
        for number in range(600):  # more than its socket holds; the first that waits takes two seconds
            spec = a_spec(f"a.{number}", "true", start_by_boot_ms=late)
            driver.run_coroutine(driver.host.launch(spec))
            if boot_ms() >= late:
                break
        assert driver.stop(f"a.{number}").ending in ("cancelled", "never_started")


def test_without_room_for_its_record_an_attempt_ends_by_the_fault_of_its_node(
    small_disk: Callable[..., SmallDisk], root: Path, new_driver: Callable[..., Driver]
) -> None:
    disk = small_disk(root)
    driver = new_driver()
    disk.fill()
    ended = driver.run("a.1", "true")
    disk.free()
    assert (ended.ending, ended.node_fault, ended.detail) == (
        "never_started",
        True,
        "could not be recorded: No space left on device",
    )
