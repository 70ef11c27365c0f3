"""Metadata services of clouds on a loopback port: EC2's with session tokens, Compute Engine's, and hostile ones.

`say` sets what a path answers; without that there is nothing there (404). `mood` makes every answer slow, huge, a
redirect or nonsense; with `refuse` no token is given or taken.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SPOT_ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"


class MetadataStandIn:
    """Metadata service of a machine; `requests` are the received lines."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {PREEMPTED: "FALSE", MAINTENANCE: "NONE"}
        self.mood = ""
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        self.interrupted: set[str] | None = None
        self.released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def say(self, path: str, text: str | None) -> None:
        """Have a path answer this; None: there is nothing."""
        if text is None:
            self.answers.pop(path, None)
        else:
            self.answers[path] = text

    def interrupt(self, seconds: float, action: str = "terminate") -> None:
        """Give the spot notice of EC2 for so many seconds from now; a machine that comes later has none."""
        self.interrupted = set(self.tokens)
        at = datetime.now(UTC) + timedelta(seconds=seconds)
        self.say(SPOT_ACTION, json.dumps({"action": action, "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}))

    def expire_tokens(self) -> None:
        self.tokens.clear()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(service: MetadataStandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            service.requests.append(f"PUT {self.path}")
            if service.mood == "refuse":
                self._answer(403, "")
            elif self.path != "/latest/api/token" or not self.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
                self._answer(400, "")
            else:
                token = secrets.token_urlsafe(24)
                service.tokens.add(token)
                self._answer(200, token)

        def do_GET(self) -> None:
            service.requests.append(f"GET {self.path}")
            if self.path.startswith("/latest/"):
                is_allowed = self.headers.get("X-aws-ec2-metadata-token") in service.tokens
                refusal = 401
            else:
                is_allowed, refusal = self.headers.get("Metadata-Flavor") == "Google", 403
            if not is_allowed or service.mood == "refuse":
                self._answer(refusal, "")
            elif service.mood == "slow":
                self._drip()
            elif service.mood == "silent":
                service.released.wait(30)
            elif service.mood == "huge":
                self._answer(200, "x" * 10_000_000)
            elif service.mood == "redirect":
                self._answer(302, "", {"Location": f"{service.url}/elsewhere"})
            elif service.mood == "broken":
                self._answer(500, "")
            elif self.path in service.answers and not self._is_spared():
                self._answer(200, service.answers[self.path])
            else:
                self._answer(404, "")

        def _answer(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
            body = text.encode()
            with contextlib.suppress(OSError):
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                if self.path.startswith("/computeMetadata/"):
                    self.send_header("Metadata-Flavor", "Google")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def _is_spared(self) -> bool:
            """Whether a spot notice is for other machines."""
            token = self.headers.get("X-aws-ec2-metadata-token")
            return self.path == SPOT_ACTION and service.interrupted is not None and token not in service.interrupted

        def _drip(self) -> None:
            """One byte now and then, for longer than anybody waits."""
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                end = time.monotonic() + 30
                while time.monotonic() < end and not service.released.wait(0.05):
                    self.wfile.write(b"x")
                    self.wfile.flush()

        def log_message(self, *words: object) -> None:
            """Nobody reads it."""

    return Handler


@contextlib.contextmanager
def metadata_service() -> Iterator[MetadataStandIn]:
    """A metadata service for as long as the block runs."""
    service = MetadataStandIn()
    try:
        yield service
    finally:
        service.close()
