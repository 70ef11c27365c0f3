"""Simulated agents: many in one process, each with its own WebSocket; questions about them come on stdin.

Arguments: the folder of the sockets of nodes, or the joined.json of the first of them and `socket` or `tls`; how many.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

from websockets.asyncio.client import ClientConnection, unix_connect

from distributed_grid import __version__, wire
from distributed_grid.agent.join_client import JoinedKey, open_websocket, read_joined_key
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.nodes import Usage
from distributed_grid.errors import Unreachable

BEAT_SECONDS = wire.HEARTBEAT_MS / 1000
CAPACITY = wire.ReportedCapacity(4000, 16 * 1024**3)


class SimulatedAgents:
    """All agents, and what they measured."""

    def __init__(self, links: Path | None, count: int, joined: JoinedKey | None = None) -> None:
        self.links = links
        self.count = count
        self.joined = joined
        self.beats: list[float] = []
        self.starts: list[tuple[str, float]] = []
        self.welcome = 0

    async def agent(self, number: int) -> None:
        node = f"n{number}"
        async with await self.connect(node) as connection:
            await connection.send(
                wire.encode(
                    wire.AgentHello(
                        protocol=wire.PROTOCOL, version=__version__, node=node, attempts=(), capacity=CAPACITY, boot="x"
                    )
                )
            )
            sent: dict[int, float] = {}
            beating: asyncio.Task[None] | None = None
            async for data in connection:
                assert isinstance(data, bytes)
                message = wire.decode_to_agent(data)
                if isinstance(message, wire.Welcome):
                    self.welcome += 1
                    beating = asyncio.create_task(self.beat(connection, node, sent))
                elif isinstance(message, wire.HeartbeatReply):
                    self.beats.append(time.perf_counter() - sent.pop(message.beat))
                elif isinstance(message, wire.StartAttemptOrder):
                    self.starts.append((message.job_id, time.perf_counter()))
                    outcome = Outcome(Ending.EXITED, exit_code=0)
                    await connection.send(
                        wire.encode(
                            wire.AttemptStartedReport(
                                seq=1, lease_id=message.lease_id, fence=message.fence, pid=1, cores=()
                            )
                        )
                    )
                    await connection.send(
                        wire.encode(
                            wire.AttemptEndedReport(
                                seq=2, lease_id=message.lease_id, fence=message.fence, outcome=outcome
                            )
                        )
                    )
            if beating is not None:
                beating.cancel()

    async def connect(self, node: str) -> ClientConnection:
        while self.joined is not None:
            try:
                return await open_websocket(replace(self.joined, node=node))
            except Unreachable:  # too many of one address that are not admitted yet
                await asyncio.sleep(random.uniform(0.5, 2.0))
        path = str(self.links / f"{node}.sock") if self.links else ""
        return await unix_connect(path, "ws://grid/v1/agent", compression=None, ping_interval=None)

    async def beat(self, connection: ClientConnection, node: str, sent: dict[int, float]) -> None:
        number = int(time.perf_counter() * 1000)
        draw = random.Random(node)
        await asyncio.sleep(draw.random() * BEAT_SECONDS)
        while True:
            number += 1
            sent[number] = time.perf_counter()
            used = draw.randrange(1000)
            usage = Usage(
                cpu_busy_milli=used,
                cpu_outside_milli=used,
                memory_bytes=draw.randrange(16 * 1024**3),
                memory_outside_bytes=draw.randrange(8 * 1024**3),
            )
            await connection.send(wire.encode(wire.Heartbeat(node=node, usage=usage, beat=number)))
            await asyncio.sleep(BEAT_SECONDS)

    async def answer(self) -> None:
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            if line.strip() == "clear":
                self.beats.clear()
                print('"cleared"', flush=True)
            else:
                print(json.dumps(self.beats if line.strip() == "beats" else self.starts), flush=True)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self.count):
                group.create_task(self.agent(number))
                if number % 50 == 49:
                    await asyncio.sleep(0.1)
            while self.welcome < self.count:
                await asyncio.sleep(0.05)
            print("ready", flush=True)
            await self.answer()


def main(place: str, count: str, way: str = "") -> None:
    """Run until stdin ends."""
    joined = read_joined_key(Path(place)) if way else None
    if joined is not None and way == "tls":
        joined = replace(joined, socket="/nonexistent")
    asyncio.run(SimulatedAgents(Path(place), int(count), joined).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
