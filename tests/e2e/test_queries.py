"""A look never acts: commands that only show something stop, change and restart no control plane."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from distributed_grid.client.client import Client
from distributed_grid.state_dir import StateDir
from tests.support.shell import GRID, Shell, wait_until

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


def test_a_wait_without_names_counts_the_jobs_that_failed_before_it(grid: Shell) -> None:
    jobs = [grid.detach("-j", name, command) for name, command in (("bad", "false"), ("good", "true"))]
    for job in jobs:
        wait_until(lambda job=job: grid.job(job)["state"] == "ended")
    assert grid("jobs", "wait", check=1).stdout == "bad: exit 1\ngood: exit 0\n"
    assert grid("jobs", "wait", check=0).stdout == "no jobs\n", "each end is reported once"
    grid("run-shared", "false", check=1)
    grid("jobs", "wait", check=0)  # that one was not detached: its user has seen how it ended
    named = grid.detach("sh", "-c", "exit 4")
    grid("jobs", "wait", named, check=4)
    cancelled = grid.detach("sleep", "300")
    wait_until(lambda: grid.job(cancelled)["state"] == "running")
    grid("jobs", "cancel", cancelled, check=0)
    grid("jobs", "wait", check=0)
    slow = grid.detach("sh", "-c", "sleep 1; exit 5")
    assert "still" in grid("jobs", "wait", "-t", "0.1", check=124).stderr
    assert grid("jobs", "wait", check=5).stdout == f"{slow}: exit 5\n"


def a_terminal(grid: Shell, *words: str) -> str:
    """Screen of a command on a terminal of 80 columns."""
    command = shlex.join([*GRID, *words])
    shown = subprocess.run(
        ["script", "-qec", f"stty cols 80 rows 24; {command}", "/dev/null"],
        capture_output=True,
        text=True,
        cwd=grid.cwd,
        env=grid.env | {"TERM": "dumb"},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return shown.stdout.replace("\r", "")


def test_no_list_is_cut_without_a_word(grid: Shell) -> None:
    grid("status", check=0)
    with Client(StateDir(grid.state_dir), may_start=False) as client:
        for number in range(55):
            name = f"{number:032x}"
            client.submit_job(request_id=name, argv=["true"], job_id=f"held-{number}", require=[], amount=1)
            client.wait_for_job(job_id=name)  # ended jobs are listed in the order of their ends
    lines = grid("events", "--json", check=0)
    events = [json.loads(line) for line in lines.stdout.splitlines()]
    assert len(events) > 200
    assert lines.stderr == ""
    assert {event["job_id"] for event in events if event["type"] == "requested"} == {f"held-{n}" for n in range(55)}
    assert len(grid("events", "-l", "7", check=0).stdout.splitlines()) == 7
    part = a_terminal(grid, "events").splitlines()
    assert len(part) == 101
    assert part[-1] == "grid: only the newest 100 events are shown: --limit N shows more of them, --all all"
    assert len(a_terminal(grid, "events", "--all").splitlines()) == len(events)
    assert "give --all or --limit" in grid("events", "--all", "-l", "7", check=2).stderr
    listed = grid("jobs", "list", check=0)
    assert len(listed.stdout.splitlines()) == 21
    assert listed.stderr == "grid: the last 20 of 55 jobs; --limit N lists more of them, --all all\n"
    assert grid("jobs", "list", "-l", "7", check=0).stderr.startswith("grid: the last 7 of 55 jobs; ")
    everything = grid("jobs", "list", "--all", check=0)
    assert (everything.stderr, len(everything.stdout.splitlines())) == ("", 56)
    as_json = grid("jobs", "list", "--json", check=0)
    names = [job["job_id"] for job in json.loads(as_json.stdout)]
    assert (as_json.stderr, names) == ("", [f"held-{number}" for number in range(55)])
    assert [job["job_id"] for job in grid.json("jobs", "list", "-l", "3")] == names[-3:]
