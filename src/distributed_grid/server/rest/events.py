"""The audit trail, as lines of JSON or as server-sent events."""

from __future__ import annotations

import contextlib
from typing import Annotated

from fastapi import APIRouter, Header, Query

from distributed_grid.api import requests
from distributed_grid.server.rest.auth import AuthenticatedRequest, Visit
from distributed_grid.server.rest.models import Event
from distributed_grid.server.rest.responses import NDJSON, Stream, Write, line

SSE = "text/event-stream"
router = APIRouter(tags=["events"])


@router.get(
    "/events",
    status_code=200,
    response_class=Stream,
    responses={200: {"model": Event, "description": "One event a line.", "content": {NDJSON: {}, SSE: {}}}},
)
async def events(
    visitor: Visit,
    after: Annotated[int | None, Query(ge=0, le=2**62, description="Only those after this `seq`.")] = None,
    follow: Annotated[bool, Query(description="Go on with what still comes.")] = False,
    subject: Annotated[str | None, Query(max_length=128, description="About this job, lease or node.")] = None,
    types: Annotated[list[str] | None, Query(max_length=50, alias="type")] = None,
    limit: Annotated[int, Query(ge=1, le=1_000_000)] = 100,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    last_event_id: Annotated[str, Header(include_in_schema=False)] = "",
) -> Stream:
    """What happened, oldest first: the newest `limit`, or those after a number."""
    if last_event_id.isdigit() and len(last_event_id) < 19:
        after = int(last_event_id)
    op = requests.ListEvents(after, follow, subject, tuple(types or ()), limit)
    as_sse = SSE in accept
    return Stream(lambda write: _tell(visitor, op, as_sse, write), SSE if as_sse else NDJSON)


async def _tell(visitor: AuthenticatedRequest, op: requests.ListEvents, as_sse: bool, write: Write) -> None:
    async with contextlib.aclosing(visitor.deeds.events(op)) as found:
        async for event in found:
            text = line(event)
            await write(
                b"id: %d\nevent: %s\ndata: %s\n" % (event["seq"], event["type"].encode(), text) if as_sse else text
            )
