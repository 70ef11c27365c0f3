"""What every request must pass before it is looked at: Host, Origin, size.

Rule 1: a page in somebody's browser cannot speak to the grid under a name of its own (DNS rebinding), nor for
another page (Origin).
Rule 2: a request is at most 1 MB, whether or not it says so.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distributed_grid.server.rest.responses import Answer, TooLarge, failure, refusal

LARGEST_BODY = 1024 * 1024
IsKnown = Callable[[str], bool]


class HostCheck:
    """Lets through what may be looked at; `served` hears of each."""

    def __init__(self, app: ASGIApp, *, is_known_host: IsKnown, served: Callable[[], None]) -> None:
        self._app = app
        self._is_known_host = is_known_host
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        problem = self._problem(headers, scope["scheme"])
        if problem is not None:
            await problem(scope, receive, send)
            return
        self._served()
        try:
            await self._app(scope, _limited(receive), send)
        finally:
            self._served()

    def _problem(self, headers: dict[str, str], scheme: str) -> Answer | None:
        host = headers.get("host", "")
        if not self._is_known_host(name_of(host)):
            return failure(403, "Forbidden", "the Host header names another host; see server.names in the config")
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"{scheme}://{host}".lower():
            return failure(403, "Forbidden", "pages of other origins may not ask here")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > LARGEST_BODY:
            return refusal(TooLarge(f"a request may have {LARGEST_BODY} bytes, not {length}"))
        return None


def name_of(host: str) -> str:
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
        if taken > LARGEST_BODY:
            raise TooLarge(f"a request may have {LARGEST_BODY} bytes")
        return message

    return limited
