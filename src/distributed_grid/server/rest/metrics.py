"""What the nodes do and did; the same numbers for Prometheus."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from distributed_grid.api import requests
from distributed_grid.monitoring.prometheus import CONTENT_TYPE
from distributed_grid.server.rest.auth import AuthenticatedRequest, Visit
from distributed_grid.server.rest.models import Shape
from distributed_grid.server.rest.nodes import NodeName
from distributed_grid.server.rest.responses import Answer
from distributed_grid.server.services.metrics import measured

router = APIRouter(tags=["metrics"])
Minutes = Annotated[int | None, Query(ge=1, le=1440, description="How far back, in minutes.")]


@router.get("/v1/metrics/snapshots", response_model=Shape)
async def snapshots(visitor: Visit) -> Answer:
    """What each node does now."""
    return await _measured(visitor, kind="snapshots")


@router.get("/v1/metrics/summary", response_model=Shape)
async def summary(visitor: Visit) -> Answer:
    """The cluster in a few numbers."""
    return await _measured(visitor, kind="summary")


@router.get("/v1/metrics/rebalancing", response_model=Shape)
async def rebalancing(visitor: Visit) -> Answer:
    """How often the grid was rebalanced of late."""
    return await _measured(visitor, kind="rebalancing")


@router.get("/v1/metrics/scheduling", response_model=Shape)
async def scheduling(visitor: Visit) -> Answer:
    """How well requests were served over the last day."""
    return await _measured(visitor, kind="scheduling")


@router.get("/v1/metrics/trend/{name}/{resource_type}", response_model=Shape)
async def trend(
    visitor: Visit, name: NodeName, resource_type: Literal["cpu", "memory", "gpu"], window: Minutes = None
) -> Answer:
    """Where a node's use of one resource is going."""
    return await _measured(visitor, kind="trend", node=name, resource_type=resource_type, window=window)


@router.get("/v1/metrics/history/{name}", response_model=Shape)
async def history(visitor: Visit, name: NodeName, window: Minutes = None) -> Answer:
    """What a node did, minute by minute."""
    return await _measured(visitor, kind="history", node=name, window=window)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "The text format of Prometheus."}},
)
async def prometheus(visitor: Visit) -> Response:
    """For Prometheus; scrape it with a bearer token."""
    text = (await measured(visitor.house.monitor, requests.GetMetrics("prometheus")))["text"]
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


async def _measured(visitor: AuthenticatedRequest, **asked: Any) -> Answer:
    return Answer(await measured(visitor.house.monitor, requests.convert(asked, requests.GetMetrics)))
