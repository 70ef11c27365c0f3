"""Boosts: what nodes lend to one that needs more. Asked for, listed, extended, given back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query

from distributed_grid.api import requests
from distributed_grid.server.rest.auth import AuthenticatedRequest, Visit, takes
from distributed_grid.server.rest.models import Boosts, OneBoost
from distributed_grid.server.rest.responses import Answer
from distributed_grid.server.services.boosts import BoostService

router = APIRouter(tags=["boosts"])
BoostName = Annotated[str, Path(min_length=1, max_length=128, description="A boost's id, or any unique prefix.")]
Key = Annotated[str | None, Header(alias="Idempotency-Key", description="The same key and body do nothing twice.")]


@router.get("/boosts", response_model=Boosts)
async def boosts(
    visitor: Visit, node: Annotated[str, Query(max_length=128, description="Only what is lent to this node.")] = ""
) -> Answer:
    """The boosts that hold something, summed up by type and one by one."""
    return Answer(await _boosting(visitor).list(requests.ListBoosts(node)))


@router.get("/boosts/{name}", response_model=OneBoost)
async def boost(visitor: Visit, name: BoostName) -> Answer:
    """One boost, alive or ended."""
    return Answer(await _boosting(visitor).one(name))


@router.post("/boosts", response_model=OneBoost, openapi_extra=takes(requests.RequestBoost))
async def request(visitor: Visit, _key: Key = None) -> Answer:
    """Lend a node what another can spare. The answer never waits: a boost that is not `active` yet is in line for
    `wait_seconds`, or is being reserved; look at it again. A dry run has no `boost`."""
    op = requests.convert(await visitor.fields_with_id(), requests.RequestBoost)
    return Answer(await _boosting(visitor).request(op, visitor.caller))


@router.delete("/boosts/{name}", response_model=OneBoost)
async def release(visitor: Visit, name: BoostName) -> Answer:
    """Give a boost back; a second time is harmless. Only its owner or the admin may."""
    return Answer(await _boosting(visitor).release(requests.ReleaseBoost(name), visitor.caller))


@router.post("/boosts/{name}/extend", response_model=OneBoost, openapi_extra=takes(requests.ExtendBoost, "boost_id"))
async def extend(visitor: Visit, name: BoostName) -> Answer:
    """More time for a boost, counted from its end. Only its owner or the admin may."""
    op = requests.convert({**await visitor.fields(), "boost_id": name}, requests.ExtendBoost)
    return Answer(await _boosting(visitor).extend(op, visitor.caller))


def _boosting(visitor: AuthenticatedRequest) -> BoostService:
    return BoostService(visitor.house, visitor.deeds)
