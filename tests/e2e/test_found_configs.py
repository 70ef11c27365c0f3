"""A config that was found and not named is no order: who may have written it, and what of it acts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.crashes.conftest import needs_root
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

PLACE = Path("config/my-cluster-enhanced.yaml")
NODES = "nodes: [{name: theirs, host: local}]\n"
NOBODY = 65534


def put_config(grid: Shell, text: str) -> Path:
    path = grid.cwd / PLACE
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def node_names(grid: Shell) -> list[str]:
    return [node["node_id"] for node in grid.json("status")["nodes"]]


def alarm(grid: Shell) -> tuple[str, Path]:
    """A config whose alert is raised at once, and the file that its command makes."""
    made = grid.cwd / "alarmed"
    script = grid.cwd / "alarm.sh"
    script.write_text(f"#!/bin/sh\ntouch {made}\n")
    script.chmod(0o755)
    return (
        f"{NODES}alerts: {{memory: 0.001, command: {script}}}\nresource_sharing: {{monitoring_interval: 0.2}}\n",
        made,
    )


def alerts(grid: Shell) -> list[str]:
    return grid("events", "--type", "alert-raised", "--json", check=0).stdout.splitlines()


def test_a_config_in_a_strangers_directory_is_not_used(grid: Shell) -> None:
    needs_root("give a directory away")
    text, made = alarm(grid)
    path = put_config(grid, text)
    os.chown(path.parent, NOBODY, NOBODY)
    done = grid("status", check=0)
    assert done.stderr == (
        f"grid: not using {PLACE}, because its folder belongs to uid {NOBODY}, not to you; "
        f"to use it all the same, name it: grid --config {PLACE} …\n"
    )
    assert node_names(grid) != ["theirs"]
    assert grid.json("daemon", "status")["config"] is None
    assert grid("status", check=0).stderr == "", "said once, when it would have been used"
    assert not made.exists()


def test_a_command_in_a_found_config_runs_only_once_the_file_was_named(grid: Shell) -> None:
    text, made = alarm(grid)
    path = put_config(grid, text)
    said = grid("status", check=0).stderr.splitlines()
    assert said[0] == f"grid: using ./{PLACE}"
    assert said[1:] == [
        f"grid: alerts.command in {path} acts only once you have named that file: grid --config {path} daemon start"
    ]
    assert node_names(grid) == ["theirs"]
    wait_until(lambda: alerts(grid))
    assert not made.exists()
    before = grid.daemon_pid()

    grid("status", "--config", str(path), check=0)  # a look: remembered, but nothing is restarted
    assert grid.daemon_pid() == before
    assert not made.exists()
    grid("run-shared", "--config", str(path), "true", check=0)  # needs a grid: it acts from now on
    assert grid.daemon_pid() == before, "alerts are a live key"
    wait_until(made.exists)
    grid("daemon", "stop", check=0)

    made.unlink()
    assert grid("status", check=0).stderr == f"grid: using ./{PLACE}\n"  # found again, and known
    wait_until(made.exists)
    grid("daemon", "stop", check=0)
    path.write_text(text + "# a comment\n")
    assert grid("status", check=0).stderr == f"grid: using ./{PLACE}\n"  # it means the same
    grid("daemon", "stop", check=0)
    path.write_text(text.replace("0.001", "0.002"))
    assert "acts only once you have named that file" in grid("status", check=0).stderr


def test_a_found_config_opens_no_port_to_others(grid: Shell) -> None:
    put_config(grid, NODES + "server: {host: 0.0.0.0, port: 0}\n")
    assert "server.host, server.port in " in grid("status", check=0).stderr
    info = grid.json("daemon", "status")
    assert info["rest"].startswith("https://127.0.0.1:")
    assert any("server.host, server.port in" in warning for warning in info["warnings"])


def test_work_under_way_is_not_disturbed_by_naming_the_file(grid: Shell) -> None:
    path = put_config(grid, NODES + "server: {port: 0}\n")
    job = grid.detach("sleep", "300")
    before = grid.daemon_pid()
    grid("run-shared", "-c", str(path), "-a", "0.1", "true", check=0)
    assert grid.daemon_pid() == before
    grid("jobs", "cancel", job, check=0)


def test_it_says_that_a_config_is_used_only_where_it_is(grid: Shell) -> None:
    other = grid.cwd / "other.yaml"
    other.write_text("nodes: [{name: mine, host: local}]\n")
    job = grid("run-shared", "-c", str(other), "--detach", "sleep", "300", check=0).stdout.strip()
    grid.kill_daemon()
    put_config(grid, NODES)
    (grid.host_dir / "grid.sock").unlink()
    done = grid("status", check=0)  # the job goes on under its own config, whatever is found here
    assert node_names(grid) == ["mine"]
    path = grid.cwd / PLACE
    assert done.stderr == (
        f"grid: {path} is not used while jobs or leases of {other} are alive; "
        f"to use it: grid --config {path} daemon start\n"
    )
    grid("jobs", "cancel", job, check=0)


def test_a_config_that_is_written_while_a_control_plane_runs_is_named_with_the_command_to_type(grid: Shell) -> None:
    assert grid("status", check=0).stderr == ""
    place = grid.state_dir / "cluster.yaml"
    place.write_text(NODES)
    advice = f"to use it: grid --config {place} daemon start"
    line = f"grid: {place} is new, and the control plane goes on with {{}}; {advice}\n"
    for _ in range(2):
        done = grid("status", check=0)
        assert done.stderr == line.format("this machine alone")
    assert node_names(grid) != ["theirs"]
    _, command = done.stderr.strip().split("to use it: grid ")
    grid(*command.split(), check=0)
    assert node_names(grid) == ["theirs"]
    assert grid("status", check=0).stderr == ""
    place.write_text(NODES.replace("theirs", "ours"))
    assert grid("status", check=0).stderr == line.format("the one it has read before")
    place.write_text(NODES)
    assert grid("status", check=0).stderr == ""
