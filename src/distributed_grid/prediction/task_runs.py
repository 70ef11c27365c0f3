"""Runs of tasks as the predictor remembers them, what it says about the next one, and the summary of old ones.

Runs that are too old to be kept one by one are histograms over logarithmic buckets. Summaries add up: folding in pieces
gives what folding at once gives. A typical value is the upper edge of its bucket, so it is never below the truth and
above it by a tenth at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Final

from msgspec import Meta, Struct

from distributed_grid.prediction.tiers import Tier

MAX_QUANTITY = 2**60
Quantity = Annotated[int, Meta(ge=0, le=MAX_QUANTITY)]
BUCKETS_PER_DOUBLING: Final = 8
TYPICAL_VALUES: Final = 32
Histogram = dict[int, int]
"""Runs in each bucket."""


class TaskRun(Struct, frozen=True):
    """One run that is over; a task and an attempt are recorded once, however often they are reported.

    `key` and `features` come from `task_shape`. A quantity of 0 was not measured. A run that was cut short (over its
    limit, cancelled, preempted) is a lower bound: it used at least this much. `measured_bytes` is the peak of memory
    that a shim of the grid has measured; 0: somebody else has reported what it used.
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
    """What the next run should be given, and for how long it will run.

    `next_memory_bytes` are the limits of its reruns should it run over, each above the one before. `run_ms` is the
    median; None: not known. `confidence` is the share of earlier runs that this tier covered before it had seen them.
    """

    memory_bytes: int
    next_memory_bytes: tuple[int, ...]
    run_ms: int | None
    tier: Tier
    confidence: float
    samples: int


class RunSummary(Struct, frozen=True, array_like=True):
    """What is left of the runs of one type: how many, and how their memory and run times were spread."""

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
        """Values that are spread as the memory of the runs was, the smallest first."""
        return _typical(self.memory)

    def typical_run_ms(self) -> list[int]:
        """Values that are spread as the run times were, the smallest first."""
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
