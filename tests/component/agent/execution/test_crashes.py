"""Whoever is killed, no attempt is lost sight of, none runs twice, and none runs unwatched."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from distributed_grid.agent.execution.attempt import AttemptExit, AttemptLaunch, AttemptSpec
from distributed_grid.agent.limits import process_tree
from tests.component.agent.execution.conftest import Driver, a_spec, is_alive, is_hold_expired, python
from tests.component.agent.execution.test_stopping import STUBBORN_FAMILY

pytestmark = pytest.mark.e2e

AGENT = """
import asyncio, json, msgspec, sys
from pathlib import Path
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.execution.attempt import AttemptSpec

async def main():
    write = lambda report: print(json.dumps(msgspec.to_builtins(report)), flush=True)
    host = AttemptHost(Path(sys.argv[1]), report=write)
    await host.start()
    for spec in msgspec.json.decode(sys.stdin.buffer.read(), type=list[AttemptSpec]):
        await host.launch(spec)
    print("{}", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


class Agent:
    """An agent in a process of its own, to be killed."""

    def __init__(self, root: Path, specs: list[AttemptSpec]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(specs))
        self.process.stdin.close()

    def wait_until(self, matches: Callable[[dict], bool]) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if matches(json.loads(line)):
                return
        raise AssertionError("the agent ended")

    def kill(self) -> None:
        self.process.kill()
        assert self.process.stdout
        self.process.stdout.close()
        self.process.wait()


def test_a_shim_that_dies_while_no_file_can_be_opened_is_reported_once_one_can(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.launch("a.1", "sleep", "1000")
    shim, limits = driver.shim_pid("a.1"), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        os.kill(shim, signal.SIGKILL)
        driver.until(lambda: "the watch of an attempt failed; it begins anew" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert driver.ended("a.1").ending == "lost"


def test_an_agent_killed_while_twenty_jobs_run_loses_none_and_repeats_none(
    root: Path, new_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    tally = tmp_path / "tally"
    script = f"echo $GRID_ATTEMPT_ID >> {tally}; sleep $1; exit 7"
    specs = [a_spec(f"a.{n}", "/bin/sh", "-c", script, "sh", "1000" if n % 2 else "0.2") for n in range(20)]
    agent = Agent(root, specs)
    try:
        agent.wait_until(lambda report: report == {})
    finally:
        agent.kill()
    time.sleep(0.5)
    driver = new_driver()
    for spec in specs:
        driver.run_coroutine(driver.host.launch(spec))  # the control plane asks again for all it has not heard of
    short = [driver.ended(f"a.{n}") for n in range(0, 20, 2)]
    assert {(ended.ending, ended.exit_code) for ended in short} == {("exited", 7)}
    driver.until(lambda: all(driver.find(AttemptLaunch, f"a.{n}") for n in range(1, 20, 2)))
    assert set(driver.host.running()) == {f"a.{n}" for n in range(1, 20, 2)}
    assert sorted(tally.read_text().split()) == sorted(spec.attempt_id for spec in specs)
    long = [driver.stop(f"a.{n}", grace_ms=0) for n in range(1, 20, 2)]
    assert {ended.ending for ended in long} == {"cancelled"}


@pytest.mark.parametrize("delay_ms", [0, 1, 2, 4, 8, 16, 32])
def test_an_order_repeated_after_a_kill_in_the_middle_of_a_launch_runs_once(
    root: Path, new_driver: Callable[..., Driver], tmp_path: Path, delay_ms: int
) -> None:
    tally = tmp_path / "tally"
    spec = a_spec("a.1", "/bin/sh", "-c", f"echo once >> {tally}")
    agent = Agent(root, [spec])
    try:
        while not (root / ".control/a.1/spec.json").exists():
            time.sleep(0.0005)
        time.sleep(delay_ms / 1000)
    finally:
        agent.kill()
    driver = new_driver()
    driver.run_coroutine(driver.host.launch(spec))
    assert driver.ended("a.1").ending == "exited"
    assert tally.read_text().split() == ["once"]


def test_a_hold_runs_out_with_the_agent_dead(root: Path, new_driver: Callable[..., Driver]) -> None:
    agent = Agent(root, [a_spec("a.1", *python(STUBBORN_FAMILY), hold_ms=4000)])
    try:
        agent.wait_until(lambda report: report.get("type") == "AttemptLaunch")
    finally:
        agent.kill()
    out = root / "a.1/stdout"
    while len(out.read_text().split()) < 3:
        time.sleep(0.01)
    pids = [int(pid) for pid in out.read_text().split()]
    assert all(map(is_alive, pids))
    end = time.monotonic() + 10
    while not (root / ".control/a.1/exit.json").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert not any(map(is_alive, pids))
    assert is_hold_expired(new_driver().ended("a.1"))


def test_a_killed_shim_takes_its_tree_along_and_is_lost(driver: Driver) -> None:
    driver.launch("a.1", *python(STUBBORN_FAMILY), memory_bytes=1 << 30, cpu_milli=500)
    pids = driver.numbers("a.1", 3)
    other = driver.launch("a.2", "sleep", "1000")
    os.kill(driver.shim_pid("a.1"), 9)
    assert driver.ended("a.1").ending == "lost"
    assert not any(map(is_alive, pids))
    assert is_alive(other.pid)
    driver.run_coroutine(driver.host.launch(a_spec("a.1", "true")))
    assert [report.outcome.ending for report in driver.reports if isinstance(report, AttemptExit)] == ["lost", "lost"]


def test_a_shim_killed_while_no_agent_lives_is_lost_and_cleared_by_the_next(
    new_driver: Callable[..., Driver],
) -> None:
    first = new_driver()
    first.launch("a.1", *python(STUBBORN_FAMILY), memory_bytes=1 << 30)
    pids = first.numbers("a.1", 3)
    shim = first.shim_pid("a.1")
    first.close()
    os.kill(shim, 9)
    second = new_driver()
    assert second.ended("a.1").ending == "lost"
    assert not any(map(is_alive, pids))


def test_a_killed_shim_of_an_adopted_attempt_is_noticed(new_driver: Callable[..., Driver]) -> None:
    first = new_driver()
    first.launch("a.1", "sleep", "1000")
    first.close()
    second = new_driver()
    assert second.find(AttemptLaunch, "a.1")
    os.kill(second.shim_pid("a.1"), 9)
    assert second.ended("a.1").ending == "lost"


def test_a_killed_spawner_is_replaced_and_its_shims_go_on(driver: Driver) -> None:
    running = driver.launch("a.1", "sleep", "1000")
    for round_number in range(3):
        os.kill(driver.host.spawner_pid, 9)
        assert driver.run(f"b.{round_number}", "true").exit_code == 0
    assert is_alive(running.pid)
    assert driver.stop("a.1").ending == "cancelled"


def test_shims_killed_while_they_wait_for_work_are_replaced(driver: Driver) -> None:
    for number in range(3):
        spares = [proc for proc in process_tree.read_processes().values() if proc.parent == driver.host.spawner_pid]
        for spare in spares:
            process_tree.send_signal(spare, 9)
        assert driver.run(f"a.{number}", "true").exit_code == 0
    driver.pass_time(0.2)
    waiting = [proc.pid for proc in process_tree.read_processes().values() if proc.parent == driver.host.spawner_pid]
    driver.close()
    deadline = time.monotonic() + 5
    while any(map(is_alive, waiting)):  # nobody waits for a spawner that is gone
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_launches_survive_a_spawner_that_dies_among_them(driver: Driver) -> None:
    tally = driver.root.parent / "tally"
    for number in range(20):
        driver.run_coroutine(driver.host.launch(a_spec(f"a.{number}", "/bin/sh", "-c", f"echo {number} >> {tally}")))
        if number == 10:
            os.kill(driver.host.spawner_pid, 9)
    ended = [driver.ended(f"a.{number}") for number in range(20)]
    ran = sorted(map(int, tally.read_text().split()))
    assert len(set(ran)) == len(ran)
    assert {report.ending for report in ended} <= {"exited", "lost"}
    assert ran == [number for number, report in enumerate(ended) if report.ending == "exited"]


def test_the_end_told_while_nobody_listened_is_told_to_the_next(new_driver: Callable[..., Driver]) -> None:
    first = new_driver()
    first.launch("a.1", "/bin/sh", "-c", "sleep 0.2; exit 9")
    first.close()
    time.sleep(0.5)
    assert new_driver().ended("a.1").exit_code == 9
