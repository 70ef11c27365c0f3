"""Who asks: every request but the ones for health and for joining carries a token."""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from distributed_grid.errors import BadInput
from distributed_grid.server.context import DaemonContext
from distributed_grid.server.rest.responses import Unauthorized
from distributed_grid.server.services.jobs import Caller, JobService

BEARER = HTTPBearer(auto_error=False, description="A token: `grid daemon token create`, or the owner's own.")
KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class AuthenticatedRequest:
    """One request: who asks, and those who can answer."""

    def __init__(self, request: Request, caller: Caller) -> None:
        self.caller = caller
        self.house: DaemonContext = request.app.state.house
        self.deeds = JobService(self.house)
        self._request = request

    async def fields(self) -> dict[str, Any]:
        """The JSON object in the body; no body is an empty one."""
        return await body_of(self._request)

    async def fields_with_id(self) -> dict[str, Any]:
        """The same, with a request id: the body's, else the Idempotency-Key, else one made here."""
        fields = await self.fields()
        key = self._request.headers.get("idempotency-key")
        if key is not None and not KEY.fullmatch(key):
            raise BadInput("an Idempotency-Key has letters, digits, '-' and '_', at most 64")
        if key is not None and fields.get("request_id", key) != key:
            raise BadInput("request_id and Idempotency-Key say different things")
        return {"request_id": key or uuid.uuid4().hex, **fields}


async def visit(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]
) -> AuthenticatedRequest:
    """The visitor behind a request; refuses who has no token that counts."""
    house: DaemonContext = request.app.state.house
    token = house.admission.tokens.user_of(credentials.credentials) if credentials is not None else None
    if token is None:
        raise Unauthorized("a token is needed: Authorization: Bearer …; see grid daemon token create")
    return AuthenticatedRequest(request, Caller(token.user, token.admin, token.team))


Visit = Annotated[AuthenticatedRequest, Depends(visit)]


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object in a body."""
    raw = await request.body()
    try:
        fields = msgspec.json.decode(raw) if raw else {}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadInput(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadInput("the body must be a JSON object")
    return fields


def takes(kind: type, *left_out: str) -> dict[str, Any]:
    """The body of an operation as OpenAPI tells it: the fields of a message of `requests`."""
    _, parts = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    schema = parts[kind.__name__]
    hidden = {"op", *left_out}
    schema["properties"] = {name: part for name, part in schema["properties"].items() if name not in hidden}
    optional = hidden | {"request_id"}  # made here where nobody gives one
    schema["required"] = [name for name in schema.get("required", ()) if name not in optional]
    schema["additionalProperties"] = False
    return {"requestBody": {"required": bool(schema["required"]), "content": {"application/json": {"schema": schema}}}}
