"""`grid cluster start --ray` on three real hosts: a Ray cluster that asks for a token."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.lab import Lab
from tests.lab.ray.ray_grids import RayGrid
from tests.support.project import PROJECT
from tests.support.shell import wait_until

pytestmark = pytest.mark.lab

NODES = """
import json, ray
ray.init(log_to_driver=False, logging_level="ERROR")
print(json.dumps({node["NodeName"]: [node["Alive"], node["NodeManagerAddress"], node["Labels"].get("grid-node"),
    node["Resources"]] for node in ray.nodes()}))
"""


def test_every_host_is_a_node_of_ray_under_its_own_name_with_what_it_has(ray_grid: RayGrid, ray_lab: Lab) -> None:
    found = ray_grid.program(ray_lab.host("gpu1"), NODES)
    assert sorted(found) == ["gpu-master", "gpu1", "gpu2"]
    for host in ray_lab:
        alive, address, label, has = found[host.name]
        assert (alive, address, label) == (True, host.address, host.name)
        assert has["CPU"] == 2
        assert has["memory"] == 3 * 1024**3


def test_ray_status_works_with_what_the_grid_says_to_export_and_not_without(ray_grid: RayGrid, ray_lab: Lab) -> None:
    head = ray_lab.host("gpu-master")
    # What Ray says of itself follows its nodes by some seconds.
    wait_until(lambda: "6.0 CPU" in ray_grid.ray(head, "status").stdout, 60)
    stranger = {"RAY_ADDRESS": ray_grid.environ(head)["RAY_ADDRESS"], "RAY_AUTH_MODE": "disabled"}
    refused = ray_grid.ray(head, "status", env=stranger, check=False)
    assert refused.returncode != 0
    assert "Authentication" in refused.stderr


def test_the_token_is_a_file_for_its_owner_alone_and_on_no_command_line(ray_grid: RayGrid, ray_lab: Lab) -> None:
    token = next(ray_grid.host_dir.glob("ray/token"))
    assert token.stat().st_mode & 0o777 == 0o600
    for host in ray_lab:
        path = ray_grid.environ(host)["RAY_AUTH_TOKEN_PATH"]
        assert host.run(["stat", "-c", "%a %U", path]).stdout.split() == ["600", host.user]
        assert host.run(["cat", path]).stdout == token.read_text()
        assert not [line for _, line in host.processes() if token.read_text() in line]


def test_the_dashboard_is_on_loopback_only_and_within_reach_of_the_control_plane(
    ray_grid: RayGrid, ray_lab: Lab
) -> None:
    head = ray_lab.host("gpu-master")
    ask = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).status)"
    assert head.run(["python3", "-c", ask, "http://127.0.0.1:8265/"]).stdout.strip() == "200"
    refused = head.run(["python3", "-c", ask, f"http://{head.address}:8265/"], check=False)
    assert "Connection refused" in refused.stderr
    assert "dashboard  http://127.0.0.1:" in ray_grid("cluster", "status", check=0).stdout


def test_status_says_where_ray_is_on_every_node(ray_grid: RayGrid, ray_lab: Lab) -> None:
    for row in ray_grid.json("cluster", "status"):
        assert row["ray"]["address"] == f"{ray_lab.host('gpu-master').address}:6379"
        assert (row["ray"]["state"], row["ray"]["authenticated"], row["ray"]["risk"]) == ("running", True, None)


def test_starting_it_again_leaves_what_runs_alone(ray_grid: RayGrid, ray_lab: Lab) -> None:
    before = [host.find("/raylet/raylet") for host in ray_lab]
    assert [len(pids) for pids in before] == [1, 1, 1]
    ray_grid.start_ray()
    assert [host.find("/raylet/raylet") for host in ray_lab] == before


def test_the_validation_finds_all_well(ray_grid: RayGrid) -> None:
    script = PROJECT / "scripts" / "validate_ray_cluster.py"
    done = subprocess.run(
        [sys.executable, str(script), "--json"],
        env=ray_grid.env,
        cwd=ray_grid.cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (0, True), done.stdout + done.stderr
    assert {check["name"] for check in found["checks"] if check["ok"]} >= {
        *("connection", "nodes", "versions", "authentication", "tasks", "placement groups", "leftovers"),
    }


def test_what_the_page_about_ray_tells_to_type_on_a_running_cluster_works(ray_grid: RayGrid) -> None:
    page = (PROJECT / "docs/guide/ray.md").read_text()
    typed = re.findall(r"^\$ grid (cluster (?:status|env).*)$", page, re.MULTILINE)
    assert len(typed) == 3
    for line in typed:
        assert "token" in ray_grid(*shlex.split(line), check=0).stdout


def test_a_ray_that_the_grid_did_not_start_is_named_and_left_alone(
    ray_grid: RayGrid, ray_lab: Lab, tmp_path: Path
) -> None:
    (gcs,) = ray_lab.host("gpu-master").find("/gcs/gcs_server")
    other = RayGrid(ray_lab, tmp_path)
    try:
        said = other("cluster", "start", "--ray", check=1).stderr
        assert f"port 6379 is taken by pid {gcs} (gcs_server), which this grid did not start" in said
        assert "nothing was started" in said
    finally:
        other.close()
    assert ray_lab.host("gpu-master").find("/gcs/gcs_server") == [gcs]


def test_versions_that_differ_are_named_node_by_node_and_nothing_is_started(
    ray_grid: RayGrid, ray_lab: Lab, tmp_path: Path
) -> None:
    other = """#!/bin/sh\necho '{"python": "3.12.9", "ray": "2.41.0"}'\n"""
    ray_lab.host("gpu1").run(["sh", "-c", "cat > other-python; chmod 755 other-python"], input=other)
    ports = {"port": 6400, "client_port": 6401, "dashboard_port": 6402}
    grid = RayGrid(ray_lab, tmp_path, ray=ports, gpu1={"ray_python": "~/other-python"})
    try:
        said = grid("cluster", "start", "--ray", check=1).stderr
        assert "gpu1: Python 3.12.9, Ray 2.41.0" in said
        assert "gpu2: Python 3.1" in said
        assert "nothing was started" in said
        assert [row["wanted"] for row in grid.json("cluster", "status")] == [False, False, False]
    finally:
        grid.close()
