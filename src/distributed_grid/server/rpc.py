"""RPC over the Unix socket: the connections of clients, and the dispatcher of their requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from distributed_grid import __version__
from distributed_grid.api import requests
from distributed_grid.api.answers.jobs import FetchedFile, FetchedTree, JobNotice
from distributed_grid.api.framing import (
    JSON,
    MAX_FRAME_BYTES,
    MAX_REQUEST_BYTES,
    PROTOCOL,
    STDOUT,
    BrokenFrame,
    Unpacker,
    frame,
    frame_head,
)
from distributed_grid.errors import GridError, ProtocolError, Refused, error_view
from distributed_grid.posix.sockets import is_own_peer, peer_uid
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.answers import READ_SECONDS, EncodedAnswer
from distributed_grid.server.endpoints import BoundEndpoint, EndpointTable, Kind
from distributed_grid.server.services.jobs import FileSink
from distributed_grid.server.services.memory import MemoryService
from distributed_grid.supervision import start_logged

MAX_WAITING_BYTES = 2 * MAX_REQUEST_BYTES  # of requests behind the one being answered
REQUEST_OVERHEAD_BYTES = 100
MAX_TAKEN, MAX_TAKEN_BYTES = 8, 64 * 1024  # requests that are looked at together, of those that wait
log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class Connection(asyncio.Protocol):
    """Answers one client, in the order of its requests; a client that hangs up cancels the request under way.

    A client that does not read its answers gets no more of them, and one with too many requests waiting is cut off.
    """

    def __init__(
        self, serve: Callable[[Connection, list[bytes]], Awaitable[None]], connections: set[Connection]
    ) -> None:
        self._serve = serve
        self._connections = connections
        self._unpacker = Unpacker(MAX_REQUEST_BYTES)
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._waiting_bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer: socket.socket = transport.get_extra_info("socket")
        if not is_own_peer(peer):
            log.warning("a connection of uid %d was refused", peer_uid(peer))
            transport.abort()
            return
        self._connections.add(self)
        self._task = start_logged(self._run(), "a connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            for kind, body in self._unpacker.feed(data):
                if kind != JSON:
                    raise BrokenFrame(f"clients send JSON, not {kind!r}")
                self._waiting_bytes += len(body) + REQUEST_OVERHEAD_BYTES
                if self._waiting_bytes > MAX_WAITING_BYTES:
                    raise BrokenFrame("more requests than may wait for their answers")
                self._messages.put_nowait(body)
        except BrokenFrame as broken:
            log.warning("a client broke the protocol: %s", broken)
            self.close()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    @property
    def has_unanswered(self) -> bool:
        """True while a request waits for its answer."""
        return self._busy or not self._messages.empty()

    @property
    def is_closing(self) -> bool:
        """True once the client is known to be gone: a message sent now is not delivered."""
        return self._transport is None or self._transport.is_closing()

    async def _run(self) -> None:
        try:
            while True:
                bodies = [await self._messages.get()]
                taken = len(bodies[0])
                while len(bodies) < MAX_TAKEN and taken < MAX_TAKEN_BYTES and not self._messages.empty():
                    bodies.append(self._messages.get_nowait())
                    taken += len(bodies[-1])
                self._waiting_bytes -= taken + REQUEST_OVERHEAD_BYTES * len(bodies)
                self._busy = True
                try:
                    await self._serve(self, bodies)
                finally:
                    self._busy = False
        finally:
            self.close()  # a client that waits for an answer sees the end at least

    def send_failure(self, failure: BaseException) -> None:
        """Answer a failed request; a bug is logged, and affects no other client."""
        if isinstance(failure, GridError):
            self.send({"error": error_view(failure)})
        else:
            log.error("a request failed", exc_info=failure)
            self.send({"error": {"type": "Bug", "message": "the control plane has a bug; see its log"}})

    async def send_answer(self, answer: Any) -> None:
        """Send an answer; a long one in parts, each once the client has taken the one before. A client that takes
        nothing for long is disconnected."""
        if not isinstance(answer, EncodedAnswer):
            self.send(answer)
            return
        self._write(frame_head(JSON, answer.size))
        async for part in answer.paced_parts():
            self._write(part)
            try:
                async with asyncio.timeout(READ_SECONDS):
                    await self.drain()
            except TimeoutError:
                log.warning("a client did not read its answer for %g s: disconnected", READ_SECONDS)
                if self._transport is not None:
                    self._transport.abort()
                return

    def send(self, message: Any) -> None:
        """Send a JSON message; where a client could not take it, that is the answer."""
        body = _encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            reason = f"the answer has {len(body):,} bytes, {MAX_FRAME_BYTES:,} can be sent: ask for less"
            body = _encoder.encode({"error": error_view(Refused(reason))})
        self.send_frame(JSON, body)

    def send_last(self, answer: Any) -> None:
        """Send the answer that ends a stream."""
        self.send({**msgspec.to_builtins(answer), "done": True})

    def send_frame(self, kind: bytes, body: bytes) -> None:
        self._write(frame(kind, body))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self.is_closing:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the client has received all messages."""
        await self._writable.wait()


class Dispatcher:
    """Answers the requests of the socket as `owner`, an admin; `on_request` is called for each."""

    def __init__(self, table: EndpointTable, *, owner: str, on_request: Callable[[], None]) -> None:
        self._endpoints = table.by_request
        self._owner = Caller(owner, admin=True, is_here=True)
        self._on_request = on_request

    async def serve(self, client: Connection, bodies: list[bytes]) -> None:
        """Answer requests in their order, each before the next is begun; only submissions that a client sends without
        waiting for the answers are begun together, so that they share a commit."""
        for is_submission, ops in itertools.groupby(map(_parse, bodies), lambda op: isinstance(op, requests.SubmitJob)):
            if is_submission:
                self._on_request()
                submitted = (self._endpoints[requests.SubmitJob].call(op, self._owner) for op in ops)
                for answer in await asyncio.gather(*submitted, return_exceptions=True):
                    if isinstance(answer, BaseException):
                        client.send_failure(answer)
                    else:
                        client.send(answer)
                await client.drain()
                continue
            for op in ops:
                try:
                    await self._serve_one(client, op)
                except Exception as failure:  # the outermost loop of a client
                    client.send_failure(failure)
                await client.drain()

    async def _serve_one(self, client: Connection, op: requests.Message | GridError) -> None:
        """Answer one request; an invalid one is raised."""
        self._on_request()
        if isinstance(op, GridError):
            raise op
        bound = self._endpoints[type(op)]
        match bound.endpoint.kind:
            case Kind.ANSWER:
                answer = await bound.call(op, self._owner)
                await client.send_answer(answer)
                if isinstance(op, requests.TakeTask) and client.is_closing:  # it was not written: the client is gone
                    undelivered = requests.WithdrawAsk(op.worker_id, op.incarnation, answer.ask_id)
                    withdrawal = self._endpoints[requests.WithdrawAsk].call(undelivered, self._owner)
                    start_logged(withdrawal, "a task that was not delivered")
            case Kind.PROGRESS:
                client.send_last(await bound.call(op, self._owner, client.send))
            case Kind.STREAM:
                await self._stream(bound, op, client)

    async def _stream(self, bound: BoundEndpoint, op: requests.Message, client: Connection) -> None:
        """Send a stream by hand: events, files, or the output of a job."""
        if isinstance(op, requests.ListEvents):
            async with contextlib.aclosing(bound.call(op, self._owner)) as events:
                async for event in events:
                    client.send(event)
                    await client.drain()
            client.send({"done": True})
            return

        async def header(fields: FetchedTree | FetchedFile) -> None:
            client.send(fields)
            await client.drain()

        async def data(chunk: bytes) -> None:
            client.send_frame(STDOUT, chunk)
            await client.drain()

        sink = FileSink(header, data) if isinstance(op, requests.FetchFiles) else _SocketOutput(client)
        client.send_last(await bound.call(op, self._owner, sink))


class _SocketOutput:
    """Output of a job on the socket: frames of bytes, and a message where bytes were dropped."""

    def __init__(self, client: Connection) -> None:
        self._client = client

    async def send(self, kind: bytes, chunk: bytes) -> None:
        self._client.send_frame(kind, chunk)
        await self._client.drain()

    async def skip(self, kind: bytes, dropped: int, message: str) -> None:
        stream = "stdout" if kind == STDOUT else "stderr"
        self._client.send({"stream": stream, "dropped": dropped, "message": message})
        await self._client.drain()

    async def notify(self, notice: JobNotice) -> None:
        self._client.send(notice)
        await self._client.drain()


def _parse(body: bytes) -> requests.Message | GridError:
    """The request, or the error in it."""
    try:
        return requests.parse(body)
    except GridError as failure:
        return failure


class NodeMemoryDispatcher:
    """Answers programs on other nodes, through their agents, about the memory pool of `owner` alone."""

    def __init__(self, memory: MemoryService, owner: str) -> None:
        self._endpoints = EndpointTable([memory]).by_request
        self._caller = Caller(owner)

    async def serve(self, node: str, body: bytes) -> bytes:
        """The answer to one request from a node; a failure is in the answer."""
        try:
            op = requests.parse(body)
            if isinstance(op, requests.ClientHello):
                if op.protocol != PROTOCOL:
                    raise ProtocolError(f"this control plane speaks protocol {PROTOCOL}, not {op.protocol}")
                return _encoder.encode({"protocol": PROTOCOL, "version": __version__, "handing_over": False})
            if (bound := self._endpoints.get(type(op))) is None:
                raise Refused("from another node only the memory pool can be asked for")
            home = (node,) if isinstance(op, requests.AllocateBlock) else ()
            return _encoder.encode(await bound.call(op, self._caller, *home))
        except GridError as error:
            return _encoder.encode({"error": error_view(error)})
