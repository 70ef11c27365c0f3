"""The real grid relieves itself: a pressed node's job moves by itself; where nothing can move, the node is degraded."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

CONFIG = """
nodes:
- {name: ash, host: local, role: head, cpu_count: 4, memory_gb: 1, background: {memory: 60}}
- {name: birch, host: local, cpu_count: 4, memory_gb: 2, background: {memory: BIRCH}}
resource_sharing:
  mode: offload_only
  policy: aggressive
  rebalance_interval: 0.5
  auto_offload: {enabled: ENABLED, check_interval_seconds: 0.5, cooldown_seconds: 5}
"""
WORK = """
import os, sys, time
kept = bytearray(300 * 2**20)
for at in range(0, len(kept), 4096):
    kept[at] = 1
with open(sys.argv[1], "a") as told:
    print(os.environ["GRID_NODE"], flush=True, file=told)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
"""


def begin(grid: Shell, *, birch: int = 0, enabled: bool = True) -> None:
    text = CONFIG.replace("BIRCH", str(birch)).replace("ENABLED", str(enabled).lower())
    (grid.cwd / "pressed.yaml").write_text(text)
    grid("status", "--config", "pressed.yaml", check=0)
    wait_until(lambda: all(node["state"] == "alive" for node in grid.observe("status")["nodes"]))


def start_work(grid: Shell, name: str, tmp_path: Path, *options: str) -> Path:
    """A job on ash that fills it, says where it runs, and ends when it may; the file in which it says so."""
    told = tmp_path / f"{name}.told"
    command = [sys.executable, "-c", WORK, str(told), str(tmp_path / f"{name}.end")]
    grid.detach("-j", name, "-r", "memory", "-a", "0.35", "-n", "ash", "--expects", "7200", *options, *command)
    wait_until(lambda: told.exists() and told.read_text())
    return told


def node(grid: Shell, name: str) -> dict[str, Any]:
    return next(one for one in grid.observe("status")["nodes"] if one["node_id"] == name)


def test_a_pressed_nodes_job_moves_by_itself_and_its_pressure_falls(grid: Shell, tmp_path: Path) -> None:
    begin(grid, enabled=False)
    told = start_work(grid, "work", tmp_path, "--restartable")
    wait_until(lambda: (node(grid, "ash")["memory_used_gb"] or 0) > 0.85)
    assert grid.json("offload", "auto", "--status")["enabled"] is False
    assert told.read_text().split() == ["ash"]
    grid("offload", "auto", "--enable", check=0)
    wait_until(lambda: told.read_text().split() == ["ash", "birch"], seconds=40)
    wait_until(lambda: (node(grid, "ash")["memory_used_gb"] or 1) < 0.7)
    (ended,) = wait_until(lambda: grid.events("move-ended"))
    assert (ended["data"]["automatic"], ended["data"]["end"]) == (True, "done")
    shown = grid.json("offload", "auto", "--status")
    assert (shown["enabled"], shown["configured"], shown["failures"]) == (True, False, 0)
    assert {one["node_id"] for one in shown["nodes"]} == {"ash", "birch"}
    assert "birch" in grid("explain", "work", check=0).stdout
    assert "ash is alive" in grid("explain", "ash", check=0).stdout
    (tmp_path / "work.end").touch()
    wait_until(lambda: grid.job("work")["state"] == "ended")
    assert told.read_text().split() == ["ash", "birch"]  # exactly once on each


def test_where_nothing_can_leave_the_node_is_degraded_and_low_work_waits(grid: Shell, tmp_path: Path) -> None:
    begin(grid, birch=85)
    grid.detach("-j", "low", "-a", "0.1", "-p", "low", "-n", "ash", "sleep", "300")
    wait_until(lambda: grid.job("low")["state"] == "running")
    start_work(grid, "work", tmp_path)
    wait_until(lambda: node(grid, "ash")["degraded"], seconds=40)
    assert "ash is degraded: memory at " in grid("status", check=0).stdout
    wait_until(lambda: grid.job("low")["state"] == "paused")
    assert "is degraded" in grid("explain", "low", check=0).stdout
    grid.detach("-j", "next", "-a", "0.1", "-n", "ash", "--strategy", "node_specific", "true")
    assert grid.job("next")["state"] == "queued"
    os.kill(grid.json("daemon", "status")["pid"], signal.SIGKILL)  # the next one knows that the node is degraded
    wait_until(lambda: grid("status", "--config", "pressed.yaml").returncode == 0)
    assert node(grid, "ash")["degraded"]
    wait_until(lambda: grid.job("low")["state"] == "paused")
    (tmp_path / "work.end").touch()
    wait_until(lambda: not node(grid, "ash")["degraded"], seconds=40)
    wait_until(lambda: grid.job("low")["state"] == "running")
    wait_until(lambda: grid.job("next")["state"] == "ended")
    kinds = [one["type"] for one in grid.events("node-degraded", "node-restored") if one["node_id"] == "ash"]
    assert kinds[:2] == ["node-degraded", "node-restored"]
    raised = [one for one in grid.events("alert-raised") if one["node_id"] == "ash"]
    assert any("ash is degraded" in one["reason"] for one in raised)
    grid("jobs", "cancel", "low", check=0)
