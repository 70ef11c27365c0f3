"""Recording of runs: every ended one, once, also after a crash; one cut short is a lower bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from distributed_grid.adapters.stores.task_history import TaskHistory
from distributed_grid.control.grid import Grid
from distributed_grid.domain.jobs import Attempt, Command, Ending, Job, Outcome
from distributed_grid.prediction.task_runs import TaskRun, task_shape
from distributed_grid.server.prediction.job_runs import RunRecorder, run_of
from distributed_grid.server.prediction.service import PredictionService
from tests.support.builders import GB, a_node, a_request
from tests.unit.server.in_process_grid import InProcessGrid
from tests.unit.server.predictions import MB, a_prediction_service

TOOL = ["tool", "--size", "3"]
Story = Callable[[InProcessGrid, PredictionService], Awaitable[None]]


def tell(folder: Path, story: Story, *, records: bool = True) -> list[TaskRun]:
    """A grid of one node whose runs are recorded; what its history has in the end."""

    async def run() -> None:
        prediction = a_prediction_service(folder)
        await prediction.start()
        cluster = await InProcessGrid(prediction=prediction).open(a_node("elm", cores=4, memory_gb=16))
        if records:
            RunRecorder(cluster.grid, prediction).start()
        try:
            await cluster.run(lambda _: story(cluster, prediction))
        finally:
            await prediction.stop()

    asyncio.run(run())
    history = TaskHistory(folder / "predictions.db")
    found = history.runs("ann", task_shape(TOOL).key, 100)
    history.close()
    return found


def test_a_run_is_recorded_with_what_it_used(tmp_path: Path) -> None:
    async def story(cluster: InProcessGrid, prediction: PredictionService) -> None:
        await cluster.submit("j1", argv=TOOL)
        await cluster.starts("j1")
        await cluster.later(5)
        await cluster.ends("j1", max_memory_bytes=300 * MB, cpu_ms=4_000, wall_ms=5_000)

    (run,) = tell(tmp_path, story)
    shape = task_shape(TOOL)
    assert (run.task_id, run.attempt, run.user, run.features) == ("j1", 1, "ann", shape.features)
    assert (run.memory_bytes, run.cpu_ms, run.run_ms, run.is_lower_bound) == (300 * MB, 4_000, 5_000, False)


@pytest.mark.parametrize(
    "ending", [Ending.SIGNALLED, Ending.OVER_LIMIT, Ending.TIMED_OUT, Ending.CANCELLED, Ending.LOST, Ending.EXPIRED]
)
def test_what_was_cut_short_is_a_lower_bound(tmp_path: Path, ending: Ending) -> None:
    async def story(cluster: InProcessGrid, prediction: PredictionService) -> None:
        await cluster.submit("j1", argv=TOOL, resource_type="memory", amount=2)
        await cluster.starts("j1")
        await cluster.ends("j1", ending, max_memory_bytes=300 * MB)

    (run,) = tell(tmp_path, story)
    assert run.is_lower_bound
    assert run.memory_bytes == (2 * GB if ending is Ending.OVER_LIMIT else 300 * MB)


def test_a_run_that_failed_is_a_lower_bound(tmp_path: Path) -> None:
    async def story(cluster: InProcessGrid, prediction: PredictionService) -> None:
        for name in ("j1", "j2"):
            await cluster.submit(name, argv=TOOL, retries=1)
            await cluster.starts(name)
        await cluster.ends("j1", Ending.SIGNALLED, max_memory_bytes=1)
        await cluster.starts("j1")
        await cluster.ends("j1", max_memory_bytes=2)
        await cluster.ends("j2", max_memory_bytes=3)

    found = {(run.task_id, run.attempt): run.is_lower_bound for run in tell(tmp_path, story)}
    assert found == {("j1", 1): True, ("j1", 2): False, ("j2", 1): False}


def test_what_never_ran_is_not_recorded(tmp_path: Path) -> None:
    async def story(cluster: InProcessGrid, prediction: PredictionService) -> None:
        await cluster.submit("j1", argv=TOOL)
        await cluster.ends("j1", Ending.NEVER_STARTED)
        await cluster.submit("j2", argv=TOOL)

    assert tell(tmp_path, story) == []


def test_a_task_is_recorded_by_its_type_and_parameters() -> None:
    def recorded(payload: str, pid: int = 0) -> TaskRun | None:
        outcome = Outcome(Ending.EXITED, 0, max_memory_bytes=MB)
        attempt = Attempt(
            number=1,
            lease_id="t1.1",
            node="worker",
            fence=1,
            assigned_at_ms=1,
            started_at_ms=2,
            ended_at_ms=9,
            outcome=outcome,
            pid=pid,
        )
        task = Job(
            uid="t1",
            id="task",
            command=Command((), payload=payload),
            request=a_request("t1"),
            submitted_at_ms=1,
            attempts=(attempt,),
        )
        return run_of(task, attempt)

    run = recorded('{"type": "train", "config": {"batch_size": 32}}')
    assert run is not None
    assert (run.key, run.features, run.is_lower_bound) == ("type:train batch_size=#", (32.0,), False)
    command = recorded('{"command": "tool --size 3"}')
    assert command is not None
    assert (command.key, command.measured_bytes) == (f"pull: {task_shape(TOOL).key}", 0)
    by_agent = recorded('{"command": "tool --size 3"}', pid=7)
    assert by_agent is not None
    assert (by_agent.key, by_agent.measured_bytes) == (task_shape(TOOL).key, MB)
    assert recorded('{"what": "nobody knows"}') is recorded("[1]") is recorded("") is None


def test_what_a_dead_control_plane_had_not_recorded_is_caught_up_once(tmp_path: Path) -> None:
    async def story(cluster: InProcessGrid, prediction: PredictionService) -> None:
        for name in ("j1", "j2", "j3"):
            await cluster.submit(name, argv=TOOL, retries=1)
            await cluster.starts(name)
        await cluster.ends("j1", max_memory_bytes=1)
        await cluster.ends("j2", Ending.SIGNALLED, max_memory_bytes=2)  # it runs again
        await cluster.grid.stop()
        cluster.grid = Grid(cluster.store, cluster.clock)
        cluster.compose()
        await cluster.grid.start()
        recorder = RunRecorder(cluster.grid, prediction)
        recorder.start()
        await cluster.ends("j3", max_memory_bytes=3)
        for _ in range(2):
            await recorder.catch_up()
            await prediction.store()

    found = [(run.task_id, run.attempt, run.memory_bytes) for run in tell(tmp_path, story, records=False)]
    assert sorted(found) == [("j1", 1, 1), ("j2", 1, 2), ("j3", 1, 3)]


def test_only_what_ended_of_late_is_caught_up(tmp_path: Path) -> None:
    async def story(cluster: InProcessGrid, prediction: PredictionService) -> None:
        for name in ("old", "new"):
            await cluster.submit(name, argv=TOOL)
            await cluster.starts(name)
            await cluster.ends(name, max_memory_bytes=1)
            await cluster.later(7200)
        await RunRecorder(cluster.grid, prediction).catch_up()

    assert [run.task_id for run in tell(tmp_path, story, records=False)] == ["new"]


def test_a_follower_that_fails_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(cluster: InProcessGrid, prediction: PredictionService) -> None:
        def fail(rows: object) -> None:
            raise ZeroDivisionError

        cluster.grid.follow(fail)
        assert (await cluster.submit("j1", argv=TOOL)).job.state == "assigned"

    tell(tmp_path, story)
    assert "a follower of changes failed" in caplog.text
