"""Request checks of REST: bearer token, Host and Origin headers, size of the body.

Every request but those for health and joining needs a token. A page in a browser can reach the grid neither under a
host name of its own (DNS rebinding) nor on behalf of another origin. A body has at most 1 MB, declared or not.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distributed_grid.api.requests import non_finite_in
from distributed_grid.errors import BadInput
from distributed_grid.server.access.admission import Admission
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.rest.listener import RestServices
from distributed_grid.server.rest.responses import (
    JsonResponse,
    TooLarge,
    Unauthorized,
    error_response,
    http_error_response,
)

BEARER = HTTPBearer(auto_error=False, description="A token: `grid daemon token create`, or the owner's own.")
MAX_BODY_BYTES = 1024 * 1024
log = logging.getLogger(__name__)
IsKnownHost = Callable[[str], bool]
IDEMPOTENCY_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class AuthenticatedRequest:
    """One request: its caller, its body, and the services that can answer it."""

    def __init__(self, request: Request, caller: Caller) -> None:
        self.caller = caller
        self.services: RestServices = request.app.state.services
        self._request = request

    async def fields(self) -> dict[str, Any]:
        """The JSON object in the body; no body is an empty one."""
        return await body_of(self._request)

    async def fields_with_id(self) -> dict[str, Any]:
        """The same, with a request id: the body's, else the Idempotency-Key, else one made here."""
        fields = await self.fields()
        key = self._request.headers.get("idempotency-key")
        if key is not None and not IDEMPOTENCY_KEY.fullmatch(key):
            raise BadInput("an Idempotency-Key has letters, digits, '-' and '_', at most 64, such as sweep-7")
        if key is not None and fields.get("request_id", key) != key:
            raise BadInput("request_id and Idempotency-Key say different things")
        return {"request_id": key or uuid.uuid4().hex, **fields}


async def authenticate(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]
) -> AuthenticatedRequest:
    """The request with its caller; Unauthorized without a valid token."""
    admission: Admission = request.app.state.admission
    token = admission.tokens.user_of(credentials.credentials) if credentials is not None else None
    if token is None:
        raise Unauthorized("a token is needed: Authorization: Bearer …; see grid daemon token create")
    return AuthenticatedRequest(request, Caller(token.user, token.admin, token.team))


Authenticated = Annotated[AuthenticatedRequest, Depends(authenticate)]


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object in a body."""
    raw = await request.body()
    try:
        fields = msgspec.json.decode(raw) if raw else {}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        problem = non_finite_in(raw)
        raise BadInput(f"invalid request: {problem}" if problem else f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadInput("the body must be a JSON object")
    return fields


def takes(kind: type, *left_out: str) -> dict[str, Any]:
    """The body of an operation for OpenAPI: the fields of a request type, but `left_out`."""
    _, parts = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    schema = parts[kind.__name__]
    hidden = {"op", *left_out}
    schema["properties"] = {name: part for name, part in schema["properties"].items() if name not in hidden}
    optional = hidden | {"request_id"}  # made here where nobody gives one
    schema["required"] = [name for name in schema.get("required", ()) if name not in optional]
    schema["additionalProperties"] = False
    return {"requestBody": {"required": bool(schema["required"]), "content": {"application/json": {"schema": schema}}}}


class HostCheck:
    """Middleware that refuses wrong Host and Origin headers and large bodies; `on_request` is called for the rest."""

    def __init__(self, app: ASGIApp, *, is_known_host: IsKnownHost, on_request: Callable[[], None]) -> None:
        self._app = app
        self._is_known_host = is_known_host
        self._on_request = on_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        problem = self._problem(headers, scope["scheme"])
        if problem is not None:
            await problem(scope, receive, send)
            return
        self._on_request()
        try:
            await self._app(scope, _limited(receive), send)
        except ClientDisconnect:  # in the middle of its body: there is nobody to answer
            log.info("a client hung up in the middle of its request")
        finally:
            self._on_request()

    def _problem(self, headers: dict[str, str], scheme: str) -> JsonResponse | None:
        host = headers.get("host", "")
        if not self._is_known_host(host_name(host)):
            return http_error_response(
                403, "Forbidden", "the Host header names another host; see server.names in the config"
            )
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"{scheme}://{host}".lower():
            return http_error_response(403, "Forbidden", "requests of other origins are refused")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            return error_response(TooLarge(f"a request may have {MAX_BODY_BYTES} bytes, not {length}"))
        return None


def host_name(host: str) -> str:
    """The host in a Host header, without its port; empty where it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _limited(receive: Receive) -> Receive:
    taken = 0

    async def limited() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MAX_BODY_BYTES:
            raise TooLarge(f"a request may have {MAX_BODY_BYTES} bytes")
        return message

    return limited
