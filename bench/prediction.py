"""The predictor of the daemon: a history of a million runs, and the event loop while models are trained.

The history has 1,000 types of a thousand runs. Then a service with its thread trains 2,000 runs of 20 types while a
task on the loop measures how late it is woken, and a job of a type that is known is sized.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.sizes import sized
from bench.table import Line
from distributed_grid.adapters.stores.task_history import DAY_MS, TaskHistory
from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.prediction.task_runs import TaskRun, TierSettings
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.prediction.service import TRAINING_RUNS, PredictionService

RUNS, TYPES = sized((1_000_000, 1_000), smoke=(2_000, 20))
NOW = 20_000 * DAY_MS
BATCH = sized(10_000, smoke=1_000)


def measure() -> list[Line]:
    """Bounded reads of a long history, and what training does to the loop."""
    with tempfile.TemporaryDirectory() as folder:
        return [*_history(Path(folder)), *asyncio.run(_service(Path(folder)))]


def _history(folder: Path) -> list[Line]:
    history = TaskHistory(folder / "million.db")
    began = time.perf_counter()
    batch: list[TaskRun] = []
    for run in _runs(RUNS, TYPES):
        batch.append(run)
        if len(batch) == BATCH:
            history.record(batch)
            batch = []
    filled = time.perf_counter() - began
    keys = [f"type {i}" for i in range(0, TYPES, 10)]
    read = _slowest_ms([lambda key=key: history.runs("ana", key, TRAINING_RUNS) for key in keys])
    new = [[run] for run in _runs(50, TYPES, first=RUNS)]
    written = _slowest_ms([lambda runs=runs: history.record(runs) for runs in new])
    listed = _slowest_ms([lambda: history.types(100)] * 5)
    folded = _slowest_ms([lambda: history.fold(NOW + DAY_MS)] * 5)
    history.close()
    opened = _slowest_ms([lambda: TaskHistory(folder / "million.db").types(1)] * 3)
    return [
        Line("record runs, a million in batches", RUNS / filled, 0, "/s"),
        Line("the last 512 runs of a type, of a million; slowest", read, 50, "ms", True),
        Line("record a run; slowest of 50", written, 50, "ms", True),
        Line("list 100 types of 1,000; slowest", listed, 50, "ms", True),
        Line("fold 2,000 old runs into summaries; slowest", folded, 0, "ms", True),
        Line("open it; slowest", opened, 50, "ms", True),
    ]


def _slowest_ms(steps: list[Callable[[], object]]) -> float:
    times = []
    for step in steps:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return 1000 * max(times)


def _runs(count: int, types: int, *, first: int = 0) -> Iterator[TaskRun]:
    dice = random.Random(first)
    for i in range(first, first + count):
        size = dice.randrange(10**6, 10**10)
        yield TaskRun(
            task_id=f"task-{i}",
            attempt=1,
            user="ana",
            key=f"type {i % types}",
            features=(float(i % 17),),
            input_bytes=size,
            memory_bytes=round((10**8 + size / 3) * dice.uniform(0.95, 1.05)),
            cpu_ms=size // 10**6,
            run_ms=size // 10**6 + 10,
            ended_at_ms=NOW - i % DAY_MS,
        )


async def _service(folder: Path) -> list[Line]:
    history = TaskHistory(folder / "service.db")
    service = PredictionService(
        history, TierSettings(), update_interval_seconds=3600, now_ms=lambda: NOW, viewer=lambda: Viewer(0)
    )
    await service.start()
    caller = Caller("ana", admin=True)
    idle = await _latest_ms(asyncio.sleep(1.0))
    for run in _runs(2000, 20):
        service.record(run)
    storing = await _latest_ms(service.store())
    for i in range(20):
        await service.size("ana", ["type", str(i)], 10**9)
    training = await _latest_ms(service.train(requests.TrainPredictor(), caller, lambda step: None))
    sized = []
    for i in range(100):
        service.record(
            TaskRun(
                task_id=f"job-{i}",
                attempt=1,
                user="ana",
                key="work #",
                features=(float(i),),
                memory_bytes=10**8 + i * 10**5,
                ended_at_ms=NOW,
            )
        )
    await service.store()
    await service.size("ana", ["work", "1"], 0)
    cpu = time.thread_time()
    for i in range(200):
        began = time.perf_counter()
        await service.size("ana", ["work", str(1000 + i)], 0)
        sized.append(time.perf_counter() - began)
    cpu = time.thread_time() - cpu
    again = time.perf_counter()
    for _ in range(200):
        await service.size("ana", ["work", "1000"], 0)
    again = (time.perf_counter() - again) / 200
    await service.stop()
    return [
        Line("the loop is woken late, nothing going on, at most", idle[1], 0, "ms", True),
        Line("  while 2,000 runs are stored, at most", storing[1], 20, "ms", True),
        Line("  while 2,000 runs of 20 types are trained, at most", training[1], 20, "ms", True),
        Line("  the same, 99th percentile", training[0], 0, "ms", True),
        Line("size a job in the daemon, 95th percentile", 1000 * sorted(sized)[189], 5, "ms", True),
        Line("  its CPU time", 1000 * cpu / 200, 0, "ms", True),
        Line("  the same command again", 1000 * again, 0, "ms", True),
    ]


async def _latest_ms(work: object) -> tuple[float, float]:
    """How late a task that sleeps for a millisecond is woken while something goes on: 99th percentile, and at most."""
    assert asyncio.iscoroutine(work)
    task = asyncio.ensure_future(work)
    late = [0.0]
    while not task.done():
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append(time.perf_counter() - began - 0.001)
    await task
    late.sort()
    return 1000 * late[len(late) * 99 // 100], 1000 * late[-1]
