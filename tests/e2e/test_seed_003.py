"""The distributed memory guide, end to end: its programs, its demo and its commands, word for word."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
from typing import Any

import numpy as np
import pytest

from distributed_grid.config import load_cluster_config
from distributed_grid.orchestration.distributed_memory_pool import DistributedMemoryPool
from tests.e2e.clones import clone_to
from tests.support.project import NEVER_SECONDS, PROJECT, set_rebalance_interval
from tests.support.shell import Shell

pytestmark = pytest.mark.e2e

GUIDE = {path.stem: path.read_text() for path in (PROJECT / "tests/fixtures/memory_guide").iterdir()}
CONFIG = "config/my-cluster-enhanced.yaml"


@pytest.fixture(scope="module")
def clone(shared_grid: Shell) -> Shell:
    """A clone of the project as the current directory."""
    clone_to(shared_grid.cwd)
    set_rebalance_interval(shared_grid.cwd / "config", NEVER_SECONDS)
    return shared_grid


@pytest.fixture(autouse=True)
def _there(clone: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in clone.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(clone.cwd)


def typed(clone: Shell, script: str) -> subprocess.CompletedProcess[str]:
    """What a person types after `poetry run`, in the clone."""
    script = script.replace("poetry run ", "")
    return subprocess.run(
        ["bash", "-ec", script], cwd=clone.cwd, env=clone.env, capture_output=True, text=True, timeout=60
    )


def held(clone: Shell) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = clone.json("memory", "list")
    return found


async def run_in(names: dict[str, Any], program: str) -> None:
    """A part of the guide that awaits at its top level."""
    code = compile(program, "the guide", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(code, names)
    assert inspect.iscoroutine(running)
    await running


def test_the_program_of_the_guide(clone: Shell) -> None:
    done = subprocess.run(["python", "-c", GUIDE["pool"]], capture_output=True, text=True, timeout=60, env=clone.env)
    assert done.returncode == 0, done.stderr
    assert held(clone) == []


def test_the_same_program_step_by_step(clone: Shell) -> None:
    names: dict[str, Any] = {}
    body = GUIDE["pool"].partition("async def use_remote_memory():\n")[2].partition("\nasyncio.run")[0]
    steps = [line.strip() for line in body.splitlines() if line.strip()]
    last = next(place for place, line in enumerate(steps) if "deallocate" in line)

    async def story() -> None:
        exec(GUIDE["pool"].partition("async def")[0], names)
        await run_in(names, "\n".join(steps[:last]))
        assert names["retrieved"] == names["data"]
        (row,) = held(clone)
        assert (row["size"], row["nodes"], row["state"]) == (5 * 1024**3, ["gpu2"], "ready")
        await run_in(names, "\n".join(steps[last:]))
        assert held(clone) == []

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.slow
def test_the_arrays_and_the_model_of_the_guide(clone: Shell) -> None:
    config = load_cluster_config(CONFIG)
    names: dict[str, Any] = {"DistributedMemoryPool": DistributedMemoryPool, "config": config}

    async def story() -> None:
        names["pool"] = pool = DistributedMemoryPool(config)
        await pool.initialize()
        await run_in(names, GUIDE["arrays"])
        assert np.array_equal(names["retrieved_array"], names["large_array"])
        await pool.deallocate(names["block_id"])
        await pool.shutdown()
        await run_in(names, GUIDE["model"])
        assert (await names["pool"].find(names["model_block"]))["size"] == 10 * 1024**3
        await names["pool"].deallocate(names["model_block"])
        await names["pool"].shutdown()

    asyncio.run(asyncio.wait_for(story(), 100))
    assert held(clone) == []


def test_the_demo_of_the_guide(clone: Shell) -> None:
    done = typed(clone, GUIDE["demo"])
    assert done.returncode == 0, done.stderr
    assert "byte for byte the same: True" in done.stdout
    assert "back again the same: True" in done.stdout
    assert done.stdout.count("\n== ") == 5
    assert held(clone) == []


def test_the_commands_of_the_guide(clone: Shell) -> None:
    request, _, rest = GUIDE["requests"].partition("# Check status")
    status, _, release = rest.partition("# Release allocation")
    for asked, amount in ((request, 10), (GUIDE["more"], 15)):
        done = typed(clone, asked)
        assert f"{amount} GB from gpu2 for gpu-master" in done.stdout, done.stderr
        (allocation_id,) = re.findall(r"[0-9a-f]{32}", done.stdout)
        assert re.search(rf"gpu2 +{amount} GB .* high +active", typed(clone, status).stdout)
        released = typed(clone, release.replace("<allocation_id>", allocation_id))
        assert released.stdout.endswith(": released\n")


def test_the_remedies_of_the_guide_can_be_typed(clone: Shell) -> None:
    done = clone("memory", "allocate", "60GB", check=1)
    assert done.stderr.startswith("grid: No available nodes for memory allocation: ")
    for remedy in ("grid distribute status", "grid resource-sharing status", "grid memory stats"):
        assert typed(clone, remedy).returncode == 0
    clone("memory", "allocate", "1GB", "--key", "smaller", check=0)
    clone("memory", "deallocate", "smaller", check=0)
