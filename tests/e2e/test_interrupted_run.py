"""A test run that is interrupted, or killed, leaves no process behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import processes_using
from tests.support.project import PROJECT
from tests.support.shell import wait_until

pytestmark = [pytest.mark.e2e]

NEVER_ENDS = """
import time
from pathlib import Path


def test_it(grid, tmp_path: Path) -> None:
    grid.detach("sleep", "1000")
    Path(tmp_path / "ready").touch()
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_ends_early_takes_its_daemon_and_its_jobs_along(tmp_path: Path, number: int) -> None:
    folder = PROJECT / "tests/e2e" / f"interrupted_{tmp_path.name}"
    folder.mkdir()
    try:
        (folder / "test_never_ends.py").write_text(NEVER_ENDS)
        words = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'run'}", str(folder)]
        run = subprocess.Popen([sys.executable, "-m", "pytest", *words], cwd=PROJECT, stdout=subprocess.DEVNULL)
        wait_until(lambda: list((tmp_path / "run").rglob("ready")), 60)
        assert processes_using(str(tmp_path / "run"))
        run.send_signal(number)
        run.wait(timeout=60)
    finally:
        for file in folder.rglob("*.py"):
            file.unlink()
        for left in sorted(folder.rglob("*"), reverse=True):
            left.unlink() if left.is_file() else left.rmdir()
        folder.rmdir()
    wait_until(lambda: not processes_using(str(tmp_path / "run")), 20)
