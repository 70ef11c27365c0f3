"""A thousand agents over real WebSockets, a heartbeat every 2 s each: their cost for the control plane.

The agents are simulated in another process: they connect, send heartbeats and answer orders, but run nothing. "To
state" is from sending a heartbeat until its answer, which the control plane sends after the ledger has taken it in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.control_plane import start_control_plane, temporary_grid
from bench.sizes import sized
from bench.table import Line
from distributed_grid.api.framing import JSON, Unpacker, frame
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import ClientConfig, hello
from distributed_grid.state_dir import StateDir

AGENTS = sized(1000, smoke=10)
SECONDS = sized(20.0, smoke=1.5)
SETTLE_SECONDS, ARRIVAL_SECONDS = sized((4.0, 2.0), smoke=(0.1, 0.3))
STARTS = sized(200, smoke=4)
QUEUED = sized(10_000, smoke=8)
NODE = "- {{name: n{number}, host: 198.18.0.1, dedicated: true}}\n"


def measure() -> list[Line]:
    """Cost at rest over 20 s, then the way of 200 jobs to agents chosen at random."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    config = "nodes:\n" + "".join(NODE.format(number=number) for number in range(AGENTS))
    with temporary_grid(config) as (state_dir, client_config):
        start_control_plane(state_dir, client_config)
        with Client(state_dir, client_config) as client:
            pid = client.call("get_daemon_info")["pid"]
        agents = subprocess.Popen(
            [sys.executable, "-m", "bench.simulated_agents", str(state_dir.host_dir / "links"), str(AGENTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        assert agents.stdin is not None
        assert agents.stdout is not None
        try:
            agents.stdout.readline()  # all of them are welcome
            time.sleep(SETTLE_SECONDS)
            _ask(agents, "clear")
            before, began = _cpu_seconds(pid), time.perf_counter()
            time.sleep(SECONDS)
            part = (_cpu_seconds(pid) - before) / (time.perf_counter() - began)
            beats = _ask(agents, "beats")
            sent = asyncio.run(_jobs(state_dir))
            asyncio.run(_queue(state_dir))
            time.sleep(SETTLE_SECONDS)
            _ask(agents, "clear")
            time.sleep(SECONDS)
            queued_beats = _ask(agents, "beats")
            arrived: dict[str, float] = dict(_ask(agents, "starts"))
            size = _resident_bytes(pid)
        finally:
            agents.kill()
            agents.wait()
    ways = [arrived[name] - at for name, at in sent.items() if name in arrived]
    assert len(ways) == STARTS, f"{len(ways)} of {STARTS} jobs arrived"
    return [
        Line("control plane with 1,000 agents, of a core", 100 * part, 50, "%", lower_is_better=True),
        Line("control plane with 1,000 agents, memory", size / 1e6, 500, "MB", lower_is_better=True),
        Line("heartbeat to state p99", 1000 * _p99(beats), 200, "ms", lower_is_better=True),
        Line("the same with 10,000 jobs in the queue", 1000 * _p99(queued_beats), 200, "ms", lower_is_better=True),
        Line("job to its agent p99", 1000 * _p99(ways), 250, "ms", lower_is_better=True),
    ]


def _ask(agents: subprocess.Popen[str], question: str) -> Any:
    assert agents.stdin is not None
    assert agents.stdout is not None
    agents.stdin.write(f"{question}\n")
    agents.stdin.flush()
    return json.loads(agents.stdout.readline())


@contextlib.asynccontextmanager
async def _connection(state_dir: StateDir) -> AsyncIterator[Callable[[dict[str, object]], Awaitable[None]]]:
    reader, writer = await asyncio.open_unix_connection(str(state_dir.socket))
    unpacker = Unpacker()
    frames: list[tuple[bytes, bytes]] = []

    async def call(message: dict[str, object]) -> None:
        writer.write(frame(JSON, json.dumps(message).encode()))
        while not frames:
            frames.extend(unpacker.feed(await reader.read(65536)))
        answer = json.loads(frames.pop(0)[1])
        assert "error" not in answer, answer

    await call(hello(ClientConfig()))
    yield call
    writer.close()


async def _jobs(state_dir: StateDir) -> dict[str, float]:
    """When each job was submitted, one every 20 ms, each on a node of its own."""
    sent = {}
    async with _connection(state_dir) as call:
        for number in random.Random(1).sample(range(AGENTS), STARTS):
            name = uuid.uuid4().hex
            sent[f"job-{name[:12]}"] = time.perf_counter()
            await call(_submission(name, 1, number))
            await asyncio.sleep(0.02)
        await asyncio.sleep(ARRIVAL_SECONDS)
    return sent


def _submission(name: str, cores: int, node: int) -> dict[str, object]:
    return {"op": "submit_job", "request_id": name, "argv": ["true"], "resource_type": "cpu", "amount": cores,
            "require": [f"n{node}"], "env": {"PATH": os.defpath}, "wait_seconds": 86_400}  # fmt: skip


async def _queue(state_dir: StateDir) -> None:
    """Fill the queue: a core of ten nodes is held, and jobs want more of them than is left, in twenty groups."""
    async with _connection(state_dir) as call:
        for node in range(10):
            name = uuid.uuid4().hex
            await call({"op": "request_lease", "request_id": name, "resource_type": "cpu", "amount": 2,
                        "require": [f"n{node}"]})  # fmt: skip
    await asyncio.gather(*(_fill_queue(state_dir, part) for part in range(4)))


async def _fill_queue(state_dir: StateDir, part: int) -> None:
    async with _connection(state_dir) as call:
        for number in range(part, QUEUED, 4):
            await call(_submission(uuid.uuid4().hex, 3 + number % 2, number // 2 % 10))


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
