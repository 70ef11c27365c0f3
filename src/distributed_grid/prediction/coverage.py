"""Held-out coverage: the share of runs that a prediction made before them would have been enough for."""

from __future__ import annotations

from typing import Final

DISCOUNT: Final = 0.98
"""What an earlier run weighs beside the next one: about the last fifty count."""


class Coverage:
    """Coverage as measured so far, later runs weighing more.

    The confidence is the mean of what the true share may be (Laplace's rule), so that two runs that were covered are
    not certainty, and it comes to the true share as runs come in.
    """

    __slots__ = ("_covered", "_total")

    def __init__(self) -> None:
        self._covered = 0.0
        self._total = 0.0

    def add(self, covered: bool) -> None:
        """One more run that was predicted before it was seen."""
        self._covered = DISCOUNT * self._covered + covered
        self._total = DISCOUNT * self._total + 1

    @property
    def total(self) -> float:
        """Runs that count, less the discount."""
        return self._total

    @property
    def confidence(self) -> float:
        """Between 0 and 1; one half where nothing was measured."""
        return (self._covered + 1) / (self._total + 2)
