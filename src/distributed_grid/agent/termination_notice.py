"""Notices of a cloud that it will take this machine away, read from its metadata service.

- EC2: the notice of a spot instance says what happens and when, two minutes ahead; a rebalance recommendation only says
  that a notice may come. Each read needs a session token (IMDSv2), which lasts for hours and is renewed when refused.
- Compute Engine: a spot machine reads that it is preempted, and has 30 seconds; one that cannot be migrated is stopped
  for maintenance a minute after that is announced. That one can be called off.

Reads are plain HTTP to a link-local address, past any proxy, with short deadlines and bounded answers. What fails or
is invalid says nothing: it is read again in a moment. They block: call them in a thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from distributed_grid.domain.workers import MAX_NOTICE_MS
from distributed_grid.errors import BadInput
from distributed_grid.wire import AnnouncedEnd

if TYPE_CHECKING:
    from email.message import Message
    from http.client import HTTPConnection

SOURCE_VARIABLE, METADATA_VARIABLE = "GRID_NOTICE_SOURCE", "GRID_METADATA_URL"
METADATA_URL = "http://169.254.169.254"
POLL_SECONDS = 5.0
READ_SECONDS = 2.0
MAX_ANSWER_BYTES = 16_384
TOKEN_SECONDS = 21_600
EC2_NOTICE_MS = 120_000
PREEMPTED_MS, MAINTENANCE_MS = 25_000, 55_000
"""What is left of the 30 and 60 seconds of Compute Engine when a notice is read, at worst."""
log = logging.getLogger(__name__)


class MetadataFailed(Exception):
    """The metadata service was not reached, or its answer is invalid."""


class NoticeSource(Protocol):
    """Where a cloud says that it takes a machine away."""

    def read(self) -> AnnouncedEnd | None:
        """What it says now; None: nothing. Raises MetadataFailed where nobody knows."""


class MetadataAnswer:
    """An answer of a metadata service: status, text, and the time that it says it is."""

    def __init__(self, status: int, text: str, headers: Message) -> None:
        self.status = status
        self.text = text
        self.headers = headers

    @property
    def now(self) -> float:
        """Seconds since 1970 by the service's clock, which the times in its answers go by; else by this machine's."""
        from email.utils import parsedate_to_datetime

        try:
            return parsedate_to_datetime(self.headers.get("Date", "")).timestamp()
        except (TypeError, ValueError, OverflowError):
            return time.time()


class MetadataClient:
    """Reads a metadata service; no proxy, no redirects, and no answer longer or later than its bounds."""

    def __init__(self, url: str = METADATA_URL, *, seconds: float = READ_SECONDS) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise BadInput(f"${METADATA_VARIABLE} is {url!r}: expected http://HOST[:PORT]")
        try:
            self._host, self._port = parts.hostname, parts.port or 80
        except ValueError as failure:
            raise BadInput(f"${METADATA_VARIABLE} is {url!r}: {failure}") from failure
        self._seconds = seconds

    def request(self, method: str, path: str, headers: Mapping[str, str]) -> MetadataAnswer:
        """One answer, whatever its status. Raises MetadataFailed."""
        from http.client import HTTPConnection, HTTPException

        connection = HTTPConnection(self._host, self._port, timeout=self._seconds)
        cut = threading.Timer(self._seconds, _cut, (connection,))  # the timeout is for each piece of an answer
        cut.daemon = True
        try:
            connection.connect()
            cut.start()
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            body = answer.read(MAX_ANSWER_BYTES + 1)
            if len(body) > MAX_ANSWER_BYTES:
                raise MetadataFailed(f"{method} {path}: the answer is too long")
            return MetadataAnswer(answer.status, body.decode(errors="replace").strip(), answer.headers)
        except (OSError, HTTPException, ValueError) as failure:
            raise MetadataFailed(f"{method} {path}: {str(failure) or type(failure).__name__}") from failure
        finally:
            cut.cancel()
            connection.close()


def _cut(connection: HTTPConnection) -> None:
    """End an answer that takes too long."""
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)


class Ec2Notices:
    """Spot notices and rebalance recommendations of EC2."""

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self._token = ""

    def read(self) -> AnnouncedEnd | None:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            return _spot_action(action)
        if self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            return AnnouncedEnd("EC2 recommends to move away from this spot instance")
        return None

    def _get(self, path: str) -> MetadataAnswer | None:
        """What is there; None where there is nothing (404)."""
        for _ in range(2):
            answer = self._client.request("GET", path, {"X-aws-ec2-metadata-token": self._token or self._new_token()})
            if answer.status != HTTPStatus.UNAUTHORIZED:
                break
            self._token = ""  # it has run out
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        if answer.status != HTTPStatus.OK:
            raise MetadataFailed(f"GET {path}: status {answer.status}")
        return answer

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
        answer = self._client.request("PUT", "/latest/api/token", headers)
        if answer.status != HTTPStatus.OK or not answer.text.isascii() or not answer.text.isprintable():
            raise MetadataFailed(f"PUT /latest/api/token: status {answer.status}")
        self._token = answer.text
        return self._token


def _spot_action(answer: MetadataAnswer) -> AnnouncedEnd:
    try:
        said = json.loads(answer.text)
        action = str(said["action"])[:40]
        at = datetime.fromisoformat(said["time"])
        ends_in_ms = round(1000 * (at.replace(tzinfo=at.tzinfo or UTC).timestamp() - answer.now))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as failure:
        raise MetadataFailed(f"invalid spot notice: {failure}") from failure
    return AnnouncedEnd(f"EC2 spot notice ({action})", min(max(ends_in_ms, 0), EC2_NOTICE_MS))


class GceNotices:
    """Preemption and maintenance of Compute Engine."""

    def __init__(self, client: MetadataClient, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._monotonic = monotonic
        self._since: dict[str, float] = {}

    def read(self) -> AnnouncedEnd | None:
        if self._get("preempted").upper() == "TRUE":
            return self._ends("preempted", "Compute Engine preempts this machine", PREEMPTED_MS)
        if self._get("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            return self._ends("maintenance", "Compute Engine stops this machine for maintenance", MAINTENANCE_MS)
        self._since.clear()
        return None

    def _ends(self, what: str, why: str, notice_ms: int) -> AnnouncedEnd:
        """The end of the machine, counted from when it was first read."""
        since = self._since.setdefault(what, self._monotonic())
        left = notice_ms - round(1000 * (self._monotonic() - since))
        return AnnouncedEnd(why, min(max(left, 0), MAX_NOTICE_MS))

    def _get(self, name: str) -> str:
        path = f"/computeMetadata/v1/instance/{name}"
        answer = self._client.request("GET", path, {"Metadata-Flavor": "Google"})
        if answer.status == HTTPStatus.NOT_FOUND:
            return ""
        if answer.status != HTTPStatus.OK or answer.headers.get("Metadata-Flavor") != "Google":
            raise MetadataFailed(f"GET {path}: status {answer.status}, or not the metadata service")
        return answer.text


SOURCES: Mapping[str, Callable[[MetadataClient], NoticeSource]] = {"aws": Ec2Notices, "gcp": GceNotices}


def notice_source(environ: Mapping[str, str]) -> NoticeSource | None:
    """The source that the environment of this agent names; None where it names none."""
    name = environ.get(SOURCE_VARIABLE, "")
    if not name:
        return None
    if name not in SOURCES:
        raise BadInput(f"${SOURCE_VARIABLE} is {name!r}: expected {' or '.join(SOURCES)}")
    return SOURCES[name](MetadataClient(environ.get(METADATA_VARIABLE) or METADATA_URL))
