"""Prediction of the needs of work from its earlier runs: recording, sizing, training; predictors in memory.

- Nothing here can fail a job. A run is recorded without waiting, and a job that cannot be sized in time gets no limit.
- Learning and the history belong to one thread, which alone calls `take_in`, `load`, `train` and `fold`. `cached` may
  be called by any thread; the event loop asks only predictors that are in memory, those of the last requested types.
- Learning costs a bounded share of one core, however many jobs end: after each round the thread rests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from distributed_grid.adapters.stores.task_history import KEPT_MS, TaskHistory, TaskType
from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.prediction import (
    BatchScaling,
    BatchScalingDetail,
    ExecutionDetail,
    ExecutionRecord,
    PredictionDetail,
    PredictionRow,
    TaskTypeList,
    TaskTypeRow,
    TrainingDetail,
    TrainingReport,
    TrainingRow,
    TrainingStep,
)
from distributed_grid.errors import BadInput, GridError
from distributed_grid.prediction.memory_sizing import WINDOW
from distributed_grid.prediction.task_predictor import TaskPredictor
from distributed_grid.prediction.task_runs import (
    BATCH_SIZE,
    MemoryPrediction,
    TaskRun,
    TaskShape,
    Tier,
    TierSettings,
    pulled_shape,
    task_shape,
    typed_task_shape,
)
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.endpoints import ADMIN, READ, USER, endpoint

MAX_WAITING_RUNS = 20_000  # to be stored; beyond, the oldest are lost
MAX_KNOWN_TYPES = 20_000
MAX_TRAINED_TYPES = 1_000
MAX_PREDICTORS = 64  # in memory, at 0.6 MB each at most
TRAINING_RUNS = 2 * WINDOW  # of a type; the models forget older ones
MAX_LEARNED = 32
"""Runs of a type that are learned at once as they end; of more, the last ones, and all of them at the next training."""
GATHER_SECONDS = 1.0  # runs that end within this time are stored together
TRAINING_REST_FACTOR = 5
REST_FACTOR = 40
"""Rest of the thread after learning, as a multiple of its duration: it takes one part in forty of a core."""
RETRY_SECONDS = 10.0
MAX_SIZING_SECONDS = 1.0  # a job that cannot be sized within this time gets no limit
MAX_OF_MEASURED = 2
"""Bound of a learned size, as a multiple of the largest peak that a shim has measured."""
MB = 1024**2
T = TypeVar("T")
log = logging.getLogger(__name__)


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


class PredictionService:
    """Records runs, sizes jobs without stated needs, and answers the requests about both."""

    def __init__(
        self,
        history: TaskHistory,
        settings: TierSettings,
        *,
        update_interval_seconds: float,
        now_ms: Callable[[], int],
        viewer: Callable[[], Viewer],
        cutoff_ms: Callable[[int], int] | None = None,
    ) -> None:
        """`cutoff_ms` converts an age into a time of the grid."""
        self._pool = PredictorPool(history, settings)
        self._settings = settings
        self._update_interval_seconds = update_interval_seconds
        self._now_ms = now_ms
        self._cutoff_ms = cutoff_ms or (lambda keep_ms: now_ms() - keep_ms)
        self._viewer = viewer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prediction")
        self._waiting: deque[TaskRun] = deque(maxlen=MAX_WAITING_RUNS)
        self._has_waiting = asyncio.Event()
        self._is_stopped = False
        self._storing = asyncio.Lock()
        self._known: dict[TypeKey, None] = {}
        self._knows_all = False
        self._loading: dict[TypeKey, asyncio.Future[TaskPredictor | None]] = {}

    async def start(self) -> None:
        """Read the types that have a history. Safe to call twice."""
        types = await self._in_thread(self._pool.types, MAX_KNOWN_TYPES)
        self._known = dict.fromkeys(TypeKey(task_type.user, task_type.key) for task_type in reversed(types))
        self._knows_all = len(types) < MAX_KNOWN_TYPES

    async def stop(self) -> None:
        """Store the waiting runs. Safe to call twice."""
        if not self._is_stopped:
            self._is_stopped = True
            await self.store()
            self._thread.shutdown()
            self._pool.close()

    # -------------------------------------------------------------- for jobs

    async def size(self, user: str, argv: Sequence[str], input_bytes: int) -> MemoryPrediction | None:
        """Memory for a job that states no needs; None, and no limit, if too little is known. It is at most
        `MAX_OF_MEASURED` times the largest peak that a shim has measured: reports of others alone give none."""
        shape = task_shape(argv)
        sized = await self._size(TypeKey(user, shape.key), shape, input_bytes)
        if sized is None or not sized[0].measured_bytes:
            return None
        predictor, predicted = sized
        most_bytes = MAX_OF_MEASURED * predictor.measured_bytes
        first, *reruns = (min(size, most_bytes) for size in (predicted.memory_bytes, *predicted.next_memory_bytes))
        return replace(predicted, memory_bytes=first, next_memory_bytes=tuple(reruns))

    async def size_pulled(self, user: str, shape: TaskShape) -> MemoryPrediction | None:
        """The same for a task of this shape, from the reports of pull workers."""
        sized = await self._size(TypeKey(user, pulled_shape(shape).key), shape, 0)
        return None if sized is None else sized[1]

    async def _size(
        self, task: TypeKey, shape: TaskShape, input_bytes: int
    ) -> tuple[TaskPredictor, MemoryPrediction] | None:
        try:
            predictor = await self._predictor(task)
            predicted = None if predictor is None else predictor.predict(input_bytes, shape.features)
            return None if predictor is None or predicted is None else (predictor, predicted)
        except Exception:  # a bug here must not fail a job
            log.exception("a job could not be sized; it gets no limit")
            return None

    async def run_ms(self, user: str, argv: Sequence[str], input_bytes: int) -> int | None:
        """Median run time of a command, also if its memory is unknown; None: unknown."""
        try:
            shape = task_shape(argv)
            predictor = await self._predictor(TypeKey(user, shape.key))
            return None if predictor is None else predictor.run_ms(input_bytes, shape.features)
        except Exception:  # a bug here must not fail a job
            log.exception("the run time of a job could not be predicted; it counts as not known")
            return None

    def record(self, run: TaskRun) -> None:
        """Queue an ended run for storing, without waiting. A second time for the same attempt changes nothing."""
        self._waiting.append(run)
        self._has_waiting.set()

    async def _predictor(self, task: TypeKey) -> TaskPredictor | None:
        """The predictor of a type; None without a history, or if that cannot be read in time."""
        predictor = self._pool.cached(task)
        if predictor is not None or (self._knows_all and task not in self._known):
            return predictor
        loading = self._loading.get(task)
        if loading is None:
            loading = self._loading[task] = asyncio.ensure_future(self._in_thread(self._pool.load, task))
            loading.add_done_callback(lambda done: self._loading.pop(task, None))
        await asyncio.wait({loading}, timeout=MAX_SIZING_SECONDS)
        return loading.result() if loading.done() else None

    # -------------------------------------------------------------- in the background

    async def learn_forever(self) -> None:
        """Store and learn runs as they come, until cancelled."""
        while True:
            await self._has_waiting.wait()
            await asyncio.sleep(GATHER_SECONDS)
            began = time.monotonic()
            stored = await self.store() is not None
            busy = time.monotonic() - began
            await asyncio.sleep(min(REST_FACTOR * busy, self._update_interval_seconds) if stored else RETRY_SECONDS)

    async def train_forever(self) -> None:
        """At every interval fold old runs, and train the types that have learned since, until cancelled."""
        while True:
            await asyncio.sleep(self._update_interval_seconds)
            await self._fold()
            for task in await self._in_thread(self._pool.take_untrained):
                began = time.monotonic()
                await self._in_thread(self._pool.train, task, self._now_ms())
                await asyncio.sleep(TRAINING_REST_FACTOR * (time.monotonic() - began))

    async def store(self) -> list[TaskRun] | None:
        """Store and learn the waiting runs; the new ones among them. None if that failed: they keep waiting."""
        async with self._storing:
            runs = list(self._waiting)
            if not runs:
                return []
            self._waiting.clear()
            self._has_waiting.clear()
            return await self._take_in(runs)

    async def _take_in(self, runs: list[TaskRun]) -> list[TaskRun] | None:
        """Store and learn these runs; the new ones among them. None if that failed: they wait for the next try."""
        new = await self._in_thread(self._pool.take_in, runs, self._cutoff_ms(KEPT_MS))
        if new is None:
            room = MAX_WAITING_RUNS - len(self._waiting)
            self._waiting.extendleft(reversed(runs[-room:] if room else []))
            self._has_waiting.set()
            return None
        for task in (TypeKey(run.user, run.key) for run in new):
            self._known.pop(task, None)
            self._known[task] = None  # the last one
            if len(self._known) > MAX_KNOWN_TYPES:
                del self._known[next(iter(self._known))]
                self._knows_all = False
        return new

    async def _fold(self) -> int:
        """Fold all old rows, in short steps; their number."""
        total = 0
        while folded := await self._in_thread(self._pool.fold, self._cutoff_ms(KEPT_MS)):
            total += folded
        return total

    async def _in_thread(self, step: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, step, *arguments)

    # -------------------------------------------------------------- requests

    @endpoint(READ)
    async def predict(self, op: requests.PredictTask, caller: Caller) -> PredictionDetail:
        """Predicted needs of the next run of a task."""
        shape = _shape_of(op)
        await self.store()
        predictor = await self._in_thread(self._pool.load, TypeKey(caller.user, shape.key))
        return PredictionDetail(prediction_row(caller.user, shape, op.input_bytes, predictor, self._settings))

    @endpoint(USER)
    async def record_execution(self, op: requests.RecordExecution, caller: Caller) -> ExecutionDetail:
        """Record one run by hand; it is on disk when this returns."""
        shape = _shape_of(op)
        if not (op.memory_bytes or op.cpu_ms or op.run_ms or op.gpu_memory_bytes):
            raise BadInput("nothing was measured: give at least one of memory, run time, CPU time and GPU memory")
        run = TaskRun(
            task_id=op.task_id,
            attempt=op.attempt,
            user=caller.user,
            key=shape.key,
            features=shape.features,
            input_bytes=op.input_bytes,
            memory_bytes=op.memory_bytes,
            cpu_ms=op.cpu_ms,
            run_ms=op.run_ms,
            gpu_memory_bytes=op.gpu_memory_bytes,
            ended_at_ms=self._now_ms(),
            is_lower_bound=op.cut_short,
        )
        async with self._storing:
            new = await self._take_in([run])
        if new is None:
            raise GridError("the history of runs cannot be written now; it is tried again (see the daemon's log)")
        predictor = await self._in_thread(self._pool.load, TypeKey(caller.user, shape.key))
        execution = ExecutionRecord(
            task_id=op.task_id,
            attempt=op.attempt,
            key=shape.key,
            known=run not in new,
            samples=predictor.samples if predictor is not None else 0,
        )
        return ExecutionDetail(execution)

    @endpoint(READ)
    async def list_types(self, op: requests.ListTaskTypes, caller: Caller) -> TaskTypeList:
        """The types that have a history; an admin sees those of everybody."""
        await self.store()
        viewer = self._viewer()
        rows: list[TaskTypeRow] = []
        types = await self._in_thread(self._pool.types, op.limit + 1)
        for task_type in types[: op.limit]:
            if not caller.admin and task_type.user != caller.user:
                continue
            task = TypeKey(task_type.user, task_type.key)
            predictor = self._pool.cached(task)
            tier, confidence = predictor.tier() if predictor is not None else (None, None)
            rows.append(
                TaskTypeRow(
                    key=task_type.key,
                    user=task_type.user,
                    samples=task_type.samples,
                    last_run_at=viewer.time(task_type.last_at_ms),
                    tier=tier,
                    confidence=confidence,
                    trained_at=viewer.time(self._pool.trained_at_ms(task)),
                )
            )
        return TaskTypeList(rows, more=len(types) > op.limit)

    @endpoint(ADMIN)
    async def train(
        self, op: requests.TrainPredictor, caller: Caller, report: Callable[[TrainingStep], None]
    ) -> TrainingDetail:
        """Learn every type anew from its history, and fold old runs; each trained type is reported."""
        began = time.monotonic()
        await self.store()
        folded = await self._fold()
        types = await self._in_thread(self._pool.types, MAX_TRAINED_TYPES)
        rows: list[TrainingRow] = []
        for number, task_type in enumerate(types, 1):
            task = TypeKey(task_type.user, task_type.key)
            trained = await self._in_thread(self._pool.train, task, self._now_ms())
            if trained is not None:
                before = trained.confidence_before
                rows.append(
                    TrainingRow(
                        key=task.key,
                        user=task.user,
                        samples=trained.samples,
                        tier_before=trained.tier_before,
                        confidence_before=None if before is None else round(before, 4),
                        tier=trained.tier,
                        confidence=round(trained.confidence, 4),
                    )
                )
            report(TrainingStep(trained=number, total=len(types), key=task_type.key))
        seconds = round(time.monotonic() - began, 3)
        return TrainingDetail(TrainingReport(trained=rows, folded_runs=folded, seconds=seconds))

    @endpoint(READ)
    async def batch_scaling(self, op: requests.GetBatchScaling, caller: Caller) -> BatchScalingDetail:
        """Factors of the needs of a type of task with another batch size."""
        if not op.task_type:
            raise BadInput("a batch size belongs to a task type, not to a command")
        base, other = (
            typed_task_shape(op.task_type, {**op.parameters, BATCH_SIZE: size})
            for size in (op.base_batch_size, op.batch_size)
        )
        await self.store()
        predictor = await self._in_thread(self._pool.load, TypeKey(caller.user, base.key))
        learned = predictor.batch_factors(base.features, other.features) if predictor is not None else {}
        proportional = op.batch_size / op.base_batch_size
        scaling = BatchScaling(
            key=base.key,
            tier=Tier.STATISTICS if learned else Tier.DEFAULTS,
            samples=predictor.samples if predictor is not None else 0,
            memory=learned.get("memory", proportional),
            run_time=learned.get("run_time", proportional),
            cpu_time=learned.get("cpu_time", proportional),
        )
        return BatchScalingDetail(scaling)


def _shape_of(op: requests.TaskDescription) -> TaskShape:
    if bool(op.argv) == bool(op.task_type):
        raise BadInput("a task is either a command or a task type: give one of them")
    if op.argv and op.parameters:
        raise BadInput("parameters belong to a task type; those of a command are its words")
    return task_shape(op.argv) if op.argv else typed_task_shape(op.task_type, op.parameters)


def prediction_row(
    user: str, shape: TaskShape, input_bytes: int, predictor: TaskPredictor | None, settings: TierSettings
) -> PredictionRow:
    if predictor is None:
        predictor = TaskPredictor(settings, len(shape.features))
    given = (input_bytes, shape.features)
    predicted = predictor.predict(*given)
    cpu_milli, run_ms = predictor.cpu_milli(*given), predictor.run_ms(*given)
    gpu_bytes = predictor.gpu_memory_bytes(*given)
    reasons = predictor.reasons()
    if predicted is not None and pulled_shape(shape) != shape:  # runs of jobs: a size is bounded
        most = f"{MAX_OF_MEASURED} x {predictor.measured_bytes / MB:,.0f} MB"
        bound = f"a job gets at most {most}, the largest peak that the grid has measured"
        unmeasured = "no run of it was measured by the grid itself: a job gets no memory from this"
        reasons = [*reasons, bound if predictor.measured_bytes else unmeasured]
    return PredictionRow(
        key=shape.key,
        user=user,
        tier=predicted.tier if predicted is not None else Tier.DEFAULTS,
        confidence=round(predicted.confidence, 4) if predicted is not None else 0.0,
        tier_confidences={name: round(predictor.confidence(name), 4) for name in (Tier.ML, Tier.STATISTICS)},
        samples=predictor.samples,
        memory_mb=predicted.memory_bytes / MB if predicted is not None else None,
        rerun_memory_mb=[limit / MB for limit in predicted.next_memory_bytes] if predicted is not None else [],
        cpu_cores=None if cpu_milli is None else cpu_milli / 1000,
        gpu_memory_mb=None if gpu_bytes is None else gpu_bytes / MB,
        run_seconds=None if run_ms is None else run_ms / 1000,
        why=list(reasons),
    )
