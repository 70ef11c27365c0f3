"""Watches the shims of attempts: what each tells, that it is gone, and what became of its attempt then.

A shim that was asked for here tells its story on a channel. One that was found alive is known by its pidfd, and its
story is in the attempt's directory.

Rule 1. Whoever died before a command could run is replaced; where it may have run, it is not run again.
Rule 2. An end that no shim has told is told when nothing of the attempt is left, and is on the disk first.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from distributed_grid.agent.execution import throttle
from distributed_grid.agent.execution.affinity import CoreAffinity
from distributed_grid.agent.execution.attempt import RunningAttempt, record_of
from distributed_grid.agent.execution.recovery import clear, was_begun
from distributed_grid.agent.execution.spawner_client import SpawnerClient, until
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.limits import process_tree

SENDS = 5  # to a spawner that dies each time
Heard = Callable[[RunningAttempt, dict[str, Any]], None]


class ShimMonitor:
    """Watches one shim for each attempt; `took_off` and `finish` hear what became of it, as it is recorded."""

    def __init__(
        self,
        root: str,
        handover: SpawnerClient,
        pins: CoreAffinity,
        *,
        do: Callable[[Coroutine[Any, Any, None]], None],
        took_off: Heard,
        finish: Heard,
    ) -> None:
        self._root = root
        self._handover = handover
        self._pins = pins
        self._do = do
        self._took_off = took_off
        self._finish = finish

    async def hand_over(self, attempt: RunningAttempt) -> None:
        """Give it to the spawner, with the writing end of a pipe on which the shim will tell its story."""
        attempt.sends += 1
        channel, telling = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(telling, True)
        attempt.watched = channel
        asyncio.get_running_loop().add_reader(channel, self._hear, attempt)
        await self._handover.give(attempt.id, telling)

    def adopt(self, attempt: RunningAttempt) -> None:
        """Watch an attempt that somebody else had started, wherever it is in its life."""
        attempt.sends = SENDS  # whatever it was, it is not started anew without being asked
        if not self._watch_shim(attempt):
            self._do(self._wait_for_shim(attempt))

    def leave(self, attempt: RunningAttempt) -> None:
        """Watch it no more. Safe twice."""
        if attempt.watched is not None:
            asyncio.get_running_loop().remove_reader(attempt.watched)
            os.close(attempt.watched)
            attempt.watched = None

    # ------------------------------------------------------------------ a shim of our own

    def _hear(self, attempt: RunningAttempt) -> None:
        """The shim told something, or is gone."""
        assert attempt.watched is not None
        told = os.read(attempt.watched, 65536)
        *lines, attempt.heard = (attempt.heard + told).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "started" in message:
                self._took_off(attempt, message["started"])
            else:
                self._finish(attempt, message["ended"])
        if not told:
            self._shim_ended(attempt)

    # ------------------------------------------------------------------ a shim that was found

    def _watch_shim(self, attempt: RunningAttempt) -> bool:
        """Watch a shim somebody else had forked; False when it is gone or has not started its command yet."""
        with JobDir(self._root, attempt.id) as job:
            if not job.is_locked():
                return False
            started = job.read(job_dir.STARTED)
        if started is None:
            return False
        try:
            pidfd = os.pidfd_open(started["shim"]["pid"])
        except ProcessLookupError:
            return False
        attempt.watched = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._shim_ended, attempt)
        self._took_off(attempt, started)
        if throttle.is_marked(self._root):  # the last agent died while this gave way to the owner
            self._pins.pin(attempt, started["shim"]["pid"])
            process_tree.send_all(process_tree.below(started["shim"]["pid"]), signal.SIGCONT)
        return True

    async def _wait_for_shim(self, attempt: RunningAttempt) -> None:
        with JobDir(self._root, attempt.id) as job:
            while job.is_locked():
                if self._watch_shim(attempt):
                    return
                await asyncio.sleep(0.005)
        await self._after_shim(attempt)

    # ------------------------------------------------------------------ its end

    def _shim_ended(self, attempt: RunningAttempt) -> None:
        self.leave(attempt)
        self._do(self._after_shim(attempt))

    async def _after_shim(self, attempt: RunningAttempt) -> None:
        """Its shim is gone without a word: find out what happened, and make sure that nothing is left."""
        with JobDir(self._root, attempt.id) as job:
            await until(lambda: not job.is_locked())
            record = job.read_end()
            begun = was_begun(job)
            if record is None and not begun and attempt.sends < SENDS:
                job.remove(job_dir.LOCK)
                await self.hand_over(attempt)  # spawner or shim died before it was taken up
                return
            if record is None:
                if begun:
                    await clear(job)
                    record = record_of("lost", "its supervisor died; nothing of it is left")
                else:
                    record = record_of("never_started", "could not be started: its supervisor died first")
                job.write(job_dir.EXIT, record, durable=True)
        self._finish(attempt, record)
