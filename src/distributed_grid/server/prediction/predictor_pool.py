"""Predictors in memory over the history on disk: those of the last requested types.

One thread learns: it alone calls `take_in`, `load`, `train` and `fold`. `cached` may be called by any thread, and its
predictor may be asked meanwhile.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from distributed_grid.adapters.stores.task_history import TaskHistory, TaskType
from distributed_grid.prediction.memory_sizing import WINDOW
from distributed_grid.prediction.task_predictor import TaskPredictor
from distributed_grid.prediction.task_runs import TaskRun, Tier, TierSettings

MAX_PREDICTORS = 64  # in memory, at 0.6 MB each at most
TRAINING_RUNS = 2 * WINDOW  # of a type; the models forget older ones
MAX_LEARNED = 32
"""Runs of a type that are learned at once as they end; of more, the last ones, and all of them at the next training."""


class TypeKey(NamedTuple):
    """A user and the shape of a task; the key of a command that a pull worker has run shows that (`pulled_shape`)."""

    user: str
    key: str


class TrainedType(NamedTuple):
    """A type before and after a training: the tier, and the share of runs it covered that it had not seen."""

    task: TypeKey
    samples: int
    tier_before: Tier | None
    confidence_before: float | None
    tier: Tier
    confidence: float


class PredictorPool:
    def __init__(self, history: TaskHistory, settings: TierSettings) -> None:
        self._history = history
        self._settings = settings
        self._lock = threading.Lock()
        self._predictors: OrderedDict[TypeKey, TaskPredictor] = OrderedDict()
        self._untrained: set[TypeKey] = set()
        self._trained_at_ms: dict[TypeKey, int] = {}

    def cached(self, task: TypeKey) -> TaskPredictor | None:
        """The predictor of a type, if it is in memory."""
        with self._lock:
            predictor = self._predictors.get(task)
            if predictor is not None:
                self._predictors.move_to_end(task)
            return predictor

    def types(self, limit: int) -> list[TaskType]:
        """The types with the latest runs."""
        return self._history.types(limit)

    def take_in(self, runs: Sequence[TaskRun], before_ms: int) -> list[TaskRun] | None:
        """Store runs and learn the new ones, which are returned; None if they could not be stored. Runs that ended
        before `before_ms` are left out: no row is kept that shows whether they were recorded before."""
        new = self._history.record([run for run in runs if run.ended_at_ms >= before_ms])
        if new is None:
            return None
        by_type: dict[TypeKey, list[TaskRun]] = defaultdict(list)
        for run in new:
            by_type[TypeKey(run.user, run.key)].append(run)
        for task, ended in by_type.items():
            predictor = self.cached(task)
            if predictor is not None:
                predictor.learn_all(ended[-MAX_LEARNED:])
                predictor.count_unlearned(ended[:-MAX_LEARNED])
                predictor.measured_bytes = max(predictor.measured_bytes, *(run.measured_bytes for run in ended))
                self._untrained.add(task)
        return new

    def load(self, task: TypeKey) -> TaskPredictor | None:
        """The predictor of a type, from memory or from its history; None without a history."""
        predictor = self.cached(task) or self._learn_history(task)
        if predictor is not None:
            self._keep(task, predictor)
        return predictor

    def trained_at_ms(self, task: TypeKey) -> int:
        """Time of the last training of a type in memory; 0: not since it is there."""
        return self._trained_at_ms.get(task, 0)

    def train(self, task: TypeKey, now_ms: int) -> TrainedType | None:
        """Learn a type anew from its history; None without a history. A predictor that was not in memory is dropped."""
        before = self.cached(task)
        trained = self._learn_history(task)
        if trained is None:
            return None
        if before is not None:
            self._keep(task, trained)
            self._trained_at_ms[task] = now_ms
        tier_before, confidence_before = before.tier() if before is not None else (None, None)
        return TrainedType(task, trained.samples, tier_before, confidence_before, *trained.tier())

    def take_untrained(self) -> list[TypeKey]:
        """The types in memory that have learned since their training; they count as trained from now."""
        untrained, self._untrained = self._untrained, set()
        return sorted(untrained & self._predictors.keys())

    def fold(self, before_ms: int) -> int:
        """Fold some of the rows of runs that ended before; 0: none are left."""
        return self._history.fold(before_ms)

    def close(self) -> None:
        self._history.close()

    def _learn_history(self, task: TypeKey) -> TaskPredictor | None:
        runs = self._history.runs(*task, TRAINING_RUNS)
        summary = self._history.summary(*task)
        if not runs and not summary.count:
            return None
        predictor = TaskPredictor(self._settings, len(runs[-1].features) if runs else 0)
        if summary.count:
            predictor.learn_summary(summary)
        predictor.learn_all(runs)
        predictor.samples = max(predictor.samples, self._history.samples(*task))
        predictor.measured_bytes = self._history.measured_bytes(*task)
        return predictor

    def _keep(self, task: TypeKey, predictor: TaskPredictor) -> None:
        with self._lock:
            self._predictors[task] = predictor
            self._predictors.move_to_end(task)
            while len(self._predictors) > MAX_PREDICTORS:
                left, _ = self._predictors.popitem(last=False)
                self._trained_at_ms.pop(left, None)
