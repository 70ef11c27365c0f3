"""Runs of tasks as the predictor remembers them, predictions with their tiers and limits, and the summary of old runs.

Tiers: with enough runs all models predict; with a few, those of few parameters; below that, defaults. A tier that
covered too few of the runs that it had not seen gives way to the next one.

Runs that are too old to be kept one by one are histograms over logarithmic buckets. Summaries add up: folding in pieces
gives the same as folding at once. A typical value is the upper edge of its bucket, so it is never below the truth and
above it by a tenth at most.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Annotated, Final

from msgspec import Meta, Struct

from distributed_grid.domain.resources import MAX_AMOUNT

DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD: Final = 0.7
DEFAULT_PREDICTION_UPDATE_INTERVAL: Final = 3600  # seconds between two full trainings
DEFAULT_MIN_SAMPLES_FOR_ML: Final = 30
DEFAULT_MIN_SAMPLES_FOR_STATS: Final = 5
LEAST_SAMPLES_FOR_ML: Final = 5
LEAST_SAMPLES_FOR_STATS: Final = 3  # fewer say nothing about how far runs stray
DISCOUNT: Final = 0.98  # what an earlier run weighs beside the next one: about the last fifty count


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
    """Measured coverage, later runs weighing more.

    The confidence is the mean of the possible true shares (Laplace's rule), so that two covered runs are not certainty,
    and it approaches the true share.
    """

    __slots__ = ("_covered", "_total")

    def __init__(self) -> None:
        self._covered = 0.0
        self._total = 0.0

    def add(self, covered: bool) -> None:
        self._covered = DISCOUNT * self._covered + covered
        self._total = DISCOUNT * self._total + 1

    @property
    def total(self) -> float:
        return self._total

    @property
    def confidence(self) -> float:
        """Between 0 and 1; one half without measurements."""
        return (self._covered + 1) / (self._total + 2)


MAX_QUANTITY = 2**60
Quantity = Annotated[int, Meta(ge=0, le=MAX_QUANTITY)]
BUCKETS_PER_DOUBLING: Final = 8
TYPICAL_VALUES: Final = 32
Histogram = dict[int, int]  # runs in each bucket


class TaskRun(Struct, frozen=True):
    """One ended run; a task and an attempt are recorded once, however often they are reported.

    `key` and `features` come from `task_shape`. A quantity of 0 was not measured. A run that was cut short (over its
    limit, cancelled, preempted) is a lower bound. `measured_bytes` is the peak of memory measured by a shim of the
    grid; 0 if the usage was reported by another source.
    """

    task_id: str
    attempt: int
    user: str
    key: str
    features: tuple[float, ...] = ()
    input_bytes: Quantity = 0
    memory_bytes: Quantity = 0
    cpu_ms: Quantity = 0
    run_ms: Quantity = 0
    gpu_memory_bytes: Quantity = 0
    ended_at_ms: int = 0
    is_lower_bound: bool = False
    measured_bytes: Quantity = 0


class MemoryPrediction(Struct, frozen=True):
    """Memory limits and run time of the next run.

    `next_memory_bytes` are the limits of its reruns, each above the one before. `run_ms` is the median; None if
    unknown. `confidence` is the share of earlier runs that this tier covered in advance.
    """

    memory_bytes: int
    next_memory_bytes: tuple[int, ...]
    run_ms: int | None
    tier: Tier
    confidence: float
    samples: int


class RunSummary(Struct, frozen=True, array_like=True):
    """Summary of old runs of one type: their number, and the spread of memory and run times."""

    count: int = 0
    memory: Histogram = {}
    run_time: Histogram = {}

    def plus(self, runs: Iterable[TaskRun]) -> RunSummary:
        """With these runs added; those that were cut short are not counted."""
        count, memory, run_time = self.count, dict(self.memory), dict(self.run_time)
        for run in runs:
            if run.is_lower_bound:
                continue
            count += run.memory_bytes > 0
            for histogram, value in ((memory, run.memory_bytes), (run_time, run.run_ms)):
                if value > 0:
                    bucket = math.ceil(math.log2(value) * BUCKETS_PER_DOUBLING - 1e-9)
                    histogram[bucket] = histogram.get(bucket, 0) + 1
        return RunSummary(count, memory, run_time)

    def typical_memory_bytes(self) -> list[int]:
        """Values spread like the memory of the runs, the smallest first."""
        return _typical(self.memory)

    def typical_run_ms(self) -> list[int]:
        """Values spread like the run times, the smallest first."""
        return _typical(self.run_time)


def _typical(histogram: Histogram) -> list[int]:
    """One value for each run, or for as many equal shares of them as are kept; the largest is always among them."""
    total = sum(histogram.values())
    count = min(total, TYPICAL_VALUES)
    values, seen, taken = [], 0, 0
    for bucket in sorted(histogram):
        seen += histogram[bucket]
        upper = math.ceil(2 ** (bucket / BUCKETS_PER_DOUBLING))
        while taken < count and (taken + 1) * total <= seen * count:
            values.append(upper)
            taken += 1
    return values


MIN_LIMIT_BYTES: Final = 64 * 1024**2
"""The smallest limit: below that, a limit costs more reruns than it saves memory."""
LEAST_GROWTHS: Final = (1.25, 2.0, 4.0)  # of the limit before, for each rerun
STEP_BITS: Final = 7  # there are 2 ** 7 limits between a power of two and the next


def limits_of(predicted: MemoryPrediction) -> tuple[int, ...]:
    """Limits of the first run and its reruns: the predicted ones, each at least a fixed factor above the one before, so
    that a job that needs ten times as much is not ended by a guess. Limits are rounded up, so that waiting jobs are
    equal to each other."""
    limits = [rounded_limit(predicted.memory_bytes)]
    for at, growth in enumerate(LEAST_GROWTHS):
        sizes = predicted.next_memory_bytes[at : at + 1]
        bigger = rounded_limit(max((*sizes, int(limits[-1] * growth))))
        if bigger > limits[-1]:
            limits.append(bigger)
    return tuple(limits)


def rounded_limit(size: int) -> int:
    """The next limit of at least this size."""
    size = min(max(size, MIN_LIMIT_BYTES), MAX_AMOUNT)
    step = 1 << max(size.bit_length() - 1 - STEP_BITS, 0)
    return min(-(-size // step) * step, MAX_AMOUNT)
