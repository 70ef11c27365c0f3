"""Calling a web address with an alert: one POST, a deadline over everything, no redirects.

Spoken by hand over a stream, because a blocking library has time-outs per read only: a server that answers a byte at
a time would hold its thread for hours. Here the deadline cancels wherever the call stands.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from urllib.parse import SplitResult, unquote, urlsplit

from distributed_grid import __version__
from distributed_grid.errors import BadInput

DEADLINE_SECONDS = 5.0
LONGEST_LINE = 4096
_PORTS = {"http": 80, "https": 443}


class CallFailed(Exception):
    """The address did not take the message; `again` says whether it may do so later."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


class Webhook:
    """A web address to tell things to. It is a secret: only its scheme and host are ever shown."""

    def __init__(self, address: str) -> None:
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError:
            raise BadInput("the webhook is no web address") from None
        if parts.scheme not in _PORTS or not parts.hostname or not address.isascii() or not address.isprintable():
            raise BadInput("the webhook must be an address that starts with http:// or https://")
        self._host = parts.hostname
        self._port = port or _PORTS[parts.scheme]
        self._head = _head(parts, self._host)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.shown = f"{parts.scheme}://{_bracketed(self._host)}:{self._port}"

    async def post(self, body: bytes, *, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        """Send a JSON text; returns when the other side took it, raises CallFailed where it did not in time."""
        try:
            async with asyncio.timeout(deadline_seconds):
                status = await self._call(body)
        except TimeoutError:
            raise CallFailed(f"no answer within {deadline_seconds:g} s", again=True) from None
        except (OSError, EOFError, ValueError) as failure:
            raise CallFailed(str(failure) or type(failure).__name__, again=True) from failure
        if not 200 <= status < 300:
            raise CallFailed(f"answered {status}", again=status == 429 or status >= 500)

    async def _call(self, body: bytes) -> int:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=LONGEST_LINE)
        try:
            writer.write(self._head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            words = (await reader.readline()).split(maxsplit=2)
            if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
                raise ValueError("the answer is not HTTP")
            return int(words[1])
        finally:
            writer.transport.abort()  # nothing more is wanted of it, and a polite end could take forever


def _head(parts: SplitResult, host: str) -> bytes:
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {_bracketed(host)}" + (f":{parts.port}" if parts.port else ""),
        f"User-Agent: distributed-grid/{__version__}",
        "Content-Type: application/json",
        "Connection: close",
    ]
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        lines.append("Authorization: Basic " + base64.b64encode(login.encode()).decode())
    return ("\r\n".join(lines) + "\r\n").encode()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
