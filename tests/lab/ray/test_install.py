"""`grid cluster install --ray` on a host that has only Python: Ray arrives by SSH, and runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.clusters import Cluster
from tests.lab.lab import Lab, problem

pytestmark = [pytest.mark.lab, pytest.mark.chaos, pytest.mark.timeout(400)]


def test_ray_is_installed_started_stopped_and_removed_where_there_was_only_python(tmp_path: Path) -> None:
    if reason := problem():
        pytest.skip(reason)
    with Lab(["gpu1"], memory_gb=4, home_mb=1600) as lab:
        (host,) = lab
        grid = Cluster(lab, tmp_path, gpu1={"role": "head"})
        try:
            refused = grid("cluster", "start", "--ray", check=1).stderr
            assert "gpu1: Ray is not installed there; type: grid cluster install --ray gpu1" in refused
            lines = grid("cluster", "install", "--ray", check=0, timeout=300).stdout
            assert "MB of wheels: 100 %" in lines
            assert "installed ray-2." in lines
            again = grid("cluster", "install", "--ray", check=0, timeout=120).stdout
            assert "MB of wheels" not in again
            assert "was there already" in again
            (row,) = grid.results("start", "--ray").values()
            assert row["ok"], row
            (command,) = host.run(["sh", "-c", "ls -d ~/.distributed_grid/versions/ray-*/bin/ray"]).stdout.split()
            environ = grid.json("cluster", "env", "gpu1")
            assert environ["GRID_RAY_PYTHON"] == command.removesuffix("ray") + "python", "what boost run puts first"
            said = host.run([command, "status"], env=environ, timeout=60).stdout
            assert "2.0 CPU" in said
        finally:
            grid.close()
        assert grid.clear_leftovers() == {}
