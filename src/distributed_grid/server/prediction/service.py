"""Prediction of what work needs, from what its earlier runs used: recording, sizing, training.

- Nothing here can fail a job. A run is recorded without waiting, and a job that cannot be sized in time gets no limit.
- Learning and the history belong to one thread; the event loop asks only predictors that are in memory.
- Learning costs a bounded share of one core, however many jobs end: after each round the thread rests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from distributed_grid.adapters.stores.task_history import KEPT_MS, TaskHistory
from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.control.views import View
from distributed_grid.errors import BadInput, GridError
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
from distributed_grid.server.prediction.predictor_pool import PredictorPool, TrainedType, TypeKey
from distributed_grid.server.services.nodes import Report

if TYPE_CHECKING:
    from distributed_grid.control.view_types import (
        BatchScaling,
        ExecutionRecord,
        PredictionRow,
        TaskTypeRow,
        TrainingReport,
        TrainingRow,
    )

MAX_WAITING_RUNS = 20_000
"""Runs that wait to be stored; beyond, the oldest are lost."""
MAX_KNOWN_TYPES = 20_000
GATHER_SECONDS = 1.0
"""Runs that end within this time are stored together."""
TRAINING_REST_FACTOR = 5
REST_FACTOR = 40
"""After learning, the thread rests so many times as long: it takes one part in forty of a core."""
RETRY_SECONDS = 10.0
MAX_SIZING_SECONDS = 1.0
"""A job that cannot be sized within this time gets no limit."""
MAX_TRAINED_TYPES = 1_000
MAX_OF_MEASURED = 2
"""A learned size is at most so many times the largest peak that a shim has measured."""
MB = 1024**2
T = TypeVar("T")
log = logging.getLogger(__name__)


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
        """`cutoff_ms` says before which time of the grid a run is older than so long."""
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
        """Find out which types have a history. Safe to call twice."""
        types = await self._in_thread(self._pool.types, MAX_KNOWN_TYPES)
        self._known = dict.fromkeys(TypeKey(found.user, found.key) for found in reversed(types))
        self._knows_all = len(types) < MAX_KNOWN_TYPES

    async def stop(self) -> None:
        """Store what waits. Safe to call twice."""
        if not self._is_stopped:
            self._is_stopped = True
            await self.store()
            self._thread.shutdown()
            self._pool.close()

    # -------------------------------------------------------------- for jobs

    async def size(self, user: str, argv: Sequence[str], input_bytes: int) -> MemoryPrediction | None:
        """Memory for a job that states no needs; None: too little is known, so it gets no limit. It is no more than
        `MAX_OF_MEASURED` times what a shim has measured: what somebody else has reported alone gives none."""
        predicted = await self._size(TypeKey(user, (shape := task_shape(argv)).key), shape, input_bytes)
        if predicted is None:
            return None
        predictor, memory = predicted
        return _bounded(memory, MAX_OF_MEASURED * predictor.measured_bytes)

    async def size_pulled(self, user: str, shape: TaskShape) -> MemoryPrediction | None:
        """The same for a task of this shape, from what pull workers have reported."""
        predicted = await self._size(TypeKey(user, pulled_shape(shape).key), shape, 0)
        return None if predicted is None else predicted[1]

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
        """Median run time of such a command, also where its memory is not known; None: not known."""
        try:
            shape = task_shape(argv)
            predictor = await self._predictor(TypeKey(user, shape.key))
            return None if predictor is None else predictor.run_ms(input_bytes, shape.features)
        except Exception:  # a bug here must not fail a job
            log.exception("the run time of a job could not be predicted; it counts as not known")
            return None

    def record(self, run: TaskRun) -> None:
        """Take in a run that is over, without waiting. The same task and attempt a second time changes nothing."""
        self._waiting.append(run)
        self._has_waiting.set()

    async def _predictor(self, task: TypeKey) -> TaskPredictor | None:
        """The predictor of a type; None where it has no history, or where that cannot be read in time."""
        found = self._pool.cached(task)
        if found is not None or (self._knows_all and task not in self._known):
            return found
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
        """Train at every interval what has learned since, and fold what is old, until cancelled."""
        while True:
            await asyncio.sleep(self._update_interval_seconds)
            await self._fold()
            for task in await self._in_thread(self._pool.take_untrained):
                began = time.monotonic()
                await self._in_thread(self._pool.train, task, self._now_ms())
                await asyncio.sleep(TRAINING_REST_FACTOR * (time.monotonic() - began))

    async def store(self) -> list[TaskRun] | None:
        """Store and learn the runs that wait; those that were new. None where that failed, and they go on waiting."""
        async with self._storing:
            runs = list(self._waiting)
            if not runs:
                return []
            self._waiting.clear()
            self._has_waiting.clear()
            return await self._take_in(runs)

    async def _take_in(self, runs: list[TaskRun]) -> list[TaskRun] | None:
        """Store and learn these runs; those that were new. None where that failed; then they wait."""
        new = await self._in_thread(self._pool.take_in, runs, self._cutoff_ms(KEPT_MS))
        if new is None:
            room = MAX_WAITING_RUNS - len(self._waiting)
            self._waiting.extendleft(reversed(runs[-room:] if room else []))
            self._has_waiting.set()
            return None
        for run in new:
            self._remember(TypeKey(run.user, run.key))
        return new

    def _remember(self, task: TypeKey) -> None:
        """Remember that a type has a history."""
        self._known.pop(task, None)
        self._known[task] = None
        if len(self._known) > MAX_KNOWN_TYPES:
            del self._known[next(iter(self._known))]
            self._knows_all = False

    async def _fold(self) -> int:
        """Fold all rows that are too old, in short steps; how many."""
        total = 0
        while folded := await self._in_thread(self._pool.fold, self._cutoff_ms(KEPT_MS)):
            total += folded
        return total

    async def _in_thread(self, step: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, step, *arguments)

    # -------------------------------------------------------------- requests

    @endpoint(READ)
    async def predict(self, op: requests.PredictTask, caller: Caller) -> View:
        """What the next run of a task needs."""
        shape = _shape_of(op)
        await self.store()
        predictor = await self._in_thread(self._pool.load, TypeKey(caller.user, shape.key))
        return {"prediction": prediction_row(caller.user, shape, op.input_bytes, predictor, self._settings)}

    @endpoint(USER)
    async def record_execution(self, op: requests.RecordExecution, caller: Caller) -> View:
        """Record one run by hand; it is on disk when this returns."""
        shape = _shape_of(op)
        if not (op.memory_bytes or op.cpu_ms or op.run_ms or op.gpu_memory_bytes):
            raise BadInput("nothing was measured: give at least one of memory, run time, CPU time and GPU memory")
        run = TaskRun(
            op.task_id,
            op.attempt,
            caller.user,
            shape.key,
            shape.features,
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
        execution: ExecutionRecord = {
            "task_id": op.task_id,
            "attempt": op.attempt,
            "key": shape.key,
            "known": run not in new,
            "samples": predictor.samples if predictor is not None else 0,
        }
        return {"execution": execution}

    @endpoint(READ)
    async def list_types(self, op: requests.ListTaskTypes, caller: Caller) -> View:
        """The types that have a history; an admin sees those of everybody."""
        await self.store()
        viewer = self._viewer()
        rows: list[TaskTypeRow] = []
        types = await self._in_thread(self._pool.types, op.limit + 1)
        for found in types[: op.limit]:
            if not caller.admin and found.user != caller.user:
                continue
            task = TypeKey(found.user, found.key)
            predictor = self._pool.cached(task)
            tier, confidence = predictor.tier() if predictor is not None else (None, None)
            rows.append(
                {
                    "key": found.key,
                    "user": found.user,
                    "samples": found.samples,
                    "last_run_at": viewer.time(found.last_at_ms),
                    "tier": tier,
                    "confidence": confidence,
                    "trained_at": viewer.time(self._pool.trained_at_ms(task)),
                }
            )
        return {"task_types": rows, "more": len(types) > op.limit}

    @endpoint(ADMIN)
    async def train(self, op: requests.TrainPredictor, caller: Caller, report: Report) -> View:
        """Learn every type anew from its history, and fold what is old; each type is reported as it is done."""
        began = time.monotonic()
        await self.store()
        folded = await self._fold()
        types = await self._in_thread(self._pool.types, MAX_TRAINED_TYPES)
        trained: list[TrainingRow] = []
        for number, found in enumerate(types, 1):
            done = await self._in_thread(self._pool.train, TypeKey(found.user, found.key), self._now_ms())
            if done is not None:
                trained.append(_training_row(done))
            report({"trained": number, "total": len(types), "key": found.key})
        training: TrainingReport = {
            "trained": trained,
            "folded_runs": folded,
            "seconds": round(time.monotonic() - began, 3),
        }
        return {"training": training}

    @endpoint(READ)
    async def batch_scaling(self, op: requests.GetBatchScaling, caller: Caller) -> View:
        """How much more a type of task takes with another batch size."""
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
        scaling: BatchScaling = {
            "key": base.key,
            "tier": Tier.STATISTICS if learned else Tier.DEFAULTS,
            "samples": predictor.samples if predictor is not None else 0,
            "memory": learned.get("memory", proportional),
            "run_time": learned.get("run_time", proportional),
            "cpu_time": learned.get("cpu_time", proportional),
        }
        return {"scaling": scaling}


def _bounded(predicted: MemoryPrediction, most_bytes: int) -> MemoryPrediction | None:
    """The prediction with no size above that; None where that leaves nothing."""
    if not most_bytes:
        return None
    first, *reruns = (min(size, most_bytes) for size in (predicted.memory_bytes, *predicted.next_memory_bytes))
    return replace(predicted, memory_bytes=first, next_memory_bytes=tuple(reruns))


def _bound_reason(measured_bytes: int) -> str:
    """The bound of a learned size, as text."""
    if not measured_bytes:
        return "no run of it was measured by the grid itself: a job gets no memory from this"
    most = f"{MAX_OF_MEASURED} x {measured_bytes / MB:,.0f} MB"
    return f"a job gets at most {most}, the largest peak that the grid has measured"


def _shape_of(op: requests.TaskDescription) -> TaskShape:
    """The shape of what a request describes."""
    if bool(op.argv) == bool(op.task_type):
        raise BadInput("a task is either a command or a task type: give one of them")
    if op.argv and op.parameters:
        raise BadInput("parameters belong to a task type; those of a command are its words")
    return task_shape(op.argv) if op.argv else typed_task_shape(op.task_type, op.parameters)


def prediction_row(
    user: str, shape: TaskShape, input_bytes: int, predictor: TaskPredictor | None, settings: TierSettings
) -> PredictionRow:
    """A prediction as it is shown."""
    if predictor is None:
        predictor = TaskPredictor(settings, len(shape.features))
    given = (input_bytes, shape.features)
    found = predictor.predict(*given)
    tier, confidence = (found.tier, found.confidence) if found is not None else (Tier.DEFAULTS, 0.0)
    cpu_milli, run_ms = predictor.cpu_milli(*given), predictor.run_ms(*given)
    gpu_bytes = predictor.gpu_memory_bytes(*given)
    is_job = found is not None and pulled_shape(shape) != shape
    bound = [_bound_reason(predictor.measured_bytes)] if is_job else []
    return {
        "key": shape.key,
        "user": user,
        "tier": tier,
        "confidence": round(confidence, 4),
        "tier_confidences": {name: round(predictor.confidence(name), 4) for name in (Tier.ML, Tier.STATISTICS)},
        "samples": predictor.samples,
        "memory_mb": found.memory_bytes / MB if found is not None else None,
        "rerun_memory_mb": [limit / MB for limit in found.next_memory_bytes] if found is not None else [],
        "cpu_cores": None if cpu_milli is None else cpu_milli / 1000,
        "gpu_memory_mb": None if gpu_bytes is None else gpu_bytes / MB,
        "run_seconds": None if run_ms is None else run_ms / 1000,
        "why": [*predictor.reasons(), *bound],
    }


def _training_row(trained: TrainedType) -> TrainingRow:
    before = trained.confidence_before
    return {
        "key": trained.task.key,
        "user": trained.task.user,
        "samples": trained.samples,
        "tier_before": trained.tier_before,
        "confidence_before": None if before is None else round(before, 4),
        "tier": trained.tier,
        "confidence": round(trained.confidence, 4),
    }
