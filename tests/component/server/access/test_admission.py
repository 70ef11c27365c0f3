"""Admission of nodes: a key that was replaced is good for nothing, an open connection included."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from distributed_grid import wire
from distributed_grid.agent.join_client import JoinToken
from distributed_grid.api import requests
from distributed_grid.server.access.admission import Admission, AdvertisedAddress
from distributed_grid.server.access.agent_websocket import AgentWebSocket
from distributed_grid.server.access.tokens import JoinGrant, TokenStore, hash_of, new_secret, new_token_id
from tests.component.server.access.test_agent_websocket import HELLO, Reception


class Listener:
    """The daemon's listener for connections of agents, on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.tokens = TokenStore(folder, lambda: round(1000 * time.time()))
        self.reception = Reception()
        self.websockets: list[AgentWebSocket] = []

        async def advertise() -> AdvertisedAddress:
            return AdvertisedAddress(("127.0.0.1:1",), "0" * 64)

        self.admission = Admission(
            self.tokens,
            configured=(),
            advertise=advertise,
            disconnect=self.disconnect,
        )

    def accept(self) -> AgentWebSocket:
        self.websockets.append(AgentWebSocket(self.reception, self.admission.admit))
        return self.websockets[-1]

    def disconnect(self, node: str) -> None:
        for websocket in self.websockets:
            if node in websocket.nodes:
                websocket.close("revoked")

    async def join(self, key: str) -> None:
        """Join as gpu1 with a token that is bound to that name."""
        token_id, secret = new_token_id(), new_secret()
        self.tokens.add_grant(
            JoinGrant(id=token_id, hash=hash_of(secret), node="gpu1", expires_ms=round(1000 * time.time()) + 60_000)
        )
        token = JoinToken(("127.0.0.1:1",), "", token_id, secret).text()
        await self.admission.join(requests.JoinRequest(token, hash_of(key), "gpu1"))


async def a_link(port: int, key: str) -> ClientConnection:
    headers = {"Authorization": f"Bearer gpu1.{key}"}
    return await connect(f"ws://127.0.0.1:{port}/v1/agent", additional_headers=headers, compression=None, proxy=None)


def test_joining_again_under_the_same_name_cuts_the_connection_of_the_old_key(tmp_path: Path) -> None:
    async def story() -> None:
        listener = Listener(tmp_path)
        server = await asyncio.get_running_loop().create_server(listener.accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await listener.join("first")
        async with await a_link(port, "first") as old:
            await old.send(wire.encode(HELLO))
            await listener.join("second")
            with pytest.raises(ConnectionClosed):
                async with asyncio.timeout(10):
                    await old.recv()
            async with await a_link(port, "second") as new:
                await new.send(wire.encode(HELLO))
                await new.ping()
        server.close()

    asyncio.run(story())
