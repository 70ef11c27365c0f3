"""How a command ended is reported exactly."""

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.agent.execution.attempt import AttemptExit, AttemptLaunch
from tests.component.agent.execution.conftest import Driver, is_alive, python

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("code", [0, 1, 3, 126, 127, 137, 255])
def test_the_exit_code_is_the_commands_own(driver: Driver, code: int) -> None:
    ended = driver.run("a.1", "/bin/sh", "-c", f"exit {code}")
    assert (ended.ending, ended.exit_code, ended.signal) == ("exited", code, None)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGHUP])
def test_death_by_signal_is_not_an_exit_code(driver: Driver, signum: signal.Signals) -> None:
    ended = driver.run("a.1", "/bin/sh", "-c", f"kill -{int(signum)} $$")
    assert (ended.ending, ended.exit_code, ended.signal) == ("signalled", None, int(signum))
    assert signum.name in ended.detail


def test_a_command_that_is_nowhere_never_started(driver: Driver) -> None:
    ended = driver.run("a.1", "no-such-thing")
    assert (ended.ending, ended.exit_code, ended.detail) == (
        "never_started",
        127,
        "no such command: no-such-thing",
    )
    assert driver.run("a.2", "/no/such/thing").detail == "no such command: /no/such/thing"
    assert driver.run("a.3", "").ending == "never_started"


def test_a_file_that_cannot_run_never_started(driver: Driver, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("echo hello\n")
    ended = driver.run("a.1", str(plain))
    assert (ended.ending, ended.exit_code, ended.detail) == ("never_started", 126, f"not executable: {plain}")
    plain.chmod(0o755)
    assert "neither a program" in driver.run("a.2", str(plain)).detail
    plain.write_text("#!/no/such/interpreter\n")
    assert "interpreter" in driver.run("a.3", str(plain)).detail
    assert driver.run("a.4", str(tmp_path)).exit_code == 126


def test_a_missing_working_directory_is_named(driver: Driver, tmp_path: Path) -> None:
    ended = driver.run("a.1", "true", cwd=str(tmp_path / "gone"))
    assert (ended.ending, ended.detail) == ("never_started", f"no such directory: {tmp_path / 'gone'}")


def test_a_null_byte_in_an_argument_is_refused_by_name(driver: Driver) -> None:
    ended = driver.run("a.1", "echo", "a\0b")
    assert ended.ending == "never_started"
    assert "null" in ended.detail


def test_bytes_that_are_not_text_pass_through(driver: Driver) -> None:
    weird = os.fsdecode(b"\xff\xfe")
    driver.run("a.1", "printf", "%s", weird, env={"PATH": os.environ["PATH"], "W": weird})
    assert (driver.root / "a.1/stdout").read_bytes() == b"\xff\xfe"


def test_fifty_megabytes_of_output_arrive(driver: Driver) -> None:
    assert driver.run("a.1", "head", "-c", "50000000", "/dev/zero").exit_code == 0
    assert (driver.root / "a.1/stdout").stat().st_size == 50_000_000


def test_a_command_may_close_its_output(driver: Driver) -> None:
    assert driver.run("a.1", "/bin/sh", "-c", "exec >&- 2>&-; exit 5").exit_code == 5


def test_nobody_else_can_read_the_files(driver: Driver) -> None:
    driver.run("a.1", "true")
    home = driver.root / "a.1"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()}
    assert stat.S_IMODE(home.stat().st_mode) == modes.pop("work") == modes.pop("checkpoints") == 0o700
    assert set(modes.values()) == {0o600}


def test_the_record_says_what_was_used(driver: Driver) -> None:
    ended = driver.run("a.1", *python("x = bytearray(50_000_000)\nwhile __import__('time').process_time() < .3: pass"))
    assert 250 <= ended.cpu_ms <= 2000
    assert ended.wall_ms >= 250
    assert 50_000_000 <= ended.max_memory_bytes <= 100_000_000


def test_what_main_leaves_behind_is_ended_with_it(driver: Driver) -> None:
    ended = driver.run("a.1", "/bin/sh", "-c", "setsid sleep 1000 & echo $!; exit 4")
    assert (ended.ending, ended.exit_code) == ("exited", 4)
    assert not is_alive(int(driver.out("a.1")))


def test_what_only_has_to_finish_writing_may(driver: Driver) -> None:
    driver.run("a.1", "bash", "-c", "exec > >(sleep 0.05; cat); echo the last line")
    assert driver.out("a.1") == "the last line\n"


def synced_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes of all files that this process has put on the disk since."""
    synced: list[int] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return synced


def test_an_end_that_nobody_acknowledges_is_put_on_the_disk(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = synced_files(monkeypatch)
    driver.run("a.1", "true")
    journal = (driver.root / ".control/a.1/exit.json").stat().st_ino
    driver.until(lambda: journal in synced)


class AcknowledgingDriver(Driver):
    """Has the end of a.1 acknowledged as soon as it is reported."""

    def receive(self, report: AttemptLaunch | AttemptExit) -> None:
        super().receive(report)
        if report.attempt_id == "a.1" and isinstance(report, AttemptExit):
            self.host.forget("a.1")


def test_an_end_that_is_acknowledged_is_in_another_store(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = synced_files(monkeypatch)
    driver = AcknowledgingDriver(root)
    try:
        for name in ("a.1", "a.2"):
            driver.run(name, "true")
        first, second = ((root / f".control/{name}/exit.json").stat().st_ino for name in ("a.1", "a.2"))
        driver.until(lambda: second in synced)
        assert first not in synced
    finally:
        driver.finish()


class FailingDriver(Driver):
    """Fails at the first report of every end."""

    failed: tuple[str, ...] = ()

    def receive(self, report: AttemptLaunch | AttemptExit) -> None:
        if isinstance(report, AttemptExit) and report.attempt_id not in self.failed:
            self.failed = (*self.failed, report.attempt_id)
            raise ZeroDivisionError("the report went nowhere")
        super().receive(report)


def test_an_end_whose_report_failed_is_reported_again(root: Path) -> None:
    driver = FailingDriver(root)
    try:
        assert driver.run("a.1", "sh", "-c", "exit 3").exit_code == 3
        driver.launch("a.2", "sleep", "1000")
        os.kill(driver.shim_pid("a.2"), signal.SIGKILL)
        assert driver.ended("a.2").ending == "lost"
        assert driver.failed == ("a.1", "a.2")
    finally:
        driver.finish()


def test_an_end_is_reported_whatever_fails_before_that(new_driver: Callable[..., Driver]) -> None:
    driver = new_driver(count_cpu_time=lambda node, cpu_ms: 1 // 0)
    assert driver.run("a.1", "sh", "-c", "exit 3").exit_code == 3
    assert driver.host.running() == ()
