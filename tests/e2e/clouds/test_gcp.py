"""Rented machines of Compute Engine with a real daemon: the cloud is a stand-in, its machines run their boot script."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.clouds.gce import ZONES, GceStandIn
from tests.support.clouds.gce_credentials import write_service_account
from tests.support.processes import is_running
from tests.support.provider_contract import TOKEN
from tests.support.shell import Shell, wait_until


class Clock:
    """The cloud's clock: real time, and what is added to it."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class GceGrid(Shell):
    """A grid of one core whose cloud is a stand-in; `boots` has its machines run."""

    def __init__(self, folder: Path, *, boots: bool, **options: Any) -> None:
        super().__init__(folder / "state", folder)
        self.clock = Clock()
        self.cloud = GceStandIn(self.clock, boots=folder / "machines" if boots else None, **options)
        self.key_file = write_service_account(folder / "key.json", f"{self.cloud.url}/token")
        self.cloud.on_die = self.kill_at_once

    def configure(self, **sections: Any) -> None:
        gcp = {**self.cloud.settings(), "anonymous": False, "credentials_file": str(self.key_file), "max_run_hours": 12}
        config: dict[str, Any] = {
            "name": "rented",
            "nodes": [{"name": "home", "host": "local", "cpu_count": 1, "memory_gb": 4, "trust_declared": True}],
            "server": {"host": "0.0.0.0", "port": 0},
            "workers": {"consistency_seconds": 0.5, "call_seconds": 3, "exit_seconds": 60},
            "scaling": {
                "provider": "gcp",
                "max_workers": 2,
                "evaluation_window_seconds": 2,
                "scale_up_cooldown_seconds": 0,
                "scale_down_cooldown_seconds": 2,
                "budget_per_hour": 1,
            },
            "providers": {"gcp": gcp},
        }
        for name, section in sections.items():
            config[name] = {**config.get(name, {}), **section}
        (self.cwd / "cluster.yaml").write_text(yaml.safe_dump(config))
        self.env["GRID_CONFIG"] = str(self.cwd / "cluster.yaml")
        self("daemon", "start", "--config", "cluster.yaml", check=0)
        self.pid = self.daemon_pid()
        if config["scaling"]["provider"]:
            wait_until(lambda: not self.observe("scale", "status")["problem"])

    def kill_at_once(self) -> None:
        """kill -9 the control plane, in the middle of a call."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(self.pid))

    def workers(self, *words: str) -> dict[str, dict[str, Any]]:
        return {one["worker_id"]: one for one in self.observe("workers", "list", *words)["workers"]}

    def close(self) -> None:
        super().close()
        self.cloud.close()


@pytest.fixture
def living(tmp_path: Path) -> Iterator[GceGrid]:
    """A grid whose machines run."""
    grid = GceGrid(tmp_path, boots=True)
    yield grid
    grid.close()


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GceGrid]:
    """A grid whose machines are only listed; nothing is started by itself."""
    grid = GceGrid(tmp_path_factory.mktemp("listed"), boots=False)
    grid.configure(scaling={"provider": None})
    yield grid
    grid.close()


def test_a_task_that_waits_gets_a_machine_runs_there_and_the_machine_is_deleted(living: GceGrid) -> None:
    foreign = living.cloud.add_foreign()
    living.configure()
    living.detach("-r", "cpu", "-a", "1", "sleep", "300")
    task = living.detach("-r", "cpu", "-a", "2", "sh", "-c", "echo on $GRID_NODE")
    living("jobs", "wait", task, "--timeout", "90", check=0, timeout=120)
    node = living.job(task)["node_id"]
    worker = living.workers()[node]
    assert (worker["provider"], worker["offer"]) == ("gcp", f"cpu/e2-standard-2/spot/{ZONES[0]}")
    assert living.cloud.existing()[node].market == "spot"
    assert wait_until(lambda: not living.workers(), 90)
    assert living.cloud.existing().keys() == {""}, "only the machine that is not ours is left"
    assert living.cloud.existing()[""].instance == foreign
    assert living("jobs", "logs", task, check=0).stdout == f"on {node}\n"


def test_neither_credentials_nor_tokens_are_to_be_read_anywhere(living: GceGrid) -> None:
    living.configure(scaling={"provider": None}, logging={"level": "debug"})
    made = living.json("workers", "create", "--wait", "60", timeout=90)["workers"][0]["worker_id"]
    living.cloud.faults.waiting["terminate"] = ["refuse", "fail"]
    living("workers", "terminate", made, "--wait", "60", check=0, timeout=90)
    (script,) = [item["value"] for item in living.cloud.bodies[0]["metadata"]["items"]]
    join_token = re.search(r"gridjoin1_[\w-]{20,}", script)
    assert join_token is not None
    private = json.loads(living.key_file.read_text())["private_key"].splitlines()[1]
    assert living.cloud.web.assertions[0]["iss"].startswith("worker@")
    kept = [path for path in (living.cwd / "state").rglob("*") if path.is_file()]
    for secret in (join_token[0], private, living.cloud.web.bearer):
        found = [path.name for path in kept if secret.encode() in path.read_bytes()]
        assert found == []
    shown = living("events", "--json", "--limit", "1000", check=0).stdout + living("workers", "list", "--all").stdout
    assert "gridjoin1_" not in shown
    assert living.cloud.web.bearer not in shown
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            assert living.cloud.web.bearer.encode() not in (process / "cmdline").read_bytes()


STEPS = [
    {"create": ["die_before"]},
    {"create": ["die_after"]},
    {"create": ["lose_after", "die_before"], "list": ["busy"] * 99},
    {"list": ["", "die_before"]},
    {"terminate": ["die_before"]},
    {"terminate": ["die_after"]},
    {"terminate": ["busy", "lose_before", "die_after"]},
]


@pytest.mark.parametrize("faults", STEPS, ids=lambda faults: " ".join(f"{name}-{faults[name][-1]}" for name in faults))
def test_a_control_plane_that_is_killed_around_a_call_leaves_no_machine_behind(
    listed: GceGrid, faults: dict[str, list[str]]
) -> None:
    cloud = listed.cloud
    cloud.visible_after = cloud.stops_in = 0.2
    foreign = cloud.add_foreign()
    listed.pid = listed.daemon_pid()
    cloud.faults.waiting = {name: list(found) for name, found in faults.items() if name != "terminate"}
    listed("workers", "create", "--type", "cpu")  # its answer may be lost with the daemon
    if "terminate" in faults:
        wait_until(lambda: [one for one in listed.workers().values() if one["state"] == "booting"], 30)
        cloud.faults.waiting = {name: list(found) for name, found in faults.items()}
        listed("workers", "terminate", *listed.workers())
    wait_until(lambda: not is_running(listed.pid), 30)
    cloud.faults.clear()
    wait_until(lambda: all(one["state"] != "asked" for one in listed.workers().values()), 30)
    assert {name for name in cloud.existing() if name} <= listed.workers().keys()
    if ids := list(listed.workers()):
        listed("workers", "terminate", *ids, check=0)
    wait_until(lambda: not listed.workers(), 30)
    assert cloud.existing().keys() == {""}
    assert foreign in {one.instance for one in cloud.machines() if one.ended_at is None}
    names = [body["name"] for body in cloud.bodies]
    assert len(names) == len(set(names)), "one machine for each worker"


def test_a_machine_whose_control_plane_is_gone_is_deleted_by_the_clock_of_the_cloud(living: GceGrid) -> None:
    living.configure(scaling={"provider": None})
    worker = living.json("workers", "create", "--wait", "60", timeout=90)["workers"][0]["worker_id"]
    living.kill_daemon()
    living.clock.ahead = 11 * 3600
    assert worker in living.cloud.existing(), "it has an hour left"
    living.clock.ahead = 12 * 3600 + 60
    assert not living.cloud.existing()
    ended = next(one for one in living.cloud.machines() if one.worker_id == worker)
    assert ended.ended_at is not None
    assert ended.ended_at - ended.made_at <= 12 * 3600 + 60


def test_a_stockout_of_spot_machines_falls_back_to_the_other_zone_and_then_to_standard_ones(listed: GceGrid) -> None:
    listed.cloud.faults.waiting["create"] = ["no_capacity", "no_capacity"]
    listed.cloud.bodies.clear()
    listed("workers", "create", "--type", "cpu", check=0)
    booting = wait_until(lambda: [one for one in listed.workers().values() if one["state"] == "booting"], 30)
    assert booting[0]["offer"] == f"cpu/e2-standard-2/standard/{ZONES[0]}"
    tried = [f"{body['scheduling']['provisioningModel']}" for body in listed.cloud.bodies]
    assert tried == ["SPOT", "SPOT", "STANDARD"]
    assert TOKEN not in repr(booting)
    listed("workers", "terminate", booting[0]["worker_id"], "--wait", "30", check=0)
