"""Work on effects is begun once per key, in bounded number, and again until nobody calls for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from distributed_grid.control.reconciler import Reconciler

ROUND_SECONDS = 0.01


class Performer:
    """Performs the keys in `wanted` with every round; work ends when `gate` is set."""

    def __init__(self, at_once: int | None = None, seconds: float = ROUND_SECONDS) -> None:
        self.work = Reconciler(at_once=at_once)
        self.seconds = seconds
        self.wanted: list[str] = []
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.gate = asyncio.Event()
        self.rounds = 0

    async def reconcile(self) -> None:
        self.rounds += 1
        for key in self.wanted:
            self.begin(key)

    def begin(self, key: str) -> None:
        self.work.begin(key, lambda: self.perform(key), f"work on {key}")

    async def perform(self, key: str) -> None:
        self.begun.append(key)
        try:
            await self.gate.wait()
        finally:
            self.ended.append(key)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.001)


def run(story: Callable[[Performer], Awaitable[None]], at_once: int | None = None, seconds: float = 0.01) -> None:
    async def whole() -> None:
        performer = Performer(at_once, seconds)
        rounds = asyncio.create_task(performer.work.run(performer.reconcile, performer.seconds))
        await performer.until(lambda: performer.rounds > 0)
        try:
            await story(performer)
        finally:
            rounds.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await rounds
            assert performer.begun == performer.ended or len(performer.begun) == len(performer.ended)
            assert not any(performer.work.is_under_way(key) for key in performer.begun)

    asyncio.run(whole())


def test_work_under_way_is_not_begun_twice_and_is_begun_again_while_it_is_called_for() -> None:
    async def story(performer: Performer) -> None:
        performer.wanted = ["a"]
        await performer.until(lambda: performer.rounds > 3)
        assert performer.begun == ["a"]
        assert performer.work.is_under_way("a")
        performer.gate.set()
        await performer.until(lambda: len(performer.begun) > 1)

    run(story)


def test_a_freed_slot_begins_a_round_at_once() -> None:
    async def story(performer: Performer) -> None:
        performer.wanted = ["a", "b"]
        performer.work.wake()
        await performer.until(lambda: performer.begun == ["a"])
        performer.wanted = ["b"]
        performer.gate.set()
        await performer.until(lambda: performer.begun[:2] == ["a", "b"])

    run(story, at_once=1, seconds=60)


def test_a_failed_key_waits_for_its_next_try_until_it_is_forgotten() -> None:
    async def story(performer: Performer) -> None:
        tries = performer.work.fail("a", "no room", lasts=True, retry_seconds=60)
        performer.work.fail("a", "away", lasts=False, retry_seconds=60)
        assert (tries.failures, tries.lasting, tries.problem) == (2, 1, "away")
        assert 0 <= performer.work.age_seconds("a") < 5
        performer.begin("a")
        assert not performer.work.is_under_way("a")
        performer.work.keep_only({"b"})
        performer.begin("a")
        assert performer.work.is_under_way("a")
        performer.work.fail("b", "away", lasts=False, retry_seconds=60)
        performer.work.forget("b")
        performer.begin("b")
        assert performer.work.is_under_way("b")

    run(story, seconds=60)


def test_a_caller_can_wait_for_the_work_of_a_key() -> None:
    async def story(performer: Performer) -> None:
        await performer.work.wait_for("a")
        performer.begin("a")
        asyncio.get_running_loop().call_later(0.01, performer.gate.set)
        await performer.work.wait_for("a")
        assert performer.ended == ["a"]

    run(story, seconds=60)


def test_nothing_is_begun_before_the_first_round_or_after_the_stop() -> None:
    async def story() -> None:
        performer = Performer()
        performer.begin("a")
        assert not performer.work.is_under_way("a")
        rounds = asyncio.create_task(performer.work.run(performer.reconcile, 60))
        await performer.until(lambda: performer.rounds > 0)
        performer.begin("a")
        await performer.until(lambda: performer.begun == ["a"])
        rounds.cancel()
        await asyncio.gather(rounds, return_exceptions=True)
        assert performer.ended == ["a"]
        performer.begin("b")
        assert not performer.work.is_under_way("b")
        await performer.work.stop()

    asyncio.run(story())
