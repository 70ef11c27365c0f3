"""Memory to allocate to the next run of a type of task, learned online from its earlier runs.

The promise: an allocation is the one that is expected to waste least memory × time over what is known, where too little
wastes all of it; a retry always gets more than the limit that was too small; the same runs in the same order give the
same allocations; memory and time are bounded.

A model is a curve over one feature (constant, power law or straight line), moved locally by the mean residual of the
nearest runs, and a spread that is the same everywhere or that of the nearest runs. All combinations are fitted. The
prediction of each for a run that it had not seen (leave one out) gives its likelihood; the likelihoods are the weights
of the mixture that predicts. So nothing has to be set per type: a constant, a line, a plateau, a step and a noisy cloud
each get the models that describe them.

Memory and its residuals are logarithms in the models, so a spread is relative to the memory; the result is a
distribution of bytes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Values = NDArray[np.float64]
MAX_OVER_RUN_PROBABILITY = 0.05
"""Over-runs annoy people beyond the memory they waste: no first allocation accepts more of them than this."""
RETRY_PROBABILITY = 0.998  # a retry is charged the memory that a run stays within with this probability
NEIGHBOUR_SHARES: Final = (0.5, 0.25, 0.1)
"""The nearest runs, as shares of all, over which residuals and spreads are averaged."""
MIN_NEIGHBOURS: Final = 3
RESIDUAL_PRIOR: Final = 0.5  # runs without a residual that are added to every local mean
SPREAD_PRIOR: Final = 4.0
"""Runs of the common spread that are added to every local one: a spread takes more runs to know than a mean."""
MIN_SPREAD: Final = 1e-4  # the smallest spread that can be learned, relative to the memory
LIKELIHOOD_FREEDOM: Final = 4.0
"""Degrees of freedom of the Student distribution that residuals are judged by: it forgives outliers."""
MAX_MODELS: Final = 4
MIN_WEIGHT: Final = 0.02  # models that weigh less are left out of the mixture
MAX_RATIO: Final = 2.0  # no prediction exceeds the largest seen, or the mean of the curves, by more than this factor
# Residuals are smoothed with a Student distribution of four degrees of freedom, coarse in the middle and fine in the
# tails, so that memory beyond the largest seen has a probability.
_EDGES = np.array([0, 0.002, 0.01, 0.04, 0.12, 0.25, 0.4, 0.6, 0.75, 0.88, 0.96, 0.99, 0.998, 1])
_KERNEL_WEIGHTS = np.diff(_EDGES)


class MemoryDistribution(Struct, frozen=True):
    """Weighted values of the memory a run may need, in bytes, ascending; the weights sum to 1."""

    used_bytes: Values
    weights: Values

    @classmethod
    def of(cls, used_bytes: Values, weights: Values) -> MemoryDistribution:
        """The distribution of values in any order, with weights of any sum."""
        order = np.argsort(used_bytes)
        return cls(used_bytes[order], weights[order] / weights.sum())

    def probability_above(self, limit_bytes: float) -> float:
        return float(self.weights[np.searchsorted(self.used_bytes, limit_bytes, side="right") :].sum())

    def quantile(self, probability: float) -> float:
        """Memory that a run stays within with this probability."""
        at = np.searchsorted(np.cumsum(self.weights), probability)
        return float(self.used_bytes[min(int(at), len(self.used_bytes) - 1)])

    def above(self, limit_bytes: float) -> MemoryDistribution | None:
        """The distribution of runs above the limit; None if it gave them no probability."""
        first = np.searchsorted(self.used_bytes, limit_bytes, side="right")
        weights = self.weights[first:]
        total = weights.sum()
        return MemoryDistribution(self.used_bytes[first:], weights / total) if total > 0 else None

    def least_waste_bytes(self) -> float:
        """The allocation with the least expected waste.

        A run that fits wastes its unused part. A run that exceeds it wastes the whole allocation and the unused part of
        its retry.
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


# Exact quantiles for four degrees of freedom, in the middles of the steps.
_MIDDLES = (_EDGES[1:] + _EDGES[:-1]) / 2
_ALPHA = 4 * _MIDDLES * (1 - _MIDDLES)
_ROOT = np.cos(np.arccos(np.sqrt(_ALPHA)) / 3) / np.sqrt(_ALPHA)
_KERNEL: Values = np.sign(_MIDDLES - 0.5) * 2 * np.sqrt(np.maximum(_ROOT - 1, 0))


class _Curve(Struct, frozen=True):
    """log memory = log(max(floor, intercept + slope · x)), or without logarithm for a power law in x = log feature."""

    intercept: float
    slope: float
    centre: float
    is_log: bool
    floor: float = 0.0

    def at(self, feature: float, log_feature: float) -> float:
        if self.is_log:
            return self.intercept + self.slope * (log_feature - self.centre)
        return math.log(max(self.intercept + self.slope * (feature - self.centre), self.floor))


class _FeatureModels:
    """All models over one feature: their residuals on runs they had not seen, scales and likelihoods."""

    def __init__(self, feature: Values, used: Values, is_local: bool) -> None:
        self._feature, self._log = feature, np.log1p(feature)
        self._lowest, self._highest = float(used.min()), float(used.max())
        count = len(used)
        self._tolerance = 1e-6 * float(self._log.std()) + 1e-12
        shares = (min(max(MIN_NEIGHBOURS, round(share * count)), count - 1) for share in NEIGHBOUR_SHARES)
        self._neighbours = sorted(set(shares), reverse=True) if is_local else []
        kernels: list[Values] = []
        if is_local:
            distances = np.abs(self._log[:, None] - self._log[None])
            np.fill_diagonal(distances, np.inf)
            near = np.partition(distances, [k - 1 for k in self._neighbours], axis=1)
            kernels = [_tricube(distances, near[:, k - 1 : k], self._tolerance) for k in self._neighbours]
        self._curves, self._residuals = _fit_curves(feature, self._log, used)
        moved = [self._residuals - _local_mean(kernel, self._residuals) for kernel in kernels]
        residuals = np.concatenate([self._residuals, *moved], axis=1)
        self._log_spreads = np.log(np.abs(residuals) + MIN_SPREAD)
        self._common = self._log_spreads.mean(axis=0)
        common = np.broadcast_to(self._common, residuals.shape)
        local = [_local_spread(kernel, self._log_spreads, self._common) for kernel in kernels]
        scales = np.concatenate([common, *local], axis=1)
        self.standardised: Values = np.tile(residuals, len(kernels) + 1) / np.exp(scales)
        """Residuals in units of the model's spread; a column a model."""
        # Likelihood of every column, under a Student distribution fitted to it in a few steps of expectation
        # maximisation.
        standardised = self.standardised
        freedom = LIKELIHOOD_FREEDOM
        centre, variance = standardised.mean(axis=0), np.maximum((standardised**2).mean(axis=0), 1e-6)
        for _ in range(4):
            weights = (freedom + 1) / (freedom + (standardised - centre) ** 2 / variance)
            centre = (weights * standardised).sum(axis=0) / weights.sum(axis=0)
            variance = np.maximum((weights * (standardised - centre) ** 2).mean(axis=0), 1e-6)
        surprise = (freedom + 1) / 2 * np.log1p((standardised - centre) ** 2 / variance / freedom)
        self.log_likelihood: Values = (-0.5 * np.log(variance) - surprise - scales).sum(axis=0)

    def drop_residuals(self) -> None:
        """Drop the residuals, which only the choice and the weights of the models need: they are most of the memory."""
        self.standardised = np.empty((0, 0))

    def at(self, feature: float) -> tuple[Values, Values]:
        """Logarithm of the memory and spread of every model, in the order of the columns."""
        log_feature = math.log1p(feature)
        distances = np.abs(self._log - log_feature)
        near = np.partition(distances, [k - 1 for k in self._neighbours]) if self._neighbours else distances
        kernels = [_tricube(distances, near[k - 1 : k], self._tolerance) for k in self._neighbours]
        curves = np.array([curve.at(feature, log_feature) for curve in self._curves])
        centres = np.concatenate([curves, *(curves + _local_mean(kernel, self._residuals) for kernel in kernels)])
        # Residuals are those of the curve as it is, so the sum is bounded and not the curve. Beyond what was seen, none
        # is trusted to fall or rise faster than the feature does.
        lowest = self._lowest - max(float(self._log.min()) - log_feature, 0)
        highest = self._highest + max(log_feature - float(self._log.max()), 0)
        local = [_local_spread(kernel, self._log_spreads, self._common) for kernel in kernels]
        return np.tile(np.clip(centres, lowest, highest), len(kernels) + 1), np.exp(
            np.concatenate([self._common, *local])
        )


class MemoryModels:
    """Mixture of all models over all features, weighted by likelihood."""

    def __init__(self, features: Values, used_bytes: Values, *, is_local: bool = True) -> None:
        """From the runs: a row of features each, no value missing or negative, and the memory, above 0.

        Without `is_local` the curves are neither moved nor widened near some runs: few parameters for few runs.
        """
        count, self._largest = len(used_bytes), float(np.log(used_bytes.max()))
        self._features = [_FeatureModels(column, np.log(used_bytes), is_local) for column in features.T]
        likelihoods = np.concatenate([models.log_likelihood for models in self._features])
        owners = np.repeat(np.arange(len(self._features)), [len(m.log_likelihood) for m in self._features])
        columns = np.concatenate([np.arange(len(m.log_likelihood)) for m in self._features])
        weights = np.exp(likelihoods - likelihoods.max())
        weights /= weights.sum()
        best = np.argsort(-weights, kind="stable")[:MAX_MODELS]
        best = best[(weights[best] >= MIN_WEIGHT) | (np.arange(len(best)) == 0)]
        self._owners, self._columns = owners[best], columns[best]
        self._weights = weights[best] / weights[best].sum()
        chosen = zip(self._owners, self._columns, strict=True)
        standardised = np.stack([self._features[owner].standardised[:, column] for owner, column in chosen])
        standardised.sort(axis=1)
        smoothed = standardised[:, :, None] + _bandwidths(standardised)[:, :, None] * _KERNEL
        self._standardised = smoothed.reshape(len(best), -1)
        self._count = count
        for models in self._features:
            models.drop_residuals()

    def distribution(self, features: Values) -> MemoryDistribution:
        """Distribution of the memory of a run with these features."""
        at = {owner: self._features[owner].at(float(features[owner])) for owner in set(self._owners.tolist())}
        chosen = list(zip(self._owners.tolist(), self._columns.tolist(), strict=True))
        centres = np.array([at[owner][0][column] for owner, column in chosen])
        spreads = np.array([at[owner][1][column] for owner, column in chosen])
        highest = max(self._largest, float(self._weights @ centres)) + math.log(MAX_RATIO)
        used = centres[:, None] + spreads[:, None] * self._standardised
        weights = np.outer(self._weights, np.tile(_KERNEL_WEIGHTS, self._count)).ravel()
        return MemoryDistribution.of(np.exp(np.clip(used, 0, highest)).ravel(), weights)


def _fit_curves(feature: Values, log_feature: Values, used: Values) -> tuple[list[_Curve], Values]:
    """The curves, and by how much each misses a run when it is fitted to all others; a column a curve."""
    count = len(used)
    mean = float(used.mean())
    curves, residuals = [_Curve(mean, 0.0, 0.0, True)], [(used - mean) * count / (count - 1)]
    if log_feature.std() > 1e-9 and count > 4:
        fitted, intercept, slope, centre, leverage = _line(log_feature, used, np.ones(count))
        curves.append(_Curve(intercept, slope, centre, True))
        residuals.append((used - fitted) / (1 - leverage))
        memory = np.exp(used)
        fitted, intercept, slope, centre, leverage = _line(feature, memory, memory**-2)
        floor = float(memory.min()) / 2
        curves.append(_Curve(intercept, slope, centre, False, floor))
        unseen = memory - (memory - fitted) / (1 - leverage)
        residuals.append(used - np.log(np.maximum(unseen, floor)))
    return curves, np.stack(residuals, axis=1)


def _line(x: Values, y: Values, weights: Values) -> tuple[Values, float, float, float, Values]:
    """Weighted least squares: fitted values, intercept at the centre, slope, centre, and the leverage of each run."""
    total = weights.sum()
    centre, middle = float(weights @ x / total), float(weights @ y / total)
    away = x - centre
    inertia = float(weights @ away**2)
    slope = float(weights @ (away * (y - middle))) / inertia
    leverage = weights * (1 / total + away**2 / inertia)
    return middle + slope * away, middle, slope, centre, np.minimum(leverage, 0.95)


def _tricube(distances: Values, width: Values, tolerance: float) -> Values:
    """Weights of the runs by distance: 1 at none, 0 from the width on."""
    ratio = distances / (width * 1.0001 + tolerance)
    weights: Values = np.maximum(1 - ratio * ratio * ratio, 0)
    return weights * weights * weights


def _local_mean(kernel: Values, residuals: Values) -> Values:
    mean: Values = kernel @ residuals / (kernel.sum(axis=-1, keepdims=True) + RESIDUAL_PRIOR)
    return mean


def _local_spread(kernel: Values, log_spreads: Values, common: Values) -> Values:
    total = kernel.sum(axis=-1, keepdims=True)
    spread: Values = (kernel @ log_spreads + SPREAD_PRIOR * common) / (total + SPREAD_PRIOR)
    return spread


def _bandwidths(ordered: Values) -> Values:
    """Width of the smoothing of every residual in ascending rows.

    It is Silverman's, but no wider than the distance within which the nearest residuals are, so that groups of runs
    with a gap between them stay apart; and with a floor for runs that are all alike.
    """
    count = ordered.shape[1]
    deviation = ordered.std(axis=1, keepdims=True)
    low, high = np.quantile(ordered, [0.25, 0.75], axis=1, keepdims=True)
    silverman = np.minimum(deviation, np.maximum((high - low) / 1.35, deviation / 10)) * count**-0.2
    nearest = min(round(math.sqrt(count)), count - 1)
    reach = np.full(ordered.shape, np.inf)
    for below in range(nearest + 1):
        inner = slice(below, count - nearest + below)
        down, up = ordered[:, : count - nearest], ordered[:, nearest:]
        within = np.maximum(ordered[:, inner] - down, up - ordered[:, inner])
        reach[:, inner] = np.minimum(reach[:, inner], within)
    widths: Values = np.maximum(np.minimum(silverman, reach), 0.25 * count**-0.2)
    return widths


WINDOW: Final = 256
"""The last runs that are remembered: older ones say less about the next, and bound time and memory."""
MIN_RUNS: Final = 5  # below, nothing is known
REFIT_SHARE: Final = 16
"""The models are fitted anew after each sixteenth of the remembered runs, so that a run costs little to learn."""
RETRY_GROWTH: Final = 2.0  # factor of an allocation after a second over-run, or where nothing is known
MIN_RETRY_GROWTH: Final = 1.02  # a limit that was too small is raised by this at least
MAX_BYTES: Final = 2**60
MAX_COLUMNS: Final = 2
"""The features that models are fitted over: those by which the memory is ordered most, so that time is bounded."""


class Run(Struct, frozen=True):
    """Memory limit of a run and the memory it used, or at least used if it was cut short.

    Features are numbers known before the run, such as the bytes of its input; a negative or infinite one counts as
    unknown.
    """

    features: tuple[float, ...]
    used_bytes: int
    is_lower_bound: bool = False
    id: str = ""  # of the task: a run that ends well replaces the lower bounds of the attempts before it


class _Fitted(Struct, frozen=True):
    """Models, their features, and the substitutes for unknown features."""

    models: MemoryModels
    defaults: Values
    columns: list[int]


class MemorySizer:
    """Allocations of memory for one type of task.

    One thread at a time may learn while others ask: the models are replaced as a whole, never changed.
    """

    def __init__(self, feature_count: int = 1, *, min_runs: int = MIN_RUNS, is_local: bool = True) -> None:
        """With `is_local=False`, few parameters: for a few runs (see `MemoryModels`)."""
        self._feature_count = feature_count
        self._min_runs = min_runs
        self._is_local = is_local
        self._runs: deque[Run] = deque(maxlen=WINDOW)
        self._unfitted = 0
        self._fitted: _Fitted | None = None

    def learn_all(self, runs: Iterable[Run]) -> None:
        """Learn from runs that ended or were cut short, the oldest first; unmeasured ones are ignored."""
        largest = max((known.used_bytes for known in self._runs), default=0)
        must_fit = False
        for run in runs:
            if not math.isfinite(run.used_bytes) or run.used_bytes <= 0:
                continue
            used: float | None = run.used_bytes
            if run.is_lower_bound:
                distribution = self.distribution(run.features)
                if distribution is None or distribution.probability_above(run.used_bytes) >= 0.5:
                    used = None  # as expected: the lower bound adds nothing
                else:
                    rest = distribution.above(run.used_bytes)
                    used = rest.quantile(0.5) if rest else run.used_bytes * RETRY_GROWTH
            kept = [known for known in self._runs if not run.id or known.id != run.id]
            if len(kept) < len(self._runs):  # lower bounds of the same run
                self._runs = deque(kept, maxlen=WINDOW)
                must_fit = True
            if used is not None:
                bounded = int(min(used, MAX_BYTES))
                self._runs.append(Run(run.features, bounded, run.is_lower_bound, run.id if run.is_lower_bound else ""))
                self._unfitted += 1
                must_fit |= bounded > largest
        if must_fit or (self._unfitted and self._unfitted * REFIT_SHARE >= len(self._runs)):
            if len(self._runs) < self._min_runs:
                return
            rows = np.stack([self._row(run.features) for run in self._runs])
            known = ~np.isnan(rows)
            defaults = np.array([np.median(c[k]) if k.any() else 0.0 for c, k in zip(rows.T, known.T, strict=True)])
            rows = np.where(known, rows, defaults)
            sizes = np.array([float(run.used_bytes) for run in self._runs])
            columns = _ordering_columns(rows, sizes)
            self._fitted = _Fitted(MemoryModels(rows[:, columns], sizes, is_local=self._is_local), defaults, columns)
            self._unfitted = 0

    def allocation(self, features: Sequence[float]) -> int | None:
        """Bytes for the first attempt of a run; None if too little is known."""
        limits = self.allocations(features, 0)
        return None if limits is None else limits[0]

    def allocations(self, features: Sequence[float], reruns: int) -> tuple[int, ...] | None:
        """Bytes for the first attempt and `reruns` more, each for a run that exceeds the one before; None if too little
        is known."""
        distribution = self.distribution(features)
        if distribution is None:
            return None
        limits = [min(math.ceil(distribution.least_waste_bytes()), MAX_BYTES)]
        for _ in range(reruns):
            limits.append(next_limit(distribution, limits))
        return tuple(limits)

    def distribution(self, features: Sequence[float]) -> MemoryDistribution | None:
        """Distribution of the memory of a run with these features; None if too little is known."""
        fitted = self._fitted
        if fitted is None:
            return None
        row = self._row(features)
        return fitted.models.distribution(np.where(np.isnan(row), fitted.defaults, row)[fitted.columns])

    def _row(self, features: Sequence[float]) -> Values:
        row = np.full(self._feature_count, np.nan)
        for i, value in enumerate(features[: self._feature_count]):
            if math.isfinite(value) and value >= 0:
                row[i] = min(value, MAX_BYTES)
        return row


def next_limit(distribution: MemoryDistribution | None, limits: Sequence[int]) -> int:
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
