"""Workers on EC2 with a real daemon: a task that waits becomes an instance that really boots, runs it, and goes; the
control plane is killed around the calls; nothing secret is left anywhere. EC2 is the stand-in of tests/support."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clouds.ec2 import ACCESS_KEY, SECRET_KEY, Ec2StandIn
from tests.support.clouds.stand_in import Machine
from tests.support.ports import free_port
from tests.support.processes import is_running
from tests.support.shell import Shell, wait_until


class RentedGrid(Shell):
    """A grid of one core, whose cloud has instances of two."""

    cloud: Ec2StandIn
    pid: int

    def begin(self, cloud: Ec2StandIn, **scaling: Any) -> RentedGrid:
        self.cloud = cloud
        keys = {"access_key_id": "${AWS_ACCESS_KEY_ID}", "secret_access_key": "${AWS_SECRET_ACCESS_KEY}"}
        self.env |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        config = {
            "name": "rented",
            "nodes": [{"name": "home", "host": "local", "cpu_count": 1, "memory_gb": 4, "trust_declared": True}],
            "server": {"host": "0.0.0.0", "port": free_port()},
            "workers": {"consistency_seconds": 0.6, "launch_seconds": 60, "call_seconds": 3},
            "scaling": {"budget_per_hour": 1, **scaling},
            "providers": {"aws": cloud.config() | {"credentials": keys}},
            "logging": {"level": "debug"},
        }
        path = self.cwd / "cluster.yaml"
        path.write_text(json.dumps(config))
        self.env["GRID_CONFIG"] = str(path)
        self("daemon", "start", check=0)
        self.cloud.kill = self.kill_now
        return self

    def kill_now(self) -> None:
        """kill -9 the control plane, whatever it does."""
        os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(self.pid))

    def workers(self) -> dict[str, dict[str, Any]]:
        return {one["worker_id"]: one for one in self.observe("workers", "list")["workers"]}

    def existing(self) -> list[Machine]:
        """The instances that cost money now."""
        return [one for one in self.cloud.machines() if one.ended_at is None]


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[RentedGrid]:
    cloud = Ec2StandIn(boot_folder=tmp_path / "machines")
    (tmp_path / "here").mkdir()
    shell = RentedGrid(tmp_path / "state", tmp_path / "here")
    shell.cloud = cloud
    yield shell
    shell.close()
    cloud.close()


SCALING = {
    "provider": "aws",
    "max_workers": 1,
    "evaluation_window_seconds": 2,
    "scale_up_cooldown_seconds": 0,
    "scale_down_cooldown_seconds": 1,
}


def test_a_task_that_waits_becomes_an_instance_that_boots_runs_it_and_goes(grid: RentedGrid) -> None:
    grid.begin(grid.cloud, **SCALING)
    grid("scale", "plan", check=0)  # from here on the grid knows what EC2 has
    grid.detach("-r", "cpu", "-a", "1", "sleep", "300")
    task = grid.detach("-r", "cpu", "-a", "2", "sh", "-c", "echo from $GRID_NODE")
    grid("jobs", "wait", task, "--timeout", "90", check=0, timeout=120)
    (machine,) = grid.cloud.machines()
    assert grid.job(task)["node_id"] == machine.worker_id
    assert (machine.market, machine.zone) == ("spot", "us-west-2a")
    (token,) = re.findall(r"gridjoin1_[\w-]+", grid.cloud.user_data(machine.instance))
    assert wait_until(lambda: not grid.workers(), 60)
    assert not grid.existing()
    assert grid("jobs", "logs", task, check=0).stdout == f"from {machine.worker_id}\n"
    assert "CancelSpotInstanceRequests" in grid.cloud.actions
    assert grid.cloud.actions.index("CancelSpotInstanceRequests") < grid.cloud.actions.index("TerminateInstances")
    check_no_secrets(grid, token)


def check_no_secrets(grid: RentedGrid, token: str) -> None:
    """Neither the credentials nor a join token are in a file of the control plane, an event, or a command line."""
    secrets = [SECRET_KEY.encode(), ACCESS_KEY.encode(), token.encode()]
    for path in grid.state_dir.rglob("*"):
        if path.is_file() and "join-token" not in path.name:
            content = path.read_bytes()
            assert not [one for one in secrets if one in content], path
    assert "UserData" not in (grid.host_dir / "daemon.log").read_text()
    said = grid("events", "--json", "--limit", "1000", check=0).stdout + grid("config", "show").stdout
    assert not [one for one in secrets if one in said.encode()]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes()
        except OSError:
            continue
        assert not [one for one in secrets if one in line], line


STEPS = [
    {"create": ["kill_before"]},
    {"create": ["lose_after", "kill_after"], "list": ["fail"] * 99},
    {"terminate": ["fail", "throttle", "kill_before"]},
    {"terminate": ["kill_after"]},
]


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RentedGrid]:
    """A grid whose instances are only listed."""
    folder = tmp_path_factory.mktemp("listed")
    (folder / "here").mkdir()
    cloud = Ec2StandIn(visible_after=0.3, stops_in=0.3)
    shell = RentedGrid(folder / "state", folder / "here").begin(cloud)
    yield shell
    shell.close()
    cloud.close()


@pytest.mark.parametrize("faults", STEPS, ids=lambda faults: " ".join(f"{name}-{faults[name][-1]}" for name in faults))
def test_a_control_plane_that_is_killed_around_a_call_leaves_no_instance_behind(
    listed: RentedGrid, faults: dict[str, list[str]]
) -> None:
    foreign = listed.cloud.add_foreign()
    listed.pid = pid = listed.daemon_pid()
    listed.cloud.faults.waiting = {name: list(found) for name, found in faults.items()}
    listed("workers", "create")  # its answer may be lost with the daemon
    if "terminate" in faults:
        worker = wait_until(lambda: [one for one in listed.workers().values() if one["state"] == "booting"])[0]
        listed("workers", "terminate", worker["worker_id"])
    wait_until(lambda: not is_running(pid), 30)
    listed.cloud.faults.clear()
    wait_until(lambda: all(one["state"] != "asked" for one in listed.workers().values()), 30)
    ours = [one for one in listed.existing() if one.grid_id]
    assert len(ours) <= 1
    assert {one.worker_id for one in ours} <= listed.workers().keys()
    if ids := list(listed.workers()):
        listed("workers", "terminate", *ids, check=0)
    wait_until(lambda: not listed.workers(), 40)
    assert not [one for one in listed.existing() if one.grid_id]
    assert foreign in {one.instance for one in listed.existing()}


def test_a_type_without_capacity_in_one_zone_is_had_in_the_next_and_the_first_is_closed(listed: RentedGrid) -> None:
    listed.cloud.full = {("t3.medium", "us-west-2a")}
    listed("workers", "create", check=0)
    worker = wait_until(lambda: [one for one in listed.workers().values() if one["state"] == "booting"], 30)[0]
    assert worker["offer"] == "t3.medium/us-west-2b/spot"
    listed.cloud.full = set()
    listed("workers", "terminate", worker["worker_id"], "--wait", "40", check=0)
