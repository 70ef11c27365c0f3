"""Secrets of the current directory on a far node: they do not arrive, nor in any cache, unless the user says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.agents.conftest import FarGrid
from tests.e2e.agents.test_wrapped_command import RUN

pytestmark = pytest.mark.e2e
TOKEN = b"token-" + os.urandom(8).hex().encode()
NOTE = "grid: not shipped, as they look like secrets: .env, .ssh/ (allow with --ship PATTERN)"
LIST = ("sh", "-c", "find . -type f | sort")


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarGrid]:
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "here/.ssh").mkdir(parents=True)
    for name in (".env", ".ssh/id_rsa"):
        (folder / "here" / name).write_bytes(TOKEN + name.encode())
    (folder / "here/train.py").write_text("pass")
    made = FarGrid(folder / "state", folder / "here")
    yield made.begin("gpu2")
    made.close()


def copies(grid: FarGrid) -> list[Path]:
    """Files outside the current directory that hold a secret: in state directories, content stores, job directories."""
    files = (path for path in grid.cwd.parent.rglob("*") if path.is_file() and grid.cwd not in path.parents)
    return [path for path in files if TOKEN in path.read_bytes()]


def test_secrets_neither_arrive_nor_stay_in_a_cache_and_one_line_names_them(grid: FarGrid) -> None:
    done = grid("run-shared", *grid.on("gpu2", *LIST), check=0)
    assert done.stdout.split() == ["./train.py"]
    assert done.stderr.splitlines() == [NOTE]
    wrapped = [sys.executable, "-c", RUN, LIST[2], ""]
    done = subprocess.run(wrapped, cwd=grid.cwd, env=grid.env, check=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr.splitlines()) == (["./train.py"], [NOTE])
    boost = grid.json("boost", "request", "here", "cpu", "1", "--source", "gpu2", "--only")["boost_id"]
    done = grid("boost", "run", boost, "--", *LIST, check=0)
    assert (done.stdout.split(), done.stderr.splitlines()) == (["./train.py"], [NOTE])
    assert copies(grid) == []
    done = grid("boost", "run", "--ship", ".env", boost, "--", "cat", ".env", check=0)
    assert done.stdout.encode() == TOKEN + b".env"
    grid("boost", "release", boost, check=0)


def test_ship_lets_through_what_it_names(grid: FarGrid) -> None:
    done = grid("run-shared", "--ship", ".env", *grid.on("gpu2", "cat", ".env"), check=0)
    assert done.stdout.encode() == TOKEN + b".env"
    assert ".ssh/ (allow" in done.stderr
    words = ("--ship", ".env", "--ship", ".ssh/id_rsa", "--ship", "*.p12")
    done = grid("run-shared", *words, *grid.on("gpu2", *LIST), check=0)
    assert done.stdout.split() == ["./.env", "./.ssh/id_rsa", "./train.py"]
    assert done.stderr.splitlines() == [
        "grid: --ship '*.p12': no file that looks like a secret matches, outside of ignored directories"
    ]
    assert any(grid.agents["gpu2"].folder in path.parents for path in copies(grid))


@pytest.mark.parametrize("command", [("run-shared",), ("boost", "run"), ("offload", "wrap")])
def test_a_bad_pattern_is_one_line_and_exit_code_2(grid: FarGrid, command: tuple[str, ...]) -> None:
    boost = ("some-boost",) if command[0] == "boost" else ()
    done = grid(*command, "--ship", "../.env", *boost, "true", check=2)
    assert done.stderr.splitlines() == [
        "grid: --ship '../.env': leads outside the directory; give a path inside it, such as .env or 'certs/*.pem'"
    ]


def test_a_home_directory_is_shipped_only_where_it_is_named(grid: FarGrid) -> None:
    at_home = {"HOME": str(grid.cwd)}
    done = grid("run-shared", "sh", "-c", "echo $GRID_NODE", check=0, env=at_home)
    assert done.stdout == "here\n"
    assert done.stderr.startswith("grid: this job stays on this machine: ")
    assert "is a home directory or above one, which is never shipped unless it is named" in done.stderr
    refused = grid("run-shared", *grid.on("gpu2", "true"), check=2, env=at_home)
    assert "use --workdir DIR or --workdir none" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    done = grid("run-shared", "--workdir", ".", *grid.on("gpu2", *LIST), check=0, env=at_home)
    assert (done.stdout.split(), done.stderr.splitlines()) == (["./train.py"], [NOTE])
    wrapped = [sys.executable, "-c", RUN, "true", ""]
    done = subprocess.run(wrapped, cwd=grid.cwd, env=grid.env | at_home, capture_output=True, text=True, timeout=60)
    assert done.stderr.startswith("grid: starts here: the directory ")


PYTHON = """
import asyncio, sys
from distributed_grid.core import GridOrchestrator

async def main():
    async with GridOrchestrator() as grid:
        for ship in ((), (".env",)):
            done = await grid.run_with_shared_resources(
                ["sh", "-c", "ls -A"], "cpu", 1, preferred_nodes=["gpu2"], strategy="node_specific", ship=ship
            )
            print(" ".join(done.stdout.split()))

asyncio.run(main())
"""


def test_python_withholds_secrets_too_and_logs_their_names(grid: FarGrid) -> None:
    program = [sys.executable, "-c", PYTHON]
    done = subprocess.run(program, cwd=grid.cwd, env=grid.env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["train.py", ".env train.py"]
    assert NOTE.removeprefix("grid: ") in done.stderr.splitlines()
