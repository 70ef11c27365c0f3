"""Prediction service: it records without waiting, sizes from what it knows, trains, and never fails a job."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distributed_grid.adapters.stores.task_history import TaskHistory
from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.errors import BadInput, GridError
from distributed_grid.prediction.task_runs import TaskRun, Tier, TierSettings, task_shape
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.prediction.service import PredictionService

NOW = 1_700_000_000_000
MB = 1 << 20
ANA = Caller("ana")
ADMIN = Caller("root", admin=True)
Story = Callable[[PredictionService], Coroutine[Any, Any, None]]


def a_service(folder: Path, **settings: float) -> PredictionService:
    tiers = TierSettings()
    return PredictionService(
        TaskHistory(folder / "predictions.db"),
        tiers,
        update_interval_seconds=settings.get("interval", 3600.0),
        now_ms=lambda: NOW,
        viewer=lambda: Viewer(0),
    )


@contextlib.asynccontextmanager
async def running(service: PredictionService) -> AsyncIterator[PredictionService]:
    """The service with its loops."""
    await service.start()
    loops = [asyncio.create_task(loop()) for loop in (service.learn_forever, service.train_forever)]
    try:
        yield service
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await service.stop()
        await service.stop()


def tell(folder: Path, story: Story, **settings: float) -> None:
    async def whole() -> None:
        async with running(a_service(folder, **settings)) as service:
            await asyncio.wait_for(story(service), 60)

    asyncio.run(whole())


def a_run(number: int, argv: list[str], *, user: str = "ana", mb: float = 100, run_ms: int = 5000) -> TaskRun:
    shape = task_shape(argv)
    memory = round(mb * MB) + number % 5 * MB
    return TaskRun(
        task_id=f"task-{number}",
        attempt=1,
        user=user,
        key=shape.key,
        features=shape.features,
        memory_bytes=memory,
        run_ms=run_ms,
        ended_at_ms=NOW,
        measured_bytes=memory,
    )


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.02)


def test_runs_are_learned_by_themselves_and_size_the_next_of_that_user(tmp_path: Path) -> None:
    async def story(service: PredictionService) -> None:
        assert await service.size("ana", ["work", "7"], 0) is None
        for i in range(40):
            service.record(a_run(i, ["work", "5"]))

        async def is_sized() -> bool:
            return await service.size("ana", ["work", "7"], 0) is not None

        await until(is_sized)
        found = await service.size("ana", ["work", "7"], 0)
        assert found is not None
        assert (found.tier, found.samples) == (Tier.ML, 40)
        assert 104 * MB <= found.memory_bytes < 120 * MB
        assert found.run_ms == pytest.approx(5000, rel=0.01)
        assert await service.run_ms("ana", ["work", "7"], 0) == found.run_ms
        assert await service.size("bo", ["work", "7"], 0) is None
        assert await service.run_ms("bo", ["work", "7"], 0) is None

    tell(tmp_path, story)


def test_a_restart_knows_what_was_recorded_before(tmp_path: Path) -> None:
    async def record(service: PredictionService) -> None:
        for i in range(10):
            service.record(a_run(i, ["work"]))
            service.record(a_run(i, ["work"]))  # reported twice

    async def ask(service: PredictionService) -> None:
        sizes = await asyncio.gather(*(service.size("ana", ["work"], 0) for _ in range(50)))
        assert {found.samples for found in sizes if found is not None} == {10}
        assert len([found for found in sizes if found is not None]) == 50

    tell(tmp_path, record)
    tell(tmp_path, ask)


def test_a_history_that_cannot_be_written_harms_nothing_and_is_written_later(tmp_path: Path) -> None:
    folder = tmp_path / "gone"

    async def story(service: PredictionService) -> None:
        for i in range(10):
            service.record(a_run(i, ["work"]))
        assert await service.store() is None
        assert await service.size("ana", ["work"], 0) is None
        with pytest.raises(GridError, match="cannot be written"):
            await service.record_execution(requests.RecordExecution(task_id="x", argv=("a",), run_ms=1), ANA)
        folder.mkdir()
        stored = await service.store()
        assert stored is not None
        assert len(stored) == 11
        assert await service.size("ana", ["work"], 0) is not None

    tell(folder, story)


def test_training_happens_by_itself_at_the_interval(tmp_path: Path) -> None:
    async def trained_at(service: PredictionService) -> str | None:
        rows = (await service.list_types(requests.ListTaskTypes(), ANA)).task_types
        found: str | None = rows[0].trained_at
        return found

    async def story(service: PredictionService) -> None:
        service.record(a_run(1, ["work"]))
        await service.store()
        await service.run_ms("ana", ["work"], 0)
        assert await trained_at(service) is None
        service.record(a_run(2, ["work"]))

        async def is_trained() -> bool:
            return await trained_at(service) is not None

        await until(is_trained)

    tell(tmp_path, story, interval=1.0)


def test_the_loop_does_not_wait_while_models_are_trained(tmp_path: Path) -> None:
    """While a thread trains, the event loop gets its turns; `bench/prediction.py` measures how late they are."""
    turns = 0

    async def watch() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    async def story(service: PredictionService) -> None:
        for key in range(4):
            for i in range(200):
                service.record(a_run(1000 * key + i, [f"work{'abcd'[key]}", str(i)], mb=100 + i))
        await service.store()
        watcher = asyncio.create_task(watch())
        answer = await service.train(requests.TrainPredictor(), ADMIN, lambda step: None)
        watcher.cancel()
        assert len(answer.training.trained) == 4

    tell(tmp_path, story)
    assert turns > 20
    assert threading.active_count() < 20


def predict(**fields: Any) -> requests.PredictTask:
    return msgspec.convert(fields, requests.PredictTask)


def test_a_prediction_is_shown_with_its_reasons(tmp_path: Path) -> None:
    async def story(service: PredictionService) -> None:
        nothing = (await service.predict(predict(argv=["work"]), ANA)).prediction
        assert (nothing.tier, nothing.memory_mb, nothing.run_seconds) == ("defaults", None, None)
        assert nothing.why[-1] == "defaults: a job gets no limit"
        for i in range(8):
            op = requests.RecordExecution(
                task_id=f"t{i}", argv=("work",), memory_bytes=100 * MB, run_ms=2000, cpu_ms=3000, gpu_memory_bytes=MB
            )
            first = (await service.record_execution(op, ANA)).execution
            again = (await service.record_execution(op, ANA)).execution
            assert (first.known, again.known, again.samples) == (False, True, i + 1)
        found = (await service.predict(predict(argv=["work"]), ANA)).prediction
        assert (found.tier, found.samples, found.key) == ("statistics", 8, "work")
        assert found.memory_mb is not None
        assert 100 <= found.memory_mb < 110
        assert found.run_seconds == pytest.approx(2, rel=0.01)
        assert found.cpu_cores == pytest.approx(1.5, rel=0.01)
        assert found.gpu_memory_mb == pytest.approx(1, rel=0.1)
        assert found.rerun_memory_mb == sorted(found.rerun_memory_mb)
        assert len(found.rerun_memory_mb) == 3

    tell(tmp_path, story)


def test_types_are_listed_to_their_user_and_all_to_an_admin(tmp_path: Path) -> None:
    async def story(service: PredictionService) -> None:
        service.record(a_run(1, ["work"]))
        service.record(a_run(2, ["other"], user="bo"))
        mine = (await service.list_types(requests.ListTaskTypes(), ANA)).task_types
        assert [(row.user, row.key, row.samples) for row in mine] == [("ana", "work", 1)]
        everything = (await service.list_types(requests.ListTaskTypes(), ADMIN)).task_types
        assert {row.user for row in everything} == {"ana", "bo"}
        assert everything[0].last_run_at.startswith("2023-11-14T")

    tell(tmp_path, story)


def test_training_reports_each_type_as_it_is_done(tmp_path: Path) -> None:
    async def story(service: PredictionService) -> None:
        for i in range(12):
            service.record(a_run(i, ["work"]))
            service.record(a_run(100 + i, ["other"]))
        steps: list[Any] = []
        answer = await service.train(requests.TrainPredictor(), ADMIN, steps.append)
        assert [(step.trained, step.total) for step in steps] == [(1, 2), (2, 2)]
        trained = {row.key: row for row in answer.training.trained}
        assert set(trained) == {"work", "other"}
        assert (trained["work"].samples, trained["work"].tier) == (12, "statistics")
        assert trained["work"].confidence >= 0.7

    tell(tmp_path, story)


def test_batch_sizes_scale_by_what_was_seen_and_in_proportion_where_nothing_was(tmp_path: Path) -> None:
    async def story(service: PredictionService) -> None:
        op = requests.GetBatchScaling(task_type="train", base_batch_size=1, batch_size=16)
        nothing = (await service.batch_scaling(op, ANA)).scaling
        assert (nothing.tier, nothing.memory) == ("defaults", 16)
        for i in range(24):
            batch = float(2 ** (i % 6))
            record = requests.RecordExecution(
                task_id=f"t{i}",
                task_type="train",
                parameters={"batch_size": batch},
                memory_bytes=round((600 + 100 * batch + i % 3) * MB),
                run_ms=round(1000 * batch) + i,
            )
            await service.record_execution(record, ANA)
        found = (await service.batch_scaling(op, ANA)).scaling
        assert (found.tier, found.samples) == ("statistics", 24)
        assert found.memory == pytest.approx(2200 / 700, rel=0.1)
        assert found.run_time == pytest.approx(16, rel=0.15)
        with pytest.raises(BadInput, match="task type"):
            await service.batch_scaling(requests.GetBatchScaling(argv=("x",), base_batch_size=1, batch_size=2), ANA)

    tell(tmp_path, story)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "either a command or a task type"),
        ({"argv": ["a"], "task_type": "b"}, "either a command or a task type"),
        ({"argv": ["a"], "parameters": {"b": 1}}, "parameters belong to a task type"),
    ],
)
def test_a_task_that_is_described_wrongly_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    async def story(service: PredictionService) -> None:
        with pytest.raises(BadInput, match=message):
            await service.predict(predict(**fields), ANA)

    tell(tmp_path, story)


def test_an_execution_without_a_measurement_is_refused(tmp_path: Path) -> None:
    async def story(service: PredictionService) -> None:
        with pytest.raises(BadInput, match="nothing was measured"):
            await service.record_execution(requests.RecordExecution(task_id="x", argv=("a",)), ANA)
        assert (await service.list_types(requests.ListTaskTypes(), ANA)).task_types == []

    tell(tmp_path, story)
