"""Workers of a provider with a real daemon: their life, budgets, a control plane that is killed at every step, and the
dead-man switch. The provider is plugged in by entry point and follows a script; its machines are real agents."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.errors import BadInput, Refused
from distributed_grid.orchestration.cloud_provider_manager import CloudProviderManager
from tests.support.processes import is_running
from tests.support.project import PROJECT
from tests.support.scripted_provider import CloudFile, plug_in
from tests.support.shell import Shell, wait_until

CONFIG = """
name: rented
hold_seconds: 6
nodes:
- {{name: here, host: local}}
workers:
  {{launch_seconds: {launch}, join_seconds: 30, consistency_seconds: 0.3, call_seconds: 1.5, exit_seconds: {exit}}}
scaling: {{budget_per_hour: {budget}}}
providers:
  scripted: {{state_file: {state}, agent: {agent}, elsewhere: {elsewhere}, prices: {prices}}}
"""


class RentedGrid(Shell):
    """A grid with a scripted provider."""

    cloud: CloudFile

    def begin(self, **settings: Any) -> RentedGrid:
        folder = self.cwd.parent
        self.cloud = CloudFile(folder / "cloud.json")
        values = {"agent": False, "elsewhere": False, "prices": True, "budget": 0.45, "launch": 20, "exit": 60}
        values |= {"state": folder / "cloud.json"} | settings
        config = folder / "rented.yaml"
        config.write_text(CONFIG.format(**{key: json.dumps(value, default=str) for key, value in values.items()}))
        self.env |= {"GRID_CONFIG": str(config), "PYTHONPATH": f"{PROJECT}:{plug_in(folder / 'plug')}"}
        return self

    def workers(self, *words: str) -> dict[str, dict[str, Any]]:
        return {one["worker_id"]: one for one in self.observe("workers", "list", *words)["workers"]}

    def until_gone(self, *ids: str) -> None:
        wait_until(lambda: not self.workers().keys() & set(ids), 30)

    def close(self) -> None:
        super().close()
        self.cloud.close()


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RentedGrid]]:
    grids: list[RentedGrid] = []

    def made(**settings: Any) -> RentedGrid:
        folder = tmp_path_factory.mktemp("rented")
        (folder / "here").mkdir()
        grids.append(RentedGrid(folder / "state", folder / "here").begin(**settings))
        return grids[-1]

    yield made
    for grid in grids:
        grid.close()


@pytest.fixture(scope="module")
def living(make: Callable[..., RentedGrid]) -> RentedGrid:
    """A grid whose workers are real agents."""
    return make(agent=True)


@pytest.fixture(scope="module")
def scripted(make: Callable[..., RentedGrid]) -> RentedGrid:
    """A grid whose machines are only listed."""
    return make()


def test_a_worker_joins_runs_a_job_and_is_gone_when_it_is_terminated(living: RentedGrid) -> None:
    made = living.json("workers", "create", "--wait", "30")["workers"]
    worker = made[0]["worker_id"]
    assert (made[0]["state"], made[0]["price_per_hour"]) == ("joined", 0.1)
    on_it = ["--strategy", "node_specific", "-n", worker]
    done = living("run-shared", "-r", "cpu", "-a", "1", *on_it, "sh", "-c", "echo on $GRID_NODE", check=0)
    assert done.stdout.strip() == f"on {worker}"
    job = living.detach("-r", "cpu", "-a", "1", *on_it, "sleep", "600")
    wait_until(lambda: living.job(job)["state"] == "running")
    refused = living("workers", "terminate", worker, check=1)
    assert "has 1 leases" in refused.stderr
    token = next(one for one in living.json("daemon", "join-token", "list") if one["used_by"] == worker)
    ended = living.json("workers", "terminate", worker, "--force", "--wait", "30")["workers"]
    assert ended[0]["state"] == "gone"
    assert not living.cloud.existing()
    wait_until(lambda: worker not in {node["node_id"] for node in living.observe("status")["nodes"]})
    tokens = {one["token_id"]: one for one in living.json("daemon", "join-token", "list")}
    assert tokens[token["token_id"]]["problem"] == "was revoked"
    (ended,) = [one for one in living.json("workers", "list", "--all")["workers"] if one["worker_id"] == worker]
    assert ended["ended_at"]
    wait_until(lambda: living.job(job)["state"] == "queued", 20)  # as with any node that is drained
    living("jobs", "cancel", job, check=0)


def test_the_token_of_a_worker_is_nowhere_to_be_read(living: RentedGrid) -> None:
    kept = b"".join(path.read_bytes() for path in living.host_dir.glob("grid.db*"))
    assert b"gridjoin1_" not in kept
    assert "gridjoin1_" not in (living.host_dir / "daemon.log").read_text()
    assert (living.host_dir / "worker-token.key").stat().st_mode & 0o777 == 0o600


def test_a_start_beyond_the_budget_is_refused_and_starts_nothing(scripted: RentedGrid) -> None:
    before = len(scripted.cloud.calls("create"))
    refused = scripted("workers", "create", "--count", "5", check=1)
    assert "would make $0.50 an hour, and scaling.budget_per_hour is $0.45" in refused.stderr
    plan = scripted.json("workers", "create", "--count", "4", "--dry-run")
    assert plan["budget"]["per_hour"] == pytest.approx(0.4)
    assert scripted.workers() == {}
    assert len(scripted.cloud.calls("create")) == before


def test_an_offer_without_capacity_is_closed_and_another_is_tried_under_a_new_id(scripted: RentedGrid) -> None:
    scripted.cloud.script(create=["no_capacity"])
    first = scripted.json("workers", "create")["workers"][0]["worker_id"]
    other = wait_until(lambda: [one for one in scripted.workers().values() if one["state"] == "booting"])[0]
    assert (other["offer"], other["reason"] is not None) == ("small-b", True)
    assert other["worker_id"] != first
    assert scripted.workers("--all")[first]["state"] == "gone"
    assert scripted.events("offer-closed")
    scripted.json("workers", "terminate", other["worker_id"], "--wait", "30")


STEPS = [
    {"create": ["die_before"]},
    {"create": ["die_after"]},
    {"create": ["lose_after", "die_before"], "list": ["fail"] * 99},
    {"list": ["", "die_before"]},
    {"terminate": ["die_before"]},
    {"terminate": ["die_after"]},
    {"terminate": ["fail", "lose_after", "die_before"]},
    {"describe": ["die_before"]},
]


@pytest.mark.parametrize("faults", STEPS, ids=lambda faults: " ".join(f"{name}-{faults[name][-1]}" for name in faults))
def test_a_control_plane_that_is_killed_at_any_step_leaves_no_machine_behind(
    scripted: RentedGrid, faults: dict[str, list[str]]
) -> None:
    wait_until(lambda: not scripted.workers(), 30)
    pid = scripted.daemon_pid()
    scripted.cloud.script(**{name: found for name, found in faults.items() if name in ("create", "list")})
    scripted("workers", "create", "--type", "cpu")  # its answer may be lost with the daemon
    if "terminate" in faults or "describe" in faults:
        worker = wait_until(lambda: [one for one in scripted.workers().values() if one["state"] == "booting"])[0]
        scripted.cloud.script(**faults)
        scripted("workers", "terminate", worker["worker_id"])
    wait_until(lambda: not is_running(pid), 20)
    scripted.cloud.script()
    wait_until(lambda: all(one["state"] != "asked" for one in scripted.workers().values()), 30)
    known = scripted.workers()
    assert scripted.cloud.existing().keys() <= known.keys()
    ids = list(scripted.workers())
    if ids:
        scripted("workers", "terminate", *ids, check=0)
    scripted.until_gone(*ids)
    assert not scripted.cloud.existing()


def test_a_machine_that_no_worker_stands_for_is_ended_and_that_of_another_grid_is_not(scripted: RentedGrid) -> None:
    grid_id = (scripted.host_dir / "grid.id").read_text().strip()
    machine = {"instance": "i-x", "made_at": time.time() - 60, "ends_at": None, "price_micro": 1}
    scripted.cloud.add({"worker_id": "worker-stray", "grid_id": grid_id, **machine})
    scripted.cloud.add({"worker_id": "worker-foreign", "grid_id": "another", **machine})
    made = scripted.json("workers", "create")["workers"][0]["worker_id"]  # providers with workers are listed often
    wait_until(lambda: "worker-stray" not in scripted.cloud.existing(), 20)
    assert {event["subject"] for event in scripted.events("worker-stray")} == {"worker-stray"}
    assert "worker-foreign" in scripted.cloud.existing()
    scripted.json("workers", "terminate", made, "--wait", "30")
    scripted.cloud.add({"worker_id": "worker-foreign", "grid_id": "another", **machine, "ends_at": 1})


def test_a_program_with_a_running_loop_starts_and_ends_workers_by_plain_calls(scripted: RentedGrid) -> None:
    scripted.cloud.script()
    asyncio.run(_use_manager(scripted))


async def _use_manager(scripted: RentedGrid) -> None:
    with CloudProviderManager(state_dir=str(scripted.state_dir)) as manager:
        offers = manager.add_provider("scripted")
        assert {one["worker_type"] for one in offers} == {"cpu", "gpu"}
        worker = manager.create_worker("scripted", {"cpu": {"cores": 2}, "memory": {"total_mb": 1024}}, "cpu")
        assert (worker["cpu_cores"], worker["memory_gb"]) == (2, 1)
        assert [one["worker_id"] for one in manager.list_workers("scripted")] == [worker["worker_id"]]
        manager.terminate_worker("scripted", worker["worker_id"])
        wait_until(lambda: manager.get_worker_status("scripted", worker["worker_id"])["state"] == "gone", 30)
        with pytest.raises(Refused, match="budget_per_hour"):
            manager.create_worker("scripted", {"gpus": 1}, "gpu")
        with pytest.raises(BadInput, match="no provider 'azure'"):
            manager.add_provider("azure")
        with pytest.raises(BadInput, match="unknown resources: tpus"):
            manager.create_worker("scripted", {"tpus": 1})


def test_stopping_the_daemon_names_the_workers_that_go_on(scripted: RentedGrid) -> None:
    worker = scripted.json("workers", "create")["workers"][0]["worker_id"]
    refused = scripted("daemon", "stop", check=1)
    assert worker in refused.stderr
    other = scripted.cwd.parent / "other.yaml"
    other.write_text("name: other\n")
    assert worker in scripted("daemon", "start", "--config", str(other), check=1).stderr
    stopped = scripted("daemon", "stop", "--force", check=0)
    assert worker in stopped.stderr
    assert scripted.workers().keys() == {worker}
    scripted.json("workers", "terminate", worker, "--wait", "30")


def test_a_worker_that_could_not_reach_the_control_plane_is_refused_before_anything_is_spent(
    make: Callable[..., RentedGrid],
) -> None:
    grid = make(elsewhere=True, prices=False)
    refused = grid("workers", "create", check=1)
    assert "type: grid daemon start --listen" in refused.stderr
    grid("daemon", "start", "--listen", "0.0.0.0:0", check=0)
    unpriced = grid("workers", "create", check=1)
    assert "costs is not known, and there is a budget" in unpriced.stderr
    assert not grid.cloud.calls("create")
    unknown = grid("workers", "create", "--provider", "nowhere", check=2)
    assert "no provider 'nowhere'" in unknown.stderr


def test_a_worker_ends_itself_and_its_jobs_when_the_control_plane_is_gone_for_good(
    make: Callable[..., RentedGrid],
) -> None:
    grid = make(agent=True, exit=2)
    worker = grid.json("workers", "create", "--wait", "30")["workers"][0]["worker_id"]
    seconds = "987.25"
    grid.detach("-r", "cpu", "-a", "1", "--strategy", "node_specific", "-n", worker, sys.executable, "-c",
                f"import time; time.sleep({seconds})")  # fmt: skip
    wait_until(lambda: _processes_with(seconds))
    agent = grid.cloud.existing()[worker]["pid"]
    grid.kill_daemon()
    wait_until(lambda: not is_running(agent) and not _processes_with(seconds), 30)


def _processes_with(word: str) -> list[str]:
    """The command lines of commands with this word."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"time.sleep({word})" in line and line.startswith(sys.executable):
            found.append(line)
    return found
