"""Leases: asked for, looked at, extended, given back."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Header, Path, Query

from distributed_grid.api import requests
from distributed_grid.server.rest.auth import Visit, takes
from distributed_grid.server.rest.models import Allocations, Explanation, LendingLedger, OneAllocation
from distributed_grid.server.rest.responses import Answer

router = APIRouter(tags=["leases"])
LeaseName = Annotated[str, Path(min_length=1, max_length=128, description="A lease's id, or any unique prefix.")]
Key = Annotated[str | None, Header(alias="Idempotency-Key", description="The same key and body do nothing twice.")]


@router.get("/leases", response_model=Allocations)
async def leases(visitor: Visit) -> Answer:
    """The leases that hold something."""
    return Answer({"allocations": (await visitor.deeds.status())["allocations"]})


@router.get("/leases/{name}", response_model=OneAllocation)
async def lease(visitor: Visit, name: LeaseName) -> Answer:
    """One lease, alive or ended."""
    return Answer(await visitor.deeds.lease(name))


@router.get("/leases/{name}/explain", response_model=Explanation)
async def explain(visitor: Visit, name: LeaseName) -> Answer:
    """Why a lease waits, why it is there, why it ended, when it will start."""
    return Answer(await visitor.deeds.explain(requests.Explain(name, "lease")))


@router.post("/leases", response_model=OneAllocation, openapi_extra=takes(requests.RequestLease))
async def ask(visitor: Visit, _key: Key = None) -> Answer:
    """Ask for resources to hold, without a command. The answer never waits: a lease whose `state` is `asked` is in
    line for `wait_seconds`; look at it again."""
    op = requests.convert(await visitor.fields_with_id(), requests.RequestLease)
    return Answer(await visitor.deeds.ask(op, visitor.caller))


@router.get("/ledger", response_model=LendingLedger)
async def ledger(
    visitor: Visit,
    since_seconds: Annotated[float, Query(gt=0, le=3.2e9, description="How far back.")] = 30 * 86_400.0,
    by: Annotated[Literal["user", "node", "day"] | None, Query(description="Summed up by this alone.")] = None,
) -> Answer:
    """Who lent whom how much."""
    return Answer(await visitor.deeds.ledger(requests.GetLendingReport(since_seconds, by or "")))


@router.delete("/leases/{name}", response_model=OneAllocation)
async def release(visitor: Visit, name: LeaseName) -> Answer:
    """Give a lease back; a second time is harmless. Only its owner or the admin may."""
    return Answer(await visitor.deeds.release(requests.ReleaseLease(name), visitor.caller))


@router.post(
    "/leases/{name}/extend", response_model=OneAllocation, openapi_extra=takes(requests.ExtendLease, "allocation_id")
)
async def extend(visitor: Visit, name: LeaseName) -> Answer:
    """More time for a lease, counted from its end. Only its owner or the admin may."""
    op = requests.convert({**await visitor.fields(), "allocation_id": name}, requests.ExtendLease)
    return Answer(await visitor.deeds.extend(op, visitor.caller))
