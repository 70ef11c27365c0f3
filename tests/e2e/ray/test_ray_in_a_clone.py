"""Ray on the three simulated nodes of the shipped config: a raylet each, told apart by name; boosts land on them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.config.sections import Ray
from distributed_grid.server.ray.ray_nodes import HEAD_PORTS
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
OBSERVER = (
    CONNECTED
    + """
from ray.util.placement_group import placement_group_table
for _ in sys.stdin:
    rows = {node["NodeName"]: [node["Resources"], node["Labels"], node["NodeManagerPort"]] for node in ray.nodes()}
    groups = {row["name"]: names[row["bundles_to_node_id"][0]] for row in placement_group_table().values()
              if row["state"] == "CREATED"}
    print(json.dumps({"nodes": rows, "groups": groups}), flush=True)
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


def process_of(clone: Shell, node: str, program: str) -> int:
    """The process of a program that Ray's start on a node has begun, by the record of that start; 0: there is none."""
    for record in Path(clone.env["HOME"]).glob(f".distributed_grid/agents/*/{node}/ray/started.json"):
        mark = f"GRID_RAY_MARK={json.loads(record.read_text())['mark']}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_it = os.readlink(process / "exe").endswith(f"/{program}")
                if is_it and mark in (process / "environ").read_bytes().split(b"\0"):
                    return int(process.name)
    return 0


def raylets(clone: Shell) -> dict[str, int]:
    """The raylets that this grid has recorded, by node."""
    found = {node: process_of(clone, node, "raylet") for node in NODES}
    return {node: pid for node, pid in found.items() if pid}


class RayClone(Shell):
    """A clone, what `cluster start --ray` printed there, and a Ray program that says what Ray has."""

    started = ""
    observer: subprocess.Popen[bytes] | None = None

    def in_ray(self) -> dict[str, Any]:
        """Ray's own word: its nodes by name, and where each placement group of the grid is."""
        if self.observer is None:
            words = ("bash", "-ec", f"eval \"$(grid cluster env)\"; exec python -c '{OBSERVER}'")
            self.observer = subprocess.Popen(
                words, cwd=self.cwd, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert self.observer.stdin is not None
        assert self.observer.stdout is not None
        self.observer.stdin.write(b"\n")
        self.observer.stdin.flush()
        found: dict[str, Any] = json.loads(self.observer.stdout.readline())
        return found

    def close(self) -> None:
        self.stop_observing()
        super().close()

    def stop_observing(self) -> None:
        """End the Ray program; the next look at Ray starts another. One whose head has died keeps a core busy."""
        if self.observer is not None:
            self.observer.kill()
            self.observer.communicate()
            self.observer = None


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayClone]:
    """A clone with its Ray cluster on a machine where Ray's ports are taken; nothing is borrowed automatically."""
    folder = tmp_path_factory.mktemp("clone")
    shell = RayClone(folder / "state", clone_to(folder / "clone"))
    shell.env["OPENBLAS_NUM_THREADS"] = (
        "1"  # every process of Ray loads it, and idle threads of it are busy for a while
    )
    set_rebalance_interval(shell.cwd / "config", NEVER_SECONDS)
    with contextlib.ExitStack() as taken:
        for name in HEAD_PORTS:
            with contextlib.suppress(OSError):  # somebody has it already
                taken.enter_context(socket.create_server(("", getattr(Ray(), name))))
        try:
            shell.started = shell("cluster", "start", "--ray", check=0, timeout=200).stdout
            yield shell
        finally:
            shell("cluster", "stop", "--force", "--purge", timeout=60)
            shell.close()
            for note in Path(shell.env["HOME"]).glob(
                ".distributed_grid/agents/*/*/ray/elsewhere"
            ):  # of a node that left the config
                shutil.rmtree(Path(note.read_text().strip()).parent, ignore_errors=True)


def test_each_simulated_node_is_a_raylet_with_what_is_declared_for_it(clone: RayClone) -> None:
    nodes = clone.in_ray()["nodes"]
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


# ---------------------------------------------------------------- the boost guide, from top to bottom


def typed(clone: Shell, line: str, *, code: int = 0) -> str:
    """A line of the guide, as it stands there."""
    assert line.startswith("poetry run grid ")
    done = clone(*line.removeprefix("poetry run grid ").split(), check=code)
    return done.stdout if code == 0 else done.stderr


def requested(clone: Shell, line: str) -> str:
    """The id of the boost that a line of the guide requests; it is for gpu-master, and in Ray on another node."""
    words = typed(clone, line).splitlines()
    assert re.search(r" from gpu[12] for gpu-master, until ", words[1])
    assert words[2].startswith("reserved in Ray by the placement group grid-boost-")
    boost = words[0].removeprefix("boost ")
    assert words[3] == f"use it: grid boost run {boost} -- COMMAND; in a Ray program: with boost.use()"
    return boost


@pytest.fixture
def nothing_left(clone: Shell) -> Iterator[None]:
    """Every boost that a test has requested is released after it."""
    yield
    for row in clone.json("boost", "status")["boosts"]:
        clone("boost", "release", row["boost_id"], check=0)


def test_guide_prerequisites_and_configuration(clone: RayClone) -> None:
    path = clone.cwd / "config" / "as-in-the-guide.yaml"
    marks = "\n".join(f"    {kind}:\n      high: 0.8\n      low: 0.3" for kind in ("cpu", "memory", "gpu"))
    sharing = "  enabled: true\n  policy: balanced\n  rebalance_interval: 30\n"
    path.write_text(f"resource_sharing:\n{sharing}  pressure_thresholds:\n{marks}\n")
    shown = clone("config", "check", str(path), check=0).stdout
    assert "as-in-the-guide.yaml" in shown
    assert len([row for row in clone.json("cluster", "status") if row["ray"]["state"] == "running"]) >= 2


@pytest.mark.usefixtures("nothing_left")
def test_guide_commands_request_check_release(clone: RayClone) -> None:
    boosts = [
        requested(clone, "poetry run grid boost request gpu-master cpu 2.0 --priority high"),
        requested(clone, "poetry run grid boost request gpu-master gpu 1 --duration 1800"),
        requested(clone, "poetry run grid boost request gpu-master memory 4.0 --source gpu2"),
        requested(clone, "poetry run grid boost request gpu-master cpu 4.0"),
    ]
    groups = clone.in_ray()["groups"]
    assert {name.removeprefix("grid-boost-").partition("-")[0]: node for name, node in groups.items()} == dict.fromkeys(
        boosts, "gpu2"
    )
    status = typed(clone, "poetry run grid boost status")
    assert status.startswith("4 active boosts: 6 cores, 1 GPU, 4 GB\n")
    assert status.count("Ray") == 4
    assert typed(clone, "poetry run grid boost status --node gpu-master") == status
    wanted = {(boost, "gpu2", "gpu-master", True) for boost in boosts}
    wait_until(lambda: kept(clone) == wanted)
    for boost in (boosts[0], boosts[1][:8]):
        assert typed(clone, f"poetry run grid boost release {boost}").endswith(": released\n")
    wait_until(lambda: {name.split("-")[2] for name in clone.in_ray()["groups"]} == {*boosts[2:]})


def kept(clone: Shell) -> set[tuple[str, str, str, bool]]:
    """The boosts in the file that the guide names."""
    rows = json.loads((clone.state_dir / "resource_boosts.json").read_text())["boosts"]
    return {(row["boost_id"], row["source_node"], row["target_node"], row["is_active"]) for row in rows}


PROGRAM = (
    CONNECTED
    + """
@ray.remote(**json.loads(sys.argv[1]))
def work():
    context, group = ray.get_runtime_context(), ray.util.get_current_placement_group()
    gpus = len(context.get_accelerator_ids()["GPU"])
    return [names[context.get_node_id()], group is not None, gpus, sum(i * i for i in range(100_000))]
print(json.dumps(ray.get([work.remote() for _ in range(2)], timeout=60)))
"""
)


@pytest.mark.usefixtures("nothing_left")
def test_guide_examples_run_on_the_source(clone: RayClone) -> None:
    wanted = {
        "poetry run grid boost request gpu-master cpu 4.0 --priority high --duration 1800": ({"num_cpus": 2}, 0),
        "poetry run grid boost request gpu-master gpu 1 --priority critical --duration 3600": ({"num_gpus": 1}, 1),
        "poetry run grid boost request gpu-master memory 8.0 --source gpu2 --duration 7200": ({"memory": 4 << 30}, 0),
    }
    (clone.cwd / "task.py").write_text(PROGRAM)
    running = []
    for line, (options, gpus) in wanted.items():
        boost = requested(clone, line)
        command = ("boost", "run", boost, "--", "python", "task.py", json.dumps(options))
        running.append((clone.start(*command), gpus))
    for process, gpus in running:
        shown, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        assert [row[:3] for row in json.loads(shown)] == [["gpu2", True, gpus]] * 2
    rows = clone.json("boost", "status", "--node", "gpu-master")["boosts"]
    lasting = [_seconds(row["expires_at"]) - _seconds(row["allocated_at"]) for row in rows]
    assert sorted(map(round, lasting)) == [1800, 3600, 7200]


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


@pytest.mark.usefixtures("nothing_left")
def test_guide_troubleshooting_and_debug_commands(clone: RayClone) -> None:
    refused = typed(clone, "poetry run grid boost request gpu-master cpu 500", code=1)
    assert "No nodes have sufficient available resources" in refused
    assert "Target node not found in cluster" in typed(clone, "poetry run grid boost request gpu9 cpu 1", code=1)
    boost = requested(clone, "poetry run grid boost request gpu-master cpu 1")
    (clone.state_dir / "resource_boosts.json").unlink()
    assert [row["boost_id"] for row in clone.json("boost", "status")["boosts"]] == [boost]
    assert typed(clone, "poetry run grid cluster status").count("running") == 3
    assert "gpu2" in typed(clone, "poetry run grid resource-sharing status")
    checks = in_ray(clone, "python scripts/validate_ray_cluster.py")
    assert checks.endswith("all is well\n")
    assert "3 alive: gpu-master, gpu1, gpu2" in checks
    assert "1 groups, each with its lease" in checks


MANAGER = """
import asyncio, json
from distributed_grid.orchestration.resource_boost_manager import (
    AllocationPriority, ResourceBoostManager, ResourceBoostRequest, ResourceType)
async def main():
    async with ResourceBoostManager() as manager:
        request = ResourceBoostRequest("gpu-master", ResourceType.CPU, 1.0, AllocationPriority.HIGH, 600.0, "gpu1")
        boost_id = await manager.request_boost(request)
        (boost,) = await manager.get_active_boosts("gpu-master")
        status = await manager.get_boost_status()
        released = await manager.release_boost(boost_id)
        left = await manager.get_active_boosts()
        print(json.dumps([boost.boost_id == boost_id, boost.source_node, boost.enforced_by, status["active_boosts"],
                          released, len(left)]))
asyncio.run(main())
"""


def test_guide_api_and_automatic_cleanup(clone: RayClone) -> None:
    assert json.loads(in_ray(clone, f"python -c '{MANAGER}'")) == [True, "gpu1", "ray", 1, True, 0]
    clone("boost", "request", "gpu-master", "gpu", "1", "--duration", "1", check=0)
    wait_until(lambda: not clone.observe("boost", "status")["boosts"])
    wait_until(lambda: clone.in_ray()["groups"] == {})


# ---------------------------------------------------------------- the memory guide


MEMORY_TASK = """
import ray

# Tasks automatically use shared memory pool
@ray.remote(memory=5*1024**3)  # Request 5GB
def memory_intensive_task():
    import numpy as np
    large_array = np.zeros((1000000, 1000))
    return large_array.sum()

# Ray places this on gpu-master using gpu2's memory
result = ray.get(memory_intensive_task.remote())
"""
WHERE = """
@ray.remote
def where():
    return ray.get_runtime_context().get_node_id()
names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
print(result, names[ray.get(where.remote())])
"""


@pytest.mark.usefixtures("nothing_left")
def test_the_task_of_the_memory_guide_runs_in_what_gpu2_lends(clone: RayClone) -> None:
    line = "poetry run grid resource-sharing request --node gpu-master --type memory --amount 10.0 --priority high"
    words = typed(clone, f"{line} --config config/my-cluster-enhanced.yaml").splitlines()
    assert words[1].startswith("10 GB from gpu2 for gpu-master, until ")
    allocation = words[0].removeprefix("allocation ")
    (clone.cwd / "memory_task.py").write_text(MEMORY_TASK + WHERE)
    shown = clone("boost", "run", allocation, "--", "python", "memory_task.py", check=0, timeout=100).stdout
    assert shown.splitlines()[-1] == "0.0 gpu2"


# ---------------------------------------------------------------- usage, and what happens to Ray


BURN = (
    CONNECTED
    + """
import pathlib, time
@ray.remote
def burn(until):
    kept = bytearray(600 << 20)
    while not pathlib.Path(until).exists():
        sum(range(100_000))  # a part of one core
        time.sleep(0.004)
print("done", ray.get(burn.remote(sys.argv[1])))
"""
)


@pytest.mark.usefixtures("nothing_left")
def test_what_ray_uses_counts_on_its_own_node_and_on_no_other(clone: RayClone) -> None:
    def usage() -> dict[str, tuple[float, float]]:
        nodes = clone.observe("status")["nodes"]
        return {node["node_id"]: (node["cpu_percent"], node["memory_used_gb"]) for node in nodes}

    before = usage()
    (clone.cwd / "burn.py").write_text(BURN)
    boost = clone.json("boost", "request", "gpu-master", "cpu", "1", "--source", "gpu1")
    until = clone.cwd / "enough"
    program = clone.start("boost", "run", boost["boost_id"], "--", "python", "burn.py", str(until))
    wait_until(lambda: usage()["gpu1"][0] > before["gpu1"][0] + 1, 60)
    wait_until(lambda: usage()["gpu1"][1] > before["gpu1"][1] + 0.4, 60)
    now = usage()
    for other in ("gpu-master", "gpu2"):
        assert now[other][1] < before[other][1] + 0.3
    until.touch()
    assert program.wait(60) == 0


def test_the_line_that_start_prints_leads_to_a_ray_with_all_nodes(clone: RayClone) -> None:
    assert 'in each new shell: eval "$(grid cluster env)"' in clone.started.splitlines()[-1]

    def status_of_all() -> str:  # Ray's status is a few seconds old
        status = in_ray(clone, "ray status")
        return status if len(re.findall(r"^ 1 node_", status, re.MULTILINE)) == 3 else ""

    status = wait_until(status_of_all, 60)
    assert "/40.0 CPU" in status
    assert "/4.0 GPU" in status
    assert {row["node_id"]: row["ray"]["state"] for row in clone.json("cluster", "status")} == dict.fromkeys(
        NODES, "running"
    )


def test_ports_that_somebody_else_has_are_left_to_them(clone: RayClone) -> None:
    chosen = json.loads((clone.host_dir / "ray/ports.json").read_text())
    assert {name: chosen[name] > getattr(Ray(), name) for name in chosen} == dict.fromkeys(HEAD_PORTS, True)
    environ = clone.json("cluster", "env")
    assert environ["RAY_ADDRESS"].endswith(f":{chosen['port']}")
    assert environ["RAY_API_SERVER_ADDRESS"].endswith(f":{chosen['dashboard_port']}")


USE_AUTOMATIC = """
import asyncio, pathlib, sys, time
import ray
from distributed_grid.orchestration.resource_boost_manager import ResourceBoostManager
ray.init(log_to_driver=False, logging_level="ERROR")
async def automatic():
    async with ResourceBoostManager() as manager:
        while True:
            for boost in await manager.get_active_boosts("gpu-master"):
                if boost.automatic and boost.placement_group:
                    return boost
            await asyncio.sleep(0.2)
boost = asyncio.run(automatic())
@ray.remote
def work(until):
    while not pathlib.Path(until).exists():
        time.sleep(0.05)
    return ray.util.get_current_placement_group() is not None
with boost.use():
    print(boost.boost_id, boost.source_node, ray.get(work.remote(sys.argv[1])))
"""


def test_after_the_daemon_was_killed_the_same_raylets_go_on(clone: RayClone) -> None:
    before = raylets(clone)
    boost = clone.json("boost", "request", "gpu-master", "cpu", "1")
    clone.kill_daemon()
    clone("cluster", "start", "--ray", check=0, timeout=100)
    assert raylets(clone) == before
    assert clone.json("boost", "status")["boosts"][0]["placement_group"] == boost["placement_group"]
    clone("boost", "release", boost["boost_id"], check=0)


def test_when_the_head_has_died_all_start_anew_and_boosts_are_bound_again(clone: RayClone) -> None:
    before = raylets(clone)
    boost = clone.json("boost", "request", "gpu-master", "cpu", "1")
    clone.stop_observing()
    os.kill(process_of(clone, "gpu-master", "gcs_server"), signal.SIGKILL)
    clone("cluster", "start", "--ray", check=0, timeout=200)
    after = raylets(clone)
    assert set(after) == set(NODES)
    assert not {*before.values()} & {*after.values()}
    assert not any(map(is_running, before.values()))

    def is_bound_again() -> bool:
        (row,) = clone.observe("boost", "status")["boosts"]
        return row["is_active"] and row["placement_group"] not in (None, boost["placement_group"])

    wait_until(is_bound_again, 60)
    clone("boost", "release", boost["boost_id"], check=0)


def test_an_automatic_lease_is_bound_in_ray_and_its_use_counts(clone: RayClone) -> None:
    clone("daemon", "stop", check=0)
    set_rebalance_interval(clone.cwd / "config", 1, was=NEVER_SECONDS)
    until = clone.cwd / "used"
    (clone.cwd / "use.py").write_text(USE_AUTOMATIC)
    typed_line = f"""eval "$(grid cluster env)"; python use.py {until}"""
    program = subprocess.Popen(
        ["bash", "-ec", typed_line], cwd=clone.cwd, env=clone.env, stdout=subprocess.PIPE, text=True
    )
    try:
        (used,) = wait_until(
            lambda: [row for row in clone.observe("boost", "status")["boosts"] if row["used_amount"]], 100
        )
    finally:
        until.touch()
        shown, _ = program.communicate(timeout=60)
    assert (used["automatic"], used["enforced_by"], used["used_amount"]) == (True, "ray", used["amount"])
    assert shown == f"{used['boost_id']} gpu2 True\n"
    assert "tasks of ray use it" in clone("events", "--type", "rebalanced", check=0).stdout


def test_the_raylet_of_a_node_that_leaves_the_config_is_stopped(clone: RayClone) -> None:
    before = raylets(clone)
    clone("daemon", "stop", check=0)
    config = clone.cwd / "config/my-cluster-enhanced.yaml"
    config.write_text(re.sub(r"(?s)- name: gpu1.*?(?=- name: gpu2)", "", config.read_text()))
    clone("daemon", "start", check=0)
    wait_until(lambda: not is_running(before["gpu1"]), 60)
    left = {name: pid for name, pid in before.items() if name != "gpu1"}
    wait_until(lambda: raylets(clone) == left)
    assert [row["node_id"] for row in clone.json("cluster", "status")] == ["gpu-master", "gpu2"]


def test_stop_ends_every_raylet_and_purge_removes_its_files(clone: RayClone) -> None:
    pids = raylets(clone)
    assert {"gpu-master", "gpu2"} <= set(pids)
    records = list(Path(clone.env["HOME"]).glob(".distributed_grid/agents/*/*/ray/started.json"))
    there = [record for record in records if record.parents[1].name in ("gpu-master", "gpu2")]
    places = [Path(json.loads(record.read_text())["temp"]) for record in there]
    clone("cluster", "stop", check=0)
    wait_until(lambda: not any(map(is_running, pids.values())))
    assert raylets(clone) == {}
    assert all(place.exists() for place in places)  # its logs
    clone("cluster", "stop", "--purge", check=0)
    assert not any(place.exists() for place in places)
