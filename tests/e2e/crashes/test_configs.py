"""Which config rules: the one work goes on under, unless the user says otherwise and nothing is held."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.crashes.conftest import a_gate, daemon_pid, kill_nine, one_line, open_gate
from tests.support.processes import is_running
from tests.support.project import PROJECT, set_rebalance_interval
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

SHIPPED = PROJECT / "config" / "my-cluster-enhanced.yaml"


def a_config(folder: Path, node: str) -> str:
    """A config file of one local node with that name."""
    path = folder / f"{node}.yaml"
    path.write_text(f"nodes:\n- name: {node}\n  host: local\n")
    return str(path)


def names(grid: Shell, **options: Any) -> list[str]:
    return sorted(node["node_id"] for node in grid.json("status", **options)["nodes"])


def test_a_config_that_contradicts_a_busy_daemon_is_refused_with_the_command_to_type(grid: Shell) -> None:
    one, two = a_config(grid.cwd, "one"), a_config(grid.cwd, "two")
    gate = a_gate(grid, "gate")
    job = grid("run-shared", "--config", one, "--detach", "sh", "-c", "read x < gate; exit 5", check=0).stdout.strip()
    first = daemon_pid(grid)

    said = one_line(grid("run-shared", "--config", two, "true"))
    assert f"{two} differs in nodes.one, nodes.two from the config in use" in said
    assert "holds 1 lease:" in said
    assert "grid daemon stop" in said
    one_line(grid("run-shared", "true", env={"GRID_CONFIG": two}))
    shown = grid("status", "--config", two, check=0)  # a look goes on, with one line
    assert shown.stderr.startswith(f"grid: the control plane uses {one}, not {two} (nodes.one, nodes.two)")
    assert names(grid, env={"GRID_CONFIG": one}) == ["one"]  # the same config does not contradict
    assert daemon_pid(grid) == first

    open_gate(gate)
    assert grid("jobs", "wait", job, "--timeout", "10").returncode == 5
    grid("run-shared", "--config", two, "true", check=0)  # nothing is held any more: the daemon is replaced
    assert names(grid) == ["two"]
    assert daemon_pid(grid) != first
    assert grid.json("daemon", "status")["config"] == two
    assert grid.job(job)["node_id"] == "one"


@pytest.mark.parametrize("deed", ["goes on", "cancelled"])
def test_typing_that_command_leaves_the_work_of_the_old_config_in_good_hands(grid: Shell, deed: str) -> None:
    one, two = a_config(grid.cwd, "one"), a_config(grid.cwd, "two")
    gate = a_gate(grid, "gate")
    job = grid("run-shared", "--config", one, "--detach", "sh", "-c", "read x < gate; exit 5", check=0).stdout.strip()
    pid = wait_until(lambda: grid.job(job)["attempts"][-1]["pid"])

    grid("daemon", "stop", check=0)
    grid("status", "--config", two, check=0)
    assert grid.job(job)["state"] == "running"
    assert is_running(pid)
    if deed == "goes on":
        open_gate(gate)
    else:
        grid("jobs", "cancel", job, check=0)
    assert grid("jobs", "wait", job, "--timeout", "10").returncode == (5 if deed == "goes on" else 130)
    assert not is_running(pid)
    wait_until(lambda: names(grid) == ["two"])


@pytest.mark.parametrize("other_has_one", [False, True], ids=["without a config", "with another config"])
def test_work_goes_on_under_its_config_wherever_the_next_command_is_typed(
    grid: Shell, tmp_path: Path, other_has_one: bool
) -> None:
    (grid.cwd / "config").mkdir()
    shutil.copy(SHIPPED, grid.cwd / "config")
    gate = a_gate(grid, "gate")
    started = grid("run-shared", "-n", "gpu2", "--detach", "sh", "-c", "read x < gate; exit 5", check=0)
    assert "config/my-cluster-enhanced.yaml" in started.stderr
    job = started.stdout.strip()
    wait_until(lambda: grid.job(job)["state"] == "running")
    kill_nine(grid)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if other_has_one:
        (elsewhere / "config").mkdir()
        os.rename(a_config(elsewhere, "mine"), elsewhere / "config" / SHIPPED.name)
    there = Shell(grid.state_dir, elsewhere)
    assert names(there) == ["gpu-master", "gpu1", "gpu2"]
    assert there.json("daemon", "status")["config"] == str(grid.cwd / "config" / SHIPPED.name)
    assert there.job(job)["state"] == "running"
    assert there.job(job)["node_id"] == "gpu2"
    open_gate(gate)
    assert there("jobs", "wait", job, "--timeout", "10").returncode == 5


def test_what_the_grid_borrowed_by_itself_keeps_no_config_and_no_node(grid: Shell) -> None:
    (grid.cwd / "config").mkdir()
    shutil.copy(SHIPPED, grid.cwd / "config")
    set_rebalance_interval(grid.cwd / "config", 1)
    shipped = names(grid)
    wait_until(lambda: grid.observe("boost", "status")["boosts"], pause=0.2)
    grid("run-shared", "--config", a_config(grid.cwd, "one"), "true", check=0)
    grid("daemon", "stop", check=0)
    assert set(names(grid)) == set(shipped)
