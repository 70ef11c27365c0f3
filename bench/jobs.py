"""One-line commands on two cores, a core each, through the API: from the first submission to the last end.

With a new state directory and with the one that the earlier rounds have used, on disk and in memory. Beside it, in the
same run, HyperQueue with the same commands, where `$GRID_PEERS_PYTHON` names a Python that has it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

from bench.control_plane import start_control_plane, temporary_grid
from bench.sizes import sized
from bench.table import Line
from distributed_grid.api.framing import JSON, Unpacker, frame
from distributed_grid.client.conversation import ClientConfig, hello
from distributed_grid.state_dir import StateDir

JOBS = sized(400, smoke=8)
ROUNDS = sized(4, smoke=2)
CLIENTS = 4
TWO_CORES = """
nodes:
- name: two
  host: local
  cpu_count: 2
  memory_gb: 4
  trust_declared: true
"""


def measure() -> list[Line]:
    """On disk and in memory, each with the peer in the same place."""
    in_memory = Path("/dev/shm")
    lines = _measure_in(Path(tempfile.gettempdir()), "on disk")
    return lines + (_measure_in(in_memory, "in memory") if in_memory.is_dir() else [])


def _measure_in(folder: Path, where: str) -> list[Line]:
    """The first round, and the better of the later ones, because the machine is not ours alone; the peer in between."""
    rates, peers = [], []
    with temporary_grid(TWO_CORES, folder) as (state_dir, client_config):
        start_control_plane(state_dir, client_config)
        for _ in range(ROUNDS):
            rates.append(JOBS / asyncio.run(run_round(state_dir)))
            peer = _hyperqueue(folder)
            peers += [peer] if peer is not None else []
    new, used = rates[0], max(rates[1:])
    lines = [
        Line(f"one-line commands, two cores, {where}, new state directory", new, 200, "/s"),
        Line(f"one-line commands, two cores, {where}, used state directory", used, 200, "/s"),
        Line("  the last round, relative to the first", rates[-1] / new, 0, "×"),
    ]
    if peers:
        lines += [
            Line("  new, relative to HyperQueue's first round", new / peers[0], 1, "×"),
            Line("  used, relative to HyperQueue's best round", used / max(peers), 1, "×"),
        ]
    return lines


async def run_round(state_dir: StateDir) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(_client(state_dir, JOBS // CLIENTS) for _ in range(CLIENTS)))
    return time.perf_counter() - began


async def _client(state_dir: StateDir, count: int) -> None:
    """Submit, all at once, then wait for each."""
    reader, writer = await asyncio.open_unix_connection(str(state_dir.socket))
    unpacker = Unpacker()
    frames: list[tuple[bytes, bytes]] = []

    def send(message: dict[str, object]) -> None:
        writer.write(frame(JSON, json.dumps(message).encode()))

    async def answer() -> dict[str, object]:
        while not frames:
            frames.extend(unpacker.feed(await reader.read(65536)))
        found: dict[str, object] = json.loads(frames.pop(0)[1])
        assert "error" not in found, found
        return found

    send(hello(ClientConfig()))
    await answer()
    names = [uuid.uuid4().hex for _ in range(count)]
    for name in names:
        send({"op": "submit_job", "request_id": name, "argv": ["true"], "resource_type": "cpu", "amount": 1,
              "env": {"PATH": os.defpath}, "cwd": "/"})  # fmt: skip
    for _ in names:
        await answer()
    for name in names:
        send({"op": "wait_for_job", "job_id": name})
    for _ in names:
        job = (await answer())["job"]
        assert isinstance(job, dict)
        assert job["exit_code"] == 0, job
    writer.close()


def _hyperqueue(folder: Path) -> float | None:
    """Commands per second of HyperQueue on two cores; None where no Python with it was named."""
    python = os.environ.get("GRID_PEERS_PYTHON")
    if python is None:
        return None
    script = Path(__file__).with_name("hyperqueue_peer.py")
    done = subprocess.run(
        [python, str(script), str(JOBS), str(folder)], capture_output=True, text=True, check=True, timeout=120
    )
    return float(done.stdout.split()[-1])
