"""Keys of the config that only a whole grid shows: its name, its log, and sharing that is not enabled."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.shell import Shell

LOCAL = "nodes: [{name: desk, host: local}]\n"


def a_config(folder: Path, text: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(LOCAL + text)
    return str(path)


def test_the_name_of_the_cluster_is_shown(grid: Shell, tmp_path: Path) -> None:
    grid("--config", a_config(tmp_path, "name: lab\n"), "daemon", "start", check=0)
    assert "name:           lab\n" in grid("daemon", "status", check=0).stdout
    assert grid.json("daemon", "status")["name"] == "lab"


def test_the_log_goes_to_the_file_that_the_config_names(grid: Shell, tmp_path: Path) -> None:
    log = tmp_path / "grid.log"
    config = a_config(tmp_path, f"logging: {{file: {log}, format: json, level: info}}\n")
    grid("--config", config, "daemon", "start", check=0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(line["message"].startswith("serving, version") and line["level"] == "info" for line in lines)
    assert "serving, version" not in (grid.host_dir / "daemon.log").read_text()


def test_a_log_that_cannot_be_opened_is_one_line(grid: Shell, tmp_path: Path) -> None:
    config = a_config(tmp_path, f"logging: {{file: {tmp_path}/none/grid.log}}\n")
    said = grid("--config", config, "daemon", "start", check=1).stderr
    assert f"the log {tmp_path}/none/grid.log cannot be opened: No such file or directory" in said


def test_shared_status_says_when_sharing_is_not_enabled(grid: Shell, tmp_path: Path) -> None:
    grid("--config", a_config(tmp_path, "resource_sharing: {enabled: false}\n"), "daemon", "start", check=0)
    assert grid("shared-status", check=0).stdout.startswith("Resource sharing not enabled: ")
    assert grid.json("shared-status")["enabled"] is False
    assert "Resource sharing not enabled" in grid("run-shared", "true", check=1).stderr
