"""A job on another node: its output, its directory, its files, and how they come back."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.e2e.agents.conftest import FarGrid, wait_until

pytestmark = pytest.mark.e2e
Make = Callable[..., FarGrid]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("far")
    (folder / "here").mkdir()
    made = FarGrid(folder / "state", folder / "here")
    yield made.begin("gpu2")
    made.close()


def test_output_and_exit_code_come_from_the_far_node(grid: FarGrid) -> None:
    done = grid("run-shared", *grid.on("gpu2", "sh", "-c", "echo $GRID_NODE; echo oh >&2; exit 7"))
    assert (done.returncode, done.stdout, done.stderr) == (7, "gpu2\n", "oh\n")


def test_the_current_directory_is_shipped_and_results_come_back(grid: FarGrid) -> None:
    (grid.cwd / "data").mkdir(exist_ok=True)
    (grid.cwd / "data" / "in.txt").write_text("seven\n")
    (grid.cwd / "work.sh").write_text("#!/bin/sh\nmkdir -p out/deep; cat data/in.txt | tr a-z A-Z > out/deep/result\n")
    (grid.cwd / "work.sh").chmod(0o755)
    done = grid("run-shared", *grid.on("gpu2"), "--fetch", "out/**", "./work.sh", check=0)
    assert (grid.cwd / "out/deep/result").read_text() == "SEVEN\n"
    assert "fetched 1 file" in done.stderr
    assert not (grid.cwd / "data/out").exists()


def test_without_a_workdir_the_private_directory_is_empty(grid: FarGrid) -> None:
    done = grid("run-shared", *grid.on("gpu2"), "--workdir", "none", "sh", "-c", "ls -A | wc -l", check=0)
    assert done.stdout.strip() == "0"


def test_another_directory_can_be_shipped(grid: FarGrid) -> None:
    other = grid.cwd.parent / "other"
    other.mkdir()
    (other / "only-here").write_text("x")
    words = ("--workdir", str(other), "--fetch", "new", "sh", "-c", "ls; echo hi > new")
    done = grid("run-shared", *grid.on("gpu2"), *words, check=0)
    assert done.stdout.split() == ["only-here"]
    assert (other / "new").read_text() == "hi\n"


def test_the_caller_machines_variables_stay_behind_unless_given(grid: FarGrid) -> None:
    env = {"PATH": f"/nowhere:{grid.env['PATH']}", "HOME": "/nowhere", "TERM": "dumb"}
    show = ("sh", "-c", "echo $HOME; echo $PATH; echo $TERM; echo $MINE")
    done = grid("run-shared", *grid.on("gpu2"), "-e", "MINE=1", *show, check=0, env=env)
    home, path, term, mine = done.stdout.splitlines()
    assert home != "/nowhere"
    assert "/nowhere" not in path
    assert (term, mine) == ("dumb", "1")
    done = grid("run-shared", *grid.on("gpu2"), "-e", "HOME=/nowhere", *show, check=0)
    assert done.stdout.splitlines()[0] == "/nowhere"


def test_a_detached_job_is_followed_and_fetched_later(grid: FarGrid) -> None:
    slow = "for i in 1 2 3; do echo $i; sleep 0.2; done; echo made > made"
    job = grid.detach(*grid.on("gpu2"), "--workdir", "none", "sh", "-c", slow)
    assert grid("jobs", "logs", "-f", job, check=0).stdout.split() == ["1", "2", "3"]
    came = grid.json("jobs", "fetch", job, "--to", "brought")
    assert (came["files"], came["paths"]) == (1, ["made"])
    assert (grid.cwd / "brought" / "made").read_text() == "made\n"


def test_output_of_megabytes_arrives_whole_and_the_tail_alone_too(grid: FarGrid) -> None:
    job = grid.detach(*grid.on("gpu2"), "--workdir", "none", "python3", "-c", "print('x' * 5_000_000 + 'END')")
    whole = grid("jobs", "logs", "-f", job, check=0).stdout
    assert len(whole) == 5_000_004
    assert grid("jobs", "logs", "--tail", "4", job, check=0).stdout == "END\n"


def test_a_job_is_cancelled_with_all_it_started(grid: FarGrid) -> None:
    job = grid.detach(*grid.on("gpu2"), "sh", "-c", "sleep 1000 & sleep 1000")
    grid.pid_of(job)
    grid("jobs", "cancel", job, check=0)
    assert grid("jobs", "wait", job, "--timeout", "20").returncode == 130


def test_too_large_a_directory_keeps_the_job_here_and_says_so(grid: FarGrid) -> None:
    big = grid.cwd.parent / "big"
    big.mkdir()
    with open(big / "huge", "wb") as file:
        file.truncate(200 * 1024 * 1024)
    done = grid("run-shared", "--workdir", str(big), "true")
    assert done.returncode == 2
    assert "too large to ship" in done.stderr
    small, grid.cwd = grid.cwd, big
    try:
        done = grid("run-shared", "sh", "-c", "echo $GRID_NODE", check=0)
        assert done.stdout == "here\n"
        assert "stays on this machine" in done.stderr
        assert grid("run-shared", *grid.on("gpu2", "true")).returncode == 2
    finally:
        grid.cwd = small


def test_a_command_that_is_not_there_says_so(grid: FarGrid) -> None:
    done = grid("run-shared", *grid.on("gpu2", "no-such-command"))
    assert done.returncode == 127
    assert "no such command" in done.stderr


def test_only_changed_files_travel_the_second_time(grid: FarGrid) -> None:
    tree = grid.cwd.parent / "tree"
    tree.mkdir()
    for number in range(50):
        (tree / f"f{number}").write_text(str(number) * 1000)
    content = grid.agents["gpu2"].folder / "content"
    run = ("run-shared", *grid.on("gpu2"), "--workdir", str(tree), "sh", "-c", "cat f* | wc -c")
    grid(*run, check=0)
    before = {path: path.stat().st_ino for path in content.rglob("*") if path.is_file()}
    (tree / "f7").write_text("changed")
    assert int(grid(*run, check=0).stdout) > 0
    after = {path: path.stat().st_ino for path in content.rglob("*") if path.is_file()}
    new = [path for path, inode in after.items() if before.get(path) != inode]
    assert len(new) == 2, new  # the changed file and the list of files


def test_a_job_is_shown_where_it_runs(grid: FarGrid) -> None:
    job = grid.detach(*grid.on("gpu2"), "sleep", "1000")
    wait_until(lambda: grid.job(job)["state"] == "running")
    assert grid.job(job)["node_id"] == "gpu2"
    assert "gpu2" in grid("status", check=0).stdout
    leases = json.loads(grid("shared-status", "--json", check=0).stdout)["allocations"]
    assert leases[0]["node_id"] == "gpu2"
    grid("jobs", "cancel", job, check=0)


def test_a_program_ships_and_fetches_too(grid: FarGrid) -> None:
    import asyncio

    from distributed_grid.config import ClusterConfig
    from distributed_grid.core import GridOrchestrator, SSHManager

    tree = grid.cwd.parent / "program"
    tree.mkdir()
    (tree / "in").write_text("seven")
    config = ClusterConfig.from_yaml(grid.env["GRID_CONFIG"])

    async def story() -> None:
        async with GridOrchestrator(config, state_dir=grid.state_dir) as orchestrator:
            result = await orchestrator.run_with_shared_resources(
                "mkdir out; tr a-z A-Z < in > out/it; echo $GRID_NODE",
                preferred_nodes=["gpu2"],
                cwd=tree,
                fetch=["out/**"],
            )
            assert (result.stdout, result.exit_code) == ("gpu2\n", 0)
        workers = await SSHManager(config, state_dir=grid.state_dir).get_workers()
        assert [worker["node_id"] for worker in workers] == ["here", "gpu2"]
        offers = await SSHManager(config, state_dir=grid.state_dir).get_offers()
        assert ("gpu2", "cpu", 2.0) in [(offer.node_id, offer.resource_type, offer.amount) for offer in offers]

    asyncio.run(story())
    assert (tree / "out/it").read_text() == "SEVEN"
