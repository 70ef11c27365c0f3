"""Disk guard: an attempt above its limit is paused and ended, the largest writer is ended on a full disk, nothing is
deleted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.agent import AsyncioTasks
from distributed_grid.agent.execution.attempt import AttemptExit
from distributed_grid.agent.execution.disk_guard import DiskGuard
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.owner.borrowed_work import HostedWork
from distributed_grid.agent.owner.guard import OwnerGuard
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.posix.boot_clock import boot_ms
from tests.component.agent.execution.conftest import Driver
from tests.e2e.crashes.conftest import needs_root
from tests.lab.disks import Disk

pytestmark = pytest.mark.e2e
MB = 1 << 20
BLOCK_BYTES = 4096
WRITER = "head -c {} /dev/zero > $GRID_JOB_DIR/big; echo written; exec sleep 1000"


class Guarded:
    """A driver whose disk guard watches."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.pauses: list[tuple[str, bool, str]] = []
        work = HostedWork(driver.host, UsageMeter(MachineProbe()))
        self.owner_guard = OwnerGuard(work, boot_ms, report_pause=self._paused)
        self.guard = DiskGuard(driver.host, self.owner_guard)
        self._tasks = [
            driver.loop.create_task(watcher.watch(AsyncioTasks().sleep)) for watcher in (self.owner_guard, self.guard)
        ]

    def _paused(self, attempt_id: str, fence: int, paused: bool, why: str) -> None:
        self.pauses.append((attempt_id, paused, why))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


@pytest.fixture
def guarded(driver: Driver) -> Iterator[Guarded]:
    found = Guarded(driver)
    yield found
    found.close()


def test_an_attempt_above_its_limit_is_paused_then_ended_and_its_files_stay(guarded: Guarded) -> None:
    driver = guarded.driver
    driver.launch("a-1", "sh", "-c", WRITER.format(20 * MB), max_files_bytes=10 * MB, grace_ms=500)
    driver.launch("a-2", "sh", "-c", WRITER.format(8 * MB), max_files_bytes=10 * MB, grace_ms=500)
    ended = driver.ended("a-1")
    reason = "its files on the node take 0.0195 GB (limit 0.00977 GB, max_files_gb)"
    assert (ended.ending, ended.is_disk_overrun, ended.detail) == ("over_limit", True, reason)
    assert guarded.pauses == [("a-1", True, reason)]
    assert (driver.root / "a-1/work/big").stat().st_size == 20 * MB
    assert driver.host.running() == ("a-2",)


def test_an_attempt_whose_files_are_shortened_in_time_goes_on(guarded: Guarded) -> None:
    driver = guarded.driver
    driver.launch("a-1", "sh", "-c", WRITER.format(20 * MB), max_files_bytes=10 * MB, grace_ms=60_000)
    driver.until(lambda: len(guarded.pauses) == 1)
    os.truncate(driver.root / "a-1/work/big", 0)
    driver.until(lambda: len(guarded.pauses) == 2)
    assert guarded.pauses[1] == ("a-1", False, "")
    assert driver.host.is_active("a-1")


def test_checkpoints_count_and_output_does_not(guarded: Guarded) -> None:
    driver = guarded.driver
    driver.launch("a-1", "sh", "-c", "head -c 20000000 /dev/zero; exec sleep 1000", max_files_bytes=10 * MB, grace_ms=0)
    fill = "head -c 20000000 /dev/zero > $GRID_CHECKPOINT_DIR/c; exec sleep 1000"
    driver.launch("a-2", "sh", "-c", fill, max_files_bytes=10 * MB, grace_ms=0)
    assert driver.ended("a-2").is_disk_overrun
    assert driver.host.running() == ("a-1",)


def test_files_behind_a_link_do_not_count(guarded: Guarded, tmp_path: Path) -> None:
    driver = guarded.driver
    (tmp_path / "own").mkdir()
    (tmp_path / "own/large").write_bytes(bytes(20 * MB))
    link = f"ln -s {tmp_path}/own $GRID_JOB_DIR/link; ln -s {tmp_path}/own/large $GRID_JOB_DIR/file; exec sleep 1000"
    driver.launch("a-1", "sh", "-c", link, max_files_bytes=10 * MB, grace_ms=0)
    driver.launch("a-2", "sh", "-c", WRITER.format(20 * MB), max_files_bytes=10 * MB, grace_ms=0)
    assert driver.ended("a-2").is_disk_overrun
    assert driver.host.running() == ("a-1",)


@pytest.fixture
def disk(root: Path) -> Iterator[Disk]:
    """The root is a small disk of its own."""
    needs_root("mount a small disk")
    root.mkdir(parents=True)
    disk = Disk(root, 64 * MB)
    disk.make()
    yield disk
    disk.free()
    os.system(f"umount -l {root}")


def test_on_a_full_disk_the_attempt_that_writes_most_is_ended_and_others_are_not(
    disk: Disk, new_driver: Callable[..., Driver]
) -> None:
    driver = new_driver()
    guarded = Guarded(driver)
    driver.launch("a-1", "sh", "-c", WRITER.format(10 * MB))
    driver.launch("a-2", "sh", "-c", WRITER.format(12 * MB))
    driver.until(lambda: all(driver.out(one) == "written\n" for one in ("a-1", "a-2")))
    driver.launch("a-3", "sh", "-c", "cat /dev/zero > $GRID_CHECKPOINT_DIR/flood; exec sleep 1000")
    ended = driver.ended("a-3")
    assert (ended.ending, ended.is_disk_overrun) == ("over_limit", True)
    assert ended.detail.startswith("the disk of its node is full (")
    assert (driver.root / ".control/a-3/exit.json").exists(), "its end is recorded"
    driver.pass_time(2)  # the disk stays full: nothing is deleted
    assert sorted(driver.host.running()) == ["a-1", "a-2"]
    assert [report.attempt_id for report in driver.reports if isinstance(report, AttemptExit)] == ["a-3"]
    guarded.close()


def test_an_end_on_a_full_disk_is_recorded_at_once_also_where_its_journal_has_filled_a_block(
    disk: Disk, driver: Driver
) -> None:
    gate = driver.root.parent / "gate"
    os.mkfifo(gate)

    def launch(attempt_id: str, padding: int) -> int:
        """Returns the size of its journal once it has started."""
        env = {"PATH": os.environ["PATH"], "PADDING": "p" * padding}
        driver.launch(attempt_id, "sh", "-c", f"read x < {gate}; exit 3", env=env)
        return (driver.root / job_dir.CONTROL / attempt_id / job_dir.SPEC).stat().st_size

    size = launch("a-1", 0)
    padded = launch("a-2", BLOCK_BYTES - 50 - size % BLOCK_BYTES)
    assert 0 < BLOCK_BYTES - padded % BLOCK_BYTES < 100, "the record of an end does not fit in its last block"
    disk.fill()
    assert os.statvfs(driver.root).f_bavail == 0
    with gate.open("w") as opened:
        opened.write("go\ngo\n")
        opened.flush()
        assert driver.ended("a-2").exit_code == 3
    assert (driver.root / job_dir.CONTROL / "a-2" / job_dir.EXIT).exists()
    assert os.statvfs(driver.root).f_bavail == 0
