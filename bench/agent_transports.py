"""A thousand agents that joined, over TLS on loopback and over the Unix socket: the control plane's processor time.

Both are measured in turn on the same control plane, several times, with a heartbeat of each agent every 2 s. The bar is
1.1 times a plain TCP connection, which the control plane does not have any more: that took 1.08 times the Unix socket.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import msgspec

from bench.control_plane import start_control_plane, temporary_grid
from bench.sizes import sized
from bench.table import Line
from distributed_grid.agent.join_client import JoinedKey
from distributed_grid.client.client import Client
from distributed_grid.server.access.tokens import JoinGrant, hash_of
from distributed_grid.state_dir import StateDir

AGENTS = sized(1000, smoke=5)
ROUNDS = sized(4, smoke=1)
SECONDS = sized(12.0, smoke=1.0)
SETTLE_SECONDS = sized(4.0, smoke=0.2)
MAX_RATIO = 1.10 * 1.08
KEY = "a key for all of them"


def measure() -> list[Line]:
    """Processor time over TLS as a multiple of that over the Unix socket."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with temporary_grid() as (state_dir, client_config):
        _write_grants(state_dir)
        start_control_plane(state_dir, client_config)
        with Client(state_dir, client_config) as client:
            pid = int(client.call("get_daemon_info")["pid"])
        rest = json.loads((state_dir.host_dir / "rest.json").read_text())
        joined = JoinedKey(
            f"127.0.0.1:{rest['port']}",
            rest["fingerprint"],
            "n0",
            KEY,
            Path(rest["certificate"]).read_text(),
            socket=rest["agent_socket"],
        )
        folder = state_dir.root / "joined"
        folder.mkdir()
        (folder / "joined.json").write_text(json.dumps(asdict(joined)))
        used: dict[str, list[float]] = {"socket": [], "tls": []}
        for _ in range(ROUNDS):
            for way, times in used.items():
                times.append(_cpu_seconds_with(folder, way, pid))
    ratio = statistics.median(used["tls"]) / statistics.median(used["socket"])
    part = statistics.median(used["tls"]) / SECONDS
    return [
        Line(
            "control plane with 1,000 agents over TLS : over its Unix socket, processor time",
            ratio,
            MAX_RATIO,
            "x",
            True,
        ),
        Line("control plane with 1,000 agents over TLS, of a core", 100 * part, 50, "%", True),
    ]


def _write_grants(state_dir: StateDir) -> None:
    """Let all agents in with one key, as if each had exchanged a join token."""
    state_dir.create()
    key_hash = hash_of(KEY)
    grants = {
        f"{number:032x}": JoinGrant(
            id=f"{number:032x}", hash="0" * 64, used_by=f"n{number}", key_hash=key_hash, used_ms=1
        )
        for number in range(AGENTS)
    }
    (state_dir.host_dir / "tokens.json").write_bytes(msgspec.json.encode({"grants": grants}))


def _cpu_seconds_with(folder: Path, way: str, pid: int) -> float:
    """The processor time of the control plane while its agents send heartbeats."""
    agents = subprocess.Popen(
        [sys.executable, "-m", "bench.simulated_agents", str(folder), str(AGENTS), way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert agents.stdout is not None
    try:
        agents.stdout.readline()  # all of them are welcome
        time.sleep(SETTLE_SECONDS)
        before = _cpu_seconds(pid)
        time.sleep(SECONDS)
        return _cpu_seconds(pid) - before
    finally:
        agents.kill()
        agents.communicate()


def _cpu_seconds(pid: int) -> float:
    """The time that all threads of a process have run."""
    tasks = (Path(f"/proc/{pid}/task") / task / "schedstat" for task in os.listdir(f"/proc/{pid}/task"))
    return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9
