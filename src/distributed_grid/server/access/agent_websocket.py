"""WebSocket connection of an agent, at the control plane's end.

Without a web framework, because a thousand agents send a heartbeat every 2 s.

- The node of a connection is decided before the upgrade; statements of an agent about other nodes do not count.
- No input crashes or hangs this side: an invalid message ends the connection with a reason.
- An agent that does not read is cut off before its unread orders fill the memory.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Callable, Mapping

from websockets.exceptions import WebSocketException
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from distributed_grid.errors import ProtocolError
from distributed_grid.server.access.agent_sockets import AgentMessageSink
from distributed_grid.wire import (
    MAX_MESSAGE_BYTES,
    AgentHello,
    RejectAgent,
    ToAgent,
    Welcome,
    check_greeting,
    decode_from_agent,
    encode,
)

MAX_UNSENT_BYTES = 32 * 1024 * 1024
HELLO_SECONDS = 15.0
log = logging.getLogger(__name__)
Admit = Callable[[str, Mapping[str, str]], str | None]
"""The node that may connect with the path and headers of a request, or None."""


class AgentWebSocket(asyncio.Protocol):
    """One agent's connection."""

    def __init__(
        self,
        agents: AgentMessageSink,
        admit: Admit,
        *,
        hello_seconds: float = HELLO_SECONDS,
        on_admitted: Callable[[AgentWebSocket], None] | None = None,
        on_greeted: Callable[[AgentWebSocket], None] | None = None,
        on_close: Callable[[AgentWebSocket], None] | None = None,
        refusal: str = "",
    ) -> None:
        """With a `refusal` the connection gets that answer and is closed. `on_greeted` is called after the welcome."""
        self._agents = agents
        self._admit = admit
        self._hello_seconds = hello_seconds
        self._socket = ServerProtocol(max_size=MAX_MESSAGE_BYTES, logger=log.getChild("websocket"))
        self._transport: asyncio.Transport | None = None
        self._node = ""
        self._greeted = False
        self._parts: list[bytes] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._on_admitted = on_admitted
        self._on_greeted = on_greeted
        self._on_close = on_close
        self._refusal = refusal

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self._node,) if self._node else ()

    @property
    def descriptor(self) -> int:
        """File descriptor of the socket; -1 once it is closed."""
        return -1 if self._transport is None else int(self._transport.get_extra_info("socket").fileno())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        if self._refusal:
            body = f"{self._refusal}\n".encode()
            head = f"HTTP/1.1 429 Too Many Requests\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            transport.write(head.encode() + body)
            transport.close()
            return
        self._deadline = asyncio.get_running_loop().call_later(self._hello_seconds, self._hang_up)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._transport = None
        self._agents.gone(self)
        if self._on_close is not None:
            self._on_close(self)

    def pause_writing(self) -> None:
        log.warning("%s does not read its orders: disconnected", self._node or "an agent")
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._socket.receive_data(data)
        for event in self._socket.events_received():
            if isinstance(event, Request):
                try:
                    headers = {name.lower(): value for name, value in event.headers.raw_items()}
                    node = self._admit(event.path, headers)
                except (WebSocketException, ValueError):
                    node = None
                if node is None:
                    self._socket.send_response(self._socket.reject(http.HTTPStatus.UNAUTHORIZED, "not known here\n"))
                    continue
                self._node = node
                self._socket.send_response(self._socket.accept(event))
                if self._on_admitted is not None:
                    self._on_admitted(self)
            elif isinstance(event, Frame):
                if event.opcode in (Opcode.PING, Opcode.PONG, Opcode.CLOSE):
                    continue
                if event.opcode is Opcode.TEXT:
                    self._refuse("agents speak binary messages")
                    continue
                self._parts.append(bytes(event.data))
                if not event.fin:
                    continue
                content, self._parts = b"".join(self._parts), []
                try:
                    if not self._greeted:
                        check_greeting(content, mine="this control plane", theirs=f"the agent of {self._node}")
                    message = decode_from_agent(content)
                    if isinstance(message, AgentHello) is self._greeted:
                        raise ProtocolError("an agent greets once, and first of all")
                    if not self._greeted:
                        assert isinstance(message, AgentHello)
                        if message.node != self._node:
                            raise ProtocolError(f"this connection is {self._node}'s, not {message.node[:60]}'s")
                        self._greeted = True
                        if self._deadline is not None:
                            self._deadline.cancel()
                    self._agents.received(message, self)
                except ProtocolError as broken:
                    self._refuse(str(broken))
        self._flush()

    def eof_received(self) -> None:
        self._socket.receive_eof()
        self._flush()

    def send(self, message: ToAgent) -> None:
        """Send an order; one for a disconnected agent is derived anew at its return."""
        if self._transport is None or self._socket.state is not State.OPEN:
            return
        self._socket.send_binary(encode(message))
        self._flush()
        if isinstance(message, RejectAgent):
            self.close("refused")
        elif isinstance(message, Welcome) and self._on_greeted is not None:
            on_greeted, self._on_greeted = self._on_greeted, None
            on_greeted(self)

    def close(self, why: str = "") -> None:
        """End the connection. Safe twice."""
        if self._socket.state is State.OPEN:
            self._socket.send_close(CloseCode.GOING_AWAY, why[:100])
            self._flush()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        for part in self._socket.data_to_send():
            if part:
                self._transport.write(part)
            else:
                self._transport.close()
                return
        if self._socket.state is State.CLOSED:
            self._transport.close()

    def _refuse(self, message: str) -> None:
        self._agents.rejected(message[:1000], self)
        self.send(RejectAgent(message[:1000]))
