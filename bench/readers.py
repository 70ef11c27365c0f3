"""Many readers at a long queue: does the control plane still answer the heartbeats of its nodes in time?

Sixty callers of `get_status` on the socket, then sixty of `GET /v1/jobs?limit=10000` by REST, each asks again as soon
as it has its answer, at 50,000 queued jobs. Some nodes have simulated agents in another process, over the WebSocket of
a node on another machine; one of them runs a job. "Heartbeat" is from sending one until its answer, which renews the
hold.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from bench.agents import _ask, _connection, _p99, _resident_bytes
from bench.control_plane import GRID, start_control_plane, temporary_grid
from bench.sizes import sized
from bench.table import Line
from distributed_grid.api.framing import Unpacker, frame
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import ClientConfig, hello
from distributed_grid.state_dir import StateDir

NODES = 5
READERS = sized(60, smoke=3)
QUEUED = sized(50_000, smoke=20)
SECONDS = sized(40.0, smoke=6.0)
SLOW = sized(20, smoke=1)
"""Readers that ask and never read their answers."""
CONFIG = "hold_seconds: 15\nnodes:\n" + "".join(
    f"- {{name: n{number}, host: 198.18.0.1, dedicated: true}}\n" for number in range(NODES)
)


def measure() -> list[Line]:
    """Heartbeats, holds and memory under readers of the socket and of REST."""
    with temporary_grid(CONFIG) as (state_dir, client_config):
        start_control_plane(state_dir, client_config)
        with Client(state_dir, client_config) as client:
            pid = client.call("get_daemon_info")["pid"]
            token = _token(state_dir)
            rest = client.call("get_daemon_info")["rest"]
        agents = subprocess.Popen(
            [sys.executable, "-m", "bench.simulated_agents", str(state_dir.host_dir / "links"), str(NODES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        assert agents.stdout is not None
        try:
            agents.stdout.readline()  # all of them are welcome
            leases = asyncio.run(_fill(state_dir))
            quiet = _resident_bytes(pid)
            lines = [Line("control plane with 50,000 queued jobs, for orientation", quiet / 1e6, 0, "MB")]
            for name, reader in (
                ("get_status", lambda until: _read_status(state_dir, until)),
                ("GET /v1/jobs?limit=10000", lambda until: _read_jobs(rest, token, until)),
            ):
                _ask(agents, "clear")
                answers, longest, size = asyncio.run(_read(reader, state_dir, pid))
                beats = _ask(agents, "beats")
                lines += [
                    Line(f"{READERS} readers of {name}: answers, for orientation", answers, 0, ""),
                    Line("  longest answer, for orientation", longest, 0, "s"),
                    Line("  heartbeat to its answer p99", 1000 * _p99(beats), 200, "ms", lower_is_better=True),
                    Line("  longest, for orientation", 1000 * max(beats), 0, "ms"),
                    Line("  control plane, memory at most", size / 1e6, 500, "MB", lower_is_better=True),
                ]
            lost = _lost(state_dir, leases)
            lines.append(Line("nodes doubted or lost, and leases lost", lost, 0.5, "", lower_is_better=True))
        finally:
            agents.kill()
            agents.wait()
    return lines


async def _fill(state_dir: StateDir) -> set[str]:
    """A queue of jobs that want more than is free, and a lease on each node."""
    leases = {f"held-{node}" for node in range(NODES)}
    async with _connection(state_dir) as call:
        for node in range(NODES):
            await call({"op": "request_lease", "request_id": f"held-{node}", "resource_type": "cpu", "amount": 2,
                        "duration_seconds": 86_400, "require": [f"n{node}"]})  # fmt: skip
    await asyncio.gather(*(_fill_part(state_dir, part) for part in range(8)))
    return leases


async def _fill_part(state_dir: StateDir, part: int) -> None:
    async with _connection(state_dir) as call:
        for number in range(part, QUEUED, 8):
            name = uuid.uuid4().hex
            await call({"op": "submit_job", "request_id": name, "resource_type": "cpu", "amount": 3 + number % 2,
                        "argv": ["python", "train.py", "--rate", str(number)], "env": {"PATH": os.defpath},
                        "wait_seconds": 86_400})  # fmt: skip


async def _read(
    reader: Callable[[float], Awaitable[list[float]]], state_dir: StateDir, pid: int
) -> tuple[int, float, int]:
    """How many answers came, the longest time one took, and the most memory of the control plane."""
    until, most = time.perf_counter() + SECONDS, 0
    slow = [await asyncio.open_unix_connection(str(state_dir.socket)) for _ in range(SLOW)]
    for _, writer in slow:
        writer.write(_request(hello(ClientConfig())) + _request({"op": "get_status"}) * 20)
    reading = asyncio.gather(*(reader(until) for _ in range(READERS)))
    while not reading.done():
        most = max(most, _resident_bytes(pid))
        await asyncio.sleep(0.1)
    for _, writer in slow:
        writer.close()
    times = [seconds for each in await reading for seconds in each]
    return len(times), max(times), most


def _request(message: dict[str, object]) -> bytes:
    return frame(b"J", json.dumps(message).encode())


async def _read_status(state_dir: StateDir, until: float) -> list[float]:
    reader, writer = await asyncio.open_unix_connection(str(state_dir.socket))
    unpacker, times = Unpacker(), []
    writer.write(_request(hello(ClientConfig())))
    while not list(unpacker.feed(await reader.read(2**18))):
        pass
    while time.perf_counter() < until:
        began = time.perf_counter()
        writer.write(_request({"op": "get_status"}))
        while not list(unpacker.feed(await reader.read(2**18))):
            pass
        times.append(time.perf_counter() - began)
    writer.close()
    return times


async def _read_jobs(rest: str, token: str, until: float) -> list[float]:
    url, times = urlsplit(rest), []
    context = None
    if url.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    head = f"GET /v1/jobs?limit=10000 HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection(url.hostname, url.port, ssl=context)
    while time.perf_counter() < until:
        began = time.perf_counter()
        writer.write(head)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in answer.split(b"\r\n")[0], answer
        left = next(int(line[15:]) for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        while left:
            left -= len(await reader.read(min(left, 2**18)))
        times.append(time.perf_counter() - began)
    writer.close()
    return times


def _token(state_dir: StateDir) -> str:
    env = os.environ | {"GRID_STATE_DIR": str(state_dir.root)}
    answer = subprocess.run(
        [GRID, "daemon", "token", "create", "--json", "--user", "reader"],
        env=env,
        cwd="/",
        check=True,
        capture_output=True,
    )
    return str(json.loads(answer.stdout)["token"])


def _lost(state_dir: StateDir, leases: set[str]) -> int:
    with Client(state_dir, ClientConfig()) as client:
        events = [part for _, part in client.stream("list_events", types=["node-lost", "node-suspect"], limit=1000)]
        held = {lease["allocation_id"] for lease in client.call("get_status")["allocations"]}
    return len(events) - 1 + len(leases - held)
