"""A shim serves again and again, and no attempt notices another that it had before."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.agent.execution.attempt import AttemptLaunch
from distributed_grid.agent.execution.spawner import IDLE_SHIMS, MAX_IDLE_SHIMS
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.limits import process_tree
from tests.component.agent.execution.conftest import Driver, a_spec, is_alive, python

pytestmark = pytest.mark.e2e

MB = 1 << 20
HUNGRY = (
    f"import time; held = b'x' * {150 * MB}; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
)


def is_locked(root: Path, attempt_id: str) -> bool:
    with JobDir(str(root), attempt_id) as job:
        return job.is_locked()


def shims(driver: Driver) -> list[int]:
    """Whoever waits for an attempt or has one."""
    return [proc.pid for proc in process_tree.children_of(driver.host.spawner_pid) if not proc.dead]


def until_served_by(driver: Driver, shim: int, name: str, *argv: str) -> str:
    """Run `argv` until that shim gets it; the attempt's id."""
    for number in range(20):
        driver.run(f"{name}.{number}", *argv)
        if driver.shim_pid(f"{name}.{number}") == shim:
            return f"{name}.{number}"
    raise AssertionError("that shim was never used again")


def test_a_few_shims_serve_many_attempts(driver: Driver) -> None:
    for number in range(30):
        assert driver.run(f"a.{number}", "/bin/sh", "-c", f"exit {number}").exit_code == number
    assert len({driver.shim_pid(f"a.{number}") for number in range(30)}) <= 5


def test_each_attempt_is_told_what_it_used_itself(driver: Driver) -> None:
    big = driver.run("big.1", *python(HUNGRY))
    assert big.max_memory_bytes > 150 * MB
    assert big.cpu_ms >= 300
    name = until_served_by(driver, driver.shim_pid("big.1"), "small", "/bin/true")
    small = driver.ended(name)
    assert small.max_memory_bytes < 100 * MB
    assert small.cpu_ms < 250


def test_the_use_of_a_running_attempt_is_its_own(driver: Driver) -> None:
    driver.run("big.1", *python(HUNGRY))
    shim = driver.shim_pid("big.1")
    for number in range(20):
        driver.launch(f"small.{number}", "sleep", "1000")
        if driver.shim_pid(f"small.{number}") == shim:
            break
        driver.stop(f"small.{number}", grace_ms=0)
    else:
        raise AssertionError("that shim was never used again")
    assert driver.host.usage()[f"small.{number}"].cpu_ms < 250


@pytest.mark.parametrize("limits", [{"memory_bytes": 1 << 30}, {"cpu_milli": 500}])
def test_a_shim_that_had_limits_to_keep_serves_no_other(driver: Driver, limits: dict[str, int]) -> None:
    driver.run("a.1", "true", **limits)
    shim = driver.shim_pid("a.1")
    if limits == {"cpu_milli": 500} and not (driver.root / ".control/a.1/groups.json").exists():
        pytest.skip("no control groups for processors here: nothing was changed in the shim")
    driver.until(lambda: not is_alive(shim))


def test_a_shim_that_had_to_stop_its_attempt_serves_no_other(driver: Driver) -> None:
    driver.launch("a.1", "sleep", "1000")
    shim = driver.shim_pid("a.1")
    driver.stop("a.1")
    driver.until(lambda: not is_alive(shim))


def test_a_shim_waits_until_its_end_was_heard(driver: Driver) -> None:
    driver.run_coroutine(driver.host.launch(a_spec("a.1", "true")))
    deadline = time.monotonic() + 10
    while not (driver.root / ".control/a.1" / job_dir.EXIT).exists():  # the agent's loop stands still meanwhile
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    assert is_locked(driver.root, "a.1")
    assert driver.ended("a.1").exit_code == 0
    driver.until(lambda: not is_locked(driver.root, "a.1"))


def test_an_adopted_shim_ends_with_its_attempt(new_driver: Callable[..., Driver]) -> None:
    first = new_driver()
    first.run("a.1", "true")
    first.launch("a.2", "/bin/sh", "-c", "sleep 0.3; exit 6")
    shim = first.shim_pid("a.2")
    first.close()
    second = new_driver()
    assert second.find(AttemptLaunch, "a.2")
    assert second.ended("a.2").exit_code == 6
    second.until(lambda: not is_alive(shim))


def test_a_shim_killed_between_attempts_is_replaced(driver: Driver) -> None:
    for number in range(5):
        assert driver.run(f"a.{number}", "true").exit_code == 0
        os.kill(driver.shim_pid(f"a.{number}"), 9)


def test_a_crowd_of_shims_goes_away_when_it_is_not_needed(driver: Driver) -> None:
    for number in range(8):
        driver.run_coroutine(driver.host.launch(a_spec(f"a.{number}", "sleep", "0.3")))
    assert {driver.ended(f"a.{number}").exit_code for number in range(8)} == {0}
    driver.until(lambda: len(shims(driver)) <= MAX_IDLE_SHIMS)
    driver.until(lambda: len(shims(driver)) == IDLE_SHIMS)
    assert driver.run("b.1", "true").exit_code == 0
