"""Everybody dies at every main step of a boost's life; a minute or two later it is held everywhere or nowhere.

Part of `make chaos`: each of these waits for Ray to be there again.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable

import pytest

from tests.lab.clusters import agent_of
from tests.lab.lab import Lab
from tests.lab.ray.ray_agreement import held, kill_and_wait
from tests.lab.ray.ray_grids import RayGrid, boost
from tests.support.shell import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.chaos, pytest.mark.timeout(400), pytest.mark.usefixtures("nothing_held")]

SOURCE = "gpu2"
WORDS = ("gpu-master", "cpu", "1", "--source", SOURCE)


def kill_control_plane(grid: RayGrid, lab: Lab) -> None:
    grid.kill_daemon()


def kill_agent(grid: RayGrid, lab: Lab) -> None:
    lab.host(SOURCE).kill(agent_of(lab.host(SOURCE)))


def kill_raylet(grid: RayGrid, lab: Lab) -> None:
    kill_and_wait(grid, lab.host(SOURCE), "/raylet/raylet")


def kill_gcs(grid: RayGrid, lab: Lab) -> None:
    kill_and_wait(grid, lab.host("gpu-master"), "/gcs/gcs_server")


def kill_driver(grid: RayGrid, lab: Lab) -> None:
    for pid in lab.host("gpu-master").find("distributed_grid.adapters.ray.driver stdio"):
        lab.host("gpu-master").kill(pid)


def cut_the_cable(grid: RayGrid, lab: Lab) -> None:
    lab.cut(lab.host(SOURCE))
    time.sleep(15)
    lab.heal(lab.host(SOURCE))


DEATHS = [kill_control_plane, kill_agent, kill_raylet, kill_gcs, kill_driver, cut_the_cable]


@pytest.mark.parametrize("die", DEATHS, ids=lambda die: die.__name__)
@pytest.mark.parametrize("when", ["asked for", "held", "given back", "running out"])
def test_grid_and_ray_agree_soon(
    ray_grid: RayGrid, ray_lab: Lab, when: str, die: Callable[[RayGrid, Lab], None]
) -> None:
    wait_until(lambda: all(ray_grid.is_alive(host.name) for host in ray_lab), 120)
    wait_until(lambda: ray_grid.lends(SOURCE), 150, 1)
    if when == "asked for":
        asking = ray_grid.start("boost", "request", *WORDS, "--json", "--wait", "60")
        time.sleep(0.25)
        die(ray_grid, ray_lab)
        said, _ = asking.communicate(timeout=200)
        name = json.loads(said)["boost_id"] if asking.returncode == 0 else uuid.uuid4().hex
        assert held(ray_grid, ray_lab, name) == (asking.returncode == 0)
        return
    name = boost(ray_grid, *WORDS, "--duration", "4" if when == "running out" else "600")["boost_id"]
    if when == "given back":
        giving = ray_grid.start("boost", "release", name)
        time.sleep(0.15)
        die(ray_grid, ray_lab)
        assert giving.wait(100) == 0
    else:
        time.sleep(3.9 if when == "running out" else 0)
        die(ray_grid, ray_lab)
    is_held = held(ray_grid, ray_lab, name)
    if when != "held":
        assert not is_held
