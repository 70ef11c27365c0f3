"""A job sees its own environment and variables, and nothing of the daemon."""

import os
import signal
from pathlib import Path

import pytest

from tests.component.agent.execution.conftest import BASE_ENV, Driver, python

pytestmark = pytest.mark.e2e


def test_the_environment_is_what_was_passed_and_the_named_ones(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAEMON_SECRET", "do not tell")
    env = {"MINE": "yes", "CUDA_VISIBLE_DEVICES": "7", "GRID_ROLE": "daemon"}
    driver.run("a.1", "/usr/bin/env", "-0", env=env, gpu_indexes=(2, 0))
    seen = dict(pair.split("=", 1) for pair in driver.out("a.1").split("\0") if pair)
    assert seen == {
        "MINE": "yes",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "2,0",
        "GRID_JOB_DIR": str(driver.root / "a.1/work"),
        "GRID_JOB_ID": "job",
        "GRID_ATTEMPT_ID": "a.1",
        "GRID_NODE": "here",
        "GRID_NOTICE": str(driver.root / "a.1/notice"),
        "GRID_CHECKPOINT": str(driver.root / "a.1/checkpoint"),
        "GRID_CHECKPOINT_DIR": str(driver.root / "a.1/checkpoints"),
    }


@pytest.mark.parametrize(
    ("env", "first"),
    [
        ({"GRID_BOOST_GROUP": "g", "GRID_RAY_PYTHON": "/opt/ray/bin/python"}, "/opt/ray/bin"),
        ({"GRID_BOOST_GROUP": "g", "GRID_RAY_PYTHON": "/opt/ray/bin/python", "VIRTUAL_ENV": "/opt/own"}, "/bin"),
        ({"GRID_BOOST_GROUP": "g", "GRID_RAY_PYTHON": ""}, "/bin"),
        ({"GRID_RAY_PYTHON": "/opt/ray/bin/python"}, "/bin"),
    ],
    ids=["named", "own environment", "own path", "no boost in Ray"],
)
def test_the_interpreter_with_ray_comes_first_in_a_boost_that_ray_reserves(
    driver: Driver, env: dict[str, str], first: str
) -> None:
    driver.run("a.1", "/bin/sh", "-c", 'echo "$PATH"', env={"PATH": "/bin:/usr/bin", **env})
    assert driver.out("a.1").strip().partition(":")[0] == first


def test_a_job_without_a_gpu_sees_none_and_may_buffer(driver: Driver) -> None:
    driver.run(
        "a.1",
        "/bin/sh",
        "-c",
        'echo "[$CUDA_VISIBLE_DEVICES][$PYTHONUNBUFFERED]"',
        env={"PYTHONUNBUFFERED": ""},
    )
    assert driver.out("a.1") == "[][]\n"


def test_the_working_directory_is_the_callers_or_the_jobs_own(driver: Driver, tmp_path: Path) -> None:
    driver.run("a.1", "pwd", cwd=str(tmp_path))
    driver.run("a.2", "pwd")
    assert driver.out("a.1").strip() == str(tmp_path)
    assert driver.out("a.2").strip() == str(driver.root / "a.2/work")


def test_the_command_starts_with_a_clean_slate(driver: Driver) -> None:
    """Own session, no open files but the three, no signal ignored or blocked, nothing to read."""
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        driver.run(
            "a.1",
            *python(
                "import os, sys\n"
                "fds = sorted(os.listdir('/proc/self/fd'))\n"
                "print(os.getsid(0) == os.getpid(), fds, sys.stdin.read() == '')\n"
            ),
        )
        driver.run("a.2", "grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status")
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert driver.out("a.1") == "True ['0', '1', '2', '3'] True\n"  # 3 is the listing itself
    libc_own = 0b11 << 31  # signals 32 and 33 belong to the C library, which leaves them ignored
    masks = [int(line.split()[1], 16) & ~libc_own for line in driver.out("a.2").splitlines()]
    assert masks == [0, 0]


def test_the_spawner_is_small_and_knows_no_secret(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.run("a.1", "true")  # until then it may still be starting, with nothing imported and nothing to see
    pid = driver.host.spawner_pid
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"GRID_ROLE=spawner" in environ
    assert not any(name.encode() + b"=" in environ for name in ("HOME", "USER", "PYTEST_CURRENT_TEST"))
    assert os.getsid(pid) == pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert not any(name in maps for name in ("numpy", "msgspec", "psutil", "_asyncio"))
    assert BASE_ENV["PATH"].encode() not in environ
