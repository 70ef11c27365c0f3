"""A wrapped command that was advised to start on another machine: a real job there, and its files here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.e2e.agents.conftest import FarGrid

pytestmark = pytest.mark.e2e
RUN = """
import sys
from distributed_grid.cli.session import CliSession
from distributed_grid.cli.wrapped_command import WrappedRun

variables = dict(word.split("=", 1) for word in sys.argv[3:])
sys.exit(WrappedRun(CliSession(), ["sh", "-c", sys.argv[1]], variables, sys.argv[2].split()).run_on("gpu2"))
"""
"""What `wrap` does after the advice, which depends on how busy the machine is that all nodes of this test share."""
SCRIPT = """
cat given >> changed; rm removed; mkdir -p out; echo $GRID_NODE > out/made; echo there > edited
echo $GRID_NODE $MODE; echo oh >&2
until [ -e "$GATE" ]; do sleep 0.05; done
exit 7
"""


def test_it_runs_there_and_what_it_changed_comes_back(far_grid: Callable[..., FarGrid]) -> None:
    grid = far_grid("gpu2")
    for name in ("given", "changed", "removed", "edited"):
        (grid.cwd / name).write_text(f"{name}\n")
    (grid.cwd / "link").symlink_to("given")
    gate = grid.cwd.parent / "gate"
    command = [sys.executable, "-c", RUN, SCRIPT, "", f"GATE={gate}", "MODE=fast"]
    with subprocess.Popen(
        command, cwd=grid.cwd, env=grid.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"gpu2 fast\n"
            (grid.cwd / "edited").write_text("here\n")
            gate.touch()
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 7
    (beside,) = grid.cwd.glob("edited.from-*")
    assert errors.decode().splitlines() == ["oh", f"grid: kept your edited; the job's version is {beside.name}"]
    assert {path.name: path.read_text() for path in grid.cwd.iterdir() if path.is_file()} == {
        beside.name: "there\n",
        "given": "given\n",
        "changed": "changed\ngiven\n",
        "removed": "removed\n",
        "edited": "here\n",
        "link": "given\n",
    }
    assert (grid.cwd / "out/made").read_text() == "gpu2\n"
    assert (grid.cwd / "link").is_symlink()
    again = [sys.executable, "-c", RUN, "echo more > other; echo again > out/made", "out/**"]
    done = subprocess.run(again, cwd=grid.cwd, env=grid.env, check=True, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert (grid.cwd / "out/made").read_text() == "again\n"
    assert not (grid.cwd / "other").exists()
