"""The parts in which a range of a block travels: none reaches over the edge of a chunk."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Final, NamedTuple

from distributed_grid.memory.frames import CHUNK, Status
from distributed_grid.memory.line import SMALL, Answered

WINDOW: Final = 16  # chunks under way
SMALL_WINDOW: Final = 128


class Piece(NamedTuple):
    """A part of a block that lies within one chunk, and where its bytes are or go."""

    handle: int
    offset: int
    view: memoryview
    again: bool = False


def cut(view: memoryview, offset: int) -> deque[Piece]:
    """This range, cut at the chunks' edges."""
    pieces: deque[Piece] = deque()
    done, size = 0, len(view)
    while done < size:
        length = min(CHUNK - (offset + done) % CHUNK, size - done)
        pieces.append(Piece(0, offset + done, view[done : done + length]))
        done += length
    return pieces


class UnderWay:
    """Pieces of a list that were sent off, in order, until each is answered.

    Whatever happens, when this is left the list has again what is not done; `Answered` where the server said no.
    """

    def __init__(self, todo: deque[Piece]) -> None:
        self.window = WINDOW if todo and len(todo[0].view) > SMALL else SMALL_WINDOW
        self.pending: deque[Piece] = deque()
        self._todo = todo
        self._refused: list[Piece] = []
        self._refusal: Status | None = None

    def __enter__(self) -> UnderWay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._todo.extendleft(reversed(self.pending))
        self._todo.extendleft(reversed(self._refused))
        if error is None and self._refusal is not None:
            raise Answered(self._refusal)

    @property
    def may_send(self) -> bool:
        """Whether there is more to send, and nobody has said no."""
        return bool(self._todo) and self._refusal is None

    def send_off(self) -> Piece:
        """The next piece, which is under way from now on."""
        piece = self._todo.popleft()
        self.pending.append(piece)
        return piece

    def answered(self, status: int) -> None:
        """The oldest piece under way was answered: it is done, or tried once more, or refused."""
        piece = self.pending.popleft()
        if status == Status.CORRUPT and not piece.again:
            self._todo.append(piece._replace(again=True))
        elif status:
            self._refusal = self._refusal or Status(status)
            self._refused.append(piece)
