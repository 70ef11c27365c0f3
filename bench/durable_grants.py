"""Durable grants through the Unix socket, with fsync on: one client, and 64 at once."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import uuid

from bench.control_plane import BIG_NODE, start_control_plane, temporary_grid
from bench.sizes import sized
from bench.table import Line
from distributed_grid.api.framing import JSON, Unpacker, frame
from distributed_grid.client.conversation import ClientConfig, hello
from distributed_grid.state_dir import StateDir

CLIENTS = sized(64, smoke=4)
SECONDS = sized(5.0, smoke=0.2)


def measure() -> list[Line]:
    """Rate and tail with 64 clients, the median with one; every grant is given back at once."""
    with temporary_grid(BIG_NODE) as (state_dir, client_config):
        start_control_plane(state_dir, client_config)
        many = asyncio.run(_load(state_dir, CLIENTS))
        one = asyncio.run(_load(state_dir, 1))
    p99 = statistics.quantiles(many, n=100)[98]
    return [
        Line("durable grants, 64 clients", len(many) / SECONDS, 1_500, "/s"),
        Line("durable grant p99, 64 clients", 1000 * p99, 50, "ms", lower_is_better=True),
        Line("durable grant p50, one client", 1000 * statistics.median(one), 5, "ms", lower_is_better=True),
    ]


async def _load(state_dir: StateDir, clients: int) -> list[float]:
    end = time.perf_counter() + SECONDS
    times = await asyncio.gather(*(_client(state_dir, end) for _ in range(clients)))
    return [taken for one in times for taken in one]


async def _client(state_dir: StateDir, end: float) -> list[float]:
    reader, writer = await asyncio.open_unix_connection(str(state_dir.socket))
    unpacker = Unpacker()
    frames: list[tuple[bytes, bytes]] = []
    times: list[float] = []

    async def call(message: dict[str, object]) -> dict[str, object]:
        writer.write(frame(JSON, json.dumps(message).encode()))
        while not frames:
            frames.extend(unpacker.feed(await reader.read(65536)))
        answer: dict[str, object] = json.loads(frames.pop(0)[1])
        assert "error" not in answer, answer
        return answer

    await call(hello(ClientConfig()))
    while time.perf_counter() < end:
        request_id = uuid.uuid4().hex
        began = time.perf_counter()
        await call({"op": "request_lease", "request_id": request_id, "resource_type": "cpu", "amount": 1})
        times.append(time.perf_counter() - began)
        await call({"op": "release_lease", "allocation_id": request_id})
    writer.close()
    return times
