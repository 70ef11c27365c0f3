"""Cost of a warm command, as a multiple of a bare interpreter in the same run; nothing is compiled or written."""

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

ROUNDS = sized(25, smoke=1)
BARE = [sys.executable, "-c", "import argparse, json, socket"]
INTERPRETERS = {"python -c 'import argparse, json, socket'": BARE, "python -c pass": [sys.executable, "-c", "pass"]}
COMMANDS = {"grid status": 3, "grid run-shared -r cpu -a 1 true": 4}
"""Each command with its bar, in bare interpreters."""


def measure() -> list[Line]:
    """Ratios of medians, all commands taken in turn so that noise hits them alike."""
    with temporary_grid() as (state_dir, client_config):
        start_control_plane(state_dir, client_config)
        commands = INTERPRETERS | {name: [GRID, *name.split()[1:]] for name in COMMANDS}
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                times[name].append(_seconds(state_dir, command))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    lines = []
    for bare in INTERPRETERS:
        lines.append(Line(f"{bare}, for orientation", 1000 * medians[bare], 0, "ms"))
        lines += [
            Line(f"warm {name}, relative to that", medians[name] / medians[bare], bar, "×", lower_is_better=True)
            for name, bar in COMMANDS.items()
        ]
    return lines


def _seconds(state_dir: StateDir, command: list[str]) -> float:
    env = os.environ | {"GRID_STATE_DIR": str(state_dir.root), "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.perf_counter()
    subprocess.run(command, env=env, cwd="/", check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began
