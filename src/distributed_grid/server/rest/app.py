"""The application: the routes of every noun under one roof, one shape for errors, and OpenAPI behind the token.

HTTP on a socket that listens already, inside the daemon's own event loop; agents' WebSockets go to their door.
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
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from distributed_grid import __version__
from distributed_grid.api import requests
from distributed_grid.errors import BadInput, GridError
from distributed_grid.server.context import DaemonContext
from distributed_grid.server.rest import boosts, events, jobs, leases, metrics, nodes
from distributed_grid.server.rest.auth import HostCheck, IsKnown, Visit, body_of, takes
from distributed_grid.server.rest.models import Error, Health, Joined
from distributed_grid.server.rest.responses import Answer, failure, refusal

ABOUT = "Lends what is idle on your machines, for a while. Field names, once shipped, do not change."
ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": Error, "description": "Why not."}}
public = APIRouter(tags=["joining"])


@public.get("/health", response_model=Health, tags=["health"])
async def health() -> Answer:
    """Whether the control plane answers; needs no token and tells nothing else."""
    return Answer({"status": "ok"})


@public.post("/join", response_model=Joined, openapi_extra=takes(requests.JoinRequest))
async def join(request: Request) -> Answer:
    """Exchange a join token for the right to come in under a key of one's own, of which only the hash is sent."""
    house: DaemonContext = request.app.state.house
    return Answer(await house.admission.join(requests.convert(await body_of(request), requests.JoinRequest)))


def make_app(house: DaemonContext, is_known_host: IsKnown) -> FastAPI:
    """The application for one house; `is_known_host` says whether a Host header may name it."""
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
    app.state.house = house
    app.include_router(public, prefix="/v1")
    for part in (nodes.router, leases.router, boosts.router, jobs.router, events.router):
        app.include_router(part, prefix="/v1")
    app.include_router(metrics.router)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(visitor: Visit) -> Answer:
        return Answer(app.openapi())

    app.add_exception_handler(GridError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(HostCheck, is_known_host=is_known_host, served=house.served)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, GridError)
    return refusal(error)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    slips = "; ".join(f"{'.'.join(map(str, slip['loc'][1:]))}: {slip['msg']}" for slip in error.errors()[:5])
    return refusal(BadInput(f"invalid request: {slips}"))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kinds = {404: "NotFound", 405: "BadInput"}
    return failure(error.status_code, kinds.get(error.status_code, "GridError"), str(error.detail), error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    return failure(500, "Bug", "the control plane has a bug; see its log")


FIRST_REQUEST_SECONDS = 15.0
SHUTDOWN_SECONDS = 0.5
MAX_CONCURRENT_REQUESTS = 2000
AgentEndpoint = Callable[[], asyncio.Protocol]


class UvicornServer:
    """Serves until it is stopped; `stop` is safe to call twice and takes about a second at most."""

    def __init__(
        self,
        listener: socket.socket,
        house: DaemonContext,
        *,
        is_known_host: Callable[[str], bool],
        open_door: AgentEndpoint,
        certificate: tuple[Path, Path] | None,
    ) -> None:
        def connection(**given: Any) -> asyncio.Protocol:
            return _Connection(self._server.transports, **given)

        def door(**_: Any) -> asyncio.Protocol:
            return open_door()

        config = uvicorn.Config(
            cast(Any, make_app(house, is_known_host)),
            http=cast(type[asyncio.Protocol], connection),
            ws=cast(type[asyncio.Protocol], door),
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


class _Connection(H11Protocol):
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
