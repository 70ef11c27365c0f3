"""Telling people about alerts: always the log, and the command or web address that the config names.

Rule 1: whoever raises an alert never waits for whom it is told to.
Rule 2: notices go out in order, one alert after the other; when too many wait, the oldest are dropped, with a line
in the log.
Rule 3: the web address is a secret and appears nowhere.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from distributed_grid.config.sections import Alerts
from distributed_grid.errors import BadInput
from distributed_grid.monitoring.alert_command import CommandFailed, run_command
from distributed_grid.monitoring.alert_webhook import CallFailed, Webhook
from distributed_grid.monitoring.alerts import Alert
from distributed_grid.monitoring.snapshots import utc

MOST_WAITING = 100
PAUSES_SECONDS = (1.0, 4.0)
"""Before the second and the third call of a web address that did not answer."""
log = logging.getLogger(__name__)


class AlertDelivery:
    """Delivers alerts in the background; `start` and `stop` are safe to call twice."""

    def __init__(
        self, alerts: Alerts, *, offset_ms: Callable[[], int], pauses_seconds: Sequence[float] = PAUSES_SECONDS
    ) -> None:
        """`offset_ms` tells how far the wall clock is ahead of the grid's own time."""
        self._command = split_command(alerts.command) if alerts.command else ()
        self._webhook = Webhook(alerts.webhook.get_secret_value()) if alerts.webhook is not None else None
        self._offset_ms = offset_ms
        self._pauses = tuple(pauses_seconds)
        self._waiting: deque[Alert] = deque()
        self._arrived = asyncio.Event()
        self._leaving = threading.Event()
        self._task: asyncio.Task[None] | None = None

    def tell(self, alert: Alert) -> None:
        """Log an alert, and have it delivered; returns at once."""
        log.log(logging.WARNING if alert.raised else logging.INFO, "alert %s: %s", alert.state, alert.detail)
        if not self._command and self._webhook is None:
            return
        if len(self._waiting) >= MOST_WAITING:
            log.error("too many notices wait; not told: %s", self._waiting.popleft().detail)
        self._waiting.append(alert)
        self._arrived.set()

    async def start(self) -> None:
        if self._task is None and (self._command or self._webhook is not None):
            self._leaving.clear()
            self._task = asyncio.create_task(self._deliver())

    async def stop(self) -> None:
        """Stop telling, at once: what runs is ended, what waits is dropped."""
        self._leaving.set()
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
                try:
                    async with asyncio.TaskGroup() as both:
                        both.create_task(self._run_command(alert))
                        both.create_task(self._call_webhook(alert))
                except Exception:  # the outermost loop: the next notice may well get through
                    log.exception("a notice could not be delivered")

    async def _run_command(self, alert: Alert) -> None:
        if not self._command:
            return
        body = self._message(alert)
        variables = {
            "GRID_ALERT_NODE": alert.node,
            "GRID_ALERT_RESOURCE": alert.resource,
            "GRID_ALERT_STATE": alert.state,
            "GRID_ALERT_VALUE": f"{alert.value:.4f}",
            "GRID_ALERT_MARK": f"{alert.mark:.4f}",
            "GRID_ALERT_MESSAGE": alert.detail,
        }
        try:
            await asyncio.to_thread(run_command, self._command, body, variables, leaving=self._leaving)
        except CommandFailed as failure:
            log.error("the alert command %r %s", self._command[0], failure)

    async def _call_webhook(self, alert: Alert) -> None:
        if self._webhook is None:
            return
        body = self._message(alert)
        for pause in (*self._pauses, None):
            try:
                await self._webhook.post(body)
                return
            except CallFailed as failure:
                log.warning("the webhook at %s did not take an alert: %s", self._webhook.shown, failure)
                if not failure.again or pause is None:
                    break
                await asyncio.sleep(pause)
        log.error("the webhook at %s was not told: %s", self._webhook.shown, alert.detail)

    def _message(self, alert: Alert) -> bytes:
        """An alert as it travels."""
        return msgspec.json.encode(
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


def split_command(command: str) -> tuple[str, ...]:
    """The words of a command as a shell would take them apart; nothing else of a shell is there."""
    try:
        words = shlex.split(command)
    except ValueError as slip:
        raise BadInput(f"alerts.command cannot be read: {str(slip).lower()}") from None
    if not words or not words[0]:
        raise BadInput("alerts.command is empty")
    return tuple(words)
