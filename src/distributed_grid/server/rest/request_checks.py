"""Request checks of REST: Host and Origin headers, size and form of the body, Idempotency-Key.

A page in a browser can reach the grid neither under a host name of its own (DNS rebinding) nor on behalf of another
origin. A body has at most 1 MB, declared or not.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distributed_grid.api.requests import non_finite_in
from distributed_grid.errors import BadInput
from distributed_grid.server.rest.responses import JsonResponse, TooLarge, error_response, http_error_response

MAX_BODY_BYTES = 1024 * 1024
log = logging.getLogger(__name__)
IsKnownHost = Callable[[str], bool]
_IDEMPOTENCY_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object in a body; no body is an empty one."""
    raw = await request.body()
    try:
        fields = msgspec.json.decode(raw) if raw else {}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        problem = non_finite_in(raw)
        raise BadInput(f"invalid request: {problem}" if problem else f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadInput("the body must be a JSON object")
    return fields


def idempotency_key(request: Request, fields: dict[str, Any]) -> str | None:
    """The Idempotency-Key; BadInput where it is invalid or the `request_id` of the body is another one."""
    key = request.headers.get("idempotency-key")
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise BadInput("an Idempotency-Key has letters, digits, '-' and '_', at most 64, such as sweep-7")
    if key is not None and fields.get("request_id", key) != key:
        raise BadInput("request_id and Idempotency-Key say different things")
    return key


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
    """Raises TooLarge once the body exceeds its limit."""
    taken = 0

    async def limited() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MAX_BODY_BYTES:
            raise TooLarge(f"a request may have {MAX_BODY_BYTES} bytes")
        return message

    return limited
