"""Nodes and what they offer."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from distributed_grid.server.rest.auth import Visit
from distributed_grid.server.rest.models import Nodes, Offers, OneNode, Recommendations
from distributed_grid.server.rest.responses import Answer

router = APIRouter(tags=["nodes"])
NodeName = Annotated[str, Path(min_length=1, max_length=128, description="The node's name.")]


@router.get("/nodes", response_model=Nodes)
async def nodes(visitor: Visit) -> Answer:
    """Every node: what it has, what it lends, how hard it works."""
    return Answer({"nodes": (await visitor.deeds.status())["nodes"]})


@router.get("/nodes/{name}", response_model=OneNode)
async def node(visitor: Visit, name: NodeName) -> Answer:
    """One node."""
    return Answer(await visitor.deeds.node(name))


@router.get("/offers", response_model=Offers)
async def offers(visitor: Visit) -> Answer:
    """What can be had right now."""
    return Answer({"offers": (await visitor.deeds.status())["offers"]})


@router.get("/recommendations", response_model=Recommendations)
async def recommendations(visitor: Visit) -> Answer:
    """The work that should move from one node to another, and why."""
    return Answer({"recommendations": (await visitor.deeds.status())["recommendations"]})
