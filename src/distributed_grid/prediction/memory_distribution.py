"""Predictive distribution of the memory of a run, and the allocation that is expected to waste least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

MAX_OVER_RUN_PROBABILITY = 0.05
"""Over-runs annoy people beyond the memory they waste: no first allocation accepts more of them than this."""
RETRY_PROBABILITY = 0.998
"""A retry is charged as if it were given the memory that so many of the runs stay below."""


@dataclass(frozen=True, slots=True)
class MemoryDistribution:
    """Weighted values of the memory a run may need, in bytes, ascending; the weights sum to 1."""

    used_bytes: Values
    weights: Values

    @classmethod
    def of(cls, used_bytes: Values, weights: Values) -> MemoryDistribution:
        """The distribution of values in any order, with weights of any sum."""
        order = np.argsort(used_bytes)
        return cls(used_bytes[order], weights[order] / weights.sum())

    def probability_above(self, limit_bytes: float) -> float:
        """How likely a run with this limit runs over it."""
        return float(self.weights[np.searchsorted(self.used_bytes, limit_bytes, side="right") :].sum())

    def quantile(self, probability: float) -> float:
        """The memory that a run stays within with this probability."""
        at = np.searchsorted(np.cumsum(self.weights), probability)
        return float(self.used_bytes[min(int(at), len(self.used_bytes) - 1)])

    def above(self, limit_bytes: float) -> MemoryDistribution | None:
        """What is left of the distribution once a run has needed more than the limit; None: it gave that no chance."""
        first = np.searchsorted(self.used_bytes, limit_bytes, side="right")
        weights = self.weights[first:]
        total = weights.sum()
        return MemoryDistribution(self.used_bytes[first:], weights / total) if total > 0 else None

    def least_waste_bytes(self) -> float:
        """The allocation with the least expected waste.

        A run that fits wastes what it does not use. One that runs over wastes its whole allocation, and what its retry
        then does not use.
        """
        used, weights = self.used_bytes, self.weights
        fits = np.cumsum(weights)
        runs_over = 1 - fits
        retry = self.quantile(RETRY_PROBABILITY)
        retried = np.cumsum(weights * np.minimum(used, retry))
        unused = used * fits - np.cumsum(weights * used)
        unused_by_retries = np.maximum(runs_over * retry - (retried[-1] - retried), 0)
        waste = unused + runs_over * used + unused_by_retries
        first = min(int(np.searchsorted(fits, 1 - MAX_OVER_RUN_PROBABILITY)), len(used) - 1)
        return float(used[first + int(np.argmin(waste[first:]))])
