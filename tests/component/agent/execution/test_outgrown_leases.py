"""Leases that may grow: their size ends nothing, their limit does, and one ends where the machine's memory is short."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.owner.borrowed_work import HostedWork, OutgrownLeases
from distributed_grid.agent.owner.usage_meter import UsageMeter
from tests.component.agent.execution.conftest import Driver, python

pytestmark = pytest.mark.e2e
MB = 1 << 20
both_ways = pytest.mark.parametrize("use_cgroups", [True, False], ids=["cgroups", "watched"])
HOLDS = "x = b'x' * ({} << 20)\nprint(1, flush=True)\nimport time\ntime.sleep(1000)"
WAITS = """
import os, time
print(1, flush=True)
while not os.path.exists(os.environ["GRID_JOB_DIR"] + "/go"): time.sleep(0.02)
x = b"x" * (300 << 20)
time.sleep(0.5)
"""


class Machine:
    """A machine whose memory is what a test says."""

    def __init__(self, root: Path) -> None:
        self.file = root / "proc/meminfo"
        self.file.parent.mkdir(parents=True)
        for name in ("self/cgroup", "self/mountinfo"):
            path = root / "proc" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("")
        (root / "proc/stat").write_text("cpu  1 1 1 1 1 1 1 1 1 1\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
        self.has_available(4096)
        self.meter = UsageMeter(MachineProbe(root))

    def has_available(self, mb: int) -> None:
        self.file.write_text(f"MemTotal: {8192 * 1024} kB\nMemAvailable: {mb * 1024} kB\nSwapTotal: 0 kB\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def await_kernel_limit(driver: Driver, limit_bytes: int) -> None:
    """Wait until the control group of a.1 has this limit, where it has one: a shim that polls reads it each time."""
    recorded = driver.root / ".control/a.1/groups.json"
    for version, path in json.loads(recorded.read_text()) if recorded.exists() else ():
        file = Path(path, "memory.max" if version == 2 else "memory.limit_in_bytes")
        if file.exists():
            driver.until(partial(has_text, file, str(limit_bytes)))


def has_text(file: Path, text: str) -> bool:
    return file.read_text().strip() == text


@both_ways
def test_more_than_the_lease_is_no_overrun(new_driver: Callable[..., Driver], use_cgroups: bool) -> None:
    driver = new_driver(use_cgroups=use_cgroups)
    code = "x = b'x' * (150 << 20)\nimport time; time.sleep(0.5)"
    ended = driver.run("a.1", *python(code), memory_bytes=64 * MB, most_memory_bytes=512 * MB)
    assert (ended.ending, ended.exit_code) == ("exited", 0)
    assert ended.max_memory_bytes > 150 * MB


@both_ways
def test_more_than_the_node_lends_is_one(new_driver: Callable[..., Driver], use_cgroups: bool) -> None:
    driver = new_driver(use_cgroups=use_cgroups)
    ended = driver.run("a.1", *python(HOLDS.format(400)), memory_bytes=64 * MB, most_memory_bytes=256 * MB)
    assert ended.ending == "over_limit"
    assert "of 0.25 GB" in ended.detail


@both_ways
def test_the_limit_follows_what_the_node_can_lend(new_driver: Callable[..., Driver], use_cgroups: bool) -> None:
    driver = new_driver(use_cgroups=use_cgroups)
    driver.launch("a.1", *python(WAITS), memory_bytes=64 * MB, most_memory_bytes=128 * MB)
    driver.numbers("a.1", 1)
    for _ in range(2):
        driver.host.resize("a.1", 96 * MB, 1024 * MB)
    driver.host.resize("a.1", 32 * MB, 64 * MB)  # it came late
    await_kernel_limit(driver, 1024 * MB)
    (tree,) = driver.host.running_trees()
    assert (tree.spec.memory_bytes, tree.spec.most_memory_bytes) == (96 * MB, 1024 * MB)
    (driver.root / "a.1/work/go").touch()
    ended = driver.ended("a.1")
    assert (ended.ending, ended.exit_code) == ("exited", 0)


@both_ways
def test_the_next_agent_knows_what_a_lease_has_grown_to(new_driver: Callable[..., Driver], use_cgroups: bool) -> None:
    driver = new_driver(use_cgroups=use_cgroups)
    driver.launch("a.1", *python(WAITS), memory_bytes=64 * MB, most_memory_bytes=128 * MB)
    driver.numbers("a.1", 1)
    driver.host.resize("a.1", 96 * MB, 1024 * MB)
    await_kernel_limit(driver, 1024 * MB)
    driver.close()
    (driver.root / "a.1/work/go").touch()  # nobody is there, and the shim has read it
    driver = new_driver(use_cgroups=use_cgroups)
    known = [tree.spec.memory_bytes for tree in driver.host.running_trees()]
    assert known in ([96 * MB], [])
    ended = driver.ended("a.1")
    assert (ended.ending, ended.exit_code) == ("exited", 0)


def test_a_limit_that_was_stated_is_not_raised(driver: Driver) -> None:
    driver.launch("a.1", *python(WAITS), memory_bytes=128 * MB)
    driver.numbers("a.1", 1)
    driver.host.resize("a.1", 1024 * MB, 1024 * MB)
    (driver.root / "a.1/work/go").touch()
    assert driver.ended("a.1").ending == "over_limit"


def test_the_one_furthest_beyond_its_lease_ends_when_memory_is_short(driver: Driver, machine: Machine) -> None:
    for name, held, leased in (("a.1", 100, 64), ("b.1", 200, 64), ("c.1", 250, 512)):
        driver.launch(name, *python(HOLDS.format(held)), memory_bytes=leased * MB, most_memory_bytes=4096 * MB)
        driver.numbers(name, 1)
    leases = OutgrownLeases(driver.host, machine.meter)
    driver.until(lambda: {one.lease_id for one in leases.reports(driver.host.usage())} == {"a.1", "b.1"})
    driver.run_coroutine(leases.relieve_memory())
    assert len(driver.host.running()) == 3
    machine.has_available(100)
    driver.run_coroutine(leases.relieve_memory())
    ended = driver.ended("b.1")
    assert ended.ending == "over_limit"
    assert ended.detail.endswith("of 0.06 GB leased; its machine has 100.0 MB left")
    machine.has_available(1000)
    driver.run_coroutine(leases.relieve_memory())
    assert {*driver.host.running()} == {"a.1", "c.1"}
    machine.has_available(100)
    driver.run_coroutine(leases.relieve_memory())
    assert driver.ended("a.1").ending == "over_limit"
    driver.run_coroutine(leases.relieve_memory())
    assert {*driver.host.running()} == {"c.1"}


def test_an_owner_ends_what_is_beyond_its_lease_for_good(driver: Driver, machine: Machine) -> None:
    for name, held in (("a.1", 200), ("b.1", 10)):
        driver.launch(name, *python(HOLDS.format(held)), memory_bytes=64 * MB, most_memory_bytes=1024 * MB)
        driver.numbers(name, 1)
    work = HostedWork(driver.host, machine.meter)
    for name in ("a.1", "b.1"):
        driver.run_coroutine(work.evict(name, "its owner needs it", 100))
    ended = driver.ended("a.1")
    assert (ended.ending, driver.ended("b.1").ending) == ("over_limit", "reclaimed")
    assert ended.detail.endswith("leased; its owner needs it")
