"""Reconciler: work on effects that take time, in the background.

The ledger calls for an effect until it is reported done, so its performer begins it after the commit and again in every
round. Work is named by a key: while it is under way, or before its next try is due, it is not begun a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Container, Coroutine, Hashable
from functools import partial
from typing import Any

from msgspec import Struct

from distributed_grid.supervision import start_logged, start_restarted

Work = Callable[[], Coroutine[Any, Any, None]]


class Tries(Struct):
    """Failures of one key since its last success; forgotten when this process ends."""

    first_at: float
    failures: int = 0
    lasting: int = 0
    """Failures that do not pass by themselves."""
    due_at: float = 0.0
    """Loop time of the next try."""
    problem: str = ""


class Reconciler:
    """Tasks by key, at most `at_once` of them, with their failures."""

    def __init__(self, *, at_once: int | None = None) -> None:
        self._at_once = at_once
        self._in_flight: dict[Hashable, asyncio.Task[None]] = {}
        self._tries: dict[Hashable, Tries] = {}
        self._woken = asyncio.Event()
        self._is_running = False
        self._is_full = False
        self._rounds: asyncio.Task[None] | None = None

    def start(self, reconcile: Callable[[], Awaitable[None]], seconds: float, name: str) -> None:
        """Run rounds in the background, until `stop`."""
        self._rounds = start_restarted(partial(self.run, reconcile, seconds), name)

    async def run(self, reconcile: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Call `reconcile` now, after `wake` and every `seconds`, until cancelled; that ends all work, too."""
        self._is_running = True
        try:
            while True:
                self._woken.clear()
                await reconcile()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._woken.wait()
        except asyncio.CancelledError:
            await self._end_work()
            raise

    def wake(self) -> None:
        self._woken.set()

    async def stop(self) -> None:
        """End the rounds and all work; it is derived again. Safe to call twice."""
        if self._rounds is not None:
            self._rounds.cancel()
            await asyncio.gather(self._rounds, return_exceptions=True)
            self._rounds = None
        await self._end_work()

    async def _end_work(self) -> None:
        self._is_running = False
        tasks, self._in_flight = [*self._in_flight.values()], {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin(self, key: Hashable, work: Work, name: str) -> None:
        """Begin work, unless it is under way or not due, too much else is under way, or no rounds run."""
        tries = self._tries.get(key)
        if not self._is_running or key in self._in_flight or (tries is not None and tries.due_at > self._now()):
            return
        if self._at_once is not None and len(self._in_flight) >= self._at_once:
            self._is_full = True
            return
        task = self._in_flight[key] = start_logged(work(), f"{name} (begun again with the next round)")
        task.add_done_callback(partial(self._end, key))

    def _end(self, key: Hashable, task: asyncio.Task[None]) -> None:
        if self._in_flight.get(key) is task:
            del self._in_flight[key]
        if self._is_full:
            self._is_full = False
            self.wake()

    def is_under_way(self, key: Hashable) -> bool:
        return key in self._in_flight

    async def wait_for(self, key: Hashable) -> None:
        task = self._in_flight.get(key)
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    # ------------------------------------------------------------------ tries

    def tries(self, key: Hashable) -> Tries:
        """Failures of a key; the first call notes the time of the first try."""
        return self._tries.setdefault(key, Tries(self._now()))

    def fail(self, key: Hashable, problem: str, *, lasts: bool, retry_seconds: float) -> Tries:
        """Count a failure, and put off the next try."""
        tries = self.tries(key)
        tries.failures += 1
        tries.lasting += lasts
        tries.problem = problem
        tries.due_at = self._now() + retry_seconds
        return tries

    def age_seconds(self, key: Hashable) -> float:
        """Time since the first try of a key."""
        return self._now() - self.tries(key).first_at

    def forget(self, key: Hashable) -> None:
        self._tries.pop(key, None)

    def keep_only(self, keys: Container[Hashable]) -> None:
        self._tries = {key: tries for key, tries in self._tries.items() if key in keys}

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
