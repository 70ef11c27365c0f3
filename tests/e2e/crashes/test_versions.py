"""A command of another version than the daemon that runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import distributed_grid
from tests.e2e.crashes.conftest import PYTHON, a_gate, daemon_pid, one_line, open_gate
from tests.support.processes import is_running
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

MAIN = "from distributed_grid.cli.main import main; main()"


class OtherBuild:
    """A copy of the package with one line changed, used through its own command line."""

    def __init__(self, grid: Shell, folder: Path, file: str, line: str, other: str) -> None:
        self._grid = grid
        package = Path(distributed_grid.__file__).parent
        shutil.copytree(package, folder / "distributed_grid", ignore=shutil.ignore_patterns("__pycache__"))
        changed = folder / "distributed_grid" / file
        text, times = re.subn(line, other, changed.read_text(), flags=re.MULTILINE)
        assert times == 1
        changed.write_text(text)
        self._env = grid.env | {"PYTHONPATH": str(folder)}

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [PYTHON, "-c", MAIN, *words]
        return subprocess.run(
            command, cwd=self._grid.cwd, env=self._env, capture_output=True, text=True, timeout=60, check=False
        )


def test_a_newer_command_makes_the_daemon_hand_over_while_a_job_goes_on(grid: Shell, tmp_path: Path) -> None:
    newer = OtherBuild(grid, tmp_path / "newer", "__init__.py", r"^__version__ = .*$", '__version__ = "99.0.0"')
    gate = a_gate(grid, "gate")
    grid("status", check=0)
    old = grid.json("daemon", "status")
    follower = grid.start("run-shared", "-j", "job", "sh", "-c", "echo begin; read x < gate; echo end; exit 9")
    pid = wait_until(lambda: grid("jobs", "show", "job").returncode == 0 and grid.job("job")["attempts"][-1]["pid"])

    done = newer("status")  # a look changes nothing
    assert (done.returncode, done.stderr, daemon_pid(grid)) == (0, "", old["pid"])
    done = newer("run-shared", "-a", "0.1", "true")
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: not is_running(old["pid"]))
    new = grid.json("daemon", "status")  # the old command line is served by the new daemon, and does not fight it
    assert new["pid"] != old["pid"]
    assert (old["version"], new["version"]) == (distributed_grid.__version__, "99.0.0")
    job = grid.job("job")
    assert (job["state"], job["attempts"][-1]["pid"]) == ("running", pid)

    open_gate(gate)
    said, _ = follower.communicate(timeout=20)
    assert (follower.returncode, said) == (9, b"begin\nend\n")
    assert daemon_pid(grid) == new["pid"]


def test_another_protocol_is_refused_with_a_sentence(grid: Shell, tmp_path: Path) -> None:
    file = "api/framing.py"
    other = OtherBuild(grid, tmp_path / "other", file, r"^PROTOCOL = 2$", "PROTOCOL = 1")
    grid("status", check=0)
    before = daemon_pid(grid)
    said = one_line(other("status"))
    assert "protocol 2, not 1" in said
    assert "upgrade" in said
    assert daemon_pid(grid) == before
    grid("status", check=0)
