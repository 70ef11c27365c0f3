"""Spread a test suite over the workers of a grid: each file of tests is a task, which runs where there is room.

    python examples/distributed_tests.py examples/suite

Nodes with an agent run the tasks, and so do pull workers, which connect to the address that `--serve` prints.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed_grid.errors import GridError
from distributed_grid.orchestration.coordinator import Coordinator, CoordinatorServer

POLL_SECONDS = 0.2


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("suite", type=Path, help="a folder with test_*.py files")
    options.add_argument("--serve", type=Path, metavar="FILE", help="let pull workers connect; FILE gets their options")
    options.add_argument("--pull-only", action="store_true", help="run the tests on pull workers alone")
    options.add_argument("--retries", type=int, default=1, help="how often a file is run again that failed")
    options.add_argument("--timeout", type=float, default=300.0, help="seconds for the whole suite")
    given = options.parse_args()
    files = sorted(given.suite.glob("test_*.py"))
    if not files:
        options.error(f"no test_*.py in {given.suite}")
    try:
        with Coordinator(state_dir=os.environ.get("GRID_STATE_DIR")) as coordinator, serving(coordinator, given.serve):
            tasks = {file.stem: add(coordinator, file, given) for file in files}
            print(f"{len(tasks)} files of tests are queued", flush=True)
            return report(coordinator, tasks, given.timeout)
    except GridError as failure:
        print(f"distributed_tests: {failure}", file=sys.stderr)
        return 2


@contextmanager
def serving(coordinator: Coordinator, address_file: Path | None) -> Iterator[None]:
    """Let pull workers connect meanwhile."""
    if address_file is None:
        yield
        return
    with CoordinatorServer(coordinator) as server:
        print(f"pull workers connect to {server.url}", flush=True)
        address_file.write_text(f"{server.url} --certificate {server.certificate}")
        yield


def add(coordinator: Coordinator, file: Path, given: argparse.Namespace) -> str:
    """Queue one file; the id of its task."""
    task: dict[str, Any] = {
        "task_id": f"{file.stem}-{os.getpid()}",
        "type": "unittest",
        "module": file.stem,
        "command": [sys.executable, "-m", "unittest", file.stem],
        "env": {"PYTHONPATH": str(file.parent.resolve())},
        "retries": given.retries,
    }
    if given.pull_only:
        task["labels"] = ["pull"]
    return coordinator.task_manager.add_task(task)


def report(coordinator: Coordinator, tasks: dict[str, str], timeout: float) -> int:
    """Print where each file ran as it ends; the exit code is 0 where all passed."""
    waiting, failed, ends = dict(tasks), 0, time.monotonic() + timeout
    while waiting and time.monotonic() < ends:
        for name, task_id in list(waiting.items()):
            status = coordinator.process_message({"type": "task_status", "task_id": task_id})
            if status["state"] != "ended":
                continue
            del waiting[name]
            passed = status["outcome"] == "exited" and status["exit_code"] == 0
            failed += not passed
            print(f"{'passed' if passed else 'FAILED':6}  {name:16} on {status['node_id']}", flush=True)
        time.sleep(POLL_SECONDS)
    if waiting:
        print(f"not over after {timeout:g} s: {', '.join(waiting)}", file=sys.stderr)
    return 1 if failed or waiting else 0


if __name__ == "__main__":
    sys.exit(main())
