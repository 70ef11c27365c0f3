"""Blocking work of a program with an event loop is done in threads: at once, in order, and to its end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from distributed_grid.errors import Refused
from distributed_grid.orchestration.distributed_memory_pool import BlockingWorkers


def pool_threads() -> set[threading.Thread]:
    """Living threads of pools; one that was told to end may live a moment longer than its pool."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("memory-pool-")}


def test_work_is_done_in_a_thread_and_its_outcome_comes_back() -> None:
    def fails() -> None:
        raise KeyError("reason")

    async def story() -> None:
        before = pool_threads()
        workers = BlockingWorkers()
        assert await workers.run(threading.get_ident) != threading.get_ident()
        with pytest.raises(KeyError, match="reason"):
            await workers.run(fails)
        assert len(pool_threads() - before) == 1
        await workers.stop()
        await workers.stop()
        with pytest.raises(Refused):
            await workers.run(int)

    asyncio.run(story())


def test_as_much_goes_on_at_once_as_there_are_threads() -> None:
    async def story() -> None:
        before = pool_threads()
        workers = BlockingWorkers(max_threads=3)
        together = threading.Barrier(3, timeout=10)
        await asyncio.gather(*(workers.run(together.wait) for _ in range(6)))
        assert len(pool_threads() - before) == 3
        await workers.stop()

    asyncio.run(story())


def test_what_nobody_waits_for_any_more_is_undone_and_what_was_not_begun_is_not_done() -> None:
    async def story() -> None:
        workers = BlockingWorkers(max_threads=1)
        begun, go_on, undone = threading.Event(), threading.Event(), threading.Event()
        done: list[str] = []

        def work() -> str:
            begun.set()
            assert go_on.wait(10)
            done.append("work")
            return "made"

        def undo(result: str) -> None:
            assert result == "made"
            undone.set()

        first = asyncio.create_task(workers.run(work, undo))
        second = asyncio.create_task(workers.run(lambda: done.append("never"), lambda _: done.append("never")))
        await asyncio.to_thread(begun.wait, 10)
        first.cancel()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        go_on.set()
        assert await asyncio.to_thread(undone.wait, 10)
        await workers.stop()
        assert done == ["work"]

    asyncio.run(story())


def test_stopping_waits_for_what_goes_on() -> None:
    async def story() -> None:
        workers = BlockingWorkers()
        go_on = threading.Event()
        work = asyncio.create_task(workers.run(lambda: go_on.wait(10)))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(workers.stop())
        await asyncio.sleep(0)
        assert not stopping.done()
        go_on.set()
        await stopping
        assert await work is True

    asyncio.run(story())
