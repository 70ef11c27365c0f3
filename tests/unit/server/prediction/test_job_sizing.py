"""Sizing of jobs: memory from earlier runs, where no needs are stated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.domain.jobs import MAX_RERUNS
from distributed_grid.server.prediction.job_sizing import (
    MAX_INPUT_FILES,
    file_bytes,
    input_paths,
)
from distributed_grid.server.prediction.service import PredictionService
from tests.support.builders import a_node
from tests.unit.server.in_process_grid import InProcessGrid
from tests.unit.server.predictions import a_prediction_service, learn_runs

TRAIN = ["python3", "train.py"]
Story = Callable[[InProcessGrid, PredictionService], Awaitable[None]]


def tell(folder: Path, story: Story) -> None:
    """A grid of one node, with six earlier runs of `train.py` of about 300 MB and 30 s."""

    async def run() -> None:
        prediction = a_prediction_service(folder)
        await prediction.start()
        await learn_runs(prediction, TRAIN, 300, 301, 299, 300, 302, 300)
        cluster = await InProcessGrid(prediction=prediction).open(a_node("elm", cores=4, memory_gb=16))
        try:
            await cluster.run(lambda _: story(cluster, prediction))
        finally:
            await prediction.stop()

    asyncio.run(run())


def test_a_job_without_stated_needs_gets_one_core_and_a_limit(tmp_path: Path) -> None:
    async def story(cluster: InProcessGrid, prediction: PredictionService) -> None:
        job = (await cluster.submit("j1", argv=TRAIN)).job
        assert job.resources.cpu_cores == 1
        assert 0.29 <= job.resources.memory_gb <= 0.5
        assert job.sizing.samples == 6
        assert job.sizing.tier == "statistics"
        assert job.sizing.memory_gb == job.sizing.limits_gb[0] == job.attempts[0].memory_limit_gb
        assert len(job.sizing.limits_gb) == 1 + MAX_RERUNS
        assert job.expected_seconds == 30

    tell(tmp_path, story)


@pytest.mark.parametrize(
    "needs",
    [
        {"resource_type": "cpu"},
        {"amount": 1},
        {"resource_type": "memory", "amount": 2},
        {"resources": {"memory": 2}},
    ],
)
def test_a_job_with_stated_needs_gets_what_it_says(tmp_path: Path, needs: dict[str, Any]) -> None:
    async def story(cluster: InProcessGrid, prediction: PredictionService) -> None:
        job = (await cluster.submit("j1", argv=TRAIN, **needs)).job
        assert job.sizing is None
        assert job.resources.memory_gb == (2 if "memory" in str(needs) else 0)
        assert job.expected_seconds == 30

    tell(tmp_path, story)


def test_a_command_that_nobody_knows_gets_no_limit(tmp_path: Path) -> None:
    async def story(cluster: InProcessGrid, prediction: PredictionService) -> None:
        job = (await cluster.submit("j1", argv=["python3", "other.py"])).job
        assert (job.sizing, job.expected_seconds) == (None, None)
        assert (await cluster.submit("j2", "bob", argv=TRAIN)).job.sizing is None  # his runs are his own

    tell(tmp_path, story)


def test_a_dry_run_says_how_it_would_be_sized(tmp_path: Path) -> None:
    async def story(cluster: InProcessGrid, prediction: PredictionService) -> None:
        dry = await cluster.submit("j1", argv=TRAIN, dry_run=True)
        real = await cluster.submit("j1", argv=TRAIN)
        assert dry.job.sizing == real.job.sizing is not None
        explained = await cluster.explain(real.job.uid)
        assert explained.job.sizing == real.job.sizing

    tell(tmp_path, story)


def test_the_same_request_again_is_the_same_job_after_the_grid_has_learned_more(tmp_path: Path) -> None:
    async def story(cluster: InProcessGrid, prediction: PredictionService) -> None:
        first = (await cluster.submit("j1", argv=TRAIN)).job
        await learn_runs(prediction, TRAIN, *range(900, 930))
        again = (await cluster.submit("j1", argv=TRAIN)).job
        assert again == first
        await cluster.starts("j1")
        await cluster.ends("j1")
        ended = (await cluster.submit("j1", argv=TRAIN)).job
        assert (ended.state, ended.sizing) == ("ended", first.sizing)

    tell(tmp_path, story)


def test_files_that_a_command_names_are_its_input(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"x" * 1000)
    (tmp_path / "7").write_bytes(b"x" * 50)
    outside = tmp_path / "folder"
    outside.mkdir()
    argv = ["a.csv", "a.csv", "--data=a.csv", "-n", "7", str(tmp_path / "a.csv"), "folder", "none", "--x", "y" * 9000]
    assert file_bytes(input_paths(["tool", *argv], str(tmp_path))) == 1000
    assert file_bytes(input_paths(["tool", "a.csv", str(tmp_path / "a.csv")], "")) == 1000
    assert input_paths(["true"], str(tmp_path)) == ()
    assert len(input_paths(["tool", *map("f{}".format, range(1000))], "/data")) == MAX_INPUT_FILES


def test_the_input_counts_for_the_estimate(tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_bytes(b"x" * 4096)

    async def story(cluster: InProcessGrid, prediction: PredictionService) -> None:
        await cluster.submit("j1", argv=["tool", "data.csv"], cwd=str(tmp_path))
        job = await cluster.grid.read(lambda ledger, now: ledger.jobs["j1"])
        assert job.estimate is not None
        assert job.estimate.input_bytes == 4096

    tell(tmp_path, story)
