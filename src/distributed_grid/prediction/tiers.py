"""Tiers of prediction, and the settings that choose between them.

With enough runs all models predict; with a few, those of few parameters; below that, defaults. A tier that covered too
few of the runs that it had not seen gives way to the next one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD: Final = 0.7
DEFAULT_PREDICTION_UPDATE_INTERVAL: Final = 3600
"""Seconds between two full trainings."""
DEFAULT_MIN_SAMPLES_FOR_ML: Final = 30
DEFAULT_MIN_SAMPLES_FOR_STATS: Final = 5
LEAST_SAMPLES_FOR_ML: Final = 5
LEAST_SAMPLES_FOR_STATS: Final = 3
"""Fewer say nothing about how far runs stray."""


class Tier(enum.StrEnum):
    """How a prediction was made: by all models, by those of few parameters, or not at all."""

    ML = "ml"
    STATISTICS = "statistics"
    DEFAULTS = "defaults"


@dataclass(frozen=True, slots=True)
class TierSettings:
    """How many runs a tier needs, and how many of those it had not seen it must have covered."""

    confidence_threshold: float = DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD
    min_samples_for_ml: int = DEFAULT_MIN_SAMPLES_FOR_ML
    min_samples_for_stats: int = DEFAULT_MIN_SAMPLES_FOR_STATS
