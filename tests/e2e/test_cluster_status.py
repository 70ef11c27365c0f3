"""`grid cluster status`: what every node has free and has lent, its versions, also of nodes that joined by a token."""

from __future__ import annotations

import platform
from pathlib import Path

from distributed_grid import __version__
from tests.support.shell import Shell, wait_until


def test_every_node_is_shown_with_what_it_has_free_and_lent_and_its_versions(grid: Shell, tmp_path: Path) -> None:
    here = grid.json("status")["nodes"][0]["node_id"]
    token = grid.json("daemon", "join-token", "create", "--node", "far")["join_token"]
    agent = grid.start("agent", "--dir", str(tmp_path / "agent"), "--join", token)
    try:
        wait_until(lambda: [node["state"] for node in grid.observe("status")["nodes"]] == ["alive", "alive"])
        grid.detach("-j", "work", "-n", here, "-a", "0.5", "sleep", "300")
        wait_until(lambda: grid.job("work")["state"] == "running")
        rows = {row["node_id"]: row for row in grid.json("cluster", "status")}
        assert list(rows) == [here, "far"]
        assert [(row["address"], row["link"]) for row in rows.values()] == [("local", "local"), ("joined", "up")]
        nodes = {node["node_id"]: node for node in grid.json("status")["nodes"]}
        for name, row in rows.items():
            assert (row["version"], row["python"]) == (__version__, platform.python_version())
            assert row["cpu_lent"] == (0.5 if name == here else 0)
            assert row["cpu_free"] + row["cpu_lent"] <= row["cpu_cores"] == nodes[name]["cpu_cores"]
            assert row["memory_gb"] > 0
            assert row["ray"] is None
        assert [row["node_id"] for row in grid.json("cluster", "status", "far")] == ["far"]
        shown = grid("cluster", "status", check=0).stdout.splitlines()
        assert "CORES FREE+LENT  MEMORY FREE+LENT" in shown[0]
        assert [line.split()[:4] for line in shown[1:]] == [
            [here, "local", "alive", "local"],
            ["far", "joined", "alive", "up"],
        ]
        assert f"{rows[here]['cpu_free']:g} + 0.5" in shown[1]
        grid("jobs", "cancel", "work", check=0)
    finally:
        agent.terminate()
        agent.communicate(timeout=20)
    wait_until(lambda: grid.json("cluster", "status", "far")[0]["link"] == "down")
