"""From a task that fits nowhere to its start on a new worker: real containers and real allocations of Slurm.

A daemon with the default settings of scaling gets tasks that its one node cannot run. Times are those of the audit
trail: until the worker is wanted in the ledger (the call to the provider follows at once, and is not timed here), from
there until its agent has joined, and from there until the task runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.sizes import Unavailable, sized
from bench.table import Line
from tests.support import docker_engines, slurm_cluster
from tests.support.docker_engines import LocalDockerEngine
from tests.support.project import PROJECT
from tests.support.shell import Shell, wait_until
from tests.support.slurm_cluster import PARTITION, SlurmCluster

TASKS = sized(3, smoke=1)


def measure() -> list[Line]:
    """The steps of a few tasks, for containers and for Slurm."""
    if reason := docker_engines.problem() or slurm_cluster.problem():
        raise Unavailable(reason)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in (("containers", _containers), ("Slurm", _allocations)):
            here = Path(folder) / name
            here.mkdir()
            with kind(here) as providers:
                lines += _steps(name, here, providers)
    return lines


@contextmanager
def _containers(here: Path) -> Iterator[dict[str, Any]]:
    engine = LocalDockerEngine(here)
    try:
        engine.start()
        environ = {**os.environ, "DOCKER_HOST": engine.url}
        subprocess.run(["make", "worker-image"], cwd=PROJECT, env=environ, check=True, timeout=300, capture_output=True)
        yield {"docker_local": {"endpoint_url": engine.url, "cpu_limit": 1, "memory_limit": "256m"}}
    finally:
        engine.stop()


@contextmanager
def _allocations(here: Path) -> Iterator[dict[str, Any]]:
    with SlurmCluster(here, cpus=8, memory_mb=4096) as cluster:
        yield {
            "slurm": {
                "config_file": str(cluster.config),
                "partition": PARTITION,
                "time_limit": "0:30:00",
                "worker_types": {"cpu": {"cpus": 1, "memory_gb": 1}},
                "directory": str(here / "shared"),
            }
        }


def _steps(name: str, here: Path, providers: dict[str, Any]) -> list[Line]:
    (here / "work").mkdir()
    shell = Shell(here / "state", here / "work")
    home = {"name": "home", "host": "local", "resource_sharing": {"can_share": False}}
    config = {
        "name": "bench",
        "nodes": [home],
        "server": {"host": "0.0.0.0", "port": 0},
        "scaling": {"provider": next(iter(providers)), "max_workers": 1},
        "providers": providers,
    }
    ordered, joined, started = [], [], []
    try:
        (here / "work" / "cluster.yaml").write_text(json.dumps(config))
        shell("daemon", "start", "--config", "cluster.yaml", check=0)
        shell("scale", "plan", check=0)
        for _ in range(TASKS):
            job = shell.detach("-r", "cpu", "-a", "1", "--workdir", "none", "true")
            wait_until(lambda job=job: shell.job(job)["state"] == "ended", 90)
            node, uid = shell.job(job)["node_id"], shell.job(job)["uid"]
            asked = _time_of(shell, "requested", uid)
            wanted, join = _time_of(shell, "worker-wanted", node), _time_of(shell, "worker-joined", node)
            ordered.append(wanted - asked)
            joined.append(join - wanted)
            started.append(_time_of(shell, "started", uid) - join)
            shell("workers", "terminate", node, "--force", "--wait", "60", check=0, timeout=90)
    finally:
        shell.close()
    return [
        Line(f"{name}: a task that fits nowhere, until a worker is ordered", statistics.median(ordered), 1, "s", True),
        Line(f"{name}: until its agent has joined", statistics.median(joined), 0, "s", True),
        Line(f"{name}: until the task runs there", statistics.median(started), 2, "s", True),
    ]


def _time_of(shell: Shell, kind: str, subject: str) -> float:
    lines = shell("events", "--type", kind, "--json", check=0).stdout.splitlines()
    found = [event for event in map(json.loads, lines) if event["subject"] == subject or event.get("job_id") == subject]
    return datetime.fromisoformat(found[-1]["time"]).timestamp()
