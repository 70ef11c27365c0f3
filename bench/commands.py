"""Cost of a warm command, as a multiple of a bare interpreter in the same run."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from bench.control_plane import GRID, start_control_plane, temporary_grid
from bench.table import Line
from distributed_grid.state_dir import StateDir

ROUNDS = 25
BARE = [sys.executable, "-c", "import argparse, json, socket"]


def measure() -> list[Line]:
    """The ratio of medians, all commands taken in turn so that noise hits them alike."""
    with temporary_grid() as (state_dir, client_config):
        start_control_plane(state_dir, client_config)
        commands = {
            "bare": BARE,
            "grid status": [GRID, "status"],
            "grid run-shared -r cpu -a 1 true": [GRID, "run-shared", "-r", "cpu", "-a", "1", "true"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                times[name].append(_seconds(state_dir, command))
    bare = statistics.median(times.pop("bare"))
    lines = [
        Line(f"warm {name}, bare interpreters", statistics.median(taken) / bare, 5, "×", lower_is_better=True)
        for name, taken in times.items()
    ]
    return [Line("a bare interpreter, for orientation", 1000 * bare, 1000, "ms", lower_is_better=True), *lines]


def _seconds(state_dir: StateDir, command: list[str]) -> float:
    env = os.environ | {"GRID_STATE_DIR": str(state_dir.root)}
    began = time.perf_counter()
    subprocess.run(command, env=env, cwd="/", check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began
