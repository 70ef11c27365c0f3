"""Supervision of background tasks: a failure is logged, repaired or ends the process, and is never silent."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from distributed_grid import supervision
from distributed_grid.supervision import start_essential, start_logged, start_restarted

PROGRAM = """
import asyncio, logging, sys, time
from pathlib import Path
from distributed_grid.supervision import end_process_on_failure, start_essential

async def fail():
    await asyncio.sleep(0.01)
    raise ValueError("the reason")

async def main():
    start_essential(fail(), "the part that fails")
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
    await asyncio.sleep(60)

logging.basicConfig()
end_process_on_failure(Path(sys.argv[1]))
asyncio.run(main())
"""


OWNER = """
import asyncio, logging, sys
from pathlib import Path
from distributed_grid.adapters.clock import GridClock
from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import NodeDeclared
from distributed_grid.domain.nodes import Node
from distributed_grid.errors import StoreFailed, StoreRefused
from distributed_grid.supervision import end_process_on_failure

class DamagedStore(InMemoryStore):
    is_damaged = False

    def commit(self, batch):
        if self.is_damaged:
            raise StoreFailed("the disk is full")
        super().commit(batch)

    def load(self):
        if self.is_damaged:
            raise StoreRefused("the file is damaged")
        return super().load()

async def main():
    store = DamagedStore()
    grid = Grid(store, GridClock())
    await grid.start()
    store.is_damaged = True
    await grid.handle(NodeDeclared(Node(name="gpu1")))

logging.basicConfig()
end_process_on_failure(Path(sys.argv[1]))
asyncio.run(main())
"""


def test_an_owner_of_the_ledger_that_cannot_go_on_ends_its_process(tmp_path: Path) -> None:
    report = tmp_path / "failure.txt"
    done = subprocess.run([sys.executable, "-c", OWNER, str(report)], capture_output=True, text=True, timeout=60)
    assert done.returncode == supervision.EXIT_CODE, done.stderr
    assert "the owner of the ledger cannot go on" in report.read_text()
    assert "StoreRefused: the file is damaged" in report.read_text()


BROKEN_DISK = """
import asyncio, logging, resource, sys
from pathlib import Path
from distributed_grid.adapters.clock import GridClock
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import NodeDeclared
from distributed_grid.domain.nodes import Node
from distributed_grid.supervision import end_process_on_failure

async def main():
    grid = Grid(SqliteStore(Path(sys.argv[2]), max_io_errors=3, io_error_seconds=0), GridClock())
    await grid.start()
    await grid.handle(NodeDeclared(Node(name="gpu1")))
    if "breaks" in sys.argv:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        await grid.handle_with_retry(NodeDeclared(Node(name="gpu2")))
    print(*grid.ledger.nodes)
    await grid.stop()

logging.basicConfig()
end_process_on_failure(Path(sys.argv[1]))
asyncio.run(main())
"""


def test_a_disk_whose_io_errors_do_not_pass_ends_the_process_and_the_next_one_recovers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BROKEN_DISK, str(tmp_path / "failure.txt"), str(tmp_path / "grid.db")]
    done = subprocess.run([*command, "breaks"], capture_output=True, text=True, timeout=60)
    assert done.returncode == supervision.EXIT_CODE, done.stderr
    assert "grid.db: 3 I/O errors in a row: its disk is broken" in done.stderr
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "gpu1\n"


def test_an_essential_task_that_fails_ends_its_process_with_a_report_and_a_code_of_its_own(tmp_path: Path) -> None:
    report = tmp_path / "failure.txt"
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(report)], capture_output=True, text=True, timeout=30)
    assert done.returncode == supervision.EXIT_CODE
    assert "the part that fails cannot go on: this process ends" in done.stderr
    assert "the part that fails cannot go on" in report.read_text()
    assert 'raise ValueError("the reason")' in report.read_text() or "ValueError: the reason" in report.read_text()


def test_a_report_that_cannot_be_written_keeps_no_process_alive(tmp_path: Path) -> None:
    report = tmp_path / "missing" / "failure.txt"
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(report)], capture_output=True, text=True, timeout=30)
    assert done.returncode == supervision.EXIT_CODE


def test_a_loop_that_fails_begins_anew_and_one_that_returns_does_not(caplog: pytest.LogCaptureFixture) -> None:
    rounds = 0

    async def loop() -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise OSError("not this time")

    async def story() -> None:
        await asyncio.wait_for(start_restarted(loop, "the loop"), 10)

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())
    assert rounds == 2
    assert "the loop failed; it begins anew" in caplog.text


def test_a_task_that_nobody_holds_comes_to_its_end() -> None:
    answers: weakref.WeakSet[asyncio.Future[None]] = weakref.WeakSet()
    done = []

    async def work() -> None:
        answer = asyncio.get_running_loop().create_future()
        answers.add(answer)
        await answer
        done.append(True)

    async def story() -> None:
        start_logged(work(), "the work")
        await asyncio.sleep(0)
        gc.collect()
        for answer in answers:
            answer.set_result(None)
        await asyncio.sleep(0)

    asyncio.run(story())
    assert done


def test_what_fails_is_logged_and_what_is_cancelled_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise OSError("not this time")

    async def story() -> None:
        sleeping = [start_logged(asyncio.sleep(60), "sleep"), start_essential(asyncio.sleep(60), "more sleep")]
        await asyncio.sleep(0)
        for task in sleeping:
            task.cancel()
        failing = [start_logged(fail(), "the work"), start_essential(fail(), "the essential work")]
        await asyncio.gather(*sleeping, *failing, return_exceptions=True)
        await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())
    assert "the work failed" in caplog.text
    assert "the essential work cannot go on" in caplog.text
    assert "sleep" not in caplog.text
