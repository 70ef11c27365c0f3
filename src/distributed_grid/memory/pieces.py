"""The parts in which a range of a block travels: none reaches over the edge of a chunk."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from distributed_grid.memory.frames import CHUNK

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
