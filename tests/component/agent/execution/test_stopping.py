"""Stopping means the whole tree, at the right time, with the right name."""

import os
import time
from pathlib import Path

import pytest

from distributed_grid.agent.execution.cpu_control import Throttler
from distributed_grid.domain.jobs import Ending
from distributed_grid.posix.boot_clock import boot_ms
from tests.component.agent.execution.conftest import Driver, is_alive, is_hold_expired, python

pytestmark = pytest.mark.e2e

# Prints its pid and those of a child and of a grandchild that left for a session of its own, twice forked.
STUBBORN_FAMILY = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(1000)
    os._exit(0)
if os.fork() == 0:
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(1000)
os.write(1, b"%d\\n" % os.getpid())
time.sleep(1000)
"""


def test_a_tree_that_hides_and_ignores_is_killed_whole(driver: Driver) -> None:
    driver.launch("a.1", *python(STUBBORN_FAMILY))
    pids = driver.numbers("a.1", 3)
    began = time.monotonic()
    ended = driver.stop("a.1", ending="preempted", detail="for job 7", grace_ms=300)
    assert 0.3 <= time.monotonic() - began < 3
    assert (ended.ending, ended.detail, ended.signal) == ("preempted", "for job 7", 9)
    assert not any(map(is_alive, pids))


def test_a_tree_keeps_being_killed_while_it_keeps_forking(driver: Driver, tmp_path: Path) -> None:
    """It gives up by itself after a while, so that a failure of this test does not haunt the machine."""
    beat = tmp_path / "beat"
    code = f"""
import os, time
end = time.monotonic() + 30
while time.monotonic() < end:
    open({str(beat)!r}, "w").close()
    if os.fork(): os._exit(0)
    os.setsid()
"""
    driver.launch("a.1", "/bin/sh", "-c", 'trap "" TERM; "$@" & sleep 1000', "sh", *python(code))
    driver.until(beat.exists)
    driver.pass_time(0.1)
    assert driver.stop("a.1", grace_ms=50).ending == "cancelled"
    beat.unlink()
    driver.pass_time(0.3)
    assert not beat.exists(), "something of the tree is still there"


def test_a_polite_command_may_clean_up_and_keeps_its_exit_code(driver: Driver) -> None:
    driver.launch("a.1", "/bin/sh", "-c", "trap 'echo bye; exit 3' TERM; echo 1; while :; do sleep 0.01; done")
    driver.numbers("a.1", 1)
    ended = driver.stop("a.1")
    assert (ended.ending, ended.exit_code, driver.out("a.1")) == ("cancelled", 3, "1\nbye\n")


def test_stopping_twice_is_once_and_may_hurry(driver: Driver) -> None:
    driver.launch("a.1", *python(STUBBORN_FAMILY))
    driver.numbers("a.1", 3)
    driver.run_coroutine(driver.host.stop_attempt("a.1", ending=Ending.PREEMPTED, grace_ms=60_000))
    driver.pass_time(0.05)
    began = time.monotonic()
    assert driver.stop("a.1", ending="cancelled", grace_ms=0).ending == "preempted"
    assert time.monotonic() - began < 2
    driver.run_coroutine(driver.host.stop_attempt("a.1", ending=Ending.CANCELLED))
    assert [report.outcome.ending for report in driver.reports[1:]] == ["preempted", "preempted"]


def test_stopping_at_once_after_the_launch_is_not_missed(driver: Driver) -> None:
    for number in range(10):
        spec_id = f"a.{number}"
        from tests.component.agent.execution.conftest import a_spec

        driver.run_coroutine(driver.host.launch(a_spec(spec_id, "sleep", "1000")))
        if number % 2:
            driver.pass_time(0.0005 * number)
        assert driver.stop(spec_id).ending == "cancelled"


def test_stopping_what_was_never_here_says_so(driver: Driver) -> None:
    ended = driver.stop("a.1")
    assert (ended.ending, driver.exit_of("a.1").fence) == ("never_started", 0)


def test_a_paused_tree_uses_no_time_and_can_still_be_stopped(driver: Driver) -> None:
    busy = "import os\nos.fork()\nprint(os.getpid())\nwhile True: pass"
    driver.launch("a.1", *python(busy))
    pids = driver.numbers("a.1", 2)
    throttler = Throttler(driver.host)
    throttler.pause()
    # A signal counts once its process is scheduled again, which takes a while on a machine that others keep busy.
    driver.until(lambda: {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids} == {"T"})
    before = driver.host.usage()["a.1"].cpu_ms
    driver.pass_time(0.3)
    assert driver.host.usage()["a.1"].cpu_ms <= before + 10
    throttler.resume()
    driver.until(lambda: driver.host.usage()["a.1"].cpu_ms > before + 100)
    throttler.pause()
    began = time.monotonic()
    assert driver.stop("a.1", grace_ms=20_000).signal == 15, "not killed after its grace"
    assert time.monotonic() - began < 10


def test_a_timeout_counts_from_the_start(driver: Driver) -> None:
    ended = driver.run("a.1", "sleep", "1000", timeout_ms=300)
    assert (ended.ending, ended.detail) == ("timed_out", "timed out after 0.3 s")
    assert 300 <= ended.wall_ms < 2000


def test_an_attempt_nobody_renews_is_gone_when_its_hold_is_over(driver: Driver) -> None:
    hold_s = 2.0  # of which a busy machine may take a second before the next renewal
    renewed = began = time.monotonic()

    def renew() -> None:
        nonlocal renewed
        driver.host.extend_hold(boot_ms() + round(1000 * hold_s))
        renewed = time.monotonic()

    driver.launch("a.1", *python(STUBBORN_FAMILY), hold_ms=round(1000 * hold_s))
    renew()
    pids = driver.numbers("a.1", 3, meanwhile=renew)
    while renewed < began + 1.25 * hold_s:
        driver.pass_time(0.2)
        assert all(map(is_alive, pids))
        renew()
    while any(map(is_alive, pids)):
        driver.pass_time(0.01)
    assert hold_s - 0.3 < time.monotonic() - renewed < hold_s + 1
    assert is_hold_expired(driver.ended("a.1"))  # reported when it is on the disk, which may take longer


def test_what_has_no_hold_outlives_the_holds_of_others(driver: Driver) -> None:
    forever = driver.launch("a.1", "sleep", "1000", hold_ms=0)
    driver.launch("a.2", "sleep", "1000", hold_ms=400)
    assert is_hold_expired(driver.ended("a.2"))
    assert is_alive(forever.pid)


def test_asking_the_shim_itself_to_end_cancels(driver: Driver) -> None:
    driver.launch("a.1", "sleep", "1000")
    os.kill(driver.shim_pid("a.1"), 15)
    assert driver.ended("a.1").ending == "cancelled"
