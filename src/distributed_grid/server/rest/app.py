"""The application: the routes of every noun under one roof, one shape for errors, and OpenAPI behind the token."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from distributed_grid import __version__
from distributed_grid.api import requests
from distributed_grid.errors import BadInput, GridError
from distributed_grid.server.context import DaemonContext
from distributed_grid.server.rest import boosts, events, jobs, leases, metrics, nodes
from distributed_grid.server.rest.auth import Visit, body_of, takes
from distributed_grid.server.rest.host_check import HostCheck, IsKnown
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
