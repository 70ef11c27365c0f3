"""A long history and those who follow it: their cost for a short command.

`grid run-shared true` on three grids in turn: a new one, one with a million stored events, and one with as many and
three `grid events -f --type` followers, of which two hear nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator

from bench.control_plane import GRID, start_control_plane, temporary_grid
from bench.sizes import sized
from bench.table import Line
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.ports import Batch, EventRow
from distributed_grid.state_dir import StateDir

EVENTS, BATCH = sized((1_000_000, 20_000), smoke=(100, 50))
ROUNDS = sized(40, smoke=1)
FOLLOWED = ("node-lost", "refused", "granted")
COMMAND = [GRID, "run-shared", "-r", "cpu", "-a", "1", "true"]
TYPES = ("requested", "granted", "started", "stopped", "released", "queued")


def measure() -> list[Line]:
    """Ratios of medians."""
    with temporary_grid() as new, temporary_grid() as used, temporary_grid() as followed:
        for state_dir, _ in (used, followed):
            state_dir.create()
        _fill(used[0])
        shutil.copy(used[0].database, followed[0].database)
        for grid in (new, used, followed):
            start_control_plane(*grid)
        times: list[list[float]] = [[], [], []]
        with _followers(followed[0]):
            for _ in range(ROUNDS):
                for (state_dir, _), taken in zip((new, used, followed), times, strict=True):
                    taken.append(_seconds(state_dir))
    new_s, long_s, followed_s = map(statistics.median, times)
    return [
        Line("warm grid run-shared true, for orientation", 1000 * new_s, 0, "ms"),
        Line("with a history of 1,000,000 events, relative", long_s / new_s, 1.1, "×", lower_is_better=True),
        Line("and with three followers, relative to that", followed_s / long_s, 1.1, "×", lower_is_better=True),
    ]


def _fill(state_dir: StateDir) -> None:
    """A million events of the last hours, as of 160,000 jobs."""
    store, now = SqliteStore(state_dir.database), int(time.time() * 1000)
    for first in range(1, EVENTS, BATCH):
        seqs = range(first, first + BATCH)
        events = [
            EventRow(seq, now - 10 * (EVENTS - seq), TYPES[seq % 6], "ann", f"u{seq // 6}", "n1", "", b'{"data":{}}')
            for seq in seqs
        ]
        store.commit(Batch(events=events))
    store.close()


@contextlib.contextmanager
def _followers(state_dir: StateDir) -> Iterator[None]:
    """Three followers that have caught up."""
    processes = [
        subprocess.Popen([GRID, "events", "-f", "--type", name], env=_env(state_dir), stdout=subprocess.DEVNULL)
        for name in FOLLOWED
    ]
    try:
        time.sleep(2)
        yield
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def _env(state_dir: StateDir) -> dict[str, str]:
    return os.environ | {"GRID_STATE_DIR": str(state_dir.root)}


def _seconds(state_dir: StateDir) -> float:
    began = time.perf_counter()
    subprocess.run(COMMAND, env=_env(state_dir), cwd="/", check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began
