"""REST application and its HTTP server, inside the daemon's event loop. Agents' WebSockets are passed on.

Imported when the first connection arrives: most control planes never get one. OpenAPI needs a token, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import socket
import ssl
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from distributed_grid.errors import GridError
from distributed_grid.posix.sockets import LimitedListener, PeerLimits
from distributed_grid.server.access.admission import Admission
from distributed_grid.server.access.tls import BUFFER_BYTES, TlsConnection
from distributed_grid.server.rest.listener import RestServices
from distributed_grid.server.rest.openapi import Handler, openapi_document
from distributed_grid.server.rest.request_checks import HostCheck, IsKnownHost
from distributed_grid.server.rest.responses import JsonResponse, error_response, http_error_response
from distributed_grid.server.rest.routes import RestApi
from distributed_grid.supervision import start_essential

ARRIVAL_SECONDS = {"headers": 15.0, "body": 30.0}
"""How long each part of a request may take to arrive."""
SHUTDOWN_SECONDS = 0.5
MAX_CONCURRENT_REQUESTS = 2000
AgentEndpoint = Callable[[], asyncio.Protocol]


def make_app(
    services: RestServices, admission: Admission, *, is_known_host: IsKnownHost, on_request: Callable[[], None]
) -> Starlette:
    """The application; `is_known_host` says whether a Host header may name it."""
    api = RestApi(services, admission)
    operations = api.operations()
    make_document = functools.cache(lambda: openapi_document(operations))

    async def openapi(request: Request) -> Response:
        api.caller_of(request)
        return JsonResponse(make_document())

    handlers: dict[str, dict[str, Handler]] = {"/openapi.json": {"GET": openapi}}
    for operation in operations:
        handlers.setdefault(operation.route.path, {})[operation.route.method] = operation.serve
    routes = [Route(path, _dispatcher(by_method), methods=[*by_method]) for path, by_method in handlers.items()]
    for route in routes:
        (route.methods or set()).discard("HEAD")  # Starlette adds it to GET: it would begin streams
    app = Starlette(
        routes=routes,
        middleware=[Middleware(HostCheck, is_known_host=is_known_host, on_request=on_request)],
        exception_handlers={GridError: _grid_error, HTTPException: _http_error, Exception: _bug},
    )
    app.router.redirect_slashes = False
    return app


def _dispatcher(by_method: Mapping[str, Handler]) -> Handler:
    """The handler of a path, so that a wrong method is refused with all those of the path."""

    async def serve(request: Request) -> Response:
        return await by_method[request.method](request)

    return serve


async def _grid_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GridError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kinds = {404: "NotFound", 405: "BadInput"}
    return http_error_response(
        error.status_code, kinds.get(error.status_code, "GridError"), str(error.detail), error.headers
    )


async def _bug(request: Request, error: Exception) -> Response:
    return http_error_response(500, "Bug", "the control plane has a bug; see its log")


class UvicornServer:
    """Serves until it is stopped; `stop` is safe to call twice and takes about a second at most."""

    def __init__(
        self,
        listener: LimitedListener,
        app: Starlette,
        *,
        agent_endpoint: AgentEndpoint,
        tls: ssl.SSLContext | None,
        arrival_seconds: Mapping[str, float] = ARRIVAL_SECONDS,
    ) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES if tls is not None else 0))

        def connection(**given: Any) -> asyncio.BaseProtocol:
            http = _HttpConnection(self._server.transports, listener.limits, arrival_seconds, **given)
            if tls is None:
                return http
            encrypted = TlsConnection(tls, http, buffer)
            self._server.transports.add(encrypted)
            return encrypted

        def websocket(**_: Any) -> asyncio.Protocol:
            return agent_endpoint()

        config = uvicorn.Config(
            cast("Any", app),
            http=cast("type[asyncio.Protocol]", connection),
            ws=cast("type[asyncio.Protocol]", websocket),
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            limit_concurrency=MAX_CONCURRENT_REQUESTS,
        )
        config.load()
        self._listener = listener
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = start_essential(self._server.serve([self._listener]), "the REST server")
        gc.freeze()

    async def stop(self) -> None:
        """Close the port, wait a moment for answers under way, cut off streams and agents."""
        self._server.ending.set()
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=4 * SHUTDOWN_SECONDS)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def is_busy(self) -> bool:
        """True while an answer is under way, such as a followed stream."""
        return bool(self._server.server_state.tasks)


class _Server(uvicorn.Server):
    """uvicorn without its own signals, clock and shutdown."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()
        self.transports: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()  # those of agents included

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=SHUTDOWN_SECONDS)
        for transport in list(self.transports):
            transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=SHUTDOWN_SECONDS)


class _HttpConnection(H11Protocol):
    """HTTP connection with a limit per peer, and a deadline for each part of a request."""

    def __init__(
        self,
        known: weakref.WeakSet[asyncio.Transport],
        limits: PeerLimits,
        arrival_seconds: Mapping[str, float],
        **given: Any,
    ) -> None:
        super().__init__(**given)
        self._known = known
        self._limits = limits
        self._arrival_seconds = arrival_seconds
        self._is_refused = False
        self._awaits = ""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._known.add(transport)
        peer = transport.get_extra_info("peername")
        if self._limits.exceeded_by(peer[0] if peer else ""):
            self._is_refused = True
            limit = f"{self._limits.max_per_peer} connections already, which is the limit"
            message = f"{peer[0]} has {limit} (server.max_connections_per_peer)"
            transport.write(_refusal(429, "Too Many Requests", message))
            transport.close()
        else:
            self._await("headers")

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
            self._await(self._awaited())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await(self._awaited())

    def connection_lost(self, exc: Exception | None) -> None:
        self._await("")
        super().connection_lost(exc)

    def _awaited(self) -> str:
        """The part of a request that has begun to arrive: headers, body, or none between requests."""
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        return "headers" if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0] else ""

    def _await(self, part: str) -> None:
        """Set the deadline for this part; none for an empty one."""
        if part == self._awaits:
            return
        self._awaits = part
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if part:
            self._deadline = self.loop.call_later(self._arrival_seconds[part], self._give_up)

    def send_400_response(self, msg: str) -> None:
        """Refuse a broken request, and drop an unfinished answer to an earlier one."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            self.transport.write(_refusal(400, "Bad Request", "this is no HTTP request, or its head is too long"))
        self.transport.close()

    def _give_up(self) -> None:
        if self in self.connections:  # an agent's WebSocket has its own deadline
            self.transport.abort()


def _refusal(status: int, phrase: str, message: str) -> bytes:
    """A whole answer outside of the framework, with which the connection ends."""
    body = http_error_response(status, "Refused" if status == 429 else "BadInput", message).body
    head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}connection: close\r\n\r\n".encode() + bytes(body)
