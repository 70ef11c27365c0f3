"""The web server of the stand-in of Compute Engine: JSON over HTTP with Google's clock, and its service of tokens."""

from __future__ import annotations

import base64
import json
import threading
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Answer = tuple[int, Any]
"""Status and body; a status of 0 cuts the connection, a body of None is no JSON."""


class GceWebServer:
    """Serves calls on a port of this machine. Once somebody has asked for a token, every call must carry it."""

    def __init__(
        self, answer: Callable[[str, str, Mapping[str, str], Any, str], Answer], clock: Callable[[], float]
    ) -> None:
        self.answer, self.clock = answer, clock
        self.bearer = ""
        self.assertions: list[Mapping[str, Any]] = []
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.web = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def grant_token(self, form: Mapping[str, str]) -> Answer:
        """A token for whoever signed the assertion."""
        part = form["assertion"].split(".")[1]
        self.assertions.append(json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))))
        self.bearer = f"ya29.{uuid.uuid4().hex}"
        return 200, {"access_token": self.bearer, "expires_in": 3600, "token_type": "Bearer"}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def failure(status: int, reason: str, message: str) -> Answer:
    """An error as Google's REST calls answer it."""
    errors = [{"domain": "global", "reason": reason, "message": message}]
    return status, {"error": {"code": status, "message": message, "errors": errors}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    web: GceWebServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    server: _Server
    timeout = 30

    def do_GET(self) -> None:
        web, parts = self.server.web, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path == "/token":
            status, found = web.grant_token({key: value[0] for key, value in parse_qs(body.decode()).items()})
        elif parts.path == "/token/of-nobody":
            status, found = 400, {"error": "invalid_grant", "error_description": "Invalid JWT Signature."}
        elif web.bearer and self.headers.get("Authorization") != f"Bearer {web.bearer}":
            status, found = failure(401, "authError", "Request had invalid authentication credentials")
        else:
            reason, content = self.headers.get("X-Goog-Request-Reason", ""), json.loads(body or b"null")
            status, found = web.answer(self.command, unquote(parts.path), query, content, reason)
        if not status:
            self.close_connection = True
            return
        data = b"<html>" if found is None else json.dumps(found).encode()
        self.send_response_only(status)
        self.send_header("Date", self.date_time_string(web.clock()))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *words: Any) -> None:
        """Say nothing."""
