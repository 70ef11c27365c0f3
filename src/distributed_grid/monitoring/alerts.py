"""Alerts of nodes: when one is raised and cleared, and its delivery to the log, a command and a webhook.

An alert is raised when a value has been above its threshold for `raise_after_ms`, and cleared when it has been `margin`
below the threshold, or lower, for `clear_after_ms`; in between nothing changes, so alerts do not flap. Raised and
cleared alternate, per node and resource. Silence is not evidence: a silent node raises nothing and clears nothing, and
a streak that a silence interrupted begins anew.

Alerts are delivered in order, one after the other; when too many wait, the oldest are dropped with a line in the log.
The webhook's address is a secret: only its scheme and host are ever shown. The webhook speaks HTTP over a stream of its
own, because a blocking library has time-outs per read only: a server that answers a byte at a time would hold its
thread for hours. Here one deadline covers the whole call.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import shlex
import signal
import ssl
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct

from distributed_grid import __version__
from distributed_grid.api.answers.common import utc
from distributed_grid.config.sections import Alerts
from distributed_grid.domain.nodes import Usage, cpu_part, gpu_part, memory_part
from distributed_grid.domain.resources import Capacity
from distributed_grid.errors import BadInput
from distributed_grid.reactor.node_liveness import SUSPECT_AFTER_MS
from distributed_grid.supervision import start_restarted

MARGIN = 0.05
RAISE_AFTER_MS = 30_000
"""Cores and GPUs are there to be used: only what stays that busy is worth an alert. Memory is reported at once."""
CLEAR_AFTER_MS = 60_000


class AlertThreshold(Struct, frozen=True):
    """Mark of a resource, and how long its use must stay above it."""

    high: float
    margin: float = MARGIN
    raise_after_ms: int = 0
    clear_after_ms: int = CLEAR_AFTER_MS


class AlertState(Struct, frozen=True):
    raised: bool = False
    since_ms: int | None = None  # begin of the streak towards the other state; None: no streak
    last_ms: int = 0  # latest measurement of the streak


class Alert(Struct, frozen=True, kw_only=True):
    node: str
    resource: str
    raised: bool
    value: float  # value and mark are parts of the whole
    mark: float
    at_ms: int
    detail: str

    @property
    def state(self) -> str:
        return "raised" if self.raised else "cleared"


CLEARED = AlertState()


def next_state(state: AlertState, threshold: AlertThreshold, value: float, at_ms: int) -> AlertState:
    if state.raised:
        crossed, dwell = value <= threshold.high - threshold.margin, threshold.clear_after_ms
    else:
        crossed, dwell = value > threshold.high, threshold.raise_after_ms
    if not crossed:
        return state if state.since_ms is None else AlertState(state.raised, None, at_ms)
    unbroken = state.since_ms is not None and at_ms - state.last_ms <= SUSPECT_AFTER_MS
    since = state.since_ms if unbroken and state.since_ms is not None else at_ms
    if at_ms - since >= dwell:
        return AlertState(not state.raised, None, at_ms)
    return AlertState(state.raised, since, at_ms)


def alert_thresholds(alerts: Alerts) -> dict[str, AlertThreshold]:
    thresholds: dict[str, AlertThreshold] = {}
    if alerts.memory_high is not None:
        thresholds["memory"] = AlertThreshold(alerts.memory_high)
    if alerts.cpu_high is not None:
        thresholds["cpu"] = AlertThreshold(alerts.cpu_high, raise_after_ms=RAISE_AFTER_MS)
    if alerts.gpu_high is not None:
        thresholds["gpu"] = AlertThreshold(alerts.gpu_high, raise_after_ms=RAISE_AFTER_MS)
    return thresholds


class AlertRules:
    """Alert states of all nodes; returns the changes by each measurement."""

    def __init__(self, thresholds: dict[str, AlertThreshold]) -> None:
        self._thresholds = thresholds
        self._states: dict[str, dict[str, AlertState]] = {}

    def set_thresholds(self, thresholds: dict[str, AlertThreshold]) -> list[Alert]:
        """Replace the thresholds; alerts under the old ones are cleared, and may be raised again."""
        cleared = [
            self._clear(node, resource, state.last_ms, f"{node}: other alerts are set")
            for node, states in self._states.items()
            for resource, state in states.items()
            if state.raised
        ]
        self._thresholds, self._states = thresholds, {}
        return cleared

    def observe(self, node: str, usage: Usage, capacity: Capacity, at_ms: int) -> list[Alert]:
        """The alerts raised or cleared by this measurement; mostly none."""
        states = self._states.setdefault(node, {})
        changed: list[Alert] = []
        for resource, threshold in self._thresholds.items():
            if resource == "memory":
                value = memory_part(capacity, usage) if capacity.memory_bytes else None
            else:
                value = cpu_part(usage) if resource == "cpu" else gpu_part(usage)
            if value is None:
                continue
            old = states.get(resource, CLEARED)
            new = states[resource] = next_state(old, threshold, value, at_ms)
            if new.raised is not old.raised:
                name = resource if resource == "memory" else resource.upper()
                position = "above" if new.raised else "back below"
                detail = f"{node}: {name} at {100 * value:.0f} %, {position} the mark of {100 * threshold.high:.0f} %"
                changed.append(
                    Alert(
                        node=node,
                        resource=resource,
                        raised=new.raised,
                        value=round(value, 4),
                        mark=threshold.high,
                        at_ms=new.last_ms,
                        detail=detail,
                    )
                )
        return changed

    def forget(self, node: str, at_ms: int) -> list[Alert]:
        """Drop a node that left the grid and clear its alerts."""
        states = self._states.pop(node, {}).items()
        return [
            self._clear(node, resource, at_ms, f"{node} left the grid") for resource, state in states if state.raised
        ]

    def _clear(self, node: str, resource: str, at_ms: int, detail: str) -> Alert:
        mark = self._thresholds[resource].high
        return Alert(node=node, resource=resource, raised=False, value=0.0, mark=mark, at_ms=at_ms, detail=detail)

    def raised(self) -> list[tuple[str, str]]:
        """Nodes and resources of the raised alerts."""
        return [
            (node, resource)
            for node, states in self._states.items()
            for resource, state in states.items()
            if state.raised
        ]


COMMAND_DEADLINE_SECONDS = 10.0
POLL_SECONDS = 0.02
INHERITED_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""Variables of the control plane's environment that the command inherits."""


class AlertCommandFailed(Exception):
    """The alert command failed; the text says how it ended."""


def run_alert_command(
    argv: Sequence[str],
    body: bytes,
    variables: Mapping[str, str],
    *,
    stopping: threading.Event,
    deadline_seconds: float = COMMAND_DEADLINE_SECONDS,
) -> None:
    """Run the command with `body` on its standard input, to its end or to the deadline; blocks.

    Its whole process group is ended afterwards in any case, at once when `stopping` is set. Raises AlertCommandFailed.
    """
    env = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ} | dict(variables)
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as stdin:
        stdin.write(body)
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                argv, stdin=stdin, stdout=subprocess.DEVNULL, stderr=errors, env=env, cwd="/", start_new_session=True
            )
        except (OSError, ValueError) as failure:
            raise AlertCommandFailed(f"cannot be started: {failure}") from failure
        try:
            deadline, in_time = time.monotonic() + deadline_seconds, True
            while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if time.monotonic() >= deadline or stopping.wait(POLL_SECONDS):
                    in_time = False
                    break
        finally:
            # Nobody has waited for the leader yet, so its number still means this group and no other.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        if not in_time:
            raise AlertCommandFailed(f"was ended after {deadline_seconds:g} s")
        if code:
            size = os.fstat(errors.fileno()).st_size
            words = os.pread(errors.fileno(), 300, max(size - 300, 0)).decode(errors="replace").strip()
            raise AlertCommandFailed(f"ended with {code}" + (f": {words.splitlines()[-1]!r}" if words else ""))


WEBHOOK_DEADLINE_SECONDS = 5.0
MAX_LINE_BYTES = 4096
_PORTS = {"http": 80, "https": 443}


class WebhookFailed(Exception):
    """The webhook did not accept the alert; `retryable` says whether it may do so later."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class Webhook:
    """A web address that alerts are posted to; `name` is the part of it that may be shown."""

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
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.name = f"{parts.scheme}://{host}:{self._port}"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {host}" + (f":{port}" if port else ""),
            f"User-Agent: distributed-grid/{__version__}",
            "Content-Type: application/json",
            "Connection: close",
        ]
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            lines.append("Authorization: Basic " + base64.b64encode(login.encode()).decode())
        self._head = ("\r\n".join(lines) + "\r\n").encode()

    async def post(self, body: bytes, *, deadline_seconds: float = WEBHOOK_DEADLINE_SECONDS) -> None:
        """Send a JSON text. Raises WebhookFailed unless the other side accepts it in time."""
        try:
            async with asyncio.timeout(deadline_seconds):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, ssl=self._tls, limit=MAX_LINE_BYTES
                )
                try:
                    writer.write(self._head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
                    await writer.drain()
                    words = (await reader.readline()).split(maxsplit=2)
                finally:
                    writer.transport.abort()  # an orderly close could take forever
            if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
                raise ValueError("the answer is not HTTP")
            status = int(words[1])
        except TimeoutError:
            raise WebhookFailed(f"no answer within {deadline_seconds:g} s", retryable=True) from None
        except (OSError, EOFError, ValueError) as failure:
            raise WebhookFailed(str(failure) or type(failure).__name__, retryable=True) from failure
        if not 200 <= status < 300:
            raise WebhookFailed(f"answered {status}", retryable=status == 429 or status >= 500)


MAX_WAITING = 100
RETRY_SECONDS = (1.0, 4.0)  # pauses before the second and the third call of a webhook that did not answer
log = logging.getLogger(__name__)


class AlertDelivery:
    """Delivers alerts in the background; `start` and `stop` are safe to call twice."""

    def __init__(
        self, alerts: Alerts, *, offset_ms: Callable[[], int], retry_seconds: Sequence[float] = RETRY_SECONDS
    ) -> None:
        """`offset_ms` returns how far the wall clock is ahead of the grid's own time."""
        self.set_receivers(alerts)
        self._offset_ms = offset_ms
        self._retry_seconds = tuple(retry_seconds)
        self._waiting: deque[Alert] = deque()
        self._arrived = asyncio.Event()
        self._stopping = threading.Event()
        self._task: asyncio.Task[None] | None = None

    def set_receivers(self, alerts: Alerts) -> None:
        self._command = split_command(alerts.command) if alerts.command else ()
        self._webhook = Webhook(alerts.webhook.reveal()) if alerts.webhook is not None else None

    def send(self, alert: Alert) -> None:
        """Log an alert and queue it for delivery; returns at once."""
        log.log(logging.WARNING if alert.raised else logging.INFO, "alert %s: %s", alert.state, alert.detail)
        if not self._command and self._webhook is None:
            return
        if len(self._waiting) >= MAX_WAITING:
            log.error("too many alerts wait; not delivered: %s", self._waiting.popleft().detail)
        self._waiting.append(alert)
        self._arrived.set()

    async def start(self) -> None:
        if self._task is None:
            self._stopping.clear()
            self._task = start_restarted(self._deliver, "delivery of alerts")

    async def stop(self) -> None:
        """Stop at once: running calls are ended, waiting alerts dropped."""
        self._stopping.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _deliver(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                alert = self._waiting.popleft()
                body = msgspec.json.encode(
                    {
                        "state": alert.state,
                        "node_id": alert.node,
                        "resource_type": alert.resource,
                        "value": alert.value,
                        "mark": alert.mark,
                        "time": utc(alert.at_ms + self._offset_ms()),
                        "message": alert.detail,
                    }
                )
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._run_command(alert, body))
                        group.create_task(self._call_webhook(alert, body))
                except Exception:  # the outermost loop: the next alert may well get through
                    log.exception("an alert could not be delivered")

    async def _run_command(self, alert: Alert, body: bytes) -> None:
        if not self._command:
            return
        variables = {
            "GRID_ALERT_NODE": alert.node,
            "GRID_ALERT_RESOURCE": alert.resource,
            "GRID_ALERT_STATE": alert.state,
            "GRID_ALERT_VALUE": f"{alert.value:.4f}",
            "GRID_ALERT_MARK": f"{alert.mark:.4f}",
            "GRID_ALERT_MESSAGE": alert.detail,
        }
        try:
            await asyncio.to_thread(run_alert_command, self._command, body, variables, stopping=self._stopping)
        except AlertCommandFailed as failure:
            log.error("the alert command %r %s", self._command[0], failure)

    async def _call_webhook(self, alert: Alert, body: bytes) -> None:
        if self._webhook is None:
            return
        for pause in (*self._retry_seconds, None):
            try:
                await self._webhook.post(body)
                return
            except WebhookFailed as failure:
                log.warning("the webhook at %s did not take an alert: %s", self._webhook.name, failure)
                if not failure.retryable or pause is None:
                    break
                await asyncio.sleep(pause)
        log.error("the webhook at %s was not called: %s", self._webhook.name, alert.detail)


def split_command(command: str) -> tuple[str, ...]:
    """The words of a command, split by a shell's rules of quoting; nothing is expanded."""
    try:
        words = shlex.split(command)
    except ValueError as slip:
        raise BadInput(f"alerts.command cannot be read: {str(slip).lower()}") from None
    if not words or not words[0]:
        raise BadInput("alerts.command is empty")
    return tuple(words)
