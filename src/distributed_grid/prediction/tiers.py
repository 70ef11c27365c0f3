"""Tiers of prediction, the settings that choose between them, and the held-out coverage that a tier is judged by.

With enough runs all models predict; with a few, those of few parameters; below that, defaults. A tier that covered too
few of the runs that it had not seen gives way to the next one.
"""

from __future__ import annotations

import enum
from typing import Final

from msgspec import Struct

DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD: Final = 0.7
DEFAULT_PREDICTION_UPDATE_INTERVAL: Final = 3600
"""Seconds between two full trainings."""
DEFAULT_MIN_SAMPLES_FOR_ML: Final = 30
DEFAULT_MIN_SAMPLES_FOR_STATS: Final = 5
LEAST_SAMPLES_FOR_ML: Final = 5
LEAST_SAMPLES_FOR_STATS: Final = 3
"""Fewer say nothing about how far runs stray."""
DISCOUNT: Final = 0.98
"""What an earlier run weighs beside the next one: about the last fifty count."""


class Tier(enum.StrEnum):
    """How a prediction was made: by all models, by those of few parameters, or not at all."""

    ML = "ml"
    STATISTICS = "statistics"
    DEFAULTS = "defaults"


class TierSettings(Struct, frozen=True):
    """How many runs a tier needs, and how many of those it had not seen it must have covered."""

    confidence_threshold: float = DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD
    min_samples_for_ml: int = DEFAULT_MIN_SAMPLES_FOR_ML
    min_samples_for_stats: int = DEFAULT_MIN_SAMPLES_FOR_STATS


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
