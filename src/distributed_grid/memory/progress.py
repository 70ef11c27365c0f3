"""How far a write has come, through moves of its block."""

from __future__ import annotations

from collections import deque

from distributed_grid.memory.pieces import Piece, cut
from distributed_grid.memory.places import Known


class Progress:
    """What is left of a write, place by place.

    Where a block had one place, what was written there goes with it to the next. Where it had several, a new place may
    have been made from any of them, so the write begins anew.
    """

    def __init__(self, view: memoryview, offset: int) -> None:
        self._view = view
        self._offset = offset
        self._generation = -1
        self._places = 0
        self.left: dict[str, deque[Piece]] = {}

    def begin(self, known: Known) -> None:
        """Go on with these places."""
        names = [place.copy for place in known.places]
        if known.generation == self._generation and set(names) == self.left.keys():
            return
        rest = next(iter(self.left.values())) if self._places == 1 else cut(self._view, self._offset)
        self.left = {name: deque(rest) for name in names}
        self._generation, self._places = known.generation, len(names)
