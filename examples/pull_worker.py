"""A pull worker: a program without an agent that asks a coordinator for tasks, runs their commands and reports.

    GRID_TOKEN=… python examples/pull_worker.py ws://127.0.0.1:PORT --id box-1

It ends when it had nothing to do for `--idle` seconds, or when the coordinator is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from distributed_grid.agent.hardware import HardwareDetector

HEARTBEAT_SECONDS = 2.0
KEPT_CHARS = 2_000


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("url")
    options.add_argument("--certificate", help="the file with the coordinator's certificate (default: the system's)")
    options.add_argument("--id", default=socket.gethostname(), help="the name of this worker")
    options.add_argument("--tag", action="append", default=[], help="a tag that tasks may ask for")
    options.add_argument("--cores", type=int, default=1, help="how many cores it gives to tasks")
    options.add_argument("--idle", type=float, default=60.0, help="end after so many seconds without a task")
    given = options.parse_args()
    token = os.environ.get("GRID_TOKEN", "")
    if not token:
        options.error("set GRID_TOKEN to a token of the grid: grid daemon token create --user NAME")
    try:
        trusted = ssl.create_default_context(cafile=given.certificate)
        headers = {"Authorization": f"Bearer {token}"}
        with connect(given.url, ssl=trusted, additional_headers=headers) as coordinator:
            work(coordinator, given)
    except ConnectionClosed:
        print(f"{given.id}: the coordinator is gone", flush=True)
    except OSError as failure:
        raise SystemExit(f"pull_worker: {given.url} cannot be reached: {failure}") from failure
    return 0


def work(coordinator: ClientConnection, given: argparse.Namespace) -> None:
    """Run one task after another until none came for a while."""
    worker_id: str = given.id
    found = HardwareDetector().get_capabilities()
    resources = {"cpu": {"cores": given.cores, "available_cores": given.cores}, "memory": found["memory"]}
    ask(coordinator, type="register", worker_id=worker_id, resources=resources, tags=given.tag)
    print(f"{worker_id}: registered", flush=True)
    last_task = time.monotonic()
    while time.monotonic() - last_task < given.idle:
        task = ask(coordinator, type="get_task", worker_id=worker_id, wait_seconds=HEARTBEAT_SECONDS)["task"]
        if task is None:
            ask(coordinator, type="heartbeat", worker_id=worker_id)
            continue
        report = run(coordinator, worker_id, task)
        answer = ask(coordinator, worker_id=worker_id, task_id=task["task_id"], fence=task["fence"], **report)
        outcome = "done" if report["type"] == "complete" else "failed"
        print(f"{worker_id}: {task['task_id']} {outcome if answer['accepted'] else answer['reason']}", flush=True)
        last_task = time.monotonic()
    ask(coordinator, type="unregister", worker_id=worker_id)
    print(f"{worker_id}: nothing to do", flush=True)


def run(coordinator: ClientConnection, worker_id: str, task: dict[str, Any]) -> dict[str, Any]:
    """Run the command of a task, with a heartbeat now and then; what to report."""
    if not task.get("command"):
        return {"type": "fail", "error": "this worker runs commands only"}
    print(f"{worker_id}: {task['task_id']} begins", flush=True)
    environ = {**os.environ, **task.get("env", {})}
    environ.pop("GRID_TOKEN", None)  # it is the worker's, not the task's
    with subprocess.Popen(task["command"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=HEARTBEAT_SECONDS)
                break
            except subprocess.TimeoutExpired:
                ask(coordinator, type="heartbeat", worker_id=worker_id)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = output.decode(errors="replace")[-KEPT_CHARS:]
    result = {"worker": worker_id, "exit_code": process.returncode, "output": said}
    if process.returncode == 0:
        return {"type": "complete", "result": result, "peak_memory_mb": used.ru_maxrss / 1024}
    return {"type": "fail", "error": f"exit code {process.returncode}", "result": result}


def ask(coordinator: ClientConnection, **message: Any) -> dict[str, Any]:
    """Send a message, and return its reply; a refusal ends the worker."""
    coordinator.send(json.dumps(message))
    reply: dict[str, Any] = json.loads(coordinator.recv())
    if reply["type"] == "error":
        raise SystemExit(f"pull_worker: {reply['message']}")
    return reply


if __name__ == "__main__":
    sys.exit(main())
