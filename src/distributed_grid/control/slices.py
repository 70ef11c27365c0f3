"""Slices of the event loop's time, for work on rows of the ledger that nothing else has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeVar

SLICE_SECONDS = 0.004
CHUNK_ROWS = 256
T = TypeVar("T")
V = TypeVar("V")


def stopwatch() -> Callable[[], bool]:
    """Whether a slice that begins now is over."""
    until = time.monotonic() + SLICE_SECONDS
    return lambda: time.monotonic() > until


class LoopSlices:
    """Gives one slice in each pass of the event loop, to everybody in turn: messages are served between two of them."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def next(self) -> AsyncIterator[Callable[[], bool]]:
        """The next slice; gives whether it is over. Nothing may be awaited in it."""
        async with self._turn:
            yield stopwatch()
            await asyncio.sleep(0)

    async def wait(self) -> None:
        """Let others have their turn; for work that is short, but comes many times."""
        async with self.next():
            pass

    async def select(self, rows: Sequence[T], fits: Callable[[T], bool]) -> list[T]:
        """The rows that fit."""
        return await self._collect(rows, lambda chunk: filter(fits, chunk))

    async def convert(self, rows: Sequence[T], convert: Callable[[T], V]) -> list[V]:
        """A value for each row."""
        return await self._collect(rows, lambda chunk: map(convert, chunk))

    async def _collect(self, rows: Sequence[T], values: Callable[[Sequence[T]], Iterable[V]]) -> list[V]:
        collected: list[V] = []
        position = 0
        while position < len(rows):
            async with self.next() as is_over:
                while position < len(rows) and not is_over():
                    chunk = rows[position : position + CHUNK_ROWS]
                    collected += values(chunk)
                    position += len(chunk)
        return collected
