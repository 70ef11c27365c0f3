"""Scaling with a real daemon and a provider whose machines are real agents: the queue grows, a worker comes, runs the
task, is idle, drains, and is gone; what its task has written stays readable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.project import PROJECT
from tests.support.scripted_provider import CloudFile, plug_in
from tests.support.shell import Shell, wait_until

CONFIG = """
name: scaled
nodes:
  - {{name: home, host: local, cpu_count: 1, memory_gb: 4, trust_declared: true}}
server: {{port: {port}}}
workers: {{consistency_seconds: 1}}
scaling:
  provider: scripted
  max_workers: {most}
  evaluation_window_seconds: {window}
  scale_up_cooldown_seconds: 0
  scale_down_cooldown_seconds: {cooldown}
  budget_per_hour: 1
providers:
  scripted: {{state_file: {cloud}, agent: true}}
"""


class ScaledGrid(Shell):
    """A grid of one core whose cloud has machines of two."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "state", folder)
        self.cloud = CloudFile(folder / "cloud.json")
        packages = plug_in(folder / "packages")
        self.env |= {"PYTHONPATH": os.pathsep.join([packages, str(PROJECT)])}

    def configure(self, *, most: int = 2, window: float = 2, cooldown: float = 2) -> None:
        text = CONFIG.format(port=free_port(), cloud=self.cloud.path, most=most, window=window, cooldown=cooldown)
        (self.cwd / "cluster.yaml").write_text(text)
        self("daemon", "start", "--config", "cluster.yaml", check=0)

    def workers(self) -> dict[str, str]:
        """The workers that are not gone, and their states."""
        return {one["worker_id"]: one["state"] for one in self.observe("workers", "list")["workers"]}

    def close(self) -> None:
        super().close()
        self.cloud.close()


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[ScaledGrid]:
    shell = ScaledGrid(tmp_path)
    yield shell
    shell.close()


def test_a_task_that_waits_gets_a_worker_and_its_output_outlives_it(grid: ScaledGrid) -> None:
    grid.configure()
    blocker = grid.detach("-r", "cpu", "-a", "1", "sleep", "300")
    script = "echo from the worker; echo and this >&2; echo 42 > result.txt"
    task = grid.detach("-r", "cpu", "-a", "2", "sh", "-c", script)
    grid("jobs", "wait", task, "--timeout", "60", check=0, timeout=90)
    node = grid.job(task)["node_id"]
    assert node in grid.workers(), "it did not run on a worker"
    status = grid.json("scale", "status")
    assert (status["provider"], status["workers"]) == ("scripted", {"joined": 1})
    assert status["budget"]["per_hour"] == 0.1
    assert wait_until(lambda: not grid.workers(), 60)
    assert not grid.cloud.existing()
    assert grid.json("scale", "status")["scale_down_cooldown"] <= 2
    shown = grid("jobs", "logs", task, check=0)
    assert (shown.stdout, shown.stderr) == ("from the worker\n", "and this\n")
    grid("jobs", "fetch", task, "--to", "fetched", check=0)
    assert (grid.cwd / "fetched" / "result.txt").read_text() == "42\n"
    (kept,) = grid.events("outputs-kept")
    assert kept["subject"] == node
    assert kept["data"]["lost"] == []
    assert grid.job(blocker)["state"] == "running", "the core of the grid itself was busy all the time"


def test_a_control_plane_that_is_killed_goes_on_giving_back(grid: ScaledGrid) -> None:
    grid.configure(most=1)
    grid.detach("-r", "cpu", "-a", "1", "sleep", "300")
    script = "head -c 500000000 /dev/zero > large; echo done"
    task = grid.detach("-r", "cpu", "-a", "2", "sh", "-c", script)
    grid("jobs", "wait", task, "--timeout", "60", check=0, timeout=90)
    wait_until(lambda: "draining" in grid.workers().values(), 60)
    grid.kill_daemon()
    assert len(grid.cloud.existing()) == 1, "it was not given back before its files were home"
    assert wait_until(lambda: not grid.workers(), 90)
    assert not grid.cloud.existing()
    assert grid("jobs", "logs", task, check=0).stdout == "done\n"
    grid("jobs", "fetch", task, "--to", "fetched", check=0)
    assert (grid.cwd / "fetched" / "large").stat().st_size == 500_000_000
    assert len(grid.events("worker-gone")) == 1


def test_plan_shows_what_it_would_do_and_cost_and_run_does_it(grid: ScaledGrid) -> None:
    grid.configure(window=3600, cooldown=600)  # the next evaluation of its own is a minute from now
    idle = grid.json("scale", "plan")
    assert (idle["plan"]["decision"]["action"], idle["plan"]["cost_per_hour"]) == ("none", 0)
    for _ in range(5):
        grid.detach("-r", "cpu", "-a", "1", "sleep", "300")
    planned = wait_until(lambda: _scale_up(grid.json("scale", "plan")), 20)
    decision = planned["plan"]["decision"]
    assert (decision["count"], decision["worker_type"], decision["offer"]) == (2, "cpu", "small-a")
    assert decision["resource_requirements"] == {"cpu_cores": 2, "memory_mb": 4096, "gpu_count": 0}
    assert planned["plan"]["cost_per_hour"] == pytest.approx(0.2)
    assert 0 < planned["plan"]["cost_until_midnight"] <= 0.2 * 24
    text = grid("scale", "plan", check=0).stdout
    assert "start 2 cpu workers of scripted (small-a): 4 requests wait" in text
    assert "they cost $0.2 an hour" in text
    assert not grid.workers(), "looking changes nothing"
    refused = grid("scale", "run", check=1)
    assert "nothing was done; without a terminal to ask on, type: grid scale run --yes" in refused.stderr
    assert not grid.workers()
    done = grid.json("scale", "run", "--yes")
    assert len(done["started"]) == 2
    assert set(grid.workers()) == set(done["started"])
    for worker_id in done["started"]:
        grid("workers", "terminate", worker_id, "--force", check=0)


def _scale_up(planned: dict[str, Any]) -> dict[str, Any] | None:
    return planned if planned["plan"]["decision"]["action"] == "scale_up" else None
