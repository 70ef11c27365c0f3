"""What becomes of the grid's Ray when parts of it, or the control plane, are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.lab import Lab
from tests.lab.ray.ray_grids import RayGrid, ray_processes
from tests.lab.ray.test_cluster_start import NODES
from tests.support.shell import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.chaos, pytest.mark.timeout(400)]


def _session(grid: RayGrid) -> str:
    """The session of a Ray that runs on every node; empty while it does not."""
    rows = [row["ray"] for row in grid.json("cluster", "status")]
    sessions = {row["session"] for row in rows if row and row["state"] == "running"}
    return sessions.pop() if len(sessions) == 1 and all(row and row["state"] == "running" for row in rows) else ""


def test_a_ray_that_dies_is_started_anew_by_whichever_control_plane_is_there(ray_lab: Lab, tmp_path: Path) -> None:
    ports = {"port": 6500, "client_port": 6501, "dashboard_port": 6502, "min_worker_port": 21000}
    grid = RayGrid(ray_lab, tmp_path, ray={**ports, "max_worker_port": 21999, "tls": True})
    head, worker = ray_lab.host("gpu-master"), ray_lab.host("gpu1")
    try:
        grid.start_ray()
        first = _session(grid)
        assert first
        (gcs,) = [pid for pid in head.find("/gcs/gcs_server") if "6500" in dict(head.processes())[pid]]
        head.kill(gcs)
        second = wait_until(lambda: _session(grid) not in ("", first) and _session(grid), seconds=150, pause=1)
        grid.kill_daemon()
        (raylet,) = [pid for pid in worker.find("/raylet/raylet") if second in dict(worker.processes())[pid]]
        worker.kill(raylet)
        wait_until(lambda: grid.json("cluster", "status", "gpu1")[0]["ray"]["state"] != "running", seconds=60, pause=1)
        assert wait_until(lambda: _session(grid), seconds=150, pause=1) == second
        found = wait_until(lambda: len(alive := _alive(grid, ray_lab)) == 3 and alive, seconds=90, pause=1)
        assert sorted(found) == ["gpu-master", "gpu1", "gpu2"]
    finally:
        grid.close()
    assert not [line for host in ray_lab for line in ray_processes(host) if "6500" in line]


def _alive(grid: RayGrid, lab: Lab) -> list[str]:
    return [name for name, node in grid.program(lab.host("gpu2"), NODES).items() if node[0]]
