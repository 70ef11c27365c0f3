"""An agent that lies, over a real link socket: prints what the control plane answered to each lie, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from msgspec.structs import replace
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed

from distributed_grid import __version__, wire
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.nodes import Usage

HELLO = wire.AgentHello(protocol=wire.PROTOCOL, version=__version__, node="gpu1", boot="liar")


async def connect(path: str) -> ClientConnection:
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        short = f"/proc/self/fd/{folder}/{os.path.basename(path)}"
        return await unix_connect(short, "ws://grid/v1/agent", compression=None, max_size=None)
    finally:
        os.close(folder)


async def answers_to(path: str, *messages: bytes) -> str:
    """The refusal, how the connection ended, or the names of all that was answered."""
    heard = []
    async with await connect(path) as connection:
        try:
            for message in messages:
                await connection.send(message)
            async with asyncio.timeout(3):
                while True:
                    answer = wire.decode_to_agent(await connection.recv(decode=False))
                    if isinstance(answer, wire.RejectAgent):
                        return answer.message
                    heard.append(type(answer).__name__)
        except ConnectionClosed as closed:
            return f"closed: {closed}"
        except TimeoutError:
            return ", ".join(heard)


async def main() -> None:
    path, lease, fence = sys.argv[1], sys.argv[2], int(sys.argv[3])
    hello = wire.encode(HELLO)
    beat = wire.encode(wire.Heartbeat(node="gpu1", usage=Usage(), beat=1))
    lie = wire.encode(
        wire.AttemptEndedReport(seq=1, lease_id=lease, fence=fence, outcome=Outcome(Ending.EXITED, exit_code=0))
    )
    outcomes = {
        "absurd capacity": await answers_to(
            path, wire.encode(replace(HELLO, capacity=wire.ReportedCapacity(10**30 % 2**62, 2**61)))
        ),
        "another node": await answers_to(path, wire.encode(replace(HELLO, node="gpu2"))),
        "garbage": await answers_to(path, hello, b"\xc1" * 100),
        "another protocol": await answers_to(path, wire.encode(replace(HELLO, protocol=99))),
        "too large": await answers_to(path, hello, b"\0" * (wire.MAX_MESSAGE_BYTES + 1)),
    }
    await answers_to(path, hello, beat, lie)
    outcomes["somebody else's job"] = "no effect seen"
    print(json.dumps(outcomes))


asyncio.run(main())
