"""The resource sharing guide, end to end: its commands, its program line by line, and its three use cases."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

import pytest

from distributed_grid.config import ClusterConfig
from distributed_grid.core import GridOrchestrator, SharedRunResult
from distributed_grid.orchestration.resource_sharing import ResourceType
from tests.support.project import copy_configs
from tests.support.shell import Shell

pytestmark = pytest.mark.e2e

CORES = len(os.sched_getaffinity(0))
SCRIPTS = {
    "train.py": 'import os; print("training on GPU", os.environ["CUDA_VISIBLE_DEVICES"])',
    "train_model.py": 'import os; print("model trained on GPU", os.environ["CUDA_VISIBLE_DEVICES"])',
    "process_data.py": 'print("data processed")',
    "process_large_dataset.py": "hold = bytearray(64 * 1024**2); print(len(hold))",
    "parallel_task.py": "import os; print(len(os.sched_getaffinity(0)))",
    "compute_task.py": "import sys, time; time.sleep(1); print(sys.argv[1], int(sys.argv[2]) ** 2)",
}


@pytest.fixture
def cluster(grid: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """The three simulated machines, and a directory with the scripts that the guide runs."""
    copy_configs(grid.cwd / "config")
    for name, text in SCRIPTS.items():
        (grid.cwd / name).write_text(text)
    for name, value in grid.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GRID_CONFIG", raising=False)
    monkeypatch.chdir(grid.cwd)
    return grid


def in_the_grid(story: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(story, 90))


async def started() -> GridOrchestrator:
    config = ClusterConfig.from_yaml("config/cluster_config.yaml")
    orchestrator = GridOrchestrator(config)
    await orchestrator.initialize()
    return orchestrator


def test_the_program_of_the_guide(cluster: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    async def program() -> SharedRunResult:
        config = ClusterConfig.from_yaml("config/cluster_config.yaml")
        orchestrator = GridOrchestrator(config)

        await orchestrator.initialize()

        result = await orchestrator.run_with_shared_resources(
            command="python train.py",
            resource_type=ResourceType.GPU,
            amount=1,
            priority="high",
            job_id="training_001",
        )

        status = await orchestrator.get_shared_resource_status()
        print(f"Available offers: {status['offers']}")
        print(f"Active allocations: {status['allocations']}")
        assert {offer["node_id"] for offer in status["offers"]} == {"gpu-master", "gpu1", "gpu2"}
        assert status["allocations"] == []

        await orchestrator.shutdown()
        return result

    result: SharedRunResult = in_the_grid(program())

    assert (result.job_id, result.exit_code, result.outcome) == ("training_001", 0, "exited")
    assert result.node_id in ("gpu1", "gpu2")
    assert result.stdout == "training on GPU 0\n"
    assert "Available offers: [{" in capsys.readouterr().out
    job = cluster.job("training_001")
    assert (job["resource_type"], job["amount"], job["priority"]) == ("gpu", 1.0, "high")


def test_a_training_job_is_moved_to_a_worker_when_the_main_node_is_busy(cluster: Shell) -> None:
    async def use_case() -> Any:
        orchestrator = await started()
        local_gpu_utilization = 95
        if local_gpu_utilization > 80:
            result = await orchestrator.run_with_shared_resources(
                command="python train_model.py", resource_type=ResourceType.GPU, amount=1, priority="high"
            )
        await orchestrator.shutdown()
        return result

    result = in_the_grid(use_case())

    assert result.succeeded
    assert result.node_id != "gpu-master"
    assert result.stdout == "model trained on GPU 0\n"


def test_a_batch_runs_where_memory_is_left(cluster: Shell) -> None:
    async def use_case() -> Any:
        orchestrator = await started()
        result = await orchestrator.run_with_shared_resources(
            command="python process_large_dataset.py", resource_type=ResourceType.MEMORY, amount=8, priority="low"
        )
        await orchestrator.shutdown()
        return result

    result = in_the_grid(use_case())

    assert result.succeeded
    assert int(result.stdout) == 64 * 1024**2


def test_tasks_run_side_by_side(cluster: Shell) -> None:
    async def use_case() -> Any:
        orchestrator = await started()
        tasks = []
        for i in range(4):
            task = orchestrator.run_with_shared_resources(
                command=f"python compute_task.py --task-id {i}",
                resource_type=ResourceType.CPU,
                amount=2,
                priority="medium",
            )
            tasks.append(task)
        results = await asyncio.gather(*tasks)
        await orchestrator.shutdown()
        return results

    results = in_the_grid(use_case())

    assert [result.stdout for result in results] == [f"--task-id {i * i}\n" for i in range(4)]
    assert len({result.job_id for result in results}) == 4
    jobs = [cluster.job(result.job_id) for result in results]
    assert max(job["submitted_at"] for job in jobs) < min(job["ended_at"] for job in jobs)


@pytest.mark.parametrize(
    ("words", "shows"),
    [
        ("--resource-type gpu --amount 1 --priority high python train.py", "training on GPU 0"),
        ("--resource-type memory --amount 4 --priority medium python process_data.py", "data processed"),
        ("--resource-type cpu --amount 2 --priority low python parallel_task.py", str(min(2, CORES))),
        ("-r gpu -a 1 -n gpu1 -n gpu2 python train.py", "training on GPU 0"),
    ],
)
def test_the_commands_of_the_guide(cluster: Shell, words: str, shows: str) -> None:
    done = cluster("run-shared", *words.split(), check=0)
    assert done.stdout == f"{shows}\n"
    status = cluster("shared-status", check=0).stdout
    assert "gpu1" in status
    assert "no active allocations" in status
