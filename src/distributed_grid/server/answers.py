"""Long answers: rendered in short slices between batches, bounded in size, and shared by equal questions.

A service takes the rows of an answer in one step of the ledger's owner; rows never change, so they are a snapshot.
They become JSON here, outside of any batch, a few milliseconds at a time and one slice in each pass of the event loop.
Heartbeats are answered between two slices.

Equal questions that wait at the same time share one rendering. A question that arrives after the snapshot was taken
shares the next one, so a caller sees the effects of all answers that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from distributed_grid.control.grid import LoopSlices
from distributed_grid.errors import Unreachable
from distributed_grid.server.pages import Page
from distributed_grid.supervision import start_logged

PART_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 16 * 1024 * 1024  # of one answer; further rows are left out and counted
MAX_ROWS = 10_000  # of one list in an answer
SHORT_ROWS = 2_000  # of an answer that does not wait for longer ones
MAX_SHORT, MAX_LONG = 4, 2  # answers that are rendered at a time
MAX_SENDERS = 16  # parts that are sent in one pass of the event loop
MAX_HELD_BYTES = 64 * 1024 * 1024  # of all unsent answers: beyond that none is rendered
ROOM_SECONDS = 30.0  # a question without room for its answer is refused then
READ_SECONDS = 30.0  # a client that reads nothing of its answer is disconnected then
T = TypeVar("T")
A = TypeVar("A")
_encoder = msgspec.json.Encoder()


class EncodedAnswer(Generic[A]):
    """An answer as JSON, in parts; equal questions share one."""

    is_encoded: ClassVar[bool] = True

    __slots__ = ("__weakref__", "_renderer", "parts", "size")

    def __init__(self, parts: Sequence[bytes], renderer: AnswerRenderer) -> None:
        self.parts = tuple(parts)
        self.size = sum(map(len, self.parts))
        self._renderer = renderer

    async def paced_parts(self) -> AsyncIterator[bytes]:
        """The parts; in each pass of the event loop a few readers get one."""
        for part in self.parts:
            await self._renderer.pace()
            yield part

    def decode(self) -> Any:
        """The answer as Python values."""
        return msgspec.json.decode(b"".join(self.parts))


class AnswerRenderer:
    """Renders the long answers of one control plane."""

    def __init__(self, slices: LoopSlices) -> None:
        self.slices = slices
        self._senders = asyncio.Semaphore(MAX_SENDERS)
        self._short, self._long = asyncio.Semaphore(MAX_SHORT), asyncio.Semaphore(MAX_LONG)
        self._waiting: dict[Hashable, _SharedRendering] = {}
        self._begun: dict[Hashable, _SharedRendering] = {}
        self._has_room = asyncio.Event()
        self.held_bytes = 0
        self.renderings = 0  # since the start

    async def shared(self, question: Hashable, render: Callable[[], Awaitable[T]]) -> T:
        """The answer to a question, rendered once for all callers that wait when the rendering begins."""
        rendering = self._waiting.get(question)
        if rendering is None:
            rendering = self._waiting[question] = _SharedRendering()
            rendering.task = start_logged(self._render(question, rendering, render), "the rendering of an answer")
        rendering.readers += 1
        try:
            answer: T = await asyncio.shield(rendering.answer)
            return answer
        finally:
            rendering.readers -= 1
            if not rendering.readers and not rendering.answer.done():
                self._forget(question, rendering)
                rendering.answer.cancel()
                rendering.task.cancel()

    async def _render(
        self, question: Hashable, rendering: _SharedRendering, render: Callable[[], Awaitable[Any]]
    ) -> None:
        """Render after the last rendering of the same question; later callers get the next one."""
        answer = rendering.answer
        try:
            if (earlier := self._begun.get(question)) is not None:
                await asyncio.wait((earlier.answer,))
            self._forget(question, rendering)
            self._begun[question] = rendering
            rendered = await render()
            if not answer.done():
                answer.set_result(rendered)
        except Exception as failure:  # raised to all callers
            if not answer.done():
                answer.set_exception(failure)
        finally:
            answer.cancel()
            if self._begun.get(question) is rendering:
                del self._begun[question]

    def _forget(self, question: Hashable, rendering: _SharedRendering) -> None:
        if self._waiting.get(question) is rendering:
            del self._waiting[question]

    @contextlib.asynccontextmanager
    async def answer(self, *, max_rows: int) -> AsyncIterator[AnswerWriter]:
        """A writer for one answer, once there is room for it; Unreachable where slow readers leave none."""
        async with self._short if max_rows <= SHORT_ROWS else self._long:
            try:
                async with asyncio.timeout(ROOM_SECONDS):
                    while self.held_bytes >= MAX_HELD_BYTES:
                        self._has_room.clear()
                        await self._has_room.wait()
            except TimeoutError:
                raise Unreachable("too many long answers have not been read yet: try again later") from None
            self.renderings += 1
            yield AnswerWriter(self)

    async def pace(self) -> None:
        """Wait for the turn of a part."""
        async with self._senders:
            await asyncio.sleep(0)

    def hold(self, answer: EncodedAnswer[A]) -> EncodedAnswer[A]:
        """Count the bytes of an answer until it is garbage-collected."""
        self.held_bytes += answer.size
        weakref.finalize(answer, self._release, answer.size)
        return answer

    def _release(self, size: int) -> None:
        self.held_bytes -= size
        self._has_room.set()


class _SharedRendering:
    """A rendering and the number of callers that wait for it."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None]
        self.readers = 0


class AnswerWriter:
    """Writes one JSON object, field by field, within `MAX_ANSWER_BYTES`."""

    def __init__(self, renderer: AnswerRenderer) -> None:
        self._renderer = renderer
        self._parts: list[bytes] = []
        self._part = bytearray(b"{")
        self._written = 0

    def field(self, name: str, value: Any) -> None:
        """Write a short field."""
        self._begin(name)
        self._part += _encoder.encode(value)

    async def rows(
        self,
        name: str,
        rows: Sequence[T],
        answer_row: Callable[[T], object],
        *,
        max_rows: int = MAX_ROWS,
        last_first: bool = False,
    ) -> int:
        """Write a list in slices, or in the opposite order; the number of rows that are written."""
        self._begin(name)
        self._part += b"["
        lists: list[bytes] = []  # rows of about one part each
        count, most = 0, min(len(rows), max_rows)
        encoded: list[bytes] = []
        size = 0
        while count < most and self._written < MAX_ANSWER_BYTES:
            async with self._renderer.slices.next() as is_over:
                while count < most and self._written < MAX_ANSWER_BYTES and not is_over():
                    row = _encoder.encode(answer_row(rows[count]))
                    encoded.append(row)
                    count, size = count + 1, size + len(row) + 1
                    if size >= PART_BYTES or count == most:
                        lists.append(b",".join(reversed(encoded) if last_first else encoded))
                        self._written += size
                        encoded, size = [], 0
        if last_first:
            lists.reverse()
        for number, part in enumerate(lists):
            if number:
                self._parts.append(bytes(self._part) + b",")
                self._part.clear()
            self._part += part
        self._part += b"]"
        return count

    async def page(
        self, name: str, page: Page[T], answer_row: Callable[[T], object], *, last_first: bool = False
    ) -> EncodedAnswer[Any]:
        """Write the rows of a page, the number of those that did not fit, and the cursor of the next page; the whole
        answer."""
        count = await self.rows(name, page.rows, answer_row, last_first=last_first)
        following = page.next(count)
        self.field("more", following is not None)
        self.field("next", following)
        self.field("omitted", len(page.rows) - count)
        return self.finish()

    def finish(self) -> EncodedAnswer[Any]:
        """The whole answer."""
        self._parts.append(bytes(self._part + b"}"))
        return self._renderer.hold(EncodedAnswer(self._parts, self._renderer))

    def _begin(self, name: str) -> None:
        if self._parts or len(self._part) > 1:
            self._part += b","
        self._part += _encoder.encode(name) + b":"
