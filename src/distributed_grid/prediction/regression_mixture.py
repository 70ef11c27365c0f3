"""Linear regressions learned online and mixed by how well they have done lately.

Each is recursive least squares with its own memory (forgetting) and its own Huber limit, above which an error counts
only in proportion. The third member of the mixture is the first regressor itself: the last value.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from distributed_grid.prediction.load_history import Vector

FORGETTING = np.array((0.997, 0.9998))
HUBER_LIMITS = np.array((2.5, 1.0))
"""In mean absolute errors."""
PRIOR_VARIANCE = 1.0
MAX_VARIANCE_GROWTH = 10.0
"""A regressor that stays 0 must not let the variance of its weight grow for ever."""
COST_DISCOUNT = 0.997
COST_RATE = 0.3
MAX_COST = 5.0
SCALE_RATE = 0.02
MIN_SCALE = 0.005
FIRST_SCALE = 0.05
FIRST_WEIGHTS = 0.4 * 0.6 ** np.arange(13)
"""Exponential smoothing of the first regressors, the newest slots."""


class SavedMixture(Struct, frozen=True):
    """A mixture as a value; arrays are float64 numbers."""

    variances: bytes
    weights: bytes
    costs: bytes
    error_scale: float


class RegressionMixture:
    """Predicts a number from regressors, and learns from the truth."""

    def __init__(self, regressors: int) -> None:
        members = len(FORGETTING)
        self._size = regressors
        self._variances = np.tile(np.eye(regressors) * PRIOR_VARIANCE, (members, 1, 1))
        self._weights = np.zeros((members, regressors))
        self._weights[:, : len(FIRST_WEIGHTS)] = FIRST_WEIGHTS
        self._costs = np.zeros(members + 1)
        self.error_scale = FIRST_SCALE

    def save(self) -> SavedMixture:
        """This mixture as a value."""
        return SavedMixture(self._variances.tobytes(), self._weights.tobytes(), self._costs.tobytes(), self.error_scale)

    @classmethod
    def restore(cls, saved: SavedMixture, regressors: int) -> RegressionMixture:
        """The mixture that was saved; one with other regressors, of another version, is learned anew."""
        mixture = cls(regressors)
        if len(saved.weights) != mixture._weights.nbytes:
            return mixture
        mixture._variances[:] = np.frombuffer(saved.variances).reshape(mixture._variances.shape)
        mixture._weights[:] = np.frombuffer(saved.weights).reshape(mixture._weights.shape)
        mixture._costs[:] = np.frombuffer(saved.costs)
        mixture.error_scale = saved.error_scale
        return mixture

    def predictions(self, regressors: Vector) -> Vector:
        """What each member predicts."""
        return np.append(self._weights @ regressors, regressors[0])

    def mixed(self, predictions: Vector) -> float:
        """The members' mean, weighted by their recent errors."""
        shares = np.exp(-COST_RATE * (self._costs - self._costs.min()))
        return float(shares @ predictions / shares.sum())

    def learn(self, regressors: Vector, predictions: Vector, truth: float) -> None:
        """Correct each member by its error."""
        error = abs(truth - self.mixed(predictions))
        errors = truth - predictions
        sizes = np.abs(errors)
        self._costs = COST_DISCOUNT * self._costs + np.minimum(sizes / self.error_scale, MAX_COST)
        self.error_scale += SCALE_RATE * (min(error, 3 * self.error_scale) - self.error_scale)
        self.error_scale = max(self.error_scale, MIN_SCALE)
        trust = np.minimum(1, HUBER_LIMITS * self.error_scale / np.maximum(sizes[:-1], 1e-12))
        direction = self._variances @ regressors
        explained = direction @ regressors
        if explained.min() < 0:  # rounding over a very long time
            self._variances[:] = np.eye(self._size) * PRIOR_VARIANCE
            return
        noise = FORGETTING / trust + explained
        self._weights += direction * (errors[:-1] / noise)[:, None]
        direction /= np.sqrt(noise)[:, None]
        self._variances -= direction[:, :, None] * direction[:, None, :]
        self._variances /= FORGETTING[:, None, None]
        growth = np.trace(self._variances, axis1=1, axis2=2) / (self._size * PRIOR_VARIANCE * MAX_VARIANCE_GROWTH)
        if growth.max() > 1:
            self._variances /= np.maximum(growth, 1)[:, None, None]
