"""Orders may come twice, late, or for somebody who is gone."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.agent.execution.attempt import AttemptExit
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.domain.jobs import Ending
from distributed_grid.errors import BadInput, StaleFence
from tests.component.agent.execution.conftest import Driver, a_spec

pytestmark = pytest.mark.e2e


def test_launching_twice_runs_once_and_tells_again(driver: Driver) -> None:
    script = "echo once; sleep 0.2"
    driver.launch("a.1", "/bin/sh", "-c", script)
    for _ in range(2):
        driver.run_coroutine(driver.host.launch(a_spec("a.1", "/bin/sh", "-c", script)))
    driver.ended("a.1")
    driver.run_coroutine(driver.host.launch(a_spec("a.1", "/bin/sh", "-c", script)))
    assert [type(report).__name__ for report in driver.reports] == ["AttemptLaunch"] * 3 + ["AttemptExit"] * 2
    assert driver.out("a.1") == "once\n"


def test_an_order_from_the_past_is_refused_even_after_a_restart(new_driver: Callable[..., Driver]) -> None:
    driver = new_driver()
    driver.run("a.1", "true", fence=5)
    driver.run_coroutine(driver.host.launch(a_spec("a.1", "true", fence=8)))
    assert [report.fence for report in driver.reports] == [5, 5, 8]
    with pytest.raises(StaleFence):
        driver.run_coroutine(driver.host.launch(a_spec("a.1", "true", fence=7)))
    driver.host.forget("a.1")
    driver.close()
    driver = new_driver()
    with pytest.raises(StaleFence):
        driver.run_coroutine(driver.host.launch(a_spec("a.1", "true", fence=7)))
    driver.run_coroutine(driver.host.launch(a_spec("a.1", "true", fence=8)))
    assert [report.fence for report in driver.reports] == [8]


def test_what_is_forgotten_is_reported_no_more_and_keeps_its_logs(new_driver: Callable[..., Driver]) -> None:
    driver = new_driver()
    driver.run("a.1", "echo", "hello")
    driver.run("a.2", "true")
    driver.host.forget("a.1")
    driver.host.forget("a.1")
    driver.close()
    driver = new_driver()
    assert [report.attempt_id for report in driver.reports] == ["a.2"]
    assert driver.out("a.1") == "hello\n"
    driver.run_coroutine(driver.host.stop_attempt("a.1", ending=Ending.CANCELLED))
    assert isinstance(driver.reports[-1], AttemptExit)
    assert driver.reports[-1].outcome.exit_code == 0


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../a", "a b", "x" * 129, "a\n"])
def test_a_name_that_is_not_safe_is_refused(driver: Driver, name: str) -> None:
    with pytest.raises(BadInput, match="safe"):
        driver.host.work_dir(name)
    with pytest.raises(BadInput):
        driver.run_coroutine(driver.host.launch(a_spec(name, "true")))
    driver.host.forget(name)


def test_a_root_has_one_agent(driver: Driver) -> None:
    second = AttemptHost(driver.root, report=print, lock_timeout_s=0.05)
    with pytest.raises(BadInput):
        driver.run_coroutine(second.start())
    driver.run_coroutine(second.stop())


def test_starting_and_closing_twice_is_harmless(driver: Driver) -> None:
    driver.run_coroutine(driver.host.start())
    driver.run_coroutine(driver.host.stop())
    driver.run_coroutine(driver.host.stop())
    driver.run_coroutine(driver.host.start())
    assert driver.run("a.1", "true").exit_code == 0


def test_a_launch_that_cannot_be_recorded_never_started(driver: Driver) -> None:
    (driver.root / "a.1").write_text("in the way")
    ended = driver.run("a.1", "true")
    assert ended.ending == "never_started"
    (driver.root / "a.1").unlink()


def test_a_hundred_at_once_all_end(driver: Driver) -> None:
    began = time.monotonic()
    for number in range(100):
        driver.run_coroutine(driver.host.launch(a_spec(f"a.{number}", "true")))
    assert {driver.ended(f"a.{number}").exit_code for number in range(100)} == {0}
    assert time.monotonic() - began < 20


def test_the_layout_is_what_it_says(driver: Driver) -> None:
    driver.run("a.1", "true", cpu_milli=1000)
    assert {path.name for path in Path(driver.root, "a.1").iterdir()} == {"stdout", "stderr", "work", "checkpoints"}
    files = {path.name: path.stat() for path in Path(driver.root, ".control/a.1").iterdir()}
    assert set(files) == {"spec.json", "shim.lock", "exit.json"}
    assert len({found.st_ino for found in files.values()}) == 1
    live = driver.root / ".control/.live/a.1"
    assert live.samefile(driver.root / ".control/.host.lock")
    driver.host.forget("a.1")
    assert not live.exists()
