"""`grid cluster attach` on three hosts with a Ray that the grid did not start, from a machine that is none of them.

Part of `make chaos`: it has a lab and a Ray cluster of its own.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.adapters.node.node_script_ray import RAY_START
from tests.lab.lab import Lab, problem
from tests.lab.lab_host import Host
from tests.lab.ray.ray_grids import PYTHON, SHARE, furnish, remains_of
from tests.support.shell import Shell, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.chaos, pytest.mark.timeout(400)]

NAMES = ("head", "w1", "w2", "w3")
ONLY = ("--strategy", "node_specific", "-n")
HERE = "nodes: [{name: here, host: local}]\n"
LEFT = """
import json, ray
ray.init(log_to_driver=False, logging_level="ERROR", namespace="grid")
groups = [row["name"] for row in ray.util.placement_group_table().values() if row["state"] != "REMOVED"]
print(json.dumps([ray.util.list_named_actors(all_namespaces=True), groups]))
"""


class Cluster:
    """Somebody's Ray: started by hand, with a token."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.token = secrets.token_hex(32)
        self.address = f"{lab.host('head').address}:6379"
        self.env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_ADDRESS": self.address}
        self._nodes: dict[str, subprocess.Popen[Any]] = {}

    def start(self, name: str) -> None:
        host = self.lab.host(name)
        role = ["--head", "--port=6379", "--ray-client-server-port=10001", "--include-dashboard=false"]
        words = [*(role if name == "head" else [f"--address={self.address}"]), f"--node-ip-address={host.address}"]
        words += ["--num-cpus=2", "--memory=1073741824", "--object-store-memory=104857600", "--disable-usage-stats"]
        env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "GRPC_ENABLE_FORK_SUPPORT": "false"}
        command = [PYTHON, "-c", RAY_START, "start", "--block", f"--node-name={name}", *words]
        self._nodes[name] = host.popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: host.find("/raylet/raylet"), 90)

    def stop(self, name: str) -> None:
        process = self._nodes.pop(name)
        process.kill()
        process.wait(10)
        for pid in self.lab.host(name).find("/raylet/raylet"):
            self.lab.host(name).kill(pid)

    def close(self) -> None:
        for name in list(self._nodes):
            self.stop(name)

    def left(self) -> Any:
        """Which actors and groups Ray has."""
        done = self.lab.host("head").run([PYTHON, "-c", LEFT], env=self.env, timeout=90)
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    missing = problem() or (None if importlib.util.find_spec("ray") else "Ray is not installed here; type: make ray")
    if missing:
        pytest.skip(missing)
    with Lab(NAMES, share=SHARE) as lab:
        for host in lab:
            furnish(host)
        ray = Cluster(lab)
        for name in NAMES[:3]:
            ray.start(name)
        try:
            yield ray
        finally:
            ray.close()


@pytest.fixture(scope="module")
def grid(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("attached")
    (folder / "here").mkdir()
    shell = Shell(folder / "state", folder / "here")
    (folder / "cluster.yaml").write_text(f"hold_seconds: 20\n{HERE}")
    shell.env["GRID_CONFIG"] = str(folder / "cluster.yaml")
    try:
        yield shell
    finally:
        shell("cluster", "detach", "--force", "--discard-results", timeout=120)
        shell.close()


def states(grid: Shell) -> dict[str, str]:
    return {row["node_id"]: row["state"] for row in grid.json("cluster", "status")}


def remains(host: Host) -> list[str]:
    """Our processes and files on a host; Ray's own are somebody else's."""
    processes, files = remains_of(host)
    return [line for line in processes if "distributed_grid" in line] + files


def test_three_hosts_are_attached_through_rays_client_and_work_as_nodes_do(grid: Shell, cluster: Cluster) -> None:
    address = f"ray://{cluster.lab.host('head').address}:10001"
    grid("cluster", "attach", address, env={"RAY_AUTH_TOKEN": cluster.token}, check=0, timeout=200)
    assert states(grid) == {"here": "alive", "head": "alive", "w1": "alive", "w2": "alive"}
    wait_until(lambda: grid("run-shared", *ONLY, "w1", "-a", "0.5", "hostname").stdout == "w1\n", 60)
    row = json.loads(grid("boost", "request", "head", "cpu", "0.5", "--source", "w2", "--json", check=0).stdout)
    assert row["enforced_by"] == "ray"
    actors, groups = cluster.left()
    assert groups == [row["placement_group"]]
    assert {actor["name"].partition("-")[0] for actor in actors} == {"grid"}


def test_a_fourth_node_joins_and_another_leaves(grid: Shell, cluster: Cluster) -> None:
    cluster.start("w3")
    wait_until(lambda: states(grid).get("w3") == "alive", 90)
    cluster.stop("w1")
    wait_until(lambda: "w1" not in states(grid), 120)


def test_a_cluster_that_was_started_anew_is_taken_in_again(grid: Shell, cluster: Cluster) -> None:
    (before,) = grid.json("boost", "status")["boosts"]
    for name in ("w3", "w2", "head"):
        cluster.stop(name)
    for pid in cluster.lab.host("head").find("/gcs/gcs_server"):
        cluster.lab.host("head").kill(pid)
    for name in ("head", "w2"):
        cluster.start(name)

    def again() -> bool:
        rows = grid.json("boost", "status")["boosts"]
        return not rows or (rows[0]["state"] == "active" and rows[0]["placement_group"] != before["placement_group"])

    wait_until(again, 150, 0.5)
    wait_until(lambda: states(grid).get("w2") == "alive", 60)


def test_detaching_leaves_nothing_in_ray_and_on_its_hosts(grid: Shell, cluster: Cluster) -> None:
    grid("cluster", "detach", check=0, timeout=150)
    assert cluster.left() == [[], []]
    assert states(grid) == {"here": "alive"}
    wait_until(lambda: not [line for name in ("head", "w2") for line in remains(cluster.lab.host(name))], 60)
    assert not list(Path(grid.state_dir).rglob("ray-attached.token"))
