"""Summary of runs that are too old to be kept one by one: histograms over logarithmic buckets.

Summaries add up: folding in pieces gives what folding at once gives. A typical value is the upper edge of its bucket,
so it is never below the truth and above it by a tenth at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from distributed_grid.prediction.task_runs import TaskRun

BUCKETS_PER_DOUBLING: Final = 8
TYPICAL_VALUES: Final = 32
Histogram = dict[int, int]
"""Runs in each bucket."""


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
                    bucket = _bucket_of(value)
                    histogram[bucket] = histogram.get(bucket, 0) + 1
        return RunSummary(count, memory, run_time)

    def typical_memory_bytes(self) -> list[int]:
        """Values that are spread as the memory of the runs was, the smallest first."""
        return _typical(self.memory)

    def typical_run_ms(self) -> list[int]:
        """Values that are spread as the run times were, the smallest first."""
        return _typical(self.run_time)


def _bucket_of(value: int) -> int:
    return math.ceil(math.log2(value) * BUCKETS_PER_DOUBLING - 1e-9)


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
