"""Cost of `grid offload wrap` for a command that starts here, in bare interpreters; nothing is compiled or written."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from bench.control_plane import GRID, start_control_plane, temporary_grid
from bench.sizes import sized
from bench.table import Line
from distributed_grid.state_dir import StateDir

ROUNDS = sized(40, smoke=1)
BAR = 2
PLAIN = ["/bin/sh", "-c", ":"]
BARE = [sys.executable, "-c", "pass"]
WRAPPED = [GRID, "offload", "wrap", "--", *PLAIN]
JOB = {"GRID_JOB_ID": "job-1"}
"""Inside a job nobody is asked."""


def measure() -> list[Line]:
    """How much longer than the command itself, all taken in turn so that noise hits them alike."""
    with temporary_grid() as (state_dir, client_config):
        nobody = _medians(state_dir)
        start_control_plane(state_dir, client_config)
        asked = _medians(state_dir)
    lines = [Line("python -c pass, for orientation", 1000 * asked["bare"], 0, "ms")]
    for what, taken, kind in (
        ("that asks the control plane and starts here", asked, "wrapped"),
        ("inside a job", asked, "job"),
        ("without a control plane", nobody, "wrapped"),
    ):
        ratio = (taken[kind] - taken["plain"]) / taken["bare"]
        lines.append(Line(f"offload wrap {what}, more than the command", ratio, BAR, "×", lower_is_better=True))
    return lines


def _medians(state_dir: StateDir) -> dict[str, float]:
    commands = {"plain": (PLAIN, {}), "bare": (BARE, {}), "wrapped": (WRAPPED, {}), "job": (WRAPPED, JOB)}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, (command, extra) in commands.items():
            times[name].append(_seconds(state_dir, command, extra))
    return {name: statistics.median(taken) for name, taken in times.items()}


def _seconds(state_dir: StateDir, command: list[str], extra: dict[str, str]) -> float:
    env = os.environ | {"GRID_STATE_DIR": str(state_dir.root), "PYTHONDONTWRITEBYTECODE": "1"} | extra
    began = time.perf_counter()
    subprocess.run(command, env=env, cwd="/", check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - began
