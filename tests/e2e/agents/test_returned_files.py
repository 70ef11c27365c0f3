"""Files that come back from another node: local work stays, nothing runs by itself, and ordered files arrive."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.agents.conftest import FarGrid, far_grids, wait_until
from tests.support.shell import GRID
from tests.support.small_disks import SmallDisk, small_disk

pytestmark = pytest.mark.e2e
__all__ = ["small_disk"]
HOSTILE = (
    "mkdir -p .git/hooks; echo evil > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit; echo evil > .git/config"
)


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarGrid]:
    with far_grids(tmp_path_factory.mktemp("far")) as make:
        yield make("gpu2")


@pytest.fixture
def grid(far: FarGrid, tmp_path: Path) -> FarGrid:
    """The grid, seen from a new project directory."""
    project = tmp_path / "project"
    project.mkdir()
    far.cwd = project
    (project / ".git").mkdir()
    (project / ".git/config").write_text("[core]\n")
    (project / ".gitignore").write_text("results.log\n")
    (project / "results.log").write_text("mine\n" * 1000)
    (project / "train.py").write_text("version 1\n")
    (project / "data.txt").write_text("data\n")
    return far


def content(grid: FarGrid) -> dict[str, str]:
    """All files of the project but those of its repository."""
    files = (path for path in grid.cwd.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(grid.cwd)): path.read_text() for path in files}


def delivered(grid: FarGrid, job_id: str) -> dict[str, Any]:
    """The delivery of a job, once it is over."""

    def over() -> dict[str, Any] | None:
        answer = grid.query("get_job", job_id=job_id)
        return answer["delivery"] if answer and answer["delivery"]["ended_at"] else None

    found: dict[str, Any] = wait_until(over, 30)
    return found


WORK = "echo by the job > train.py; echo one > results.log; mkdir -p out; echo 42 > out/answer; " + HOSTILE


@pytest.mark.parametrize("way", ["--fetch", "--detach --fetch", "jobs fetch"])
def test_edits_made_while_a_job_runs_and_files_that_were_never_shipped_stay(grid: FarGrid, way: str) -> None:
    began, may_end = grid.cwd.parent / "began", grid.cwd.parent / "may-end"
    work = f"touch {began}; until test -e {may_end}; do sleep 0.05; done; {WORK}"
    words = ["run-shared", "-j", f"edit-{way.split()[0].strip('-')}", *grid.on("gpu2")]
    words += ["--detach"] if way == "jobs fetch" else [*way.split(), "**"]
    process = subprocess.Popen([*GRID, *words, "sh", "-c", work], cwd=grid.cwd, env=grid.env, stdin=subprocess.DEVNULL)
    wait_until(began.exists)
    (grid.cwd / "train.py").write_text("edited while it ran\n")
    may_end.touch()
    assert process.wait(60) == 0
    job_id = words[2]
    if way == "jobs fetch":
        grid("jobs", "wait", job_id, check=0)
        fetched = grid.json("jobs", "fetch", job_id)
    else:
        fetched = delivered(grid, job_id)
    assert content(grid) == {
        ".gitignore": "results.log\n",
        "results.log": "mine\n" * 1000,
        f"results.log.from-{job_id}": "one\n",
        "train.py": "edited while it ran\n",
        f"train.py.from-{job_id}": "by the job\n",
        "data.txt": "data\n",
        "out/answer": "42\n",
    }
    assert (grid.cwd / ".git/config").read_text() == "[core]\n"
    assert not (grid.cwd / ".git/hooks").exists()
    assert fetched["protected"] == [".git/config", ".git/hooks/pre-commit"]
    assert fetched["beside"] == {name: f"{name}.from-{job_id}" for name in ("results.log", "train.py")}


def test_overwriting_replaces_edited_files_and_nothing_protected(grid: FarGrid) -> None:
    done = grid("run-shared", *grid.on("gpu2"), "--fetch", "**", "--overwrite", "sh", "-c", WORK, check=0)
    assert (grid.cwd / "results.log").read_text() == "one\n"
    assert (grid.cwd / ".git/config").read_text() == "[core]\n"
    assert "never written back: .git/config, .git/hooks/pre-commit" in done.stderr


def test_a_file_that_grid_fetched_before_is_replaced_until_somebody_edits_it(grid: FarGrid) -> None:
    (grid.cwd / ".gitignore").write_text("out\nresults.log\n")
    words = ("run-shared", *grid.on("gpu2"), "--fetch", "out/**", "sh", "-c")
    grid(*words, "mkdir out; echo 1 > out/a; echo 1 > out/b", check=0)
    (grid.cwd / "out/b").write_text("edited\n")
    done = grid(*words, "mkdir out; echo 2 > out/a; echo 2 > out/b", check=0)
    assert (grid.cwd / "out/a").read_text() == "2\n"
    assert (grid.cwd / "out/b").read_text() == "edited\n"
    assert "kept your out/b; the job's version is out/b.from-job-" in done.stderr


def test_a_new_executable_bit_is_reported(grid: FarGrid) -> None:
    make = "echo '#!/bin/sh' > tool; chmod +x tool"
    done = grid("run-shared", *grid.on("gpu2"), "--fetch", "tool", "sh", "-c", make, check=0)
    assert "grid: executable now: tool\n" in done.stderr
    assert os.access(grid.cwd / "tool", os.X_OK)


def test_many_detached_jobs_bring_their_files_and_show_where_they_are(grid: FarGrid) -> None:
    jobs = [
        grid.detach(
            *grid.on("gpu2"), "-a", "0.1", "--fetch", f"out-{number}", "sh", "-c", f"echo {number} > out-{number}"
        )
        for number in range(10)
    ]
    deliveries = [delivered(grid, job) for job in jobs]
    assert {one["state"] for one in deliveries} == {"delivered"}
    assert [(grid.cwd / f"out-{number}").read_text() for number in range(10)] == [f"{number}\n" for number in range(10)]
    assert f"files:        fetched 1 file (2 bytes) into {grid.cwd}" in grid("jobs", "show", jobs[3], check=0).stdout


def test_the_umask_of_the_submitter_holds(grid: FarGrid) -> None:
    make = "umask 022; mkdir out; echo 1 > out/a"
    command = shlex.join([*GRID, "run-shared", *grid.on("gpu2"), "--fetch", "out/**", "sh", "-c", make])
    subprocess.run(["sh", "-c", f"umask 027; {command}"], cwd=grid.cwd, env=grid.env, check=True, capture_output=True)
    assert [(grid.cwd / name).stat().st_mode & 0o777 for name in ("out", "out/a")] == [0o750, 0o640]


def test_files_of_a_removed_directory_come_into_the_state_directory(grid: FarGrid) -> None:
    other = grid.cwd.parent / "other"
    other.mkdir()
    hold = grid.cwd.parent / "hold"
    job = grid.detach(
        *grid.on("gpu2"), "--workdir", str(other), "--fetch", "a", "sh", "-c",
        f"until test -e {hold}; do sleep 0.05; done; echo 1 > a",
    )  # fmt: skip
    other.rmdir()
    hold.touch()
    directory = delivered(grid, job)["directory"]
    assert directory.startswith(f"{grid.state_dir}/results/{job}-")
    assert Path(directory, "a").read_text() == "1\n"
    assert not other.exists()


def test_files_of_a_job_over_rest_come_into_the_state_directory(grid: FarGrid) -> None:
    listening = grid.json("daemon", "start", "--listen", "127.0.0.1:0")
    token = grid.json("daemon", "token", "create", "--user", "eve")["token"]
    body = {"argv": ["sh", "-c", "echo 1 > a"], "require": ["gpu2"], "fetch": ["a"], "job_id": "by-rest"}
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=listening["rest"], headers=headers, verify=grid.trust) as rest:
        refused = rest.post("/v1/jobs", json={**body, "fetch_to": str(grid.cwd)})
        assert (refused.status_code, "unknown field `fetch_to`" in refused.text) == (400, True)
        assert rest.post("/v1/jobs", json=body).status_code == 200
        delivery = delivered(grid, "by-rest")
        assert rest.get("/v1/jobs/by-rest").json()["delivery"] == delivery
    assert Path(delivery["directory"], "a").read_text() == "1\n"
    assert content(grid).keys() == {".gitignore", "results.log", "train.py", "data.txt"}


def test_a_pattern_that_leads_outside_is_refused_before_anything_runs(grid: FarGrid) -> None:
    done = grid("run-shared", *grid.on("gpu2"), "--fetch", "../x", "sh", "-c", "touch ran")
    assert (done.returncode, done.stdout) == (2, "")
    assert "leads outside the job's directory" in done.stderr


def test_a_job_that_never_started_has_no_files(grid: FarGrid) -> None:
    holder = grid.detach(*grid.on("gpu2"), "-a", "2", "sleep", "100")
    waiting = grid.detach(*grid.on("gpu2"), "-a", "2", "--fetch", "**", "true")
    assert "will come into" in grid("jobs", "show", waiting, check=0).stdout
    grid("jobs", "cancel", waiting, holder, check=0)
    delivery = delivered(grid, waiting)
    assert (delivery["state"], delivery["problem"]) == ("failed", f"{waiting} never started")


def test_a_full_disk_delays_the_files_until_there_is_room(grid: FarGrid, small_disk: Callable[..., SmallDisk]) -> None:
    disk = small_disk(grid.cwd.parent / "small", 1 << 20)
    disk.fill()
    words = ("--workdir", "none", "--fetch", "big", "head", "-c", "500000", "/dev/zero")
    grid.cwd, project = disk.place, grid.cwd
    job = grid.detach(*grid.on("gpu2"), *words[:-4], "sh", "-c", "head -c 500000 /dev/zero > big")
    grid.cwd = project
    problem = wait_until(lambda: grid.json("jobs", "show", job)["delivery"]["problem"], 30)
    assert f"no room on the disk of {disk.place}" in problem
    assert [path.name for path in disk.place.iterdir()] == ["ballast"]
    disk.free()
    assert delivered(grid, job)["state"] == "delivered"
    assert (disk.place / "big").stat().st_size == 500_000


def test_a_delivery_leaves_the_reserve_of_a_disk_free(grid: FarGrid, small_disk: Callable[..., SmallDisk]) -> None:
    disk = small_disk(grid.cwd.parent / "small", 64 << 20)
    (disk.place / "ballast").write_bytes(bytes(59 << 20))
    grid.cwd, project = disk.place, grid.cwd
    words = ("--workdir", "none", "--fetch", "big", "sh", "-c", "head -c 4000000 /dev/zero > big")
    job = grid.detach(*grid.on("gpu2"), *words)
    grid.cwd = project
    problem = wait_until(lambda: grid.json("jobs", "show", job)["delivery"]["problem"], 30)
    assert problem.endswith("MB are left, of which 3.2 MB stay free")
    assert [path.name for path in disk.place.iterdir()] == ["ballast"]
    disk.free()
    assert delivered(grid, job)["state"] == "delivered"
    assert (disk.place / "big").stat().st_size == 4_000_000


def test_files_arrive_after_the_control_plane_and_the_agent_were_killed(far_grid: Callable[..., FarGrid]) -> None:
    grid = far_grid("gpu1")
    hold = grid.cwd.parent / "hold"
    job = grid.detach(
        *grid.on("gpu1"), "--workdir", "none", "--fetch", "out/**", "sh", "-c",
        f"until test -e {hold}; do sleep 0.05; done; mkdir out; echo 1 > out/a",
    )  # fmt: skip
    grid.pid_of(job)
    grid.agents["gpu1"].kill()
    os.kill(grid.json("daemon", "status")["pid"], signal.SIGKILL)
    hold.touch()
    grid("status", check=0)
    grid.agents["gpu1"].start()
    assert delivered(grid, job)["state"] == "delivered"
    assert (grid.cwd / "out/a").read_text() == "1\n"
