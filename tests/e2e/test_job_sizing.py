"""Jobs without stated needs: sized from earlier runs, run again bigger, and what nobody knows is said to be unknown."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from typing import Any

import pytest

from distributed_grid.core import GridOrchestrator
from tests.e2e.test_rest import rest
from tests.support.shell import Shell, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
HUNGRY = """
import os, sys
held = bytearray(b"x") * (int(os.environ.get("MEGABYTES", "100")) * 1024 * 1024)
print(len(held))
"""
WRITES = """
import os, time
held = bytearray(b"x") * (int(os.environ.get("MEGABYTES", "20")) * 1024 * 1024)
with open(f"starts-{os.environ.get('MEGABYTES', '20')}", "a") as file:
    file.write("started\\n")
while os.environ.get("MEGABYTES") and not os.path.exists("go"):
    time.sleep(0.05)
"""
RUNS = 6


@pytest.fixture(scope="module")
def learned(shared_grid: Shell) -> Shell:
    """A grid that has run `hungry.py` several times, and knows what it needs."""
    (shared_grid.cwd / "hungry.py").write_text(HUNGRY)
    train(shared_grid, "hungry.py")
    return shared_grid


def train(grid: Shell, script: str) -> None:
    """Run a script until the grid knows what it needs."""
    for _ in range(RUNS):
        grid.detach("python3", script)
    grid("jobs", "wait", check=0)

    def is_known() -> bool:
        sizing = dry_run(grid, "python3", script)["job"]["sizing"]
        return sizing is not None and sizing["samples"] == RUNS

    wait_until(is_known)


def dry_run(grid: Shell, *argv: str) -> dict[str, Any]:
    """Dry run of a command; options come before it."""
    found: dict[str, Any] = json.loads(grid("--json", "run-shared", "--dry-run", *argv, check=0).stdout)
    return found


def recorded_runs(grid: Shell) -> list[tuple[int, int, int]]:
    """Attempt, peak memory and whether it is a lower bound, of every run in the history."""
    path = grid.host_dir / "predictions.db"
    if not path.exists():
        return []
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        return db.execute("SELECT attempt, memory_bytes, is_lower_bound FROM runs ORDER BY id").fetchall()


def test_a_command_that_ran_before_is_sized_from_its_runs(learned: Shell) -> None:
    said = learned("run-shared", "--dry-run", "python3", "hungry.py", check=0).stdout
    assert "with 1 core (sized by the grid: 0.1" in said
    assert f"from {RUNS} earlier runs (statistics, confidence 0." in said
    learned.detach("-j", "sized", "python3", "hungry.py")
    learned("jobs", "wait", "sized", check=0)
    job = learned.job("sized")
    assert 0.1 <= job["sizing"]["memory_gb"] < 0.2
    assert (job["sizing"]["samples"], job["sizing"]["tier"], job["sizing"]["overruns"]) == (RUNS, "statistics", 0)
    assert job["attempts"][0]["memory_limit_gb"] == job["sizing"]["memory_gb"]
    assert 0.097 < job["max_memory_gb"] < 0.13
    assert "memory:       sized by the grid: 0.1" in learned("jobs", "show", "sized").stdout
    assert "  memory        sized by the grid: " in learned("explain", "sized").stdout


def test_submissions_in_python_and_by_rest_are_sized_too(learned: Shell) -> None:
    async def run() -> None:
        async with GridOrchestrator(state_dir=learned.state_dir) as orchestrator:
            argv = ["python3", "hungry.py"]
            await orchestrator.run_with_shared_resources(argv, job_id="free", cwd=learned.cwd)
            await orchestrator.run_with_shared_resources(argv, "cpu", 1, job_id="stated", cwd=learned.cwd)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert learned.job("free")["sizing"] is not None
    assert learned.job("stated")["sizing"] is None
    with rest(learned) as client:
        body = {"argv": ["python3", "hungry.py"], "cwd": str(learned.cwd), "job_id": "by-rest", "dry_run": True}
        assert client.post("/v1/jobs", json=body).json()["job"]["sizing"]["memory_gb"] >= 0.1
        stated = client.post("/v1/jobs", json={**body, "resources": {"memory": 1}}).json()
        assert stated["job"]["sizing"] is None


def test_a_job_that_outgrows_a_learned_size_runs_once_and_its_lease_grows(learned: Shell) -> None:
    (learned.cwd / "writes.py").write_text(WRITES)
    train(learned, "writes.py")
    learned.detach("-j", "large", "--env", "MEGABYTES=400", "python3", "writes.py")
    wait_until(lambda: learned.job("large")["attempts"][0]["memory_limit_gb"] > 400 / 1024)
    (learned.cwd / "go").touch()
    learned("jobs", "wait", "large", check=0)
    assert (learned.cwd / "starts-400").read_text() == "started\n"
    job = learned.job("large")
    (attempt,) = job["attempts"]
    assert (attempt["outcome"], attempt["exit_code"], attempt["growths"] > 0) == ("exited", 0, True)
    grown = [event for event in learned.json("explain", "large")["events"] if event["type"] == "grown"]
    assert "of memory instead of 0." in grown[0]["reason"]
    assert f"grown {attempt['growths']} time" in learned("jobs", "show", "large").stdout


SMALL_NODE = """
nodes:
- {name: small, host: local, simulated: true, cpu_count: 4, memory_gb: 1}
"""


def test_a_job_whose_lease_cannot_grow_runs_on(grid: Shell) -> None:
    (grid.cwd / "small.yaml").write_text(SMALL_NODE)
    grid("daemon", "start", "--config", "small.yaml", check=0)
    (grid.cwd / "writes.py").write_text(WRITES)
    train(grid, "writes.py")
    grid.detach("-j", "other", "-r", "memory", "-a", "0.9", "sleep", "400")
    grid.detach("-j", "large", "--env", "MEGABYTES=400", "python3", "writes.py")
    refused = wait_until(lambda: grid.job("large")["attempts"][0]["growth_refused"])
    assert "small has " in refused
    (grid.cwd / "go").touch()
    grid("jobs", "wait", "large", check=0)
    job = grid.job("large")
    assert (job["outcome"], job["exit_code"], len(job["attempts"])) == ("exited", 0, 1)
    assert "not-grown" in [event["type"] for event in grid.json("explain", "large")["events"]]
    assert "not larger (it holds 0." in grid("jobs", "show", "large").stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_that_waits_only_for_a_learned_size_gets_what_is_free_after_a_minute(grid: Shell) -> None:
    (grid.cwd / "small.yaml").write_text(SMALL_NODE)
    grid("daemon", "start", "--config", "small.yaml", check=0)
    (grid.cwd / "hungry.py").write_text(HUNGRY.replace('"100"', '"200"'))
    train(grid, "hungry.py")
    grid.detach("-j", "other", "-r", "memory", "-a", "0.85", "sleep", "400")
    grid.detach("-j", "waits", "python3", "hungry.py")
    learned_gb = grid.job("waits")["sizing"]["memory_gb"]
    assert grid.job("waits")["state"] == "queued"
    wait_until(lambda: grid.job("waits")["outcome"] == "exited", seconds=120)
    job = grid.job("waits")
    assert (job["exit_code"], job["sizing"]["reduced_from_gb"]) == (0, learned_gb)
    assert job["attempts"][0]["memory_limit_gb"] < learned_gb
    assert "were not free within a minute; it grows with the job" in grid("jobs", "show", "waits").stdout
    (reduced,) = [event for event in grid.json("explain", "waits")["events"] if event["type"] == "reduced"]
    assert "of memory, a learned size: " in reduced["reason"]


def test_a_lease_grows_after_the_control_plane_was_killed(grid: Shell) -> None:
    (grid.cwd / "writes.py").write_text(WRITES)
    train(grid, "writes.py")
    grid.detach("-j", "large", "--env", "MEGABYTES=400", "python3", "writes.py")
    wait_until((grid.cwd / "starts-400").exists)
    grid.kill_daemon()
    wait_until(lambda: grid.job("large")["attempts"][0]["memory_limit_gb"] > 400 / 1024)
    grown = grid.job("large")["attempts"][0]["memory_limit_gb"]
    grid.kill_daemon()
    assert grid.job("large")["attempts"][0]["memory_limit_gb"] == grown
    (grid.cwd / "go").touch()
    grid("jobs", "wait", "large", check=0)
    job = grid.job("large")
    assert (job["outcome"], job["exit_code"], len(job["attempts"])) == ("exited", 0, 1)
    assert (grid.cwd / "starts-400").read_text() == "started\n"


def test_a_restartable_job_that_needs_more_is_run_again_bigger(learned: Shell) -> None:
    done = learned(
        "run-shared", "--restartable", "-j", "grown", "--env", "MEGABYTES=350", "python3", "hungry.py", check=0
    )
    assert done.stdout == f"{350 * 1024**2}\n"
    assert "of memory, which the grid gave it, and was run again with more" in done.stderr
    job = learned.job("grown")
    outcomes = [one["outcome"] for one in job["attempts"]]
    limits = [one["memory_limit_gb"] for one in job["attempts"]]
    assert outcomes == ["over_limit"] * (len(outcomes) - 1) + ["exited"]
    assert 2 <= len(outcomes) <= 4
    assert limits == sorted(set(limits)) == job["sizing"]["limits_gb"][: len(limits)]
    assert (job["sizing"]["overruns"], job["retries_left"]) == (len(outcomes) - 1, 0)
    shown = learned("jobs", "show", "grown").stdout
    assert "over limit" in next(line for line in shown.splitlines() if line.startswith("attempt 1:"))
    assert f"{len(outcomes) - 1} of its runs went over" in shown
    events = [event for event in learned.json("explain", "grown")["events"] if event["type"] == "requeued"]
    assert [round(event["data"]["memory_limit_bytes"] / 1024**3, 3) for event in events] == limits[1:]
    assert f"; run again with {limits[1]:.2f} GB, time 1 of at most 3" in events[0]["reason"]


def test_a_limit_that_the_user_gave_stays(learned: Shell) -> None:
    words = ("-r", "memory", "-a", "0.15", "-j", "fixed", "--env", "MEGABYTES=350", "--retries", "2")
    done = learned("run-shared", *words, "python3", "hungry.py")
    assert done.returncode == 137
    assert "over limit" in done.stderr
    job = learned.job("fixed")
    assert (job["outcome"], len(job["attempts"]), job["sizing"]) == ("over_limit", 1, None)


def test_cut_short_runs_are_lower_bounds_in_the_history(learned: Shell) -> None:
    runs = wait_until(lambda: [run for run in recorded_runs(learned) if run[2]])
    assert all(memory > 90 * 1024**2 for _, memory, _ in runs)
    whole = [memory for _, memory, is_lower_bound in recorded_runs(learned) if not is_lower_bound]
    assert len(whole) >= RUNS


def test_who_waits_behind_a_command_that_nobody_knows_is_told_so(grid: Shell) -> None:
    for name in ("short1", "short2"):
        grid("run-shared", "-j", name, "true", check=0)
    cores = str(int(grid.json("status")["nodes"][0]["cpu_cores"]))
    grid.detach("-j", "long", "-a", cores, "sleep", "400")
    grid.detach("-j", "next", "-a", cores, "true")
    waiting = grid.json("explain", "next")["waiting"]
    assert waiting["estimated_start"] is None
    assert waiting["start_reason"].startswith("nobody knows how long long takes")
    assert "  starts        not known: nobody knows how long long takes" in grid("explain", "next").stdout


def test_runs_that_a_killed_control_plane_had_not_recorded_are_caught_up(grid: Shell) -> None:
    for number in range(3):
        grid("run-shared", "-j", f"job{number}", "true", check=0)
    grid.kill_daemon()
    grid("status", check=0)
    runs = wait_until(lambda: len(found := recorded_runs(grid)) >= 3 and found)
    assert len(runs) == 3
    grid.kill_daemon()
    grid("run-shared", "true", check=0)
    wait_until(lambda: len(recorded_runs(grid)) >= 4)
    assert len(recorded_runs(grid)) == 4
