"""One-line commands on two cores, a core each, through the API: from the first submission to the last end.

Beside it, in the same run, HyperQueue with the same commands, where `$GRID_PEERS_PYTHON` names a Python that has it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
import uuid
from pathlib import Path

from bench.control_plane import start_control_plane, temporary_grid
from bench.table import Line
from distributed_grid.api.framing import JSON, Unpacker, frame
from distributed_grid.client.conversation import ClientConfig, hello
from distributed_grid.state_dir import StateDir

JOBS = 400
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
    """The better of three rounds, because the machine is not ours alone; the peer in between."""
    rates, peers = [], []
    with temporary_grid(TWO_CORES) as (state_dir, client_config):
        start_control_plane(state_dir, client_config)
        for _ in range(3):
            rates.append(JOBS / asyncio.run(_round(state_dir)))
            peer = _hyperqueue()
            peers += [peer] if peer is not None else []
    lines = [Line("one-line commands, two cores, a core each", max(rates), 200, "/s")]
    if peers:
        lines.append(Line("the same, as a part of HyperQueue's rate", max(rates) / max(peers), 0.5, "x"))
    return lines


async def _round(state_dir: StateDir) -> float:
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


def _hyperqueue() -> float | None:
    """Commands per second of HyperQueue on two cores; None where no Python with it was named."""
    python = os.environ.get("GRID_PEERS_PYTHON")
    if python is None:
        return None
    script = Path(__file__).with_name("hyperqueue_peer.py")
    done = subprocess.run([python, str(script), str(JOBS)], capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout.split()[-1])
