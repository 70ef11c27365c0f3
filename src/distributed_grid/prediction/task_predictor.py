"""Predictor of one type of task: tiers over its runs, each with a confidence that is measured.

- A run is predicted by each tier before the tier learns it. The share of runs that were covered is its confidence; a
  tier below the threshold gives way to the next. While few runs have come, the tier of few parameters is judged by
  folds instead: each run predicted from the others.
- A run that was cut short is a lower bound. It counts against a tier that would not have given it more, and never for
  one.
- Run time and other usage are estimated from the earlier runs.
- The same runs in the same order give the same predictions. Memory and time are bounded, whatever is learned.
- One thread at a time may learn; others may ask meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from distributed_grid.prediction.memory_sizing import WINDOW, MemoryDistribution, MemorySizer, Run
from distributed_grid.prediction.task_runs import (
    LEAST_SAMPLES_FOR_STATS,
    Coverage,
    MemoryPrediction,
    RunSummary,
    TaskRun,
    Tier,
    TierSettings,
    typical_values,
)

ESTIMATE_WINDOW: Final = 64  # runs that count: an estimate need not be as sharp as a limit
ESTIMATE_REFIT_SHARE: Final = 8
MAX_RERUNS: Final = 3
MARGIN_BYTES: Final = 4 << 20
MARGIN_SHARE: Final = 8
"""Added to every limit, or an eighth of it where that is less: programs stray by pages and arenas, however alike their
earlier runs were."""
SCORED_RUNS: Final = 48  # of many runs that are learned at once, the number of the last that are predicted first
MIN_SCORED: Final = 20  # runs predicted in advance; with fewer, folds decide
MAX_FOLDS: Final = 6
FOLDED_RUNS: Final = 40
FOLD_SHARE: Final = 8  # the folds are made anew when an eighth more runs are known
CHUNK_SHARE: Final = 6  # runs that come together are predicted and learned in parts of this share of what is known
MAX_MISSED: Final = 256
MAX_ANSWERS: Final = 256
"""Predictions that are remembered until the next run is learned: many jobs are submitted with the same words."""


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
        """Add a run that ended by itself."""
        if value > 0:
            self._runs.append(Run(features, value))
            self._unfitted += 1

    def fit(self) -> None:
        """Fit the models where enough has come in since the last time."""
        if self._unfitted and self._unfitted * ESTIMATE_REFIT_SHARE >= len(self._runs) >= LEAST_SAMPLES_FOR_STATS:
            sizer = MemorySizer(self._feature_count, min_runs=LEAST_SAMPLES_FOR_STATS, is_local=False)
            sizer.learn_all(self._runs)
            self._sizer, self._unfitted = sizer, 0

    def quantile(self, features: Sequence[float], probability: float) -> int | None:
        """Value that a run stays within with this probability; None if unknown."""
        values = self.distribution(features)
        return None if values is None else max(round(values.quantile(probability)), 1)

    def distribution(self, features: Sequence[float]) -> MemoryDistribution | None:
        """Distribution of a run's values; None if unknown."""
        return None if self._sizer is None else self._sizer.distribution(features)


class TaskPredictor:
    """Predictions for the next run of a type of task."""

    def __init__(self, settings: TierSettings, number_count: int = 0) -> None:
        """`number_count` numbers are features of every run, besides the bytes of its input."""
        self._settings = settings
        count = self._feature_count = number_count + 1
        self._ml = MemorySizer(count)
        self._statistics = MemorySizer(count, min_runs=LEAST_SAMPLES_FOR_STATS, is_local=False)
        self._coverage = {Tier.ML: Coverage(), Tier.STATISTICS: Coverage()}
        self._folds: Coverage | None = None
        self._unfolded = 0
        self._last: list[Run] = []
        self._missed: dict[str, None] = {}
        self.run_time, self.cpu_time, self.gpu_memory = (UsageEstimate(count) for _ in range(3))
        self.samples = 0  # runs that ended by themselves and whose memory was measured, also those that are forgotten
        self.measured_bytes = 0  # the largest peak of memory that a shim has measured
        self._timed = 0
        self._answers: dict[tuple[float, ...], MemoryPrediction | None] = {}

    def learn_all(self, runs: Iterable[TaskRun]) -> None:
        """Learn runs, the oldest first; the last of them are predicted before."""
        coming = list(runs)
        split = max(len(coming) - SCORED_RUNS, 0)
        if split:
            self._learn(coming[:split])
        rest = iter(coming[split:])
        while chunk := list(islice(rest, max(min(self.samples, WINDOW) // CHUNK_SHARE, 1))):
            for run in chunk:
                self._score(run)
            self._learn(chunk)
        if self._coverage[Tier.STATISTICS].total < MIN_SCORED and self._unfolded * FOLD_SHARE >= len(self._last):
            self._fold()
        for estimate in (self.run_time, self.cpu_time, self.gpu_memory):
            estimate.fit()
        self._answers = {}

    def count_unlearned(self, runs: Iterable[TaskRun]) -> None:
        """Count runs as samples for the next training."""
        self.samples += sum(not run.is_lower_bound and run.memory_bytes > 0 for run in runs)

    def learn_summary(self, summary: RunSummary) -> None:
        """Learn the summary of old runs: typical values with unknown features."""
        unknown = (float("nan"),) * self._feature_count
        runs = [Run(unknown, value) for value in typical_values(summary.memory)]
        self._ml.learn_all(runs)
        self._statistics.learn_all(runs)
        self._last = [*self._last, *runs][-FOLDED_RUNS:]
        self._fold()
        for value in typical_values(summary.run_time):
            self.run_time.learn(unknown, value)
            self._timed += 1
        self.run_time.fit()
        self.samples += summary.count
        self._answers = {}

    def predict(self, input_bytes: int, numbers: Sequence[float] = ()) -> MemoryPrediction | None:
        """Memory and run time of the next run; None: the tier is that of the defaults."""
        answers, features = self._answers, self._features(input_bytes, numbers)
        if features in answers:
            return answers[features]
        if len(answers) >= MAX_ANSWERS:
            answers.clear()
        tier, confidence = self.tier()
        sizer = self._ml if tier is Tier.ML else self._statistics
        limits = None if tier is Tier.DEFAULTS else sizer.allocations(features, MAX_RERUNS)
        prediction = None
        if limits is not None:
            first, *reruns = map(with_margin, limits)
            prediction = MemoryPrediction(
                memory_bytes=first,
                next_memory_bytes=tuple(reruns),
                run_ms=self.run_ms(input_bytes, numbers),
                tier=tier,
                confidence=confidence,
                samples=self.samples,
            )
        answers[features] = prediction
        return prediction

    def run_ms(self, input_bytes: int, numbers: Sequence[float] = ()) -> int | None:
        """Median run time; None if unknown."""
        if self._timed < self._settings.min_samples_for_stats:
            return None
        return self.run_time.quantile(self._features(input_bytes, numbers), 0.5)

    def cpu_milli(self, input_bytes: int, numbers: Sequence[float] = ()) -> int | None:
        """Mean of the busy cores of a run, in thousandths; None if unknown."""
        run_ms = self.run_ms(input_bytes, numbers)
        cpu_ms = self.cpu_time.quantile(self._features(input_bytes, numbers), 0.5) if run_ms else None
        return None if not run_ms or cpu_ms is None else round(1000 * cpu_ms / run_ms)

    def gpu_memory_bytes(self, input_bytes: int, numbers: Sequence[float] = ()) -> int | None:
        """GPU memory that nineteen of twenty runs stay within; None if unknown."""
        return self.gpu_memory.quantile(self._features(input_bytes, numbers), 0.95)

    def reasons(self) -> list[str]:
        """Why this tier predicts, in words."""
        settings, lines = self._settings, []
        for tier, least, models in (
            (Tier.ML, settings.min_samples_for_ml, "all models"),
            (Tier.STATISTICS, settings.min_samples_for_stats, "statistics"),
        ):
            if self.samples < least:
                lines.append(f"{self.samples} runs are known; {models} need {least}")
                continue
            covered = self.confidence(tier)
            share = f"{100 * covered:.0f} % of runs that they had not seen"
            if covered >= settings.confidence_threshold:
                return [*lines, f"{models} predict: they covered {share}, of {self.samples} runs"]
            lines.append(f"{models} covered only {share}; {100 * settings.confidence_threshold:.0f} % are required")
        return [*lines, "defaults: a job gets no limit"]

    def batch_factors(self, numbers: Sequence[float], other: Sequence[float]) -> dict[str, float]:
        """Factors of a run with the other numbers, where known: `memory`, `run_time`, `cpu_time`."""
        factors: dict[str, float] = {}
        one, two = (self._features(0, given) for given in (numbers, other))
        unknown = float("nan")  # the bytes of the input stay as they usually are
        for name, source in (("memory", self._statistics), ("run_time", self.run_time), ("cpu_time", self.cpu_time)):
            before, after = (source.distribution((unknown, *features[1:])) for features in (one, two))
            if before is not None and after is not None:
                factors[name] = after.quantile(0.5) / before.quantile(0.5)
        return factors if self.samples >= self._settings.min_samples_for_stats else {}

    def tier(self) -> tuple[Tier, float]:
        """The tier that predicts now, and its confidence; that of the defaults is 0."""
        settings = self._settings
        for tier, least in (
            (Tier.ML, settings.min_samples_for_ml),
            (Tier.STATISTICS, settings.min_samples_for_stats),
        ):
            confidence = self.confidence(tier)
            if self.samples >= least and confidence >= settings.confidence_threshold:
                return tier, confidence
        return Tier.DEFAULTS, 0.0

    def confidence(self, tier: Tier) -> float:
        """Measured share of runs that a tier covers."""
        coverage = self._coverage[tier]
        folds = self._folds
        if tier is Tier.STATISTICS and folds is not None and coverage.total < MIN_SCORED:
            return folds.confidence
        return coverage.confidence

    def _features(self, input_bytes: int, numbers: Sequence[float]) -> tuple[float, ...]:
        return (float(input_bytes), *numbers)

    def _score(self, run: TaskRun) -> None:
        """Whether each tier would have given the run enough, before it is learned."""
        if run.memory_bytes <= 0 or run.task_id in self._missed:
            return
        features = self._features(run.input_bytes, run.features)
        for tier, sizer in ((Tier.ML, self._ml), (Tier.STATISTICS, self._statistics)):
            limit = sizer.allocation(features)
            if limit is None:
                continue
            limit = with_margin(limit)
            if not run.is_lower_bound:
                self._coverage[tier].add(run.memory_bytes <= limit)
            elif limit <= run.memory_bytes:
                self._coverage[tier].add(False)
                self._missed[run.task_id] = None
        while len(self._missed) > MAX_MISSED:
            del self._missed[next(iter(self._missed))]

    def _learn(self, runs: Sequence[TaskRun]) -> None:
        learned = []
        for run in runs:
            features = self._features(run.input_bytes, run.features)
            learned.append(Run(features, run.memory_bytes, run.is_lower_bound, run.task_id))
            if run.is_lower_bound:
                continue
            self._missed.pop(run.task_id, None)
            self.samples += run.memory_bytes > 0
            self._timed += run.run_ms > 0
            self.run_time.learn(features, run.run_ms)
            self.cpu_time.learn(features, run.cpu_ms)
            self.gpu_memory.learn(features, run.gpu_memory_bytes)
        self._ml.learn_all(learned)
        self._statistics.learn_all(learned)
        ended = [run for run in learned if run.used_bytes > 0 and not run.is_lower_bound]
        self._last = [*self._last, *ended][-FOLDED_RUNS:]
        self._unfolded += len(ended)

    def _fold(self) -> None:
        """Predict each of the last runs from the others, by few parameters."""
        runs = self._last
        if len(runs) <= LEAST_SAMPLES_FOR_STATS:
            return
        folds, self._unfolded = Coverage(), 0
        count = min(len(runs), MAX_FOLDS)
        for fold in range(count):
            sizer = MemorySizer(self._feature_count, min_runs=LEAST_SAMPLES_FOR_STATS, is_local=False)
            sizer.learn_all(run for at, run in enumerate(runs) if at % count != fold)
            for run in runs[fold::count]:
                limit = sizer.allocation(run.features)
                if limit is not None:
                    folds.add(run.used_bytes <= with_margin(limit))
        self._folds = folds


def with_margin(limit_bytes: int) -> int:
    """A limit with the usual variation of programs added."""
    return limit_bytes + min(MARGIN_BYTES, limit_bytes // MARGIN_SHARE)
