"""Estimates of how long a run takes and what it uses besides memory, from the runs before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from distributed_grid.prediction.memory_distribution import MemoryDistribution
from distributed_grid.prediction.memory_sizing import MemorySizer, Run
from distributed_grid.prediction.tiers import LEAST_SAMPLES_FOR_STATS

ESTIMATE_WINDOW: Final = 64
"""Runs that count: an estimate need not be as sharp as a limit."""
REFIT_SHARE: Final = 8


class UsageEstimate:
    """One quantity of one type of task, such as its run time; a value of 0 was not measured.

    The models are those of memory: any quantity above 0 has a curve over the features and a relative spread.
    """

    def __init__(self, feature_count: int) -> None:
        self._feature_count = feature_count
        self._runs: deque[Run] = deque(maxlen=ESTIMATE_WINDOW)
        self._unfitted = 0
        self._sizer: MemorySizer | None = None

    def learn(self, features: tuple[float, ...], value: int) -> None:
        """Take in the value of a run that ended by itself."""
        if value > 0:
            self._runs.append(Run(features, value))
            self._unfitted += 1

    def fit(self) -> None:
        """Fit the models where enough has come in since the last time."""
        if self._unfitted and self._unfitted * REFIT_SHARE >= len(self._runs) >= LEAST_SAMPLES_FOR_STATS:
            sizer = MemorySizer(self._feature_count, min_runs=LEAST_SAMPLES_FOR_STATS, is_local=False)
            sizer.learn_all(self._runs)
            self._sizer, self._unfitted = sizer, 0

    def quantile(self, features: Sequence[float], probability: float) -> int | None:
        """What a run stays within with this probability; None: not known."""
        found = self.distribution(features)
        return None if found is None else max(round(found.quantile(probability)), 1)

    def distribution(self, features: Sequence[float]) -> MemoryDistribution | None:
        """What a run may take; None: not known."""
        return None if self._sizer is None else self._sizer.distribution(features)
