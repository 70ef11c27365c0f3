"""A stop is a state: it is carried out with the node's disk full, and "cancelled" is said when it is true."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.agents.conftest import FarGrid, far_grids, is_running, wait_until
from tests.e2e.crashes.conftest import needs_root
from tests.lab.disks import Disk

pytestmark = pytest.mark.e2e
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.1; done"


class Place:
    """A grid with one far node, and the disk of that node."""

    def __init__(self, grid: FarGrid, disk: Disk) -> None:
        self.grid = grid
        self.disk = disk
        self.agent = grid.agents["gpu2"]

    def stubborn_job(self, grace: str) -> tuple[str, int]:
        """A job that ignores SIGTERM, and the pid of its command."""
        grid = self.grid
        job = grid.detach("--grace", grace, "--workdir", "none", *grid.on("gpu2"), "sh", "-c", STUBBORN)
        pid = grid.pid_of(job)
        wait_until(lambda: grid("jobs", "logs", job).stdout == "ready\n")
        return job, pid


@pytest.fixture(scope="module")
def shared_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    needs_root("mount a small disk")
    folder = tmp_path_factory.mktemp("stops")
    disk = Disk(folder / "gpu2", 8 * 1024 * 1024)
    with far_grids(folder) as make:
        yield Place(make("gpu2", furnish=lambda folder: disk.make()), disk)
    subprocess.run(["umount", "-l", str(folder / "gpu2")], check=True)


@pytest.fixture
def place(shared_place: Place) -> Iterator[Place]:
    """One for all of these: each test begins with an agent that is well and has a disk with room."""
    shared_place.grid.until_alive("gpu2")
    yield shared_place
    shared_place.disk.free()


def test_cancelled_is_said_when_nothing_of_the_job_is_left(place: Place) -> None:
    job, pid = place.stubborn_job("0.5")
    place.disk.fill()
    assert place.grid("jobs", "cancel", job, check=0).stdout == f"{job}: cancelled\n"
    assert not is_running(pid)
    assert place.grid.job(job)["outcome"] == "cancelled"


def test_before_that_it_is_stopping(place: Place) -> None:
    job, pid = place.stubborn_job("7")
    place.disk.fill()
    assert place.grid("jobs", "cancel", job, check=0).stdout == f"{job}: stopping\n"
    assert is_running(pid)
    (shown,) = place.grid.json("jobs", "cancel", job)
    assert shown["state"] == "stopping"
    wait_until(lambda: not is_running(pid))
    assert place.grid("jobs", "wait", job, "--timeout", "20").returncode == 130
    assert place.grid("jobs", "cancel", job, check=0).stdout == f"{job}: cancelled\n"


def test_a_job_that_is_cancelled_while_its_agent_is_dead_is_stopped_by_the_next(place: Place) -> None:
    job, pid = place.stubborn_job("0.5")
    place.agent.kill()
    assert place.grid("jobs", "cancel", job, check=0).stdout == f"{job}: stopping\n"
    assert is_running(pid)
    place.agent.start()
    assert place.grid("jobs", "wait", job, "--timeout", "30").returncode == 130
    assert not is_running(pid)


def test_an_agent_that_is_killed_while_it_stops_a_job_on_a_full_disk_has_begun_it(place: Place, tmp_path: Path) -> None:
    job, pid = place.stubborn_job("4")
    place.disk.fill()
    place.grid("jobs", "cancel", job, check=0)
    place.agent.kill()
    wait_until(lambda: not is_running(pid))
    place.disk.free()
    place.agent.start()
    assert place.grid("jobs", "wait", job, "--timeout", "30").returncode == 130
