"""The Python front door beyond the guide's own examples: many at once, refusals, cancelling, crashes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from distributed_grid.config import ClusterConfig
from distributed_grid.core import GridOrchestrator
from distributed_grid.errors import BadInput, Refused, TimedOut
from tests.support.shell import Shell, wait_until

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def run(grid: Shell, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], None]:
    """Tells a story with an orchestrator of this test's grid."""
    monkeypatch.chdir(grid.cwd)

    def tell(story: Callable[..., Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            async with GridOrchestrator(state_dir=grid.state_dir) as orchestrator:
                await story(orchestrator)

        asyncio.run(asyncio.wait_for(whole(), 100))

    return tell


def test_hundreds_of_commands_at_once_all_come_back(run: Any) -> None:
    async def story(orchestrator: GridOrchestrator) -> None:
        tasks = [orchestrator.run_with_shared_resources(["echo", str(i)], "cpu", 0.5) for i in range(200)]
        results = await asyncio.gather(*tasks)
        assert [result.stdout for result in results] == [f"{i}\n" for i in range(200)]
        assert all(result.succeeded for result in results)

    run(story)


def test_one_string_is_for_the_shell_and_a_list_is_not(run: Any) -> None:
    async def story(orchestrator: GridOrchestrator) -> None:
        through_shell = await orchestrator.run_with_shared_resources("echo $((1 + 1)); exit 3")
        assert (through_shell.stdout, through_shell.exit_code, through_shell.succeeded) == ("2\n", 3, False)
        as_given = await orchestrator.run_with_shared_resources(["echo", "$((1 + 1))"])
        assert as_given.stdout == "$((1 + 1))\n"

    run(story)


def test_refusals_and_vain_waits_are_errors(run: Any) -> None:
    async def story(orchestrator: GridOrchestrator) -> None:
        with pytest.raises(Refused, match="No node can ever lend"):
            await orchestrator.run_with_shared_resources("true", "gpu", 1)
        for amount in (0, -1, float("nan"), float("inf")):
            with pytest.raises(BadInput):
                await orchestrator.run_with_shared_resources("true", "cpu", amount)
        with pytest.raises(BadInput, match="no priority"):
            await orchestrator.run_with_shared_resources("true", priority="whenever")
        holder = asyncio.create_task(orchestrator.run_with_shared_resources("sleep 60", "cpu", CORES, job_id="all"))
        while not (await orchestrator.get_shared_resource_status())["allocations"]:
            await asyncio.sleep(0.02)
        with pytest.raises(TimedOut, match="No resource offers available"):
            await orchestrator.run_with_shared_resources("true", wait_seconds=0.3)
        holder.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holder

    run(story)


def test_cancelling_the_task_cancels_the_job(run: Any, grid: Shell) -> None:
    async def story(orchestrator: GridOrchestrator) -> None:
        task = asyncio.create_task(orchestrator.run_with_shared_resources("sleep 300", job_id="long"))
        while not (await orchestrator.get_shared_resource_status())["allocations"]:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(story)
    wait_until(lambda: grid.job("long")["outcome"] == "cancelled")


def test_a_result_survives_the_death_of_the_control_plane(run: Any, grid: Shell) -> None:
    async def story(orchestrator: GridOrchestrator) -> None:
        task = asyncio.create_task(orchestrator.run_with_shared_resources("echo before; sleep 2; echo after"))
        while not (await orchestrator.get_shared_resource_status())["allocations"]:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(grid.kill_daemon)
        result = await task
        assert (result.stdout, result.exit_code) == ("before\nafter\n", 0)

    run(story)


def test_a_config_made_in_python_is_as_good_as_a_file(grid: Shell) -> None:
    async def story() -> None:
        nodes = [{"name": name, "host": "local", "cpu_count": 2, "trust_declared": True} for name in ("left", "right")]
        config = ClusterConfig.from_mapping({"nodes": nodes})
        async with GridOrchestrator(config, state_dir=grid.state_dir) as orchestrator:
            result = await orchestrator.run_with_shared_resources(
                "echo $GRID_NODE", preferred_nodes=["right"], isolated=True
            )
            assert result.stdout == "right\n"

    asyncio.run(asyncio.wait_for(story(), 60))
