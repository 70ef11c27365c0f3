"""Memory to allocate to the next run of a type of task, learned online from its earlier runs.

The promise: an allocation is the one that is expected to waste least memory × time over what is known, where too little
wastes all of it; a retry always gets more than the limit that was too small; the same runs in the same order give the
same allocations; memory and time are bounded, whatever is learned.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from distributed_grid.prediction.memory_models import MemoryDistribution, MemoryModels, Values

WINDOW: Final = 256
"""The last runs that are remembered: older ones say less about the next, and bound time and memory."""
MIN_RUNS: Final = 5
"""Below, nothing is known."""
REFIT_SHARE: Final = 16
"""The models are fitted anew after each sixteenth of the remembered runs, so that a run costs little to learn."""
RETRY_GROWTH: Final = 2.0
"""Factor of an allocation after a second over-run, or where nothing is known."""
MIN_RETRY_GROWTH: Final = 1.02
"""A limit that was too small is raised by this at least."""
MAX_BYTES: Final = 2**60
MAX_COLUMNS: Final = 2
"""The features that models are fitted over: those by which the memory is ordered most, so that time is bounded."""


class Run(Struct, frozen=True):
    """What a run was given, and the memory it used, or used at least if it was cut short.

    Features are numbers that are known before the run, such as the bytes of its input; what is not finite or negative
    is not known.
    """

    features: tuple[float, ...]
    used_bytes: int
    is_lower_bound: bool = False
    id: str = ""
    """Of the task: a run that ends well replaces the lower bounds of the attempts before it."""


class _Fitted(Struct, frozen=True):
    """Models, the features they are over, and what stands for a feature that is not known."""

    models: MemoryModels
    defaults: Values
    columns: list[int]


class MemorySizer:
    """Allocations of memory for one type of task.

    One thread at a time may learn. Others may ask meanwhile: what they ask is replaced as a whole, never changed.
    """

    def __init__(self, feature_count: int = 1, *, min_runs: int = MIN_RUNS, is_local: bool = True) -> None:
        """With `is_local=False`, few parameters: for a few runs (see `MemoryModels`)."""
        self._feature_count = feature_count
        self._min_runs = min_runs
        self._is_local = is_local
        self._runs: deque[Run] = deque(maxlen=WINDOW)
        self._unfitted = 0
        self._fitted: _Fitted | None = None

    def learn(self, run: Run) -> None:
        """Learn from a run that ended or was cut short; one whose memory was not measured says nothing."""
        self.learn_all((run,))

    def learn_all(self, runs: Iterable[Run]) -> None:
        """Learn from many runs, the oldest first; the models are fitted once."""
        largest = max((known.used_bytes for known in self._runs), default=0)
        must_fit = False
        for run in runs:
            if not math.isfinite(run.used_bytes) or run.used_bytes <= 0:
                continue
            used = self._estimate(run) if run.is_lower_bound else run.used_bytes
            must_fit |= self._forget_lower_bounds(run.id)
            if used is not None:
                bounded = int(min(used, MAX_BYTES))
                self._runs.append(Run(run.features, bounded, run.is_lower_bound, run.id if run.is_lower_bound else ""))
                self._unfitted += 1
                must_fit |= bounded > largest
        if must_fit or (self._unfitted and self._unfitted * REFIT_SHARE >= len(self._runs)):
            self._fit()

    def allocation(self, features: Sequence[float]) -> int | None:
        """Bytes for the first attempt of a run; None: too little is known to set a limit."""
        limits = self.allocations(features, 0)
        return None if limits is None else limits[0]

    def retry_allocation(self, features: Sequence[float], limits: Sequence[int]) -> int:
        """Bytes for the next attempt of a run that ran over each of these limits."""
        return _next_limit(self.distribution(features), limits)

    def allocations(self, features: Sequence[float], reruns: int) -> tuple[int, ...] | None:
        """Bytes for the first attempt, and for so many more should each run over; None: too little is known."""
        distribution = self.distribution(features)
        if distribution is None:
            return None
        limits = [min(math.ceil(distribution.least_waste_bytes()), MAX_BYTES)]
        for _ in range(reruns):
            limits.append(_next_limit(distribution, limits))
        return tuple(limits)

    def distribution(self, features: Sequence[float]) -> MemoryDistribution | None:
        """What a run with these features may need; None: too little is known."""
        fitted = self._fitted
        if fitted is None:
            return None
        row = self._row(features)
        return fitted.models.distribution(np.where(np.isnan(row), fitted.defaults, row)[fitted.columns])

    def _estimate(self, run: Run) -> float | None:
        """Memory to assume for a run that was cut short; None: that it used so much is no news."""
        distribution = self.distribution(run.features)
        if distribution is None:
            return None
        if distribution.probability_above(run.used_bytes) >= 0.5:
            return None
        rest = distribution.above(run.used_bytes)
        return rest.quantile(0.5) if rest else run.used_bytes * RETRY_GROWTH

    def _forget_lower_bounds(self, run_id: str) -> bool:
        """Whether there were any of that run."""
        if not run_id:
            return False
        kept = [known for known in self._runs if not known.id or known.id != run_id]
        if len(kept) == len(self._runs):
            return False
        self._runs = deque(kept, maxlen=WINDOW)
        return True

    def _fit(self) -> None:
        """Fit the models to the runs that are remembered."""
        if len(self._runs) < self._min_runs:
            return
        rows = np.stack([self._row(run.features) for run in self._runs])
        known = ~np.isnan(rows)
        defaults = np.array([np.median(c[k]) if k.any() else 0.0 for c, k in zip(rows.T, known.T, strict=True)])
        rows = np.where(known, rows, defaults)
        used = np.array([float(run.used_bytes) for run in self._runs])
        columns = _ordering_columns(rows, used)
        self._fitted = _Fitted(MemoryModels(rows[:, columns], used, is_local=self._is_local), defaults, columns)
        self._unfitted = 0

    def _row(self, features: Sequence[float]) -> Values:
        """The features as a row; NaN for what is not known."""
        row = np.full(self._feature_count, np.nan)
        for i, value in enumerate(features[: self._feature_count]):
            if math.isfinite(value) and value >= 0:
                row[i] = min(value, MAX_BYTES)
        return row


def _next_limit(distribution: MemoryDistribution | None, limits: Sequence[int]) -> int:
    """Bytes for an attempt after those that ran over these limits."""
    limit = max(limits)
    grown = math.ceil(limit * (RETRY_GROWTH if len(limits) > 1 else MIN_RETRY_GROWTH)) + 1
    rest = distribution.above(limit) if distribution else None
    if rest is None:
        return math.ceil(limit * RETRY_GROWTH) + 1
    return max(grown, math.ceil(rest.least_waste_bytes()))


def _ordering_columns(rows: Values, used: Values) -> list[int]:
    """The columns by which the memory is ordered most, by rank correlation; one that never varies only if none does."""
    varying = [i for i in range(rows.shape[1]) if np.ptp(rows[:, i]) > 0]
    if len(varying) <= MAX_COLUMNS or np.ptp(used) == 0:
        return varying[:MAX_COLUMNS] or [0]
    ranks = _ranks(used)
    order = sorted(varying, key=lambda i: -abs(float(np.corrcoef(_ranks(rows[:, i]), ranks)[0, 1])))
    return sorted(order[:MAX_COLUMNS])


def _ranks(values: Values) -> Values:
    """Ranks, with their mean for values that are equal."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Values = (ends - (counts - 1) / 2)[inverse]
    return ranks
