"""Supervision of background tasks: none of them dies silently.

- `start_essential`: work without which the process is of no use. A failure ends the process with a line in the log, a
  report in a file, and an exit code of its own. The next process recovers as after any crash.
- `start_restarted`: a loop that keeps nothing from one round to the next. A failure is logged, and the loop begins anew
  after a pause.
- `start_logged`: work that ends by itself. A failure is logged.

A task is referenced here until it is done: the event loop alone would let it be collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

EXIT_CODE = 70
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0
log = logging.getLogger(__name__)
Work = Coroutine[Any, Any, None]


class _Process:
    """File for the report of a failed essential task; without one the failure is only logged."""

    report: Path | None = None


_tasks: set[asyncio.Task[None]] = set()


def end_process_on_failure(report: Path) -> None:
    """From now on a failure of an essential task ends this process, with a report in this file."""
    _Process.report = report


def start_essential(work: Work, name: str) -> asyncio.Task[None]:
    """Run it; if it fails, the process ends."""
    return _start(work, name, _end_if_failed)


def start_restarted(loop: Callable[[], Work], name: str) -> asyncio.Task[None]:
    """Run it, and again after a pause whenever it fails, until it returns or is cancelled."""
    return start_essential(_restart(loop, name), name)


def start_logged(work: Work, name: str) -> asyncio.Task[None]:
    """Run it; if it fails, that is logged."""
    return _start(work, name, _log_if_failed)


def end_process(name: str, failure: BaseException) -> NoReturn:
    """End this process at once with a report; files and connections are closed as in a crash."""
    log.critical("%s cannot go on: this process ends", name, exc_info=failure)
    if _Process.report is not None:
        lines = [time.strftime("%Y-%m-%dT%H:%M:%S%z "), f"pid {os.getpid()}: {name} cannot go on\n"]
        with contextlib.suppress(OSError):  # a full disk: the log has it, if it has room
            _Process.report.write_text("".join([*lines, *traceback.format_exception(failure)]))
    logging.shutdown()
    os._exit(EXIT_CODE)


def _start(work: Work, name: str, on_done: Callable[[asyncio.Task[None]], None]) -> asyncio.Task[None]:
    task = asyncio.create_task(work, name=name)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    task.add_done_callback(on_done)
    return task


async def _restart(loop: Callable[[], Work], name: str) -> None:
    pause = FIRST_PAUSE_SECONDS
    while True:
        began = time.monotonic()
        try:
            await loop()
            return
        except Exception:  # the outermost place of a loop: it begins anew
            if time.monotonic() - began > MAX_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            log.exception("%s failed; it begins anew in %g s", name, pause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)


def _end_if_failed(task: asyncio.Task[None]) -> None:
    failure = None if task.cancelled() else task.exception()
    if failure is None:
        return
    if _Process.report is not None:
        end_process(task.get_name(), failure)
    log.critical("%s cannot go on", task.get_name(), exc_info=failure)


def _log_if_failed(task: asyncio.Task[None]) -> None:
    failure = None if task.cancelled() else task.exception()
    if failure is not None:
        log.error("%s failed", task.get_name(), exc_info=failure)
