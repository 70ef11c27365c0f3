"""Moving a process whose directory holds 50 MB, of which it writes 1 MB anew all the time: how long it stands still.

Every move is one of a real process between two nodes of this machine. The time is measured by its guard, from the first
signal that stops it to the decision to end it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.control_plane import temporary_grid
from bench.sizes import sized
from bench.table import Line
from distributed_grid.client.client import Client

NODES = """
nodes:
- {name: left, host: local, simulated: true, cpu_count: 4, memory_gb: 8}
- {name: right, host: local, simulated: true, cpu_count: 4, memory_gb: 8}
"""
MOVES, FILES = sized((5, 50), smoke=(1, 2))
MEGABYTE = 1 << 20
BAR_SECONDS = 1.0
DEADLINE_SECONDS = 60.0
WRITER = """
import os, sys, time
if os.environ.get("GRID_JOB_ID"):
    sys.exit(0)
while True:
    with open("hot.new", "wb") as file:
        file.write(os.urandom(1 << 20))
    os.replace("hot.new", "file-00")
    time.sleep(0.1)
"""


def measure() -> list[Line]:
    """Seconds that the original stands still, and how much is shipped meanwhile."""
    frozen, shipped = [], []
    with temporary_grid(NODES) as (state_dir, client_config), Client(state_dir, client_config) as client:
        for number in range(MOVES):
            row = _move(client, state_dir.root.parent / f"work-{number}", number)
            frozen.append(row["frozen_seconds"])
            shipped.append(row["shipped_bytes"] / MEGABYTE)
    return [
        Line(
            "a process with 50 MB stands still, 1 MB changed (median)",
            statistics.median(frozen),
            BAR_SECONDS,
            "s",
            True,
        ),
        Line("the longest of them", max(frozen), BAR_SECONDS, "s", True),
        Line("shipped for it in all, ahead and while it stood still", statistics.median(shipped), 0, "MB", True),
    ]


def _move(client: Client, folder: Path, number: int) -> dict[str, Any]:
    """One move to its end; the move as it ended."""
    folder.mkdir()
    for index in range(FILES):
        (folder / f"file-{index:02}").write_bytes(os.urandom(MEGABYTE))
    (folder / "writer.py").write_text(WRITER)
    pid = _daemonise([sys.executable, "writer.py"], folder)
    try:
        asked = {"move_id": f"move-bench{number}", "subject": str(pid), "node": "left", "target": "right"}
        row: dict[str, Any] = client.call("execute_offload", **asked, consent=True)["move"]
        deadline = time.monotonic() + DEADLINE_SECONDS
        while row["end"] is None and time.monotonic() < deadline:
            time.sleep(0.05)
            row = client.call("get_move", move_id=row["move_id"])["move"]
    finally:
        subprocess.run(["kill", "-9", str(pid)], check=False, stderr=subprocess.DEVNULL)
    assert row["end"] == "done", row
    return row


def _daemonise(command: list[str], folder: Path) -> int:
    """Start a process that nobody waits for; its pid."""
    starter = "import subprocess, sys; null = subprocess.DEVNULL; print(subprocess.Popen(sys.argv[1:], stdin=null, "
    starter += "stdout=null, stderr=null, start_new_session=True).pid)"
    done = subprocess.run(
        [sys.executable, "-c", starter, *command], cwd=folder, capture_output=True, text=True, check=True
    )
    return int(done.stdout)
