"""Moves of jobs between the nodes of a real grid: once, with the right output, whatever dies meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

CONFIG = """
nodes:
- {name: left, host: local, simulated: true, cpu_count: 4, memory_gb: 8}
- {name: right, host: local, simulated: true, cpu_count: 4, memory_gb: 8}
"""
COUNT = """
import os, pathlib, sys, time
saved, mark = pathlib.Path(os.environ["GRID_CHECKPOINT_DIR"], "n"), pathlib.Path(os.environ["GRID_CHECKPOINT"])
log, end = pathlib.Path(sys.argv[1]), int(sys.argv[2])
n = int(saved.read_text()) if saved.exists() else 0
with log.open("a") as file:
    file.write(f"{os.environ['GRID_NODE']} begins at {n}\\n")
while n < end or not log.with_suffix(".go").exists():
    n += 1
    saved.with_suffix(".new").write_text(str(n))
    os.replace(saved.with_suffix(".new"), saved)
    mark.touch()
    time.sleep(0.02)
print("finished")
"""
RESTART = """
import os, pathlib, signal, sys, time
log = pathlib.Path(sys.argv[1])
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with log.open("a") as file:
    file.write(f"{os.environ['GRID_NODE']} begins\\n")
while not log.with_suffix(".go").exists():
    time.sleep(0.02)
print("finished")
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A grid of two simulated nodes."""
    folder: Path = tmp_path_factory.mktemp("pair")
    (folder / "here").mkdir()
    (folder / "here" / "pair.yaml").write_text(CONFIG)
    shell = Shell(folder / "state", folder / "here")
    shell("daemon", "start", "--config", "pair.yaml", check=0)
    yield shell
    shell.close()


def submit(grid: Shell, script: str, log: Path, *words: str, options: tuple[str, ...] = ()) -> str:
    """A job on the left node, once it has begun."""
    job_id = grid.detach("-n", "left", *options, sys.executable, "-c", script, str(log), *words)
    wait_until(log.exists)
    return job_id


def finish(grid: Shell, job_id: str, log: Path) -> list[str]:
    """Let a job end; the nodes on which it began."""
    log.with_suffix(".go").touch()
    done = grid("jobs", "wait", job_id, check=0)
    assert "exit 0" in done.stdout
    assert grid("jobs", "logs", job_id, check=0).stdout == "finished\n"
    return [line.split(" ", 1)[0] for line in log.read_text().splitlines()]


def move_of(grid: Shell, move_id: str) -> dict[str, Any]:
    found = grid.query("get_move", move_id=move_id)
    return found["move"] if found else grid.json("offload", "status", move_id)


def test_a_job_with_checkpoints_goes_on_elsewhere_where_it_was(pair: Shell, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job_id = submit(pair, COUNT, log, "50")
    wait_until(lambda: pair.job(job_id)["attempts"][-1]["checkpoint_at"], seconds=30)
    scan = pair.json("offload", "scan", "-n", "left")["proposals"]
    (proposal,) = [row for row in scan if row["job_id"] == job_id]
    assert (proposal["way"], proposal["target_node"], proposal["movable"]) == ("checkpoint_restart", "right", True)
    moved = pair.json("offload", "execute", job_id)
    assert (moved["source_node"], moved["target_node"], moved["way"]) == ("left", "right", "checkpoint_restart")
    assert finish(pair, job_id, log) == ["left", "right"]
    first, second = log.read_text().splitlines()
    assert first == "left begins at 0"
    assert int(second.rpartition(" ")[2]) > 0
    assert move_of(pair, moved["move_id"])["end"] == "done"
    story = pair("explain", moved["move_id"], check=0).stdout
    assert [word for word in ("reserved", "decided", "dead", "running", "ended") if word in story] == [
        *("reserved", "decided", "dead", "running", "ended")
    ]
    assert moved["move_id"] in pair("explain", job_id, check=0).stdout


def test_a_restartable_job_begins_again_elsewhere(pair: Shell, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job_id = submit(pair, RESTART, log, options=("--restartable",))
    moved = pair.json("offload", "execute", job_id, "-t", "right")
    assert moved["way"] == "restart"
    again = pair("offload", "execute", job_id, "-t", "right")
    assert "is on right already" in again.stderr
    assert finish(pair, job_id, log) == ["left", "right"]
    assert pair.json("offload", "cancel", moved["move_id"])[0]["end"] == "done"  # too late, and harmless


def test_a_job_that_declares_nothing_stays_with_the_reason(pair: Shell, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job_id = submit(pair, RESTART, log)
    refused = pair("offload", "execute", job_id)
    assert refused.returncode == 1
    assert "--restartable" in refused.stderr
    assert finish(pair, job_id, log) == ["left"]
    assert "has ended" in pair("offload", "execute", job_id).stderr


def test_a_move_survives_the_control_plane_and_happens_once(pair: Shell, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job_id = submit(pair, RESTART, log, "stubborn", options=("--restartable", "--grace", "2"))
    moved = pair.json("offload", "execute", job_id, "-t", "right", "--no-wait")
    wait_until(lambda: move_of(pair, moved["move_id"])["state"] == "decided")
    assert move_of(pair, moved["move_id"])["waits_for"] == "the end of its attempt on left"
    refused = pair("offload", "cancel", moved["move_id"])
    assert (refused.returncode, f"grid jobs cancel {job_id}" in refused.stderr) == (1, True)
    pair.kill_daemon()
    pair("daemon", "start", "--config", "pair.yaml", check=0)
    wait_until(lambda: move_of(pair, moved["move_id"])["end"] == "done", seconds=30)
    assert finish(pair, job_id, log) == ["left", "right"]
