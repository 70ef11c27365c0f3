"""Predictors in memory over the history on disk: those of the types that were asked for last.

One thread learns: it alone calls `take_in`, `load`, `train` and `fold`. `cached` may be called by any thread, and what
it returns may be asked meanwhile.
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

MAX_PREDICTORS = 64
"""Types whose predictors are in memory, at 0.6 MB each at most."""
TRAINING_RUNS = 2 * WINDOW
"""Runs of a type that a training reads; older ones are forgotten by the models anyway."""
MAX_LEARNED = 32
"""Runs of a type that are learned at once as they end; of more, the last ones, and all of them at the next training."""


class TypeKey(NamedTuple):
    """Whose task, and of which shape; the key of a command that a pull worker has run says so (`pulled_shape`)."""

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
    """Stores runs, and keeps the predictors of some types."""

    def __init__(self, history: TaskHistory, settings: TierSettings) -> None:
        self._history = history
        self._settings = settings
        self._lock = threading.Lock()
        self._predictors: OrderedDict[TypeKey, TaskPredictor] = OrderedDict()
        self._untrained: set[TypeKey] = set()
        self._trained_at_ms: dict[TypeKey, int] = {}

    def cached(self, task: TypeKey) -> TaskPredictor | None:
        """The predictor of a type, where it is in memory."""
        with self._lock:
            found = self._predictors.get(task)
            if found is not None:
                self._predictors.move_to_end(task)
            return found

    def types(self, limit: int) -> list[TaskType]:
        """The types with the latest runs."""
        return self._history.types(limit)

    def take_in(self, runs: Sequence[TaskRun], before_ms: int) -> list[TaskRun] | None:
        """Store runs, and learn those that are new, which are returned; None where they could not be stored.

        What ended before `before_ms`, as no row that is kept, is left out: nobody could tell whether it was recorded
        before.
        """
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
        """The predictor of a type, from its history where it is not in memory; None where there is no history."""
        found = self.cached(task) or self._learn_history(task)
        if found is not None:
            self._keep(task, found)
        return found

    def trained_at_ms(self, task: TypeKey) -> int:
        """When a type in memory was last trained; 0: not since it is there."""
        return self._trained_at_ms.get(task, 0)

    def train(self, task: TypeKey, now_ms: int) -> TrainedType | None:
        """Learn a type anew from its history; None where there is nothing. What is not in memory is not kept."""
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
        """The types in memory that have learned something since they were trained; they count as trained from now."""
        found, self._untrained = self._untrained, set()
        return sorted(found & self._predictors.keys())

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
