"""With agent and shim both stopped, nothing outlives its hold: the hold watcher ends it before the control plane lends
its resources again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.agent.files import job_dir
from distributed_grid.agent.limits import process_tree
from distributed_grid.posix.boot_clock import boot_ms
from tests.component.agent.execution.conftest import Driver, is_alive, is_hold_expired, python
from tests.support.shell import wait_until

pytestmark = pytest.mark.e2e

LENT_AGAIN_MS = 2000  # the control plane waits for so long after the hold
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
print(os.getpid(), flush=True)
time.sleep(1000)
"""


def watchers(root: Path) -> list[int]:
    return [proc.pid for proc in process_tree.holders_of(f"{root}/{job_dir.WATCH_LOCK}")]


def the_watcher(root: Path) -> int:
    wait_until(lambda: watchers(root), 10)
    (pid,) = watchers(root)
    return pid


def has_processes(root: Path, attempt_id: str) -> bool:
    work = f"{root}/{attempt_id}/{job_dir.WORK}"
    return bool(process_tree.find_attempt_processes(attempt_id, work, process_tree.nobody))


def hold_deadline(root: Path) -> int:
    return job_dir.read_hold_record(str(root))[0]


def assert_dead_in_time(root: Path, attempt_id: str) -> None:
    deadline = hold_deadline(root) + LENT_AGAIN_MS
    while has_processes(root, attempt_id):  # the agent's loop stands still meanwhile
        assert boot_ms() < deadline, "it still runs when its resources are lent again"
        time.sleep(0.02)


def test_what_agent_and_shim_cannot_end_is_dead_before_a_second_attempt_may_start(driver: Driver) -> None:
    driver.launch("a.1", *python(STUBBORN), hold_ms=2000, grace_ms=100)
    driver.numbers("a.1", 2)
    shim = driver.shim_pid("a.1")
    os.kill(shim, signal.SIGSTOP)  # and this process, the agent, does nothing either
    assert_dead_in_time(driver.root, "a.1")
    assert boot_ms() >= hold_deadline(driver.root), "it was not ended before its time"
    assert driver.ended("a.1").ending == "lost"
    assert not is_alive(shim)


def test_a_dead_agent_and_a_stopped_spawner_change_nothing(new_driver: Callable[..., Driver]) -> None:
    first = new_driver()
    first.launch("a.1", *python(STUBBORN), hold_ms=2000, grace_ms=100)
    first.numbers("a.1", 2)
    the_watcher(first.root)
    os.kill(first.shim_pid("a.1"), signal.SIGSTOP)
    first.close()
    assert_dead_in_time(first.root, "a.1")
    wait_until(lambda: not watchers(first.root), 10)
    second = new_driver()
    second.launch("a.2", *python(STUBBORN), hold_ms=2000, grace_ms=100)
    second.numbers("a.2", 2)
    the_watcher(second.root)
    for pid in (second.shim_pid("a.2"), second.host.spawner_pid):
        os.kill(pid, signal.SIGSTOP)
    try:
        assert_dead_in_time(second.root, "a.2")
    finally:
        os.kill(second.host.spawner_pid, signal.SIGCONT)
    assert second.ended("a.2").ending == "lost"


def test_the_watcher_of_an_earlier_agent_is_replaced(new_driver: Callable[..., Driver]) -> None:
    first = new_driver()
    first.launch("a.1", "sleep", "1000", hold_ms=60_000)
    old = the_watcher(first.root)
    first.close()
    second = new_driver()
    wait_until(lambda: watchers(second.root) not in ([], [old]), 10)
    assert len(watchers(second.root)) == 1
    assert not is_alive(old)
    assert second.host.running() == ("a.1",)


def test_a_watcher_that_is_killed_is_replaced(driver: Driver) -> None:
    pid = driver.launch("a.1", "sleep", "1000", hold_ms=3000, grace_ms=100).pid
    os.kill(the_watcher(driver.root), signal.SIGKILL)
    the_watcher(driver.root)
    assert is_alive(pid)
    os.kill(driver.shim_pid("a.1"), signal.SIGSTOP)
    assert_dead_in_time(driver.root, "a.1")


def test_a_renewed_hold_is_left_alone_and_a_shim_that_works_ends_it_itself(driver: Driver) -> None:
    pid = driver.launch("a.1", "sleep", "1000", hold_ms=3000, grace_ms=100).pid
    for _ in range(13):
        driver.pass_time(0.3)
        driver.host.extend_hold(boot_ms() + 3000)
        assert is_alive(pid)
    assert is_hold_expired(driver.ended("a.1"))
    driver.until(lambda: not watchers(driver.root))


def test_without_a_hold_there_is_no_watcher(driver: Driver) -> None:
    driver.launch("a.1", "sleep", "1000")
    assert driver.run("a.2", "true").exit_code == 0
    assert watchers(driver.root) == []
