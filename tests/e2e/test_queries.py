"""A look never acts: commands that only show something stop, change and restart no control plane."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

QUERIES = [
    ("status",),
    ("shared-status",),
    ("jobs", "list"),
    ("jobs", "show", "some-job"),
    ("jobs", "logs", "some-job"),
    ("jobs", "wait", "some-job"),
    ("jobs", "fetch", "some-job"),
    ("events",),
    ("events", "-f"),
    ("explain", "some-job"),
    ("ledger",),
    ("boost", "status"),
    ("predict", "show"),
    ("memory", "list"),
    ("memory", "stats"),
    ("memory", "retrieve", "nothing", "-o", "-"),
    ("resource-sharing", "status"),
    ("distribute", "status"),
    ("cluster", "status"),
    ("cluster", "env"),
    ("daemon", "token", "list"),
    ("daemon", "join-token", "list"),
]


def a_config(folder: Path, node: str) -> str:
    path = folder / f"{node}.yaml"
    path.write_text(f"nodes: [{{name: {node}, host: local}}]\n")
    return str(path)


def test_no_look_replaces_a_control_plane_that_runs_with_another_config(grid: Shell) -> None:
    one, two = a_config(grid.cwd, "one"), a_config(grid.cwd, "two")
    grid("run-shared", "-c", one, "-j", "some-job", "true", check=0)
    before = grid.daemon_pid()
    shown = json.loads(grid("-c", two, "daemon", "status", "--json", check=0).stdout)
    assert (shown["pid"], shown["config"]) == (before, one)
    for words in QUERIES:
        if words == ("events", "-f"):
            continue
        said = grid(*words, "--config", two, timeout=5).stderr
        assert said.startswith(
            f"grid: the control plane uses {one}, not {two} (nodes.one, nodes.two); to change that, "
            f"type: grid --config {two} config reload\n"
        ), words
        assert said.count("the control plane uses") == 1, words
        assert "the control plane uses" not in grid(*words, "--config", one, timeout=5).stderr
        assert grid.daemon_pid() == before
    grid("-c", two, "run-shared", "true", check=0)  # this one needs a grid, and nothing is held
    assert grid.json("daemon", "status")["config"] == two


def connections(pid: int) -> int:
    """How many connections to its socket a control plane has."""
    files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if os.path.islink(path)]
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sum(row[5] == "03" and row[-1].endswith("grid.sock") and f"socket:[{row[6]}]" in files for row in rows)


def test_following_ends_when_the_control_plane_is_stopped_and_does_not_start_it_anew(grid: Shell) -> None:
    job = grid.detach("sleep", "300")
    followers = [grid.start("events", "-f"), grid.start("jobs", "logs", "-f", job), grid.start("jobs", "wait", job)]
    stream = followers[0].stdout
    assert stream is not None
    assert stream.readline()
    pid = grid.daemon_pid()
    wait_until(lambda: connections(pid) == len(followers))  # one that connects later starts the next control plane
    wait_until(lambda: grid.job(job)["state"] == "running")
    grid("daemon", "stop", check=0)
    assert [follower.wait(timeout=30) for follower in followers] == [3, 3, 3]
    grid("daemon", "status", check=3)


def test_following_goes_on_with_the_next_control_plane_that_somebody_else_starts(grid: Shell) -> None:
    job = grid.detach("sh", "-c", "echo begin; sleep 4; echo end")
    followers = [grid.start("jobs", "logs", "-f", job), grid.start("jobs", "wait", job)]
    stream = followers[0].stdout
    assert stream is not None
    assert stream.readline() == b"begin\n"
    grid.kill_daemon()
    grid("status", check=0)
    assert stream.read() == b"end\n"
    assert [follower.wait(timeout=30) for follower in followers] == [0, 0]


def test_events_are_not_followed_where_nothing_runs(grid: Shell) -> None:
    done = grid("events", "-f", check=3)
    assert done.stderr.startswith("grid: no control plane runs for ")
    grid("daemon", "status", check=3)
