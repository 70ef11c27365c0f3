"""The intelligent sharing guide, end to end: its program, its debug commands and its test commands, word for word."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.config import load_cluster_config
from distributed_grid.core import SSHManager
from tests.e2e.clones import clone_to
from tests.support.project import NEVER_SECONDS, PROJECT, set_rebalance_interval
from tests.support.shell import Shell

pytestmark = pytest.mark.e2e

GUIDES = PROJECT / "tests/fixtures/guides"
PAGE = (PROJECT / "docs/guide/resource-sharing.md").read_text()
PARTS = ("cluster_status", "resource_monitoring", "resource_requests", "intelligent_scheduling", "load_balancing")


@pytest.fixture
def clone(grid: Shell) -> Shell:
    """A clone of the project as the current directory, and nothing of it in the grid yet."""
    clone_to(grid.cwd)
    set_rebalance_interval(grid.cwd / "config", NEVER_SECONDS)
    return grid


def in_shell(clone: Shell, script: str) -> subprocess.CompletedProcess[str]:
    """What a person types after `poetry run`, in the clone."""
    return subprocess.run(
        ["bash", "-ec", script], cwd=clone.cwd, env=clone.env, capture_output=True, text=True, timeout=90
    )


@pytest.mark.parametrize("guide", sorted(GUIDES.iterdir()), ids=lambda guide: guide.stem)
def test_the_page_has_the_guides_blocks_unchanged(guide: Path) -> None:
    assert guide.read_text() in PAGE


def test_the_program_of_the_guide(clone: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in clone.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(clone.cwd)
    program = (GUIDES / "intelligent_sharing_usage.txt").read_text()
    code = compile(program, "the guide", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    config = load_cluster_config("config/my-cluster-enhanced.yaml")
    names: dict[str, Any] = {"cluster_config": config, "ssh_manager": SSHManager(config)}

    async def story() -> None:
        running = eval(code, names)
        assert inspect.iscoroutine(running)
        await running
        orchestrator = names["orchestrator"]
        (held,) = (await orchestrator.get_cluster_status())["allocations"]
        assert held["allocation_id"] == names["request_id"]
        assert (held["target_node"], held["amount"], held["priority"]) == ("gpu-master", 2.0, "high")
        assert held["node_id"] != "gpu-master"
        await orchestrator.release_resources(names["request_id"])
        await orchestrator.stop()

    asyncio.run(asyncio.wait_for(story(), 60))
    assert {node["node_id"] for node in names["status"]["nodes"]} == {"gpu-master", "gpu1", "gpu2"}
    assert set(names["snapshots"]) == {"gpu-master", "gpu1", "gpu2"}
    assert clone.json("shared-status")["allocations"] == []


def test_the_debug_commands_of_the_guide(clone: Shell) -> None:
    done = in_shell(clone, (GUIDES / "intelligent_sharing_debug.txt").read_text().replace("poetry run ", ""))
    assert done.returncode == 0, done.stderr
    assert "== Cluster status ==" in done.stdout
    assert re.search(r"gpu2 +alive +14 cores, 27\.58\d* GB, 2 GPUs to lend", done.stdout)
    assert "== Resource monitoring ==" in done.stdout
    assert "look 3: gpu-master CPU " in done.stdout


def test_every_part_of_the_demo_works_alone_and_gives_back(clone: Shell) -> None:
    for part in PARTS[2:]:
        program = f"""
import asyncio
from examples.intelligent_sharing_demo import ResourceSharingDemo
demo = ResourceSharingDemo('config/my-cluster-enhanced.yaml')
asyncio.run(demo._demo_{part}())
"""
        done = in_shell(clone, f"python -c {shlex.quote(program)}")
        assert done.returncode == 0, done.stderr
        assert f"== {part.replace('_', ' ').capitalize()} ==" in done.stdout
        assert clone.json("shared-status")["allocations"] == []
        if part == "resource_requests":
            assert "2 of cpu for gpu-master: lent by gpu" in done.stdout
            assert "10000 of cpu for gpu-master: refused" in done.stdout
        if part == "intelligent_scheduling":
            assert done.stdout.count(", confidence ") == 7
            places = dict(re.findall(r"^(\w+): ([\w-]+), confidence ", done.stdout, re.MULTILINE))
            assert (places["load_balanced"], places["local_first"]) == ("gpu2", "gpu-master"), places
        if part == "load_balancing":
            assert all(f"  {node:<12} ## 2\n" in done.stdout for node in ("gpu-master", "gpu1", "gpu2"))


def test_the_whole_demo_shows_a_lease_for_the_pressed_node_and_gives_back_what_it_borrows(clone: Shell) -> None:
    set_rebalance_interval(clone.cwd / "config", 1, was=NEVER_SECONDS)
    done = in_shell(clone, "python examples/intelligent_sharing_demo.py")
    assert done.returncode == 0, done.stderr
    headings = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert headings == [f"== {part.replace('_', ' ').capitalize()} ==" for part in PARTS]
    assert "gpu-master: memory at 76.6 %, above its mark of 70 %\n" in done.stdout
    assert re.search(r"the grid has borrowed \d+\.\d GB of gpu2 for gpu-master\n", done.stdout)
    assert {lease["user"] for lease in clone.json("shared-status")["allocations"]} <= {"grid"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_test_commands_of_the_guide(tmp_path: Path) -> None:
    commands = [
        shlex.split(line, comments=True)
        for line in (GUIDES / "intelligent_sharing_testing.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert [words[:3] for words in commands] == [["poetry", "run", "pytest"]] * 3
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_", "GRID_"))}
    environment = ours | {"COVERAGE_FILE": str(tmp_path / "coverage")}
    for words in commands[1:]:  # the first is what `make test` does with that file
        done = subprocess.run(
            [sys.executable, "-m", *words[2:], "-p", "no:cacheprovider"],
            cwd=PROJECT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    total = re.search(r"^TOTAL .* (\d+)%$", done.stdout, re.MULTILINE)
    assert total is not None, done.stdout
    assert int(total[1]) >= 90
