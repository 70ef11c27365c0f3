"""Boosts on a real Ray cluster: reserved on the right node, used by Ray programs, given back."""

from __future__ import annotations

import asyncio
import json
import subprocess
import uuid

import pytest

from distributed_grid.client.async_client import AsyncClient
from distributed_grid.client.conversation import ClientConfig
from distributed_grid.state_dir import StateDir
from tests.lab.lab import Lab
from tests.lab.memory_pools import MB, Pool
from tests.lab.ray.ray_grids import PYTHON, Console, RayGrid, boost
from tests.support.shell import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("nothing_held")]

PLAIN = """
import json, os, ray
ray.init(log_to_driver=False, logging_level="ERROR")
@ray.remote
def where():
    return os.uname().nodename, ray.util.get_current_placement_group() is not None
print(json.dumps(ray.get(where.remote(), timeout=60)))
"""
THERE = """
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
group = ray.util.get_placement_group({group!r})
@ray.remote(num_cpus=1)
def where():
    return os.uname().nodename
before = ray.available_resources()["CPU"]
return [ray.get(where.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote(), timeout=60),
        ray.cluster_resources()["CPU"] - before]
"""


def test_a_boost_is_reserved_in_ray_on_its_source_and_a_program_uses_it_there(
    ray_grid: RayGrid, console: Console
) -> None:
    found = boost(ray_grid, "gpu-master", "cpu", "1", "--source", "gpu2")
    assert (found["state"], found["source_node"], found["enforced_by"]) == ("active", "gpu2", "ray")
    assert console(THERE.format(group=found["placement_group"])) == ["gpu2", 1]
    assert console.groups() == {found["placement_group"]: "gpu2"}
    ray_grid("boost", "release", found["boost_id"][:8], check=0)
    wait_until(lambda: console.groups() == {}, 20)


def test_a_plain_ray_program_uses_the_boost_that_it_is_run_in(ray_grid: RayGrid, ray_lab: Lab) -> None:
    found = boost(ray_grid, "gpu-master", "cpu", "1", "--source", "gpu1")
    (ray_grid.cwd / "train.py").write_text(PLAIN)
    done = ray_grid("boost", "run", found["boost_id"][:8], "--", "python", "train.py", check=0, timeout=90)
    assert json.loads(done.stdout.splitlines()[-1]) == ["gpu1", True]
    python = f"{ray_lab.host('gpu1').home}/{PYTHON}"
    shown = ("--", "sh", "-c", 'command -v python; echo "$GRID_RAY_PYTHON"')
    assert ray_grid("boost", "run", found["boost_id"], *shown, check=0).stdout.split() == [python, python]
    own = ray_grid("boost", "run", "--env", "PATH=/usr/bin:/bin", found["boost_id"], *shown, check=0).stdout.split()
    assert python not in own, "a path that was given is left as it is"


def test_what_cluster_env_says_to_type_works_where_the_head_is_another_machine(ray_grid: RayGrid) -> None:
    hint = ray_grid("cluster", "status", check=0).stdout
    *exports, last = ray_grid("cluster", "env", check=0).stdout.splitlines()
    assert last.startswith("# ray status needs another address here: ray status --address 127.0.0.2:")
    command = last.partition(": ")[2]
    evaluated = 'for Ray programs, in each new shell: eval "$(grid cluster env)"'
    assert f"{evaluated}; then also: {command}; the dashboard" in hint
    program = "python -c 'import ray; ray.init(log_to_driver=False); print(len(ray.nodes()))'"
    script = f'eval "$(grid cluster env)"; {command}; {program}'
    done = subprocess.run(
        ["bash", "-ec", script], capture_output=True, text=True, env=ray_grid.env, cwd=ray_grid.cwd, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert "Autoscaler status" in done.stdout
    assert done.stdout.splitlines()[-1] == "3"
    assert any(line.startswith("export RAY_ADDRESS=ray://127.0.0.1:") for line in exports)
    assert f"export PATH={ray_grid.lab.host('gpu1').home}/rayenv/bin:" in ray_grid("cluster", "env", "gpu1").stdout


def test_two_boosts_never_hold_the_same_cores(ray_grid: RayGrid) -> None:
    boost(ray_grid, "gpu-master", "cpu", "2", "--source", "gpu2")
    refused = ray_grid("boost", "request", "gpu-master", "cpu", "1", "--source", "gpu2", "--only", check=1)
    assert refused.stderr.startswith("grid: No nodes have sufficient available resources: gpu2:")


def test_what_was_given_back_can_be_had_again_at_once(ray_grid: RayGrid) -> None:
    for _ in range(3):
        found = boost(ray_grid, "gpu-master", "cpu", "2", "--source", "gpu1")
        ray_grid("boost", "release", found["boost_id"], check=0)


def test_two_boosts_never_hold_the_same_gpu(ray_grid: RayGrid, console: Console) -> None:
    found = boost(ray_grid, "gpu-master", "gpu", "1", "--priority", "critical", "--duration", "1800")
    assert console.groups() == {found["placement_group"]: "gpu2"}
    assert console('return ray.available_resources().get("GPU", 0)') == 0
    refused = ray_grid("boost", "request", "gpu-master", "gpu", "1", check=1)
    assert "No nodes have sufficient available resources" in refused.stderr


def test_memory_is_reserved_to_the_byte_and_cores_in_fractions(ray_grid: RayGrid, console: Console) -> None:
    memory = boost(ray_grid, "gpu-master", "memory", "0.5", "--source", "gpu1")
    cores = boost(ray_grid, "gpu-master", "cpu", "0.25", "--source", "gpu1")
    bundles = console(
        """
        rows = ray.util.placement_group_table().values()
        return {row["name"]: row["bundles"]["0"] if "0" in row["bundles"] else row["bundles"][0]
                for row in rows if row["state"] == "CREATED"}
        """
    )
    assert bundles[memory["placement_group"]] == {"memory": 512 * 1024**2}
    assert bundles[cores["placement_group"]] == {"CPU": 0.25}


def test_what_ray_runs_outside_the_grid_is_not_lent(ray_grid: RayGrid, console: Console) -> None:
    taken = console(
        """
        node = next(node["NodeID"] for node in ray.nodes() if node["NodeName"] == "gpu2")
        selector = [{"ray.io/node-id": node}]
        group = ray.util.placement_group([{"CPU": 2}], name="somebody-elses", bundle_label_selector=selector)
        return group.wait(20)
        """
    )
    assert taken is True
    try:
        refused = wait_until(
            lambda: (
                "given the rest to others"
                in ray_grid(
                    "boost", "request", "gpu-master", "cpu", "1", "--source", "gpu2", "--only", "--dry-run"
                ).stderr
            ),
            30,
        )
        assert refused
    finally:
        console('ray.util.remove_placement_group(ray.util.get_placement_group("somebody-elses"))')


def test_a_boost_ends_by_itself_and_ray_has_nothing_of_it(ray_grid: RayGrid, console: Console) -> None:
    boost(ray_grid, "gpu-master", "cpu", "1", "--duration", "2")
    assert len(console.groups()) == 1
    wait_until(lambda: console.groups() == {}, 15)


def test_a_command_of_the_grid_holds_a_reservation_in_ray_while_it_runs(ray_grid: RayGrid, console: Console) -> None:
    job = ray_grid.detach("-r", "cpu", "-a", "1", "-n", "gpu1", "--strategy", "node_specific", "sleep", "86401")
    wait_until(lambda: ray_grid.job(job)["state"] == "running", 30)
    assert list(console.groups().values()) == ["gpu1"]
    ray_grid("jobs", "cancel", job, check=0)
    wait_until(lambda: console.groups() == {}, 30)


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.chaos)])
def test_hundreds_of_boosts_are_all_there_and_then_all_gone(ray_grid: RayGrid, console: Console, count: int) -> None:
    async def all_of_them(client: AsyncClient, names: list[str]) -> None:
        room = asyncio.Semaphore(64)

        async def one(name: str) -> None:
            async with room:
                asked = {"request_id": name, "target": "gpu-master", "resource_type": "cpu", "amount": 0.001}
                await client.call("request_boost", **asked, source="gpu2")

        async def gone(name: str) -> None:
            async with room:
                await client.call("release_boost", boost_id=name)

        await asyncio.gather(*map(one, names))
        assert (await client.call("list_boosts"))["active_boosts"] == len(names)
        assert len(console.groups()) == len(names)
        await asyncio.gather(*map(gone, names))

    names = [uuid.uuid4().hex for _ in range(count)]
    asyncio.run(all_of_them(AsyncClient(StateDir(ray_grid.state_dir), ClientConfig()), names))
    wait_until(lambda: console.groups() == {}, 60)


def test_a_block_of_memory_is_reserved_in_ray_on_the_node_that_lends_it(ray_grid: RayGrid, console: Console) -> None:
    pool = Pool(ray_grid)
    try:
        block = pool.allocate(64 * MB, "gpu2")
        assert pool.nodes(block) == ["gpu2"]
        assert list(console.groups().values()) == ["gpu2"]
        pool.blocks.write(block, b"beside Ray")
        assert pool.blocks.read(block, 10) == b"beside Ray"
    finally:
        pool.close()
    wait_until(lambda: console.groups() == {}, 20)
