"""A real `AttemptHost` driven from plain test functions, and proof that nothing of a test outlives it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from distributed_grid.agent.execution.attempt import AttemptExit, AttemptLaunch, AttemptSpec
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.execution.shim import HOLD_EXPIRED
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.limits import process_tree
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.posix.private_files import read_regular

T = TypeVar("T")
TIMEOUT_S = 30.0
BASE_ENV = {"PATH": os.environ.get("PATH", os.defpath)}


def a_spec(attempt_id: str, *argv: str, **changes: Any) -> AttemptSpec:
    """An attempt of `argv` with nothing special about it."""
    given: dict[str, Any] = {"env": BASE_ENV, "fence": 1, "grace_ms": 2000} | changes
    return AttemptSpec(attempt_id=attempt_id, job_id="job", node="here", argv=argv, **given)


def python(code: str) -> tuple[str, str, str, str]:
    """A command line that runs `code` in a bare interpreter."""
    return (sys.executable, "-S", "-c", code)


class Driver:
    """One agent's life: start, orders, reports, close."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.loop = asyncio.new_event_loop()
        self.reports: list[AttemptLaunch | AttemptExit] = []
        self.host = AttemptHost(root, report=self.receive, **options)
        self.run_coroutine(self.host.start())

    def receive(self, report: AttemptLaunch | AttemptExit) -> None:
        """Collects the reports of the host."""
        self.reports.append(report)

    def run_coroutine(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, TIMEOUT_S))

    def until(self, condition: Callable[[], T | None], timeout_s: float = TIMEOUT_S) -> T:
        """What `condition` returns as soon as it is true, while the agent goes on working."""

        async def wait() -> T:
            end = time.monotonic() + timeout_s
            while (began := time.monotonic()) < end:
                if found := condition():
                    return found
                await asyncio.sleep(max(0.002, 2 * (time.monotonic() - began)))  # it looks a third of the time at most
            raise AssertionError(f"waited {timeout_s} s in vain; reports: {self.reports}")

        return self.loop.run_until_complete(wait())

    def pass_time(self, seconds: float) -> None:
        self.run_coroutine(asyncio.sleep(seconds))

    def launch(self, attempt_id: str, *argv: str, **changes: Any) -> AttemptLaunch:
        self.run_coroutine(self.host.launch(a_spec(attempt_id, *argv, **changes)))
        return self.until(lambda: self.find(AttemptLaunch, attempt_id))

    def run(self, attempt_id: str, *argv: str, **changes: Any) -> Outcome:
        self.run_coroutine(self.host.launch(a_spec(attempt_id, *argv, **changes)))
        return self.ended(attempt_id)

    def exit_of(self, attempt_id: str) -> AttemptExit:
        return self.until(lambda: self.find(AttemptExit, attempt_id))

    def ended(self, attempt_id: str) -> Outcome:
        return self.exit_of(attempt_id).outcome

    def find(self, kind: type[T], attempt_id: str) -> T | None:
        mine = (report for report in self.reports if report.attempt_id == attempt_id and isinstance(report, kind))
        return next(mine, None)

    def stop(self, attempt_id: str, ending: str = "cancelled", **changes: Any) -> Outcome:
        self.run_coroutine(self.host.stop_attempt(attempt_id, ending=Ending(ending), **changes))
        return self.ended(attempt_id)

    def out(self, attempt_id: str, name: str = "stdout") -> str:
        return (self.root / attempt_id / name).read_text()

    def numbers(self, attempt_id: str, count: int, meanwhile: Callable[[], None] = lambda: None) -> list[int]:
        """The first `count` numbers the command has printed, once it has; `meanwhile` is called again and again."""
        path = self.root / attempt_id / "stdout"

        def words() -> list[str]:
            meanwhile()
            return path.read_text().split() if path.exists() else []

        self.until(lambda: len(words()) >= count)
        return [int(word) for word in words()]

    def shim_pid(self, attempt_id: str) -> int:
        with JobDir(str(self.root), attempt_id) as job:
            return int(job.read(job_dir.LOCK)["pid"])

    def close(self) -> None:
        """Safe twice."""
        if self.loop.is_closed():
            return
        self.run_coroutine(self.host.stop())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def finish(self) -> None:
        for attempt_id in () if self.loop.is_closed() else self.host.running():
            self.stop(attempt_id, grace_ms=0)
        self.close()


def is_hold_expired(outcome: Outcome) -> bool:
    return (outcome.ending, outcome.detail) == (Ending.LOST, HOLD_EXPIRED)


def is_alive(pid: int) -> bool:
    proc = process_tree.read_process(pid)
    return proc is not None and not proc.dead


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "jobs"
    yield root
    mark = f"GRID_JOB_DIR={root}/".encode()
    left = [
        proc
        for proc in process_tree.read_processes().values()
        if any(pair.startswith(mark) for pair in process_tree.read_environ(proc.pid)) and not proc.dead
    ]
    recorded = [read_regular(str(path), None, 1 << 20) for path in root.glob(".control/*/groups.json")]
    listed = [groups for groups in map(job_dir.parse_json, recorded) if isinstance(groups, list)]
    groups = [path for groups in listed for _, path in groups if Path(path).exists()]
    log = root / ".control/.spawner.log"
    errors = log.read_text() if log.exists() else ""
    process_tree.signal_all(left, 9)
    assert (left, groups, errors) == ([], [], "")


@pytest.fixture
def driver(root: Path) -> Iterator[Driver]:
    driver = Driver(root)
    yield driver
    driver.finish()


@pytest.fixture
def new_driver(root: Path) -> Iterator[Callable[..., Driver]]:
    """Makes agents for one root, one after the other; the last one is closed at the end."""
    made: list[Driver] = []

    def make(**options: Any) -> Driver:
        made.append(Driver(root, **options))
        return made[-1]

    yield make
    if made and not made[-1].loop.is_closed():
        made[-1].finish()
