"""Real process trees, real guards, and an agent's end of them; proof that nothing of a test outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from distributed_grid.agent.limits.process_tree import read_process
from distributed_grid.agent.offloading.move_orders import ResultTrees, SourceMoves
from distributed_grid.agent.offloading.process_inventory import ProcessInventory, Surroundings
from distributed_grid.agent.outbox import Outbox, Report
from distributed_grid.domain.processes import ProcessIdentity, ProcessLook
from distributed_grid.domain.states import Step
from distributed_grid.posix.boot_clock import boot_id
from distributed_grid.scheduling.offloading.processes import first_look
from distributed_grid.trees.manifest import Manifest
from distributed_grid.wire import MoveOrder, MoveReport
from tests.support.processes import is_running, processes_naming

T = TypeVar("T")
TIMEOUT_S = 30.0
MOVE = "move-1"
BEGIN = "import sys; open(sys.argv[1] + '/begun', 'w').close()\n"
SLEEPER = "import time; time.sleep(600)"


class NoTrees:
    """There is nothing to return."""

    async def read_tree(self, digest: str) -> Manifest:
        raise AssertionError(digest)

    async def lay_out(self, digest: str, target: Path) -> None:
        raise AssertionError(digest)


class Source:
    """An agent's moves, driven from plain test functions."""

    def __init__(self, root: Path, trees: ResultTrees | None = None) -> None:
        self.root = root
        self.trees = trees or NoTrees()
        self.loop = asyncio.new_event_loop()
        self.reports: list[MoveReport] = []
        self.looks: dict[str, ProcessLook] = {}
        self.start()

    def start(self) -> None:
        """An agent begins."""
        self.outbox = Outbox(self._receive, lambda ms, call: None)
        self.moves = SourceMoves(self.root, self.outbox, self.trees, Surroundings)
        self.run(self.moves.start())

    def stop(self) -> None:
        """It ends; the guards go on."""
        self.run(self.moves.stop())

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, TIMEOUT_S))

    def _receive(self, report: Report) -> None:
        assert isinstance(report, MoveReport)
        self.reports.append(report)

    def until(self, condition: Callable[[], T | None]) -> T:
        """What `condition` returns as soon as it is true, while the agent goes on working."""

        async def wait() -> T:
            end = time.monotonic() + TIMEOUT_S
            while (began := time.monotonic()) < end:
                if found := condition():
                    return found
                await asyncio.sleep(max(0.002, 2 * (time.monotonic() - began)))  # it looks a third of the time at most
            raise AssertionError(f"waited in vain; {self.reports}")

        return self.loop.run_until_complete(wait())

    def order(self, step: str, process: ProcessIdentity | None = None, *, move: str = MOVE, **details: Any) -> None:
        """Give an order; the process is compared with its first observation."""
        if step in ("freeze", "commit"):
            details.setdefault("look", self.looks.get(move))

        async def give() -> None:
            self.moves.carry_out(MoveOrder(node="here", move_id=move, step=Step(step), process=process, **details))

        self.run(give())

    def reported(self, step: str, *, move: str = MOVE) -> MoveReport:
        """The next report of this kind."""

        def find() -> MoveReport | None:
            return next((one for one in self.reports if one.state == step and one.move_id == move), None)

        report = self.until(find)
        self.reports.remove(report)
        self.outbox.acknowledged(report.seq)
        return report

    def steps(self) -> list[str]:
        return [report.state for report in self.reports]

    def open(self, process: ProcessIdentity, *, move: str = MOVE) -> None:
        """Look at a process, as a request does, and open its move."""
        found = ProcessInventory().scan(pid=process.pid)
        if found:
            self.looks[move] = first_look(found[0])
        self.order("open", process, move=move)
        self.reported("opened", move=move)

    def freeze(self, process: ProcessIdentity, *, ms: int = 20_000, move: str = MOVE) -> MoveReport:
        self.order("freeze", process, move=move, freeze_ms=ms)
        return self.reported("frozen", move=move)

    def guards(self) -> list[int]:
        """The guard of the move and its standby, in this order: the standby is the younger one."""
        found = [pid for pid in processes_naming(f"{self.root}/") if b"guard_process" in _cmdline(pid)]
        return sorted(found, key=lambda pid: (read_start(pid), pid))

    def close(self) -> None:
        self.stop()
        self.loop.close()


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def read_start(pid: int) -> int:
    proc = read_process(pid)
    return proc.start if proc is not None else 0


class Original:
    """A process tree that nobody of the grid has started."""

    def __init__(self, folder: Path, code: str, *, session: bool = True) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-S", "-c", BEGIN + code, str(folder)]
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, cwd=folder, stdin=null, stdout=null, stderr=null, start_new_session=session
        )
        self.pid = self.process.pid
        end = time.monotonic() + TIMEOUT_S
        while not (folder / "begun").exists():  # what it maps on its start is there
            assert time.monotonic() < end
            time.sleep(0.001)
        (folder / "begun").unlink()
        self.identity = ProcessIdentity(self.pid, read_start(self.pid), boot_id())

    def tree(self) -> list[int]:
        """What lives of it."""
        return processes_naming(str(self.folder))

    def states(self) -> str:
        """The states of its processes, as the kernel names them."""
        found = []
        for pid in self.tree():
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        return "".join(sorted(set(found)))

    def is_frozen(self) -> bool:
        return self.states() == "T"

    def goes_on(self) -> bool:
        """Whether it lives and nothing of it stands still."""
        return bool(self.tree()) and "T" not in self.states()

    def end(self) -> None:
        for _ in range(200):
            for pid in self.tree():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            if not self.tree():
                break
            time.sleep(0.01)
        self.process.wait()


def kill(pid: int) -> None:
    """kill -9, and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + TIMEOUT_S
    while is_running(pid):
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    found = Source(tmp_path / "agent" / "moves")
    yield found
    found.close()
    for pid in reversed(found.guards()):
        with contextlib.suppress(ProcessLookupError):
            kill(pid)
    assert not found.guards()


@pytest.fixture
def original(tmp_path: Path) -> Iterator[Callable[..., Original]]:
    """Starts originals; they end with the test."""
    made: list[Original] = []

    def make(code: str = SLEEPER, **options: Any) -> Original:
        made.append(Original(tmp_path / f"work{len(made)}", code, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()
