"""Metrics of a real grid: the collector beside a daemon, and an alert that reaches its command."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from distributed_grid.client.client import Client
from distributed_grid.errors import NotFound
from distributed_grid.monitoring.resource_metrics import ResourceMetricsCollector, ResourceSnapshot
from distributed_grid.monitoring.usage_history import MINUTE
from distributed_grid.state_dir import StateDir
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e


def test_a_program_sees_what_the_agent_measured(grid: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRID_STATE_DIR", str(grid.state_dir))
    name = grid.json("status")["nodes"][0]["node_id"]

    async def story() -> ResourceSnapshot:
        collector = ResourceMetricsCollector()
        await collector.start()
        await collector.start()
        async with asyncio.timeout(20):
            while not (shown := collector.get_all_latest_snapshots()[name]).known:
                await asyncio.sleep(0.1)
        summary = collector.get_cluster_summary()
        assert summary["nodes"] == {"total": 1, "known": 1, "unknown": 0, "by_state": {"alive": 1}}
        assert summary["memory_gb"]["used"] > 0
        trend = collector.get_resource_trend(name, "MEMORY")
        assert (trend.resource_type, trend.windows) == ("memory", ())
        assert trend.current is not None
        assert 0 < trend.current <= 1
        assert collector.get_history(name)[-1].samples >= 1
        with pytest.raises(NotFound, match="no node is called nobody"):
            collector.get_resource_trend("nobody", "cpu")
        await collector.stop()
        await collector.stop()
        assert name in collector.get_all_latest_snapshots()  # a later call attaches again
        await collector.stop()
        return shown

    shown = asyncio.run(story())
    assert shown.cpu_cores >= 1
    assert shown.memory_used_gb is not None
    assert 0 < shown.memory_used_gb <= shown.memory_gb
    assert shown.pressure is not None


def test_an_alert_reaches_its_command_and_the_log(grid: Shell, tmp_path: Path) -> None:
    script = tmp_path / "tell"
    script.write_text(f"#!/bin/sh\ncat > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/alert\n")
    script.chmod(0o700)
    config = tmp_path / "c.yaml"
    config.write_text(f"nodes: [{{name: desk, host: local}}]\nalerts: {{memory: 0.0001, command: {script}}}\n")
    grid("--config", str(config), "status", check=0)
    alert = json.loads(wait_until(lambda: (tmp_path / "alert").exists() and (tmp_path / "alert").read_text()))
    assert (alert["node_id"], alert["resource_type"], alert["state"]) == ("desk", "memory", "raised")
    assert "alert raised: desk: memory at" in (grid.host_dir / "daemon.log").read_text()


def test_a_command_that_cannot_be_read_keeps_the_grid_from_starting_and_says_so(grid: Shell, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text('nodes: [{name: desk, host: local}]\nalerts: {command: "tell \'ana"}\n')
    said = grid("--config", str(config), "status", check=2).stderr
    assert "alerts.command cannot be read: no closing quotation" in said


def test_the_history_survives_a_restart_and_is_written_as_often_as_the_config_says(grid: Shell, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("nodes: [{name: desk, host: local}]\nresource_sharing: {monitoring_interval_seconds: 0.2}\n")
    grid("--config", str(config), "daemon", "start", check=0)
    client = Client(StateDir(grid.state_dir), may_start=False)

    def samples() -> int:
        return sum(row["samples"] for row in client.call("get_metrics", kind="history", node="desk")["history"])

    with client:
        wait_until(lambda: samples() >= 3)
        wait_until(lambda: _written_samples(grid.host_dir / "history.db") >= 3)
    grid.kill_daemon()
    grid("--config", str(config), "daemon", "start", check=0)
    with client:
        assert samples() >= 3
        assert client.call("get_metrics", kind="levels")["levels"].keys() == {"desk"}


def _written_samples(file: Path) -> int:
    with closing(sqlite3.connect(file)) as db:
        rows = db.execute("SELECT row FROM minutes").fetchall()
    return int(np.frombuffer(b"".join(row for (row,) in rows), MINUTE)["samples"].sum())
