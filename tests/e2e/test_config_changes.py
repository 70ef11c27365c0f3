"""A cluster file that changes under a busy control plane: by meaning, applied or named, and nothing is locked out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

CONFIG = """\
name: lab
nodes:
- {name: here, host: local, labels: {room: cellar, row: two}, cpu_count: 2}
- {name: far, host: far.invalid}
"""
COMMENT = CONFIG + "# a comment\n"
REORDERED = """\
nodes:
- {cpu_count: 2.0, labels: {row: two, room: cellar}, host: local, name: here, port: 22}
- {hostname: far.invalid, name: far}
name: lab
"""
NOTHING_LENT = CONFIG.replace(
    "host: local", "host: local, thresholds: {cpu_min_cores: 5000, cpu_percent_max: 100, dwell: 0}"
)
OTHER_HOST = CONFIG.replace("far.invalid", "farther.invalid")
BROKEN = CONFIG + "nodes: [\n"
RUN = ("run-shared", "-a", "0.1", "-w", "0", "true")


class NamedFile:
    """Commands that name one cluster file, while a job runs."""

    def __init__(self, grid: Shell) -> None:
        self._grid = grid
        self.path = grid.cwd / "cluster.yaml"
        self.path.write_text(CONFIG)
        self.job = self("run-shared", "--detach", "-a", "0.1", "sh", "-c", "echo begun; sleep 600").stdout.strip()
        wait_until(lambda: grid.job(self.job)["state"] == "running")
        self.pid = grid.daemon_pid()

    def __call__(self, *words: str, check: int = 0) -> Any:
        return self._grid(*words, check=check, env={"GRID_CONFIG": str(self.path)})

    def assert_nothing_is_locked_out(self, problem: str) -> None:
        """Looks go on with one line about the problem; so does a cancel."""
        for words in (("status",), ("jobs", "list"), ("jobs", "logs", self.job), ("explain", self.job), ("events",)):
            done = self(*words)
            assert problem in done.stderr, words
            assert done.stderr.count("\n") == 1, words
        assert "begun" in self("jobs", "logs", self.job).stdout
        assert self._grid.daemon_pid() == self.pid
        other = self._grid.detach("-a", "0.1", "sleep", "600")
        assert problem in self("jobs", "cancel", other).stderr
        assert self._grid.job(other)["outcome"] == "cancelled"


@pytest.fixture
def file(grid: Shell) -> NamedFile:
    return NamedFile(grid)


@pytest.mark.parametrize("text", [COMMENT, REORDERED], ids=["comment", "order and spelling"])
def test_a_file_that_means_the_same_changes_nothing(grid: Shell, file: NamedFile, text: str) -> None:
    file.path.write_text(text)
    for words in (("status",), RUN, ("jobs", "list")):
        assert file(*words).stderr == "", words
    assert file("config", "reload").stdout == f"nothing has changed in {file.path}\n"
    assert grid.daemon_pid() == file.pid


def test_a_changed_threshold_is_applied_at_once_and_acts(grid: Shell, file: NamedFile) -> None:
    file(*RUN)
    file.path.write_text(NOTHING_LENT)
    look = file("status").stderr
    key = "nodes.here.thresholds"
    assert look == f"grid: {file.path} has changed in {key}; to apply that, type: grid config reload\n"
    applied = f"grid: applied {key} of {file.path}\n"
    refused = file(*RUN, check=1).stderr
    assert refused.startswith(applied)
    assert "5000 cores needed to lend any" in refused
    assert file("status").stderr == "", "it is in use"
    file.path.write_text(CONFIG)
    assert grid("config", "reload", check=0).stdout == f"applied {key} of {file.path}\n"
    assert file(*RUN).stderr == ""
    assert (grid.daemon_pid(), grid.job(file.job)["state"]) == (file.pid, "running")


def test_another_host_is_named_and_needs_the_command_that_is_said(grid: Shell, file: NamedFile) -> None:
    file.path.write_text(OTHER_HOST)
    file.assert_nothing_is_locked_out("has changed in nodes.far.host; to apply that, type: grid config reload")
    advice = "this one holds 1 lease: wait until it ends, or type: grid daemon stop (jobs go on)"
    assert file(*RUN, check=1).stderr == (
        f"grid: {file.path} differs in nodes.far.host from the config in use; that takes a new control plane, and "
        f"{advice}\n"
    )
    reloaded = file("config", "reload", check=1).stdout
    assert reloaded == f"not applied: nodes.far.host: a new control plane is needed, and {advice}\n"
    file("daemon", "stop")
    assert file(*RUN).stderr == ""
    assert grid.job(file.job)["state"] == "running"
    hosts = {row["node_id"]: row["address"] for row in grid.json("cluster", "status")}
    assert hosts["far"] == "farther.invalid"


def test_a_config_that_takes_a_new_control_plane_says_so_in_one_line(grid: Shell, file: NamedFile) -> None:
    file("jobs", "cancel", file.job)
    file.path.write_text(OTHER_HOST)
    started = file(*RUN, check=0)
    assert started.stderr == f"grid: the control plane is started anew with {file.path}: nodes.far.host differs\n"
    assert grid.daemon_pid() != file.pid
    assert file(*RUN, check=0).stderr == ""


def test_a_reload_applies_what_it_can_and_names_the_rest(grid: Shell, file: NamedFile) -> None:
    file.path.write_text(OTHER_HOST + "fairness: {patience: 7}\n")
    answer = file("config", "reload", "--json", check=1).stdout
    assert '"fairness.patience_seconds"' in answer.partition('"pending"')[0]
    assert grid.json("config", "show")["fairness"]["patience_seconds"] == 7
    file("jobs", "cancel", file.job)
    assert file("config", "reload").stdout == f"a new control plane uses {file.path}\n"
    assert grid.daemon_pid() != file.pid


def test_a_broken_or_missing_file_locks_out_no_look_cancel_or_stop(grid: Shell, file: NamedFile) -> None:
    file.path.write_text(BROKEN)
    file.assert_nothing_is_locked_out(f"grid: {file.path}:5: ")
    refused = file(*RUN, check=2).stderr
    assert refused.startswith(f"grid: {file.path}:5: ")
    assert refused.endswith("; without --config (and $GRID_CONFIG) the config in use is kept\n")
    file.path.unlink()
    file.assert_nothing_is_locked_out(f"grid: {file.path}: no such file; the control plane goes on with the config")
    grid(*RUN, check=0)
    assert "done" in file("cluster", "stop", "here", "--force").stdout
    assert "stopped" in file("daemon", "stop").stdout


def test_a_control_plane_that_was_killed_finds_its_jobs_though_the_file_is_gone(grid: Shell, file: NamedFile) -> None:
    file.path.unlink()
    grid.kill_daemon()
    shown = file("jobs", "list")
    assert file.job in shown.stdout
    note = f"grid: {file.path}: no such file; the control plane goes on with the config it has read before\n"
    assert note in shown.stderr.splitlines(keepends=True)  # another grid may have taken its port meanwhile
    file("jobs", "cancel", file.job)
    wait_until(lambda: grid.job(file.job)["outcome"] == "cancelled")


def test_none_is_this_machine_alone_whatever_files_there_are(grid: Shell, tmp_path: Path) -> None:
    clone = grid.cwd / "config" / "my-cluster-enhanced.yaml"
    clone.parent.mkdir()
    clone.write_text("nodes: [{name: one, host: local}, {name: two, host: local}]\n")
    (grid.cwd / "none").write_text("nodes: [{name: three, host: local}]\n")
    said = grid("status", check=0).stderr
    assert said == (
        "grid: using ./config/my-cluster-enhanced.yaml: 2 simulated nodes; for this machine alone: --config none\n"
    )
    anew = grid("run-shared", "-c", "none", "-a", "0.1", "true", check=0).stderr
    assert re.fullmatch(r"grid: the control plane is started anew with --config none: nodes\.one, .* differ\n", anew)
    info = grid.json("daemon", "status")
    assert info["config"] is None
    assert len(grid.json("status")["nodes"]) == 1
    assert grid("status", "--config", "none", check=0).stderr == ""
    assert grid("status", check=0, env={"GRID_CONFIG": "none"}).stderr == ""
    grid("run-shared", "-c", "./none", "-a", "0.1", "true", check=0)
    assert [node["node_id"] for node in grid.json("status")["nodes"]] == ["three"]
    assert "three" in grid("status", "-c", "none", check=0).stdout
    assert grid("config", "check", "none", check=0).stdout == "none: fine, 1 node\n"
    grid("daemon", "stop", check=0)
    grid("status", check=0, env={"GRID_CONFIG": "none"})
    assert grid.json("daemon", "status")["config"] is None
