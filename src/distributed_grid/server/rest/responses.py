"""Responses of REST: JSON as `--json` prints it, errors in one format with their status, and streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from distributed_grid.errors import (
    Ambiguous,
    BadInput,
    Conflict,
    GridError,
    IllegalStep,
    NotFound,
    ProtocolError,
    Refused,
    StaleFence,
    StoreFailed,
    StoreRefused,
    TimedOut,
    Unreachable,
    error_view,
)
from distributed_grid.server.access.tokens import Forbidden
from distributed_grid.server.answers import READ_SECONDS, EncodedAnswer

JSON = "application/json"
NDJSON = "application/x-ndjson"
Write = Callable[[bytes], Awaitable[None]]
log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class Unauthorized(GridError):
    """There is no token, or it is not valid."""


class TooLarge(BadInput):
    """The body is too large."""


STATUS: dict[type[GridError], int] = {
    TooLarge: 413,
    BadInput: 400,
    ProtocolError: 400,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    Ambiguous: 409,
    Conflict: 409,
    StaleFence: 409,
    Refused: 409,
    Unreachable: 503,
    StoreFailed: 503,
    StoreRefused: 503,
    TimedOut: 504,
    IllegalStep: 500,
    GridError: 500,
}


class JsonResponse(Response):
    """JSON, encoded as on the socket."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        return _encoder.encode(content)


class EncodedResponse(Response):
    """An answer that is encoded already, sent in parts with back-pressure. A reader that takes nothing for long is
    disconnected."""

    def __init__(self, answer: EncodedAnswer[Any]) -> None:
        self._answer = answer
        super().__init__(media_type=JSON)
        self.headers["content-length"] = str(answer.size)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for part in self._answer.paced_parts():
                async with asyncio.timeout(READ_SECONDS):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except TimeoutError:  # incomplete, so the server closes the connection
            log.warning("a client did not read its answer for %g s: disconnected", READ_SECONDS)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def error_response(error: GridError) -> JsonResponse:
    """An error as an HTTP response."""
    view = error_view(error)
    view.pop("exit_code")
    view.setdefault("reasons", [])
    status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {"Retry-After": "1"} if status == 503 else None
    return JsonResponse({"error": view}, status, headers)


def http_error_response(status: int, kind: str, message: str, headers: Any = None) -> JsonResponse:
    """An error of HTTP itself, in the same format."""
    return JsonResponse({"error": {"type": kind, "message": message, "reasons": []}}, status, headers)


def json_line(content: Any) -> bytes:
    """One line of a stream of JSON."""
    return _encoder.encode(content) + b"\n"


class StreamResponse(Response):
    """Output as it comes, with back-pressure; when the reader hangs up, its producer is cancelled."""

    def __init__(
        self, produce: Callable[[Write], Awaitable[None]], media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._produce = produce
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]  # of the empty body
        self.headers.update(headers or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def write(chunk: bytes) -> None:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

        async def disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        producing, disconnecting = asyncio.ensure_future(self._produce(write)), asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait((producing, disconnecting), return_when=asyncio.FIRST_COMPLETED)
            if producing.done():
                producing.result()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            for task in (producing, disconnecting):
                task.cancel()
            await asyncio.gather(producing, disconnecting, return_exceptions=True)
