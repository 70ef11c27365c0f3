"""Ray on the three simulated nodes of the shipped config: a raylet each, told apart by name; boosts land on them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clones import clone_to
from tests.support.processes import is_running
from tests.support.project import NEVER_SECONDS, set_rebalance_interval
from tests.support.shell import Shell, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NODES = {"gpu-master": (16, 1, 30.4), "gpu1": (8, 1, 15.1), "gpu2": (16, 2, 31.2)}
"""Cores, GPUs and GB that the shipped config declares."""
CONNECTED = """
import json, sys, ray
ray.init(log_to_driver=False, logging_level="ERROR", namespace="grid")
names = {node["NodeID"]: node["NodeName"] for node in ray.nodes() if node["Alive"]}
"""
LOOK = (
    CONNECTED
    + """
from ray.util.placement_group import placement_group_table
rows = {node["NodeName"]: [node["Resources"], node["Labels"], node["NodeManagerPort"]] for node in ray.nodes()}
groups = {row["name"]: names[row["bundles_to_node_id"][0]] for row in placement_group_table().values()
          if row["state"] == "CREATED"}
print(json.dumps({"nodes": rows, "groups": groups}))
"""
)


def in_ray(clone: Shell, script: str, *, timeout: float = 60) -> str:
    """What somebody types after the line that `cluster start` prints."""
    typed = f'eval "$(grid cluster env)"\n{script}'
    done = subprocess.run(
        ["bash", "-ec", typed], cwd=clone.cwd, env=clone.env, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def seen_in_ray(clone: Shell) -> dict[str, Any]:
    """Ray's own word: its nodes by name, and where each placement group of the grid is."""
    found: dict[str, Any] = json.loads(in_ray(clone, f"python -c '{LOOK}'"))
    return found


def raylets(clone: Shell) -> dict[str, int]:
    """The raylets that this grid has recorded, by node."""
    found: dict[str, int] = {}
    for record in Path(clone.env["HOME"]).glob(".distributed_grid/agents/*/*/ray/started.json"):
        mark = f"GRID_RAY_MARK={json.loads(record.read_text())['mark']}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                is_raylet = os.readlink(process / "exe").endswith("/raylet")
                if is_raylet and mark in (process / "environ").read_bytes().split(b"\0"):
                    found[record.parent.parent.name] = int(process.name)
            except OSError:
                continue
    return found


class RayClone(Shell):
    """A clone, and what `cluster start --ray` printed there."""

    started = ""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayClone]:
    """A clone with its Ray cluster; nothing is borrowed automatically."""
    folder = tmp_path_factory.mktemp("clone")
    shell = RayClone(folder / "state", clone_to(folder / "clone"))
    set_rebalance_interval(shell.cwd / "config", NEVER_SECONDS)
    try:
        shell.started = shell("cluster", "start", "--ray", check=0, timeout=200).stdout
        yield shell
    finally:
        shell("cluster", "stop", "--force", "--purge", timeout=60)
        shell.close()


def test_the_line_that_start_prints_leads_to_a_ray_with_all_nodes(clone: RayClone) -> None:
    assert clone.started.splitlines()[-1].endswith('type: eval "$(grid cluster env)"')

    def status_of_all() -> str:  # Ray's status is a few seconds old
        status = in_ray(clone, "ray status")
        return status if len(re.findall(r"^ 1 node_", status, re.MULTILINE)) == 3 else ""

    status = wait_until(status_of_all, 60)
    assert "/40.0 CPU" in status
    assert "/4.0 GPU" in status
    assert {row["node_id"]: row["ray"]["state"] for row in clone.json("cluster", "status")} == dict.fromkeys(
        NODES, "running"
    )


def test_each_simulated_node_is_a_raylet_with_what_is_declared_for_it(clone: Shell) -> None:
    nodes = seen_in_ray(clone)["nodes"]
    for name, (cpus, gpus, gigabytes) in NODES.items():
        has, labels, _ = nodes[name]
        assert (has["CPU"], has["GPU"]) == (cpus, gpus)
        assert has["memory"] / 1024**3 == pytest.approx(gigabytes, abs=0.01)
        assert labels["grid-node"] == name
    assert len({port for *_, port in nodes.values()}) == 3
    stores = sum(has["object_store_memory"] for has, *_ in nodes.values())
    room = os.statvfs("/dev/shm")
    assert stores <= max(room.f_blocks * room.f_frsize // 2, 3 * 80 * 1024**2)
    assert set(raylets(clone)) == set(NODES)


def test_a_boost_for_the_master_is_a_placement_group_on_gpu2(clone: Shell) -> None:
    words = clone("boost", "request", "gpu-master", "cpu", "2.0", "--priority", "high", check=0).stdout.splitlines()
    boost = words[0].removeprefix("boost ")
    assert words[1].startswith("2 cores from gpu2 for gpu-master, until ")
    assert words[-1] == f"use it: grid boost run {boost} -- COMMAND; in a Ray program: with boost.use()"
    (group,) = re.findall(r"reserved in Ray by the placement group (\S+)", words[2])
    assert seen_in_ray(clone)["groups"] == {group: "gpu2"}
    clone("boost", "release", boost, check=0)
    assert seen_in_ray(clone)["groups"] == {}


def test_after_the_daemon_was_killed_the_same_raylets_go_on(clone: Shell) -> None:
    before = raylets(clone)
    boost = clone.json("boost", "request", "gpu-master", "cpu", "1")
    clone.kill_daemon()
    clone("cluster", "start", "--ray", check=0, timeout=100)
    assert raylets(clone) == before
    assert clone.json("boost", "status")["boosts"][0]["placement_group"] == boost["placement_group"]
    clone("boost", "release", boost["boost_id"], check=0)


def test_stop_ends_every_raylet_and_nothing_else(clone: Shell) -> None:
    pids = raylets(clone)
    assert len(pids) == 3
    clone("cluster", "stop", check=0)
    wait_until(lambda: not any(map(is_running, pids.values())))
    assert raylets(clone) == {}
