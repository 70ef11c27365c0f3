"""Too long messages are refused at once or sent in pages; no link breaks over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.api.command_limits import MAX_STRING_BYTES
from distributed_grid.client.client import Client
from distributed_grid.errors import BadInput
from distributed_grid.state_dir import StateDir
from tests.e2e.agents.conftest import FarGrid, wait_until

pytestmark = pytest.mark.e2e
Make = Callable[..., FarGrid]
LIST_BLOCKS = (
    "from distributed_grid.client.memory.directory import block_directory\nprint(len(block_directory().every_block()))"
)


def links_made(grid: FarGrid, name: str) -> int:
    return grid.agents[name].log.count("linked to a control plane")


def test_a_command_that_no_node_can_start_is_refused_and_one_that_just_fits_runs(far_grid: Make) -> None:
    grid = far_grid("ash")
    there = {"strategy": "node_specific", "require": ["ash"], "amount": 0.1}
    with Client(StateDir(grid.state_dir), may_start=False) as client:
        for argv in (["true", "x" * 5_000_000], ["true", *["x" * 100_000] * 50]):
            with pytest.raises(BadInput, match=r"use a file|into a file"):
                client.call("submit_job", request_id="long", argv=argv, **there)
        with pytest.raises(BadInput, match="the variable DATA"):
            client.call("submit_job", request_id="long", argv=["true"], env={"DATA": "x" * 5_000_000}, **there)
        words = ["x" * MAX_STRING_BYTES] * 13
        argv = ["/bin/sh", "-c", 'echo $# ${#1} "${#LONG}"', "sh", *words]
        env = {"LONG": "y" * (MAX_STRING_BYTES - 5)}
        job = client.call("submit_job", request_id="fits", argv=argv, env=env, **there)["job"]["job_id"]
    assert grid("jobs", "wait", job, "--timeout", "60").returncode == 0
    assert grid("jobs", "logs", job, check=0).stdout.split() == ["13", str(MAX_STRING_BYTES), str(MAX_STRING_BYTES - 5)]
    listed = next(one for one in grid.json("status")["jobs"] + grid.json("jobs", "list") if one["job_id"] == job)
    assert len(listed["command"]) < 2000
    assert links_made(grid, "ash") == 1


def test_a_program_on_a_node_lists_more_blocks_than_fit_into_a_message(far_grid: Make, tmp_path: Path) -> None:
    grid = far_grid("ash", "birch")
    with Client(StateDir(grid.state_dir), may_start=False) as client:
        for number in range(150):
            meta, name = "\x01" * 4000, f"{number:03}-" + "\x02" * 500
            client.call("allocate_block", request_id=f"b{number}", size=1, ttl_seconds=600.0, meta=meta, name=name)
    script = tmp_path / "list.py"
    script.write_text(LIST_BLOCKS)
    run = grid("run-shared", "--workdir", "none", *grid.on("ash"), "sh", "-c", f'exec "$GRID_PYTHON" {script}')
    assert (run.returncode, run.stdout) == (0, "150\n"), run.stderr
    assert {name: links_made(grid, name) for name in ("ash", "birch")} == {"ash": 1, "birch": 1}
    grid.agents["ash"].kill()  # with all its copies, and it lists them to the next link
    grid.agents["ash"].start()
    wait_until(
        lambda: "linked to a control plane" in grid.agents["ash"].log.partition("agent on")[2].partition("agent on")[2]
    )
    grid.until_alive("ash")
    assert len(grid.json("memory", "list")) == 150
