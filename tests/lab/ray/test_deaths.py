"""Whatever of grid or Ray dies: soon a boost is either held everywhere or nowhere, and never twice."""

from __future__ import annotations

import contextlib

import pytest

from tests.lab.clusters import agent_of
from tests.lab.lab import Lab
from tests.lab.ray.ray_agreement import held, kill_and_wait
from tests.lab.ray.ray_grids import Console, RayGrid, boost
from tests.support.shell import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("nothing_held")]


def test_a_control_plane_that_is_killed_finds_its_boosts_again_and_removes_what_is_nobodys(
    ray_grid: RayGrid, ray_lab: Lab
) -> None:
    found = boost(ray_grid, "gpu-master", "cpu", "1", "--source", "gpu2")
    ray_grid.kill_daemon()
    with contextlib.closing(Console(ray_grid, ray_lab.host("gpu-master"))) as console:
        made = console(
            """
            name, left = "grid-boost-nobody-7", {"lifetime": "detached"}
            return ray.util.placement_group([{"CPU": 0.1}], name=name, **left).wait(20)
            """
        )
        assert made is True
        assert held(ray_grid, ray_lab, found["boost_id"])
        wait_until(lambda: console.groups() == {found["placement_group"]: "gpu2"}, 30)


def test_an_agent_that_is_killed_costs_no_boost(ray_grid: RayGrid, ray_lab: Lab) -> None:
    found = boost(ray_grid, "gpu-master", "cpu", "1", "--source", "gpu2")
    ray_lab.host("gpu2").kill(agent_of(ray_lab.host("gpu2")))
    assert held(ray_grid, ray_lab, found["boost_id"])


def test_a_source_whose_raylet_dies_is_bound_again_when_it_is_back(ray_grid: RayGrid, ray_lab: Lab) -> None:
    found = boost(ray_grid, "gpu-master", "cpu", "1", "--source", "gpu2")
    kill_and_wait(ray_grid, ray_lab.host("gpu2"), "/raylet/raylet")
    assert held(ray_grid, ray_lab, found["boost_id"])


def test_a_ray_that_has_forgotten_everything_is_started_anew_and_bound_again(ray_grid: RayGrid, ray_lab: Lab) -> None:
    found = boost(ray_grid, "gpu-master", "cpu", "1", "--source", "gpu1")
    kill_and_wait(ray_grid, ray_lab.host("gpu-master"), "/gcs/gcs_server")
    assert held(ray_grid, ray_lab, found["boost_id"])


def test_a_donor_that_is_cut_off_is_either_back_or_given_up(ray_grid: RayGrid, ray_lab: Lab) -> None:
    found = boost(ray_grid, "gpu-master", "cpu", "1", "--source", "gpu2")
    host = ray_lab.host("gpu2")
    ray_lab.cut(host)
    try:
        wait_until(lambda: not ray_grid.is_alive("gpu2"), 30)
    finally:
        ray_lab.heal(host)
    wait_until(lambda: ray_grid.is_alive("gpu2"), 60)
    held(ray_grid, ray_lab, found["boost_id"])  # either will do, if only both agree
