"""Machines that are taken away, with a real daemon and machines that are real agents: the notice of a spot market, the
SIGTERM of a batch system, and a control plane that is down or killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.cli.output import format_time
from tests.e2e.test_scaling import ScaledGrid
from tests.support.clouds.metadata import MetadataStandIn, metadata_service
from tests.support.ports import free_port
from tests.support.processes import is_running
from tests.support.shell import wait_until

CONFIG = """
name: taken
hold_seconds: 30
nodes:
  - {{name: home, host: local, cpu_count: 1, memory_gb: 4, trust_declared: true}}
server: {{port: {port}}}
workers: {{consistency_seconds: 1, exit_seconds: 120}}
scaling:
  provider: scripted
  max_workers: 1
  evaluation_window_seconds: 2
  scale_up_cooldown_seconds: 300
  scale_down_cooldown_seconds: 300
  budget_per_hour: {budget}
providers:
  scripted: {{state_file: {cloud}, agent: true, notices: {notices}, environ: {environ}, lifetime: {lifetime}}}
"""

COUNTING = """
trap 'echo $n > {checkpoint}; date > $GRID_CHECKPOINT; echo stopped at $n; exit 143' TERM
n=$(cat {checkpoint} 2>/dev/null || echo 0)
echo began at $n
while [ $n -lt {most} ] && [ ! -e {finish} ]; do
  [ -e $GRID_NOTICE ] && [ ! -e {told} ] && cat $GRID_NOTICE > {told}.new && mv {told}.new {told}
  n=$((n + 1)); sleep 0.05
done
echo ended at $n
"""


class TakenGrid(ScaledGrid):
    """A grid of one core whose cloud takes machines away; its checkpoints are on storage that all machines see."""

    def begin(self, *, budget: float = 1, notices: str = "", lifetime: float = 0, **environ: Any) -> None:
        given = {name: str(value) for name, value in environ.items()}
        values: dict[str, Any] = {"port": free_port(), "cloud": self.cloud.path, "budget": budget}
        values |= {"notices": json.dumps(notices), "lifetime": lifetime}
        (self.cwd / "cluster.yaml").write_text(CONFIG.format(**values, environ=json.dumps(given)))
        self("daemon", "start", "--config", "cluster.yaml", check=0)
        self.detach("-r", "cpu", "-a", "1", "sleep", "600")  # the core of the grid itself is taken
        self.checkpoint, self.finish, self.told = (self.cwd / name for name in ("checkpoint", "finish", "told"))

    def count(self, *options: str, most: int = 10_000) -> str:
        """A job that counts, and goes on from its checkpoint; on a worker, since it needs two cores."""
        files = {"checkpoint": self.checkpoint, "finish": self.finish, "told": self.told}
        script = COUNTING.format(most=most, **files)
        job = self.detach("-r", "cpu", "-a", "2", *options, "sh", "-c", script)
        wait_until(lambda: self.job(job)["state"] == "running", 60)
        return job

    def worker(self, worker_id: str) -> dict[str, Any]:
        found = [one for one in self.observe("workers", "list", "--all")["workers"] if one["worker_id"] == worker_id]
        return found[0]


@pytest.fixture
def metadata() -> Iterator[MetadataStandIn]:
    with metadata_service() as service:
        yield service


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[TakenGrid]:
    shell = TakenGrid(tmp_path)
    yield shell
    shell.close()


def test_a_spot_notice_moves_a_job_to_a_replacement_that_was_ordered_in_time(
    grid: TakenGrid, metadata: MetadataStandIn
) -> None:
    grid.begin(notices="aws", GRID_METADATA_URL=metadata.url)
    job = grid.count("--grace", "1")
    first = grid.job(job)["node_id"]
    metadata.interrupt(12)
    leaving = wait_until(lambda: grid.workers().get(first) == "draining" and grid.worker(first), 20)
    assert leaving["reason"].startswith("ends in ")
    assert leaving["reason"].endswith("s: EC2 spot notice (terminate)")
    assert leaving["ends_at"]
    creates = wait_until(lambda: len(grid.cloud.calls("create")) == 2 and grid.cloud.calls("create"), 20)
    assert first in grid.cloud.existing(), "the replacement was ordered before the old machine was gone"
    second = creates[1].split()[1]
    wait_until(lambda: grid.job(job)["node_id"] == second and grid.job(job)["state"] == "running", 40)
    reached = int(grid.checkpoint.read_text())
    assert reached > 0
    told = json.loads(grid.told.read_text())
    assert told["reason"] == "this machine is taken away: EC2 spot notice (terminate)"
    grid.finish.touch()
    grid("jobs", "wait", job, "--timeout", "30", check=0)
    assert f"began at {reached}" in grid("jobs", "logs", job, check=0).stdout
    wait_until(lambda: first not in grid.cloud.existing(), 20)
    assert [one["subject"] for one in grid.events("end-announced")] == [first]
    stopped = next(one for one in grid.events("requeued") if one["data"]["job_id"] == job)
    gone = wait_until(lambda: [one for one in grid.events("worker-gone") if one["subject"] == first], 20)[0]
    assert stopped["time"] < gone["time"]


def test_notice_comes_while_the_control_plane_is_down_and_another_when_it_is_killed(
    grid: TakenGrid, metadata: MetadataStandIn
) -> None:
    grid.begin(notices="aws", GRID_METADATA_URL=metadata.url)
    job = grid.count()
    first = grid.job(job)["node_id"]
    grid.kill_daemon()
    metadata.interrupt(60)
    told = wait_until(lambda: grid.told.exists() and json.loads(grid.told.read_text()), 20)
    assert told["reason"] == "this machine is taken away: EC2 spot notice (terminate)"
    wait_until(lambda: grid.workers().get(first) == "draining", 20)  # the command has started the control plane again
    grid.kill_daemon()
    assert grid.workers()[first] == "draining"
    creates = wait_until(lambda: len(grid.cloud.calls("create")) == 2 and grid.cloud.calls("create"), 20)
    assert first in grid.cloud.existing()
    second = creates[1].split()[1]
    wait_until(lambda: grid.workers().get(second) == "joined", 30)
    assert grid.job(job)["node_id"] == first, "it may go on until it has to stop"
    end = grid.json("explain", job)["machine_end"]
    assert end["reason"] == "EC2 spot notice (terminate)"
    assert end["stops_at"] < end["at"]
    explained = grid("explain", job, check=0).stdout
    assert f"  machine       ends at {format_time(end['at'])}: EC2 spot notice (terminate)\n" in explained
    assert f"it is stopped at {format_time(end['stops_at'])}, unless it is over before\n" in explained
    grid.finish.touch()
    grid("jobs", "wait", job, "--timeout", "30", check=0)
    assert len(grid.job(job)["attempts"]) == 1
    wait_until(lambda: first not in grid.cloud.existing(), 20)
    assert len(grid.events("end-announced")) == 1


def test_sigterm_with_a_notice_drains_the_agent_and_a_budget_for_one_machine_makes_the_next_one_wait(
    grid: TakenGrid,
) -> None:
    grid.begin(budget=0.15, GRID_NOTICE_SECONDS=12)
    job = grid.count()
    first = grid.job(job)["node_id"]
    agent = grid.cloud.existing()[first]["pid"]
    os.kill(agent, signal.SIGTERM)
    wait_until(lambda: grid.workers().get(first) == "draining", 20)
    plan = wait_until(lambda: _waiting_plan(grid), 10)
    assert f"1 job has to leave {first}, which ends in " in plan
    assert "scaling.budget_per_hour is $0.15; the replacement waits until it is gone" in plan
    other = grid.detach("-r", "cpu", "-a", "2", "true")
    assert f"{first}  its machine ends in " in grid("explain", other, check=0).stdout
    grid("jobs", "cancel", other, check=0)
    creates = wait_until(lambda: len(grid.cloud.calls("create")) == 2 and grid.cloud.calls("create"), 40)
    assert first not in grid.cloud.existing(), "there is never money for both"
    second = creates[1].split()[1]
    assert not is_running(agent)
    wait_until(lambda: grid.job(job)["node_id"] == second and grid.job(job)["state"] == "running", 40)
    reached = int(grid.checkpoint.read_text())
    grid.finish.touch()
    grid("jobs", "wait", job, "--timeout", "30", check=0)
    assert f"began at {reached}" in grid("jobs", "logs", job, check=0).stdout
    agent = grid.cloud.existing()[second]["pid"]
    for _ in range(2):
        os.kill(agent, signal.SIGTERM)
        wait_until(lambda: not is_running(agent) or grid.workers().get(second) != "joined", 20)
    wait_until(lambda: not is_running(agent), 5)  # the second signal ends it, long before its time is over


def test_the_lifetime_of_a_machine_moves_its_job_to_a_replacement_in_time(grid: TakenGrid) -> None:
    grid.begin(lifetime=20)
    job = grid.count("--grace", "1")
    first = grid.job(job)["node_id"]
    assert grid.worker(first)["ends_at"], "its provider has said so from the start"
    wait_until(lambda: grid.workers().get(first) == "draining", 20)
    told = wait_until(lambda: grid.told.exists() and json.loads(grid.told.read_text()), 10)
    assert told["reason"] == "this machine is taken away: its lifetime at the provider is over then"
    wait_until(lambda: grid.job(job)["node_id"] != first and grid.job(job)["state"] == "running", 20)
    reached = int(grid.checkpoint.read_text())
    grid.finish.touch()
    grid("jobs", "wait", job, "--timeout", "10", check=0)
    assert f"began at {reached}" in grid("jobs", "logs", job, check=0).stdout
    assert grid.job(job)["exit_code"] == 0
    creates = [call.split()[1] for call in grid.cloud.calls("create")]
    assert creates == [first, grid.job(job)["node_id"]]
    (stopped,) = [one for one in grid.events("requeued") if one["data"]["job_id"] == job]
    machine = grid.cloud.read()["machines"][first]
    assert datetime.fromisoformat(stopped["time"]).timestamp() < machine["made_at"] + 20, "it was over in time"


def _waiting_plan(grid: TakenGrid) -> str:
    plan = grid.json("scale", "plan")["plan"]["decision"]
    return plan["reason"] if plan["action"] == "none" and "has to leave" in plan["reason"] else ""
