"""Credentials of providers: a control plane that uses them shows them to nobody and hands them to no child."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_rest import rest
from tests.support.processes import processes_naming
from tests.support.project import PROJECT
from tests.support.scripted_provider import CloudFile, plug_in
from tests.support.shell import Shell, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
LITERAL, NAMED, LIBRARY = "literal-6f1d2a", "named-93be71", "library-c0ffee"
SECRETS = [word.encode() for word in (LITERAL, NAMED, LIBRARY)]
CONFIG = """
name: hygienic
logging: {{level: DEBUG}}
nodes:
- {{name: here, host: local}}
workers: {{consistency_seconds: 0.3, call_seconds: 5}}
providers:
  # as if of aws
  scripted:
    state_file: {folder}/cloud.json
    agent: true
    password: {literal}
    credentials: {{api_token: '${{CLOUD_TOKEN}}'}}
"""


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A grid that has started a worker, run jobs on it and here, and seen its provider fail."""
    folder = tmp_path_factory.mktemp("credentials")
    (folder / "here").mkdir()
    shell = Shell(folder / "state", folder / "here")
    cloud = CloudFile(folder / "cloud.json")
    config = folder / "grid.yaml"
    config.write_text(CONFIG.format(folder=folder, literal=LITERAL))
    shell.env |= {
        "PYTHONPATH": f"{PROJECT}:{plug_in(folder / 'plug')}",
        "GRID_CONFIG": str(config),
        "CLOUD_TOKEN": NAMED,
        "AWS_SECRET_ACCESS_KEY": LIBRARY,
        "GOOGLE_APPLICATION_CREDENTIALS": LIBRARY,
    }
    cloud.script(create=["fail"], list=["fail"])
    try:
        shell("daemon", "start", check=0)
        assert shell.json("workers", "create", "--wait", "60")["workers"][0]["state"] == "joined"
        shell("run-shared", "-r", "cpu", "-a", "0.1", "true", check=0)
        yield shell
    finally:
        shell("workers", "list", "--all")
        living = [one["worker_id"] for one in shell.json("workers", "list")["workers"]]
        if living:
            shell("workers", "terminate", "--force", "--discard-results", "--wait", "30", *living)
        cloud.close()
        shell.close()


def test_the_control_plane_has_what_its_config_names(grid: Shell) -> None:
    worker = grid.json("workers", "list")["workers"][0]
    assert worker["state"] == "joined", "its provider was opened with its variables"
    for name in (worker["worker_id"], "here"):
        done = grid("run-shared", "-r", "cpu", "-a", "0.1", "-n", name, "--strategy", "node_specific", "env", check=0)
        assert "GRID_NODE" in done.stdout
        is_clean(done.stdout.encode(), f"a job on {name}")


def test_errors_that_repeat_them_are_masked(grid: Shell) -> None:
    cloud = CloudFile(grid.cwd.parent / "cloud.json")
    cloud.script(create=["tell"], list=["tell", "tell_refused"], terminate=["tell", "tell_refused"])
    worker = grid.json("workers", "create", "--wait", "60")["workers"][0]["worker_id"]
    assert "'password': '***'" in problems_of(grid, worker)[-1]
    grid("workers", "terminate", "--force", "--wait", "60", worker, check=0)
    assert len([one for one in problems_of(grid, worker) if "cannot be terminated" in one and "***" in one]) >= 1
    cloud.script(create=["tell_refused"])
    refused = grid("workers", "create", "--wait", "60")
    assert refused.returncode != 0
    assert "it broke with" in refused.stderr
    assert "'api_token': '***'" in refused.stderr
    is_clean((refused.stdout + refused.stderr).encode(), "workers create")
    log = (grid.host_dir / "daemon.log").read_text()
    assert "ERROR tests.support.scripted_provider: it has {" in log, "a line that the provider itself has logged"
    assert "ValueError: {" in log, "a traceback that it has logged"


def problems_of(grid: Shell, worker: str) -> list[str]:
    found = [json.loads(line) for line in grid("events", "--type", "worker-problem", "--json").stdout.splitlines()]
    return [one["reason"] for one in found if one["subject"] == worker]


def test_no_rest_answer_has_them(grid: Shell) -> None:
    with rest(grid) as client:
        found = client.get("/v1/jobs").json()["jobs"][0]
        job, lease = found["job_id"], found["attempts"][0]["allocation_id"]
        named = {"nodes": "here", "leases": lease, "jobs": job, "boosts": lease, "metrics": "here"}
        answered = set()
        for path, methods in client.get("/openapi.json").json()["paths"].items():
            if "get" in methods:
                what = path.removeprefix("/v1/").split("/")[0]
                answer = client.get(path.replace("{name}", named.get(what, "")).replace("{resource_type}", "cpu"))
                is_clean(answer.content, path)
                answered |= {path} if answer.status_code == 200 else set()
    assert {"/v1/health", "/v1/nodes/{name}", "/v1/jobs/{name}/explain", "/v1/metrics/summary"} <= answered


def test_no_process_shows_them(grid: Shell) -> None:
    sleeping = grid.detach("sleep", "60")
    wait_until(lambda: grid.job(sleeping)["state"] == "running")
    pids = {grid.daemon_pid(), *processes_naming(str(grid.state_dir)), *processes_naming(str(grid.cwd.parent))}
    assert len(pids) > 3
    children = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if is_below(pid, grid.daemon_pid())]
    for pid in {*pids, *children}:
        for part in ("cmdline", "environ"):
            try:
                said = Path(f"/proc/{pid}/{part}").read_bytes()
            except OSError:
                continue
            is_clean(said, f"{part} of {said[:80]!r}")
    grid("jobs", "cancel", sleeping, check=0)


def is_below(pid: int, ancestor: int) -> bool:
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        pid = int(stat.rpartition(")")[2].split()[1])
        if pid == ancestor:
            return True
    return False


def test_nothing_that_is_shown_has_them(grid: Shell) -> None:
    for words in (
        ("config", "show"),
        ("workers", "list", "--all"),
        ("scale", "status"),
        ("events", "--json"),
        ("daemon", "status"),
        ("status",),
        ("config", "check", "--providers"),
    ):
        done = grid(*words)
        is_clean((done.stdout + done.stderr).encode(), " ".join(words))
    shown = grid.json("config", "show")["providers"]["scripted"]
    assert shown["password"] == "***"
    assert shown["credentials"] == {"api_token": "${CLOUD_TOKEN}"}


def test_nothing_that_is_stored_has_them(grid: Shell) -> None:
    seen = 0
    for folder, _, names in os.walk(grid.state_dir):
        for name in names:
            path = Path(folder, name)
            if not path.is_file() or path.is_symlink():
                continue
            try:
                stored = path.read_bytes()
            except FileNotFoundError:
                continue  # the grid is at work: it replaces and removes files of its own
            seen += 1
            is_clean(stored, str(path))
    assert seen > 5
    log = next(path for path in grid.state_dir.rglob("*.log") if "daemon" in path.name)
    assert "DEBUG" in log.read_text() or "it broke" in log.read_text()
    machines = json.loads((grid.cwd.parent / "cloud.json").read_text())["machines"]
    assert machines, "there was a worker"


def is_clean(said: bytes, where: str) -> None:
    for secret in SECRETS:
        assert secret not in said, where
