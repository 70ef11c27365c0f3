"""A job that damages or forges what is recorded about it loses at most itself, and hangs nobody."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.agent.execution.attempt import AttemptExit, AttemptLaunch
from distributed_grid.agent.execution.cpu_control import Throttler
from distributed_grid.domain.jobs import Ending
from tests.component.agent.execution.conftest import Driver, a_spec, is_alive, python
from tests.support import odd_files

pytestmark = pytest.mark.e2e
CONTROL_FILES = ("spec.json", "shim.lock", "exit.json", "stop.json", "cores.json", "fence.json", "groups.json")
NONSENSE = {
    "empty": "",
    "object": "{}",
    "list": "[]",
    "number": "12",
    "deep": "[" * 100_000,
    "wrong types": '{"attempt_id": "a.1", "fence": "x", "argv": 7, "ending": 3, "pid": -1, "kill_at_boot_ms": "now"}',
    "forged end": '{"ended": {"ending": "exited", "exit_code": 0}}',
}


def damage(control: Path, what: str) -> None:
    """Put this in place of every control file, as the job itself might, by its path."""
    for name in CONTROL_FILES:
        if what in NONSENSE:
            (control / name).unlink(missing_ok=True)
            (control / name).write_text(NONSENSE[what])
        else:
            odd_files.put(what, control / name)


def test_what_dot_dot_leads_to_is_no_control_file(driver: Driver) -> None:
    code = """
import os
seen = {os.path.realpath(os.readlink(f"/proc/self/fd/{fd}")) for fd in (0, 1, 2)}
print(*sorted(os.listdir("..")), *sorted(os.path.basename(os.path.dirname(path)) for path in seen))
print(any(".control" in value for value in os.environ.values()))
"""
    driver.run("a.1", *python(code))
    assert driver.out("a.1") == "checkpoints stderr stdout work a.1 a.1 dev\nFalse\n"


@pytest.mark.parametrize("what", [*NONSENSE, *odd_files.KINDS])
def test_a_running_job_that_damages_its_record_ends_as_it_ends(driver: Driver, what: str) -> None:
    driver.launch("a.1", "/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.02; done; exit 7")
    damage(driver.root / ".control/a.1", what)
    (driver.root / "a.1/work/go").touch()
    ended = driver.ended("a.1")
    assert (ended.ending, ended.exit_code) == ("exited", 7)
    assert driver.run("a.2", "true").exit_code == 0


@pytest.mark.parametrize("what", [*NONSENSE, *odd_files.KINDS])
def test_a_running_job_that_damages_its_record_can_be_stopped(driver: Driver, what: str) -> None:
    pid = driver.launch("a.1", "sleep", "1000").pid
    damage(driver.root / ".control/a.1", what)
    assert driver.stop("a.1", grace_ms=1000).ending == "cancelled"
    assert not is_alive(pid)


@pytest.mark.parametrize("what", [*NONSENSE, *odd_files.KINDS])
def test_the_next_agent_starts_whatever_a_job_did_to_its_record(new_driver: Callable[..., Driver], what: str) -> None:
    first = new_driver()
    pid = first.launch("a.1", "sleep", "1000").pid
    other = first.launch("a.2", "sleep", "1000").pid
    shim = first.shim_pid("a.1")
    first.close()
    damage(first.root / ".control/a.1", what)
    second = new_driver()
    second.until(lambda: not is_alive(pid))
    assert second.host.running() == ("a.2",)
    assert is_alive(other)
    second.run_coroutine(second.host.launch(a_spec("a.1", "true", fence=5)))
    ended = second.find(AttemptExit, "a.1")
    assert ended is not None
    assert (ended.outcome.ending, ended.fence) == ("lost", 5)
    assert second.find(AttemptLaunch, "a.1") is None, "it ran a second time"
    if is_alive(shim):  # the lock that would have told of it is gone with its file
        os.kill(shim, signal.SIGKILL)


@pytest.mark.parametrize("what", [*NONSENSE, *odd_files.KINDS])
def test_a_killed_shim_and_a_damaged_record_run_nothing_again(driver: Driver, tmp_path: Path, what: str) -> None:
    tally = tmp_path / "tally"
    pid = driver.launch("a.1", "/bin/sh", "-c", f"echo once >> {tally}; sleep 1000").pid
    driver.until(tally.exists)
    shim = driver.shim_pid("a.1")
    damage(driver.root / ".control/a.1", what)
    os.kill(shim, signal.SIGKILL)
    ended = driver.ended("a.1")
    assert ended.ending == "lost"
    driver.until(lambda: not is_alive(pid))
    assert tally.read_text().split() == ["once"]


@pytest.mark.parametrize("what", sorted({*NONSENSE, *odd_files.KINDS} - {"empty"}))  # an empty one was never written
def test_a_record_damaged_before_its_start_starts_nothing(driver: Driver, tmp_path: Path, what: str) -> None:
    os.kill(driver.host.spawner_pid, signal.SIGSTOP)
    try:
        driver.run_coroutine(driver.host.launch(a_spec("a.1", "touch", str(tmp_path / "ran"))))
        spec = driver.root / ".control/a.1/spec.json"
        if what in NONSENSE:
            spec.write_text(NONSENSE[what])
        else:
            odd_files.put(what, spec)
    finally:
        os.kill(driver.host.spawner_pid, signal.SIGCONT)
    assert driver.ended("a.1").ending in ("never_started", "lost")
    assert not (tmp_path / "ran").exists()
    assert driver.run("a.2", "true").exit_code == 0


def test_an_end_that_the_shim_did_not_write_is_none(new_driver: Callable[..., Driver]) -> None:
    first = new_driver()
    pid = first.launch("a.1", "/bin/sh", "-c", "sleep 1; exit 7").pid
    first.close()
    forged = {"ended": {"ending": "exited", "exit_code": 0}}
    control = first.root / ".control/a.1"
    (control / "exit.json").write_text(json.dumps(forged))
    with (control / "spec.json").open("a") as journal:
        journal.write("\n" + json.dumps(forged | {"nonce": "0" * 32}) + "\n")
    second = new_driver()
    assert second.host.running() == ("a.1",)
    assert second.ended("a.1").exit_code == 7
    assert not is_alive(pid)


def test_a_start_that_names_another_process_is_not_believed(new_driver: Callable[..., Driver]) -> None:
    """The shim of a forged record is somebody else: it is neither watched nor signalled."""
    first = new_driver()
    first.launch("a.1", "sleep", "1000")
    control = first.root / ".control/a.1"
    first.close()
    bystander = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
    spec = json.loads((control / "spec.json").read_text().splitlines()[0])
    shim = {"boot": spec["boot"], "pid": bystander, "start": 1}
    forged = {"started": {"pid": bystander, "start": 1, "at_boot_ms": 1, "cores": [], "shim": shim}}
    text = (control / "spec.json").read_text().splitlines()
    lines = [text[0], json.dumps(forged | {"nonce": spec["nonce"]}), *text[1:]]
    (control / "spec.json").write_text("\n".join(lines) + "\n")
    second = new_driver()
    second.pass_time(0.2)
    second.run_coroutine(second.host.stop_attempt("a.1", ending=Ending.CANCELLED, grace_ms=0))
    second.pass_time(0.5)
    try:
        assert is_alive(bystander)
    finally:
        os.kill(bystander, signal.SIGKILL)
        os.waitpid(bystander, 0)
        (control / "spec.json").write_text("\n".join(text) + "\n")
    second.until(lambda: "a.1" not in second.host.running())


@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_output_that_became_something_else_does_not_stop_the_next_attempt(driver: Driver, kind: str) -> None:
    driver.host.work_dir("a.1")
    odd_files.put(kind, driver.root / "a.1/stdout")
    began = time.monotonic()
    ended = driver.run("a.1", "true")
    assert ended.ending in ("exited", "never_started")
    assert time.monotonic() - began < 10


def test_a_fence_that_nobody_sent_is_none(new_driver: Callable[..., Driver]) -> None:
    first = new_driver()
    first.launch("a.1", "sleep", "1000")
    first.close()
    for forged in ("99", '{"fence": 99}', '{"fence": 99, "nonce": ""}'):
        (first.root / ".control/a.1/fence.json").write_text(forged)
        driver = new_driver()
        report = driver.find(AttemptLaunch, "a.1")
        assert report is not None
        assert report.fence == 1
        driver.close()
    driver = new_driver()
    driver.run_coroutine(driver.host.launch(a_spec("a.1", "true", fence=5)))
    driver.close()
    driver = new_driver()
    report = driver.find(AttemptLaunch, "a.1")
    assert report is not None
    assert report.fence == 5


@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_an_agent_starts_whatever_is_in_place_of_its_own_files(new_driver: Callable[..., Driver], kind: str) -> None:
    first = new_driver()
    assert first.run("a.1", "true").exit_code == 0
    pid = first.launch("a.2", "sleep", "1000").pid
    first.close()
    for name in (".throttled", ".spawner.log", ".hold", ".live/a.1", ".live/odd", ".live/.odd"):
        odd_files.put(kind, first.root / ".control" / name)
    second = new_driver()
    assert second.find(AttemptLaunch, "a.2") is not None
    second.host.forget("a.1")
    throttler = Throttler(second.host)
    throttler.pause()
    throttler.release()
    assert second.run("a.3", "true").exit_code == 0
    assert second.stop("a.2").ending == "cancelled"
    assert not is_alive(pid)
    (first.root / ".control/.spawner.log").rename(first.root / "odd.log")  # no log to look at
