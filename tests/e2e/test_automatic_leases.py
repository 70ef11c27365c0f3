"""Automatic leases of a node under pressure are used: by that node's work, by blocks, and by requests for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

OWN = "thresholds: {cpu_percent_max: 100, memory_percent_max: 100, cpu_min_cores: 0, memory_min_gb: 0, dwell: 0}"
CONFIG = f"""
nodes:
- {{name: small, host: local, role: head, memory_gb: 0.5, simulated: false, trust_declared: true, {OWN}}}
- {{name: large, host: local, memory_gb: 4000, simulated: false, trust_declared: true, {OWN}}}
resource_sharing:
  mode: share_and_offload
  policy: aggressive
  rebalance_interval: 2
  thresholds: {{cpu_pressure_high: 1.0, gpu_pressure_high: 1.0}}
"""
"""Any machine uses more than the half GB that `small` is said to have."""


def automatic(grid: Shell) -> list[dict[str, Any]]:
    boosts: list[dict[str, Any]] = grid.observe("boost", "status")["boosts"]
    return [one for one in boosts if one["automatic"] and one["is_active"] and one["target_node"] == "small"]


def held_by_the_grid(grid: Shell) -> float:
    rows = grid.query("get_lending_report", by="user")["rows"]
    return float(next(row["held_gb"] for row in rows if row["user"] == "grid"))


def test_a_pressed_nodes_work_runs_with_what_was_borrowed_for_it(grid: Shell) -> None:
    (grid.cwd / "two.yaml").write_text(CONFIG)
    grid("status", "--config", "two.yaml", check=0)
    boost = wait_until(lambda: automatic(grid), seconds=40, pause=0.2)[0]
    assert (boost["source_node"], boost["user"], boost["used_amount"]) == ("large", "grid", 0.0)
    words = ("boost", "run", "-j", "within", boost["boost_id"], "--")
    assert grid(*words, "sh", "-c", "echo $GRID_NODE $GRID_BOOST", check=0).stdout.split() == [
        "large",
        boost["boost_id"],
    ]
    assert "what its boost holds, medium" in grid("explain", "within", check=0).stdout
    for name, more in (("named", ["--for", "small"]), ("typed", [])):
        grid("run-shared", "-j", name, *more, "-r", "memory", "-a", "0.05", "true", check=0)
    grid("memory", "allocate", "32MB", "--key", "block", check=0)
    used = [boost for boost in automatic(grid) if boost["used_amount"]]
    assert "USED" in grid("boost", "status", check=0).stdout
    assert used
    wait_until(lambda: abs(held_by_the_grid(grid) - sum(boost["amount"] for boost in automatic(grid))) < 0.01)
    lines = grid.events("rebalanced")
    given = [line["data"]["allocation_id"] for line in lines if line["data"]["action"] == "used"]
    assert len(given) == 3
    assert all(line["node_id"] == "small" for line in lines)
    explained = grid("explain", "named", check=0).stdout
    assert "carved out of auto-small-memory-" in explained
    wrong = grid("run-shared", "--for", "nowhere", "true")
    assert wrong.returncode != 0
    assert "no node is called nowhere" in wrong.stderr
