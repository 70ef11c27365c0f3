"""REST application and its HTTP server, inside the daemon's event loop. Agents' WebSockets are passed on.

Imported when the first connection arrives, not before: FastAPI takes a second and 40 MB. OpenAPI needs a token, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from distributed_grid import __version__
from distributed_grid.control.view_types import ErrorAnswer
from distributed_grid.errors import BadInput, GridError
from distributed_grid.server.access.admission import Admission
from distributed_grid.server.rest import routes
from distributed_grid.server.rest.auth import Authenticated, HostCheck, IsKnownHost
from distributed_grid.server.rest.listener import RestServices
from distributed_grid.server.rest.responses import JsonResponse, error_response, http_error_response

ABOUT = "Lends what is idle on your machines, for a while. Field names, once shipped, do not change."
ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorAnswer, "description": "Why the request failed."}}
FIRST_REQUEST_SECONDS = 15.0
SHUTDOWN_SECONDS = 0.5
MAX_CONCURRENT_REQUESTS = 2000
AgentEndpoint = Callable[[], asyncio.Protocol]


def make_app(
    services: RestServices, admission: Admission, *, is_known_host: IsKnownHost, on_request: Callable[[], None]
) -> FastAPI:
    """The application; `is_known_host` says whether a Host header may name it."""
    app = FastAPI(
        title="grid",
        version=__version__,
        description=ABOUT,
        responses=ERRORS,
        openapi_url=None,  # served below, to those with a token
        docs_url=None,  # the page that draws it would be fetched from the internet
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services, app.state.admission = services, admission
    app.include_router(routes.router)
    app.include_router(routes.prometheus_router)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(call: Authenticated) -> JsonResponse:
        return JsonResponse(app.openapi())

    app.add_exception_handler(GridError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(HostCheck, is_known_host=is_known_host, on_request=on_request)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, GridError)
    return error_response(error)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    slips = "; ".join(f"{'.'.join(map(str, slip['loc'][1:]))}: {slip['msg']}" for slip in error.errors()[:5])
    return error_response(BadInput(f"invalid request: {slips}"))


async def _http(request: Request, error: Exception) -> Response:
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
        listener: socket.socket,
        app: FastAPI,
        *,
        agent_endpoint: AgentEndpoint,
        certificate: tuple[Path, Path] | None,
    ) -> None:
        def connection(**given: Any) -> asyncio.Protocol:
            return _HttpConnection(self._server.transports, **given)

        def websocket(**_: Any) -> asyncio.Protocol:
            return agent_endpoint()

        config = uvicorn.Config(
            cast(Any, app),
            http=cast(type[asyncio.Protocol], connection),
            ws=cast(type[asyncio.Protocol], websocket),
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            limit_concurrency=MAX_CONCURRENT_REQUESTS,
            ssl_certfile=certificate[0] if certificate else None,
            ssl_keyfile=str(certificate[1]) if certificate else None,
        )
        self._listener = listener
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._listener]))
        gc.freeze()

    async def stop(self) -> None:
        """Let nobody new in, give answers under way a moment, cut streams and agents off."""
        self._server.ending.set()
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=4 * SHUTDOWN_SECONDS)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is under way, such as a stream somebody follows."""
        return bool(self._server.server_state.tasks)


class _Server(uvicorn.Server):
    """uvicorn without its own signals, clock and manner of leaving."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()
        self.transports: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
        """The connections made so far, those of agents included."""

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
    """A connection that is remembered, and that has to ask something within a while."""

    def __init__(self, known: weakref.WeakSet[asyncio.Transport], **given: Any) -> None:
        super().__init__(**given)
        self._known = known

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._known.add(transport)
        self.loop.call_later(FIRST_REQUEST_SECONDS, self._give_up)

    def _give_up(self) -> None:
        asked: object = self.cycle
        if asked is None and self in self.connections:
            self.transport.abort()
