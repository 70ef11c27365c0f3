"""Cost of an idle agent: CPU and memory of its process and its spawner together, over two minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.control_plane import start_control_plane, temporary_grid
from bench.sizes import sized
from bench.table import Line
from distributed_grid.client.client import Client

SECONDS = sized(120.0, smoke=0.2)
SETTLE_SECONDS = sized(5.0, smoke=0.1)
CONFIG = """
nodes:
- {name: here, host: local}
- {name: far, host: 198.18.0.1}
"""


def measure() -> list[Line]:
    """CPU of the agent's whole tree and its memory, shared pages counted once for each process."""
    with (
        temporary_grid(CONFIG) as (state_dir, client_config),
        tempfile.TemporaryDirectory(prefix="grid-bench-agent-") as folder,
    ):
        start_control_plane(state_dir, client_config)
        link = {"node": "far", "socket": str(state_dir.host_dir / "links" / "far.sock")}
        Path(folder, "link.json").write_text(json.dumps(link))
        agent = subprocess.Popen([sys.executable, "-m", "distributed_grid.agent", "--dir", folder], cwd="/")
        try:
            with Client(state_dir, client_config) as client:
                _until_alive(client)
            time.sleep(SETTLE_SECONDS)
            tree = [agent.pid, *_process_tree(agent.pid)]
            before, began = _cpu_seconds(tree), time.perf_counter()
            time.sleep(SECONDS)
            part = (_cpu_seconds(tree) - before) / (time.perf_counter() - began)
            own, all_of_it = _private_bytes([agent.pid]), _private_bytes(tree)
        finally:
            agent.terminate()
            agent.wait()
    return [
        Line("agent at rest, of a core", 100 * part, 0.5, "%", lower_is_better=True),
        Line("agent at rest, resident memory", own / 1e6, 60, "MB", lower_is_better=True),
        Line("agent with its spawner and waiting shims", all_of_it / 1e6, 60, "MB", lower_is_better=True),
    ]


def _until_alive(client: Client) -> None:
    for _ in range(200):
        if any(node["node_id"] == "far" and node["state"] == "alive" for node in client.call("get_status")["nodes"]):
            return
        time.sleep(0.1)
    raise AssertionError("the agent did not come")


def _process_tree(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in map(int, listed) for found in (child, *_process_tree(child))]


def _cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _private_bytes(pids: list[int]) -> int:
    """Resident memory of the first, and of each other what it does not share with anybody."""
    size = int(Path(f"/proc/{pids[0]}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    for pid in pids[1:]:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss:",)):
                size += 1024 * int(line.split()[1])
    return size
