"""Announced end of this machine: its source and time, notices to attempts, and their stop in time.

It is announced by the cloud's metadata service, by the signal of a batch system, or by the control plane, which knows
the lifetime of the machine; the earliest end counts. Attempts get the notice and its deadline at once, and are stopped
so that they have ended within their grace, and are reported, before the machine ends. No control plane is needed for
that: an attempt that is stopped here is queued again when the control plane gets the report.

Metadata services:

- EC2: the notice of a spot instance gives the action and its time, two minutes ahead; a rebalance recommendation only
  says that a notice may come. Each read needs a session token (IMDSv2), which lasts for hours and is renewed when
  refused.
- Compute Engine: a spot machine reads that it is preempted, and has 30 seconds; one that cannot be migrated is stopped
  for maintenance a minute after the announcement, which can be withdrawn.

Reads are plain HTTP to a link-local address, past any proxy, with short deadlines and bounded answers. A read that
fails or is invalid changes nothing, and is repeated shortly after. Reads block: call them in a thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from msgspec import Struct

from distributed_grid.domain.workers import MAX_NOTICE_MS, stop_margin_ms
from distributed_grid.errors import BadInput
from distributed_grid.wire import AnnouncedEnd

if TYPE_CHECKING:
    from email.message import Message

METADATA, SIGNAL, CONTROL_PLANE = "metadata", "signal", "control plane"
CHECK_MS = 500
EARLIER_MS = 2_000
"""By how much an end must be earlier than the known one to be another."""
MAX_EXIT_MARGIN_MS = 5_000
log = logging.getLogger(__name__)


class KnownEnd(Struct, frozen=True):
    """Announced end of this machine: its time by the boot clock, and the deadline of all attempts; both 0 if unknown.
    `withdrawn`: the machine stays after all."""

    why: str
    ends_at_ms: int = 0
    stop_by_ms: int = 0
    exit_at_ms: int = 0
    withdrawn: bool = False


class RunningCommand(Protocol):
    """An attempt whose command runs; `stopping` once it was asked to stop."""

    @property
    def attempt_id(self) -> str: ...
    @property
    def grace_ms(self) -> int: ...
    @property
    def stopping(self) -> bool: ...


class EndedWork(Protocol):
    """The work of a machine that ends."""

    def running(self) -> Iterable[RunningCommand]:
        """Attempts with a running command."""

    def give_notice(self, attempt_id: str, why: str, in_ms: int) -> None:
        """Notify an attempt of its stop in this time; a second notice adds no time."""

    def withdraw_notice(self, attempt_id: str) -> None:
        """Withdraw the notice. Safe twice."""

    async def stop(self, attempt_id: str, why: str, grace_ms: int) -> None:
        """Stop an attempt; the control plane queues its job again."""


class MachineEnd:
    """Known ends of this machine; `on_change` gets an end that is new or withdrawn."""

    def __init__(self, work: EndedWork, boot_ms: Callable[[], int], on_change: Callable[[], None]) -> None:
        self._work = work
        self._boot_ms = boot_ms
        self._on_change = on_change
        self._ends: dict[str, KnownEnd] = {}  # by source
        self._noticed: dict[str, int] = {}  # the announced deadline, by attempt

    @property
    def end(self) -> KnownEnd | None:
        known = [end for end in self._ends.values() if end.ends_at_ms]
        return min(known, key=lambda end: end.ends_at_ms, default=None)

    @property
    def shutdown_reason(self) -> str:
        """Reason why no attempt may start here any more: the machine shuts down. Empty while one may."""
        end = self._ends.get(SIGNAL)
        return f"this machine is taken away: {end.why}" if end is not None else ""

    def is_known_to(self, source: str) -> bool:
        known = self._ends.get(source)
        return known is not None and known.ends_at_ms > 0

    def announce(self, source: str, announced: AnnouncedEnd | None) -> None:
        """Enter the present announcement of one source, or None. A notice counts until it is withdrawn: a later end, or
        silence of the signal's source, changes nothing."""
        known = self._ends.get(source)
        if announced is None or announced.withdrawn:
            if known is None or known.withdrawn:
                return
            reason = announced.why if announced is not None else f"the notice was withdrawn: {known.why}"
            self._ends[source] = KnownEnd(reason, withdrawn=True)
        elif announced.ends_in_ms is None:
            if known is not None and not known.withdrawn:
                return
            self._ends[source] = KnownEnd(announced.why)
        else:
            ends_at = self._boot_ms() + announced.ends_in_ms
            is_later = known is not None and known.ends_at_ms and ends_at > known.ends_at_ms - EARLIER_MS
            if is_later and source != CONTROL_PLANE:
                return
            if known is not None and abs(ends_at - known.ends_at_ms) < EARLIER_MS:
                return
            exit_at = ends_at - min(MAX_EXIT_MARGIN_MS, announced.ends_in_ms // 10)
            stop_by = ends_at - stop_margin_ms(announced.ends_in_ms)
            self._ends[source] = KnownEnd(announced.why, ends_at, stop_by, exit_at)
            log.warning("this machine ends in %.0f s: %s", announced.ends_in_ms / 1000, announced.why)
        self._on_change()

    def reported(self) -> AnnouncedEnd | None:
        """End for the control plane: the earliest that it has not announced itself, counted from now."""
        own = [end for source, end in self._ends.items() if source != CONTROL_PLANE]
        if not own:
            return None
        earliest = min(own, key=lambda end: (end.withdrawn, not end.ends_at_ms, end.ends_at_ms))
        if earliest.withdrawn or not earliest.ends_at_ms:
            return AnnouncedEnd(earliest.why, withdrawn=earliest.withdrawn)
        return AnnouncedEnd(earliest.why, min(max(earliest.ends_at_ms - self._boot_ms(), 0), MAX_NOTICE_MS))

    async def watch(self, sleep_ms: Callable[[int], Awaitable[None]]) -> None:
        """Notify and stop attempts in time, without end."""
        while True:
            try:
                await self.check()
            except Exception as failure:  # the outermost loop: the next attempt needs its notice, too
                log.warning("notifying attempts of the end of this machine failed", exc_info=failure)
            await sleep_ms(CHECK_MS)

    async def check(self) -> None:
        """Notify attempts without a notice, and stop those whose time has come."""
        end, now = self.end, self._boot_ms()
        if end is None:
            for attempt_id in self._noticed:
                self._work.withdraw_notice(attempt_id)
            self._noticed = {}
            return
        reason = f"this machine is taken away: {end.why}"
        noticed, self._noticed = self._noticed, {}
        for command in self._work.running():
            if command.stopping:
                continue
            deadline, stop_in = noticed.get(command.attempt_id, 0), end.stop_by_ms - command.grace_ms - now
            if deadline and deadline < end.stop_by_ms:
                self._work.withdraw_notice(command.attempt_id)
            if deadline != end.stop_by_ms:
                self._work.give_notice(command.attempt_id, reason, max(stop_in, 0))
            self._noticed[command.attempt_id] = end.stop_by_ms
            if stop_in <= 0:
                await self._work.stop(command.attempt_id, reason, min(command.grace_ms, max(end.stop_by_ms - now, 0)))


SOURCE_VARIABLE, METADATA_VARIABLE = "GRID_NOTICE_SOURCE", "GRID_METADATA_URL"
METADATA_URL = "http://169.254.169.254"
POLL_SECONDS = 5.0
READ_SECONDS = 2.0
MAX_ANSWER_BYTES = 16_384
TOKEN_SECONDS = 21_600
EC2_NOTICE_MS = 120_000
PREEMPTED_MS, MAINTENANCE_MS = 25_000, 55_000
"""Rest of the 30 and 60 seconds of Compute Engine when a notice is read, at worst."""


class MetadataFailed(Exception):
    """The metadata service was not reached, or its answer is invalid."""


class NoticeSource(Protocol):
    """Source of a cloud's notices that it takes a machine away."""

    def read(self) -> AnnouncedEnd | None:
        """Present announcement, if any. Raises MetadataFailed if it is unknown."""


class MetadataAnswer:
    """Answer of a metadata service: status, text, and its own time."""

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

        def cut_late_answer() -> None:
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

        cut = threading.Timer(self._seconds, cut_late_answer)  # the timeout is for each piece of an answer
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


class Ec2Notices:
    """Spot notices and rebalance recommendations of EC2."""

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self._token = ""

    def read(self) -> AnnouncedEnd | None:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            try:
                notice = json.loads(action.text)
                kind = str(notice["action"])[:40]
                ends_at = datetime.fromisoformat(notice["time"])
                ends_in_ms = round(1000 * (ends_at.replace(tzinfo=ends_at.tzinfo or UTC).timestamp() - action.now))
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as failure:
                raise MetadataFailed(f"invalid spot notice: {failure}") from failure
            return AnnouncedEnd(f"EC2 spot notice ({kind})", min(max(ends_in_ms, 0), EC2_NOTICE_MS))
        if self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            return AnnouncedEnd("EC2 recommends to move away from this spot instance")
        return None

    def _get(self, path: str) -> MetadataAnswer | None:
        """Answer at the path; None for 404."""
        for _ in range(2):
            if not self._token:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
                answer = self._client.request("PUT", "/latest/api/token", ttl)
                if answer.status != HTTPStatus.OK or not answer.text.isascii() or not answer.text.isprintable():
                    raise MetadataFailed(f"PUT /latest/api/token: status {answer.status}")
                self._token = answer.text
            answer = self._client.request("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != HTTPStatus.UNAUTHORIZED:
                break
            self._token = ""  # expired
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        if answer.status != HTTPStatus.OK:
            raise MetadataFailed(f"GET {path}: status {answer.status}")
        return answer


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

    def _ends(self, kind: str, reason: str, notice_ms: int) -> AnnouncedEnd:
        """End of the machine, counted from the first read of the notice."""
        since = self._since.setdefault(kind, self._monotonic())
        left_ms = notice_ms - round(1000 * (self._monotonic() - since))
        return AnnouncedEnd(reason, min(max(left_ms, 0), MAX_NOTICE_MS))

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
    """The source that the environment of this agent names, if any."""
    name = environ.get(SOURCE_VARIABLE, "")
    if not name:
        return None
    if name not in SOURCES:
        raise BadInput(f"${SOURCE_VARIABLE} is {name!r}: expected {' or '.join(SOURCES)}")
    return SOURCES[name](MetadataClient(environ.get(METADATA_VARIABLE) or METADATA_URL))
