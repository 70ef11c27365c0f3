"""The parts in which a range of a block travels: none reaches over the edge of a chunk.

How far a write has come, through moves of its block.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Final, NamedTuple

from distributed_grid.memory.client.buffered_socket import SMALL, StatusError
from distributed_grid.memory.client.locations import BlockLocation
from distributed_grid.memory.protocol.frames import CHUNK, FrameStatus

WINDOW: Final = 16  # chunks under way
SMALL_WINDOW: Final = 128


class ChunkRange(NamedTuple):
    """A part of a block that lies within one chunk, and where its bytes are or go."""

    handle: int
    offset: int
    view: memoryview
    again: bool = False


def cut(view: memoryview, offset: int) -> deque[ChunkRange]:
    """This range, cut at the chunks' edges."""
    pieces: deque[ChunkRange] = deque()
    done, size = 0, len(view)
    while done < size:
        length = min(CHUNK - (offset + done) % CHUNK, size - done)
        pieces.append(ChunkRange(0, offset + done, view[done : done + length]))
        done += length
    return pieces


class InFlight:
    """Pieces of a list that were sent off, in order, until each is answered.

    Whatever happens, when this is left the list has again what is not done; `StatusError` where the server said no.
    """

    def __init__(self, todo: deque[ChunkRange]) -> None:
        self.window = WINDOW if todo and len(todo[0].view) > SMALL else SMALL_WINDOW
        self.pending: deque[ChunkRange] = deque()
        self._todo = todo
        self._refused: list[ChunkRange] = []
        self._refusal: FrameStatus | None = None

    def __enter__(self) -> InFlight:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._todo.extendleft(reversed(self.pending))
        self._todo.extendleft(reversed(self._refused))
        if error is None and self._refusal is not None:
            raise StatusError(self._refusal)

    @property
    def may_send(self) -> bool:
        """Whether there is more to send, and nobody has said no."""
        return bool(self._todo) and self._refusal is None

    def send_off(self) -> ChunkRange:
        """The next piece, which is under way from now on."""
        piece = self._todo.popleft()
        self.pending.append(piece)
        return piece

    def answered(self, status: int) -> None:
        """The oldest piece under way was answered: it is done, or tried once more, or refused."""
        piece = self.pending.popleft()
        if status == FrameStatus.CORRUPT and not piece.again:
            self._todo.append(piece._replace(again=True))
        elif status:
            self._refusal = self._refusal or FrameStatus(status)
            self._refused.append(piece)


class WriteProgress:
    """What is left of a write, place by place.

    Where a block had one place, what was written there goes with it to the next. Where it had several, a new place may
    have been made from any of them, so the write begins anew.
    """

    def __init__(self, view: memoryview, offset: int) -> None:
        self._view = view
        self._offset = offset
        self._generation = -1
        self._places = 0
        self.left: dict[str, deque[ChunkRange]] = {}

    def begin(self, known: BlockLocation) -> None:
        """Go on with these places."""
        names = [place.copy for place in known.places]
        if known.generation == self._generation and set(names) == self.left.keys():
            return
        rest = next(iter(self.left.values())) if self._places == 1 else cut(self._view, self._offset)
        self.left = {name: deque(rest) for name in names}
        self._generation, self._places = known.generation, len(names)
