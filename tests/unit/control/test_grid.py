"""The owner of the ledger: commit, then act, then answer; and what happens when the store says no."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.control.grid import KEEP_HISTORY_MS, STEP_SECONDS, Grid
from distributed_grid.domain.events import (
    AttemptEnded,
    Event,
    HeartbeatReceived,
    JobCancelled,
    LeaseAsked,
    LeaseReleased,
    NodeDeclared,
)
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Usage
from distributed_grid.errors import Conflict, GridError, NotFound, Refused, StoreFailed, StoreRefused
from distributed_grid.ports import Batch, EventRow, LoadedRows, Store
from distributed_grid.reactor import LeaseAnswer
from distributed_grid.reactor.effects import AttemptEffect, Effect, StartAttempt
from distributed_grid.reactor.lease_lifetime import MAX_EXPIRED_PER_STEP
from tests.support.builders import a_node, a_request, a_submission
from tests.support.small_disks import SmallDisk, small_disk

__all__ = ["small_disk"]


class ShakyStore(InMemoryStore):
    """A store whose disk fills up, or stops to be readable, when told."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.unreadable = 0
        self.damaged = False
        self.batches: list[Batch] = []
        self.may_commit = threading.Event()
        self.may_commit.set()

    def commit(self, batch: Batch) -> None:
        assert self.may_commit.wait(10)
        if self.full:
            raise StoreFailed("the disk is full")
        self.batches.append(batch)
        super().commit(batch)

    def load(self) -> LoadedRows:
        if self.damaged:
            raise StoreRefused("the file is damaged")
        if self.unreadable:
            self.unreadable -= 1
            raise StoreFailed("the disk does not answer")
        return super().load()


class Ticking:
    """A clock that stands still."""

    def now_ms(self) -> int:
        return 1_000_000


async def a_grid(store: Store, performed: list[Effect] | None = None) -> Grid:
    """A grid with one node of four cores."""
    grid = Grid(store, Ticking())
    grid.perform_with({AttemptEffect: (performed if performed is not None else []).append})
    await grid.start()
    await grid.handle(NodeDeclared(a_node("here", cores=4)))
    await grid.handle(HeartbeatReceived(name="here", usage=Usage()))
    return grid


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 20))


async def leases_of(grid: Grid) -> set[str]:
    return await grid.read(lambda ledger, now: set(ledger.leases))


def test_a_commit_that_fails_leaves_nothing_and_is_told() -> None:
    async def story() -> None:
        store, performed = ShakyStore(), list[Effect]()
        grid = await a_grid(store, performed)
        store.full = True
        with pytest.raises(StoreFailed, match="nothing was changed"):
            await grid.handle(a_submission(a_request("lost", cores=1)))
        assert performed == []
        assert await leases_of(grid) == set()
        store.full = False
        await grid.handle(a_submission(a_request("kept", cores=1)))
        assert [effect.job.uid for effect in performed if isinstance(effect, StartAttempt)] == ["kept"]
        assert await leases_of(grid) == {"kept.1"}
        await grid.stop()

    run(story)


def test_on_a_full_disk_ends_and_cancels_are_recorded_and_new_work_is_refused(
    small_disk: Callable[..., SmallDisk], tmp_path: Path
) -> None:
    async def story() -> None:
        disk = small_disk(tmp_path / "disk", 64 << 20)
        store, performed = SqliteStore(disk.place / "grid.db"), list[Effect]()
        grid = await a_grid(store, performed)
        for name in ("ends", "cancelled"):
            await grid.handle(a_submission(a_request(name, cores=2)))
        waits = a_submission(a_request("waits", cores=1))
        await grid.handle(waits)
        store.fill_reserve()
        disk.fill()
        while grid.has_room:  # seen within a second
            await asyncio.sleep(0.01)
        for event in (a_submission(a_request("new", cores=1)), LeaseAsked(a_request("lease", cores=1))):
            with pytest.raises(StoreFailed, match="nothing was changed: the control plane's disk is full"):
                await grid.handle(event)
        assert (await grid.handle(waits)).job.uid == "waits", "the same request again is answered"
        fence = await grid.read(lambda ledger, now: ledger.jobs["ends"].attempts[-1].fence)
        await grid.handle(AttemptEnded(uid="ends", number=1, fence=fence, outcome=Outcome(Ending.EXITED, exit_code=0)))
        await grid.handle(JobCancelled("cancelled", "me"))
        assert [row.key for row in store.ended("job")] == ["job-ends"]
        stop = await grid.read(lambda ledger, now: ledger.jobs["cancelled"].stop)
        assert stop is not None
        assert await leases_of(grid) >= {"cancelled.1"}
        started = [effect.job.uid for effect in performed if isinstance(effect, StartAttempt)]
        assert "waits" not in started, "the reserve is for ends"

        disk.free()
        await grid.handle(a_submission(a_request("new", cores=0.5)))
        while not any(isinstance(effect, StartAttempt) and effect.job.uid == "waits" for effect in performed):
            await asyncio.sleep(0.01)
        await grid.stop()
        store.close()

    run(story)


def test_a_store_that_cannot_be_read_is_waited_for() -> None:
    async def story() -> None:
        store = ShakyStore()
        grid = await a_grid(store)
        await grid.handle(LeaseAsked(a_request("before", cores=1)))
        store.full, store.unreadable = True, 1
        with pytest.raises(StoreFailed):
            await grid.handle(LeaseAsked(a_request("lost", cores=1)))
        store.full = False
        assert await leases_of(grid) == {"before"}
        await grid.stop()

    run(story)


def test_an_event_that_cannot_be_stored_fails_alone_and_is_not_insisted_upon(tmp_path: Path) -> None:
    async def story() -> None:
        store = SqliteStore(tmp_path / "grid.db")
        grid = await a_grid(store)
        await grid.handle(a_submission(a_request("job", cores=1)))
        fence = await grid.read(lambda ledger, now: ledger.jobs["job"].attempts[-1].fence)
        beyond = AttemptEnded(uid="job", number=1, fence=fence, outcome=Outcome(Ending.EXITED, exit_code=0), pid=2**70)
        asked = [LeaseAsked(a_request(f"r{number}", cores=0.1)) for number in range(5)]
        events: list[Event] = [*asked[:2], beyond, *asked[2:], LeaseAsked(a_request("big", cores=100))]
        answers = await asyncio.gather(*map(grid.handle, events), return_exceptions=True)
        assert [type(one) for one in answers] == [LeaseAnswer] * 2 + [OverflowError] + [LeaseAnswer] * 3 + [Refused]
        with pytest.raises(OverflowError):
            await grid.handle_with_retry(beyond)
        await grid.handle(AttemptEnded(uid="job", number=1, fence=fence, outcome=Outcome(Ending.EXITED, exit_code=0)))
        await grid.stop()
        heir = await a_grid(store)
        assert await leases_of(heir) == {f"r{number}" for number in range(5)}
        await heir.stop()
        store.close()

    run(story)


def test_what_arrives_during_a_commit_goes_into_the_next_one() -> None:
    async def story() -> None:
        store = ShakyStore()
        grid = await a_grid(store)
        before = len(store.batches)
        store.may_commit.clear()
        first = asyncio.create_task(grid.handle(LeaseAsked(a_request("r0", cores=0.1))))
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(grid.handle(LeaseAsked(a_request(f"r{i}", cores=0.1)))) for i in range(1, 20)]
        await asyncio.sleep(0.05)
        assert not first.done()
        store.may_commit.set()
        await asyncio.gather(first, *others)
        assert before + 2 <= len(store.batches) <= before + 5  # a batch is closed when deciding has taken 20 ms
        await grid.stop()

    run(story)


def test_the_same_request_twice_at_once_is_one_grant() -> None:
    async def story() -> None:
        grid = await a_grid(ShakyStore())
        asked = LeaseAsked(a_request("r1", cores=1))
        answers = await asyncio.gather(grid.handle(asked), grid.handle(asked))
        assert answers[0].lease == answers[1].lease
        assert await leases_of(grid) == {"r1"}
        await grid.stop()

    run(story)


def test_a_request_repeated_after_its_end_hears_the_recorded_outcome() -> None:
    async def story() -> None:
        grid = await a_grid(ShakyStore())
        asked = LeaseAsked(a_request("r1", cores=1))
        # In one batch, and again when it is history.
        both = await asyncio.gather(grid.handle(asked), grid.handle(LeaseReleased("r1", "ana")), grid.handle(asked))
        later = await grid.handle(asked)
        assert isinstance(both[2], LeaseAnswer)
        assert isinstance(later, LeaseAnswer)
        assert both[2].lease.is_over
        assert later.lease.is_over
        assert await leases_of(grid) == set()
        with pytest.raises(Conflict):
            await grid.handle(LeaseAsked(a_request("r1", cores=2)))
        await grid.stop()

    run(story)


def test_a_refusal_is_answered_and_audited_and_changes_nothing() -> None:
    async def story() -> None:
        store = ShakyStore()
        grid = await a_grid(store)
        with pytest.raises(Refused):
            await grid.handle(LeaseAsked(a_request("big", cores=100)))
        with pytest.raises(NotFound):
            await grid.handle(LeaseReleased("nobody", "ana"))
        assert await leases_of(grid) == set()
        assert [event.subject for event in store.events(types=["refused"])] == ["big"]
        await grid.stop()

    run(story)


def test_a_new_owner_goes_on_where_the_last_one_was() -> None:
    async def story() -> None:
        store = ShakyStore()
        grid = await a_grid(store)
        await grid.handle(LeaseAsked(a_request("r1", cores=1)))
        await grid.handle(a_submission(a_request("job", cores=1)))
        await grid.stop()
        performed: list[Effect] = []
        heir = await a_grid(store, performed)
        assert await leases_of(heir) == {"r1", "job.1"}
        assert {effect.job.uid for effect in performed if isinstance(effect, StartAttempt)} == {"job"}
        epochs = await heir.read(lambda ledger, now: ledger.counters["epoch"])
        assert epochs == 2
        await heir.stop()

    run(story)


class FailingPerformer:
    """Performs effects on attempts, and raises a bug for those of one job."""

    def __init__(self, poison: str) -> None:
        self.poison = poison
        self.performed: list[str] = []

    def perform(self, effect: AttemptEffect) -> None:
        if effect.job.uid == self.poison:
            raise ZeroDivisionError(self.poison)
        self.performed.append(effect.job.uid)


def test_an_effect_that_fails_keeps_no_other_from_being_performed_and_nobody_from_being_answered() -> None:
    async def story() -> None:
        performer = FailingPerformer("bad")
        grid = Grid(ShakyStore(), Ticking())
        grid.perform_with({AttemptEffect: performer.perform})
        await grid.start()
        await grid.handle(NodeDeclared(a_node("here", cores=4)))
        await grid.handle(HeartbeatReceived(name="here", usage=Usage()))
        await grid.handle_all(a_submission(a_request(uid, cores=0.1)) for uid in ("first", "bad", "last"))
        assert performer.performed == ["first", "last"]
        assert await leases_of(grid) == {"first.1", "bad.1", "last.1"}
        await grid.stop()

    run(story)


def test_an_owner_that_cannot_go_on_leaves_nobody_without_an_answer() -> None:
    async def story() -> None:
        store = ShakyStore()
        grid = await a_grid(store)
        store.full, store.damaged = True, True
        waiting = [asyncio.ensure_future(grid.handle(LeaseAsked(a_request(f"r{i}", cores=1)))) for i in range(3)]
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(answer, GridError) for answer in answers)
        for _ in range(2):
            with pytest.raises(GridError, match="the control plane cannot go on"):
                await grid.read(lambda ledger, now: None)
            with pytest.raises(GridError, match="the control plane cannot go on"):
                await grid.handle_with_retry(LeaseAsked(a_request("later", cores=1)))
        await grid.stop()

    run(story)


def test_stopping_twice_is_harmless() -> None:
    async def story() -> None:
        grid = await a_grid(ShakyStore())
        await grid.stop()
        await grid.stop()

    run(story)


class Jumping(Ticking):
    """A clock that stands still until it jumps."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


def test_others_have_their_turn_while_many_waits_expire() -> None:
    async def story() -> None:
        clock = Jumping()
        grid = Grid(InMemoryStore(), clock)
        await grid.start()
        await grid.handle(NodeDeclared(a_node("here", cores=4)))
        await grid.handle(HeartbeatReceived(name="here", usage=Usage()))
        waiting = 40 * MAX_EXPIRED_PER_STEP  # more than fits into one batch
        await grid.handle_all(LeaseAsked(a_request(f"r{number}", cores=4, wait_s=10)) for number in range(waiting + 1))
        clock.ahead_ms = 10_000
        seen = [await grid.read(lambda ledger, now: len(ledger.waiting))]
        while seen[-1]:
            seen.append(await grid.read(lambda ledger, now: len(ledger.waiting)))
        assert any(0 < number < waiting for number in seen)
        await grid.stop()

    run(story)


def test_others_have_their_turn_between_two_batches_of_reads() -> None:
    async def story() -> None:
        grid = await a_grid(InMemoryStore())
        turns: list[str] = []

        def question(ledger: Ledger, now: int) -> None:
            """It takes a whole batch for itself."""
            asyncio.get_running_loop().call_soon(turns.append, "other")
            until = time.thread_time() + 2 * STEP_SECONDS
            while time.thread_time() < until:
                pass
            turns.append("read")

        await asyncio.gather(*(grid.read(question) for _ in range(3)))
        assert turns[:5] == ["read", "other", "read", "other", "read"]
        await grid.stop()

    run(story)


def test_history_is_folded_up_to_the_cutoff_and_not_by_the_grids_time() -> None:
    async def story() -> None:
        store, asked = InMemoryStore(), asyncio.Event()
        store.commit(Batch(events=[EventRow(1, 1, "granted", "ana", "l1", "", "", b"{}")]))

        def cutoff_ms(keep_ms: int) -> int:
            assert keep_ms == KEEP_HISTORY_MS
            asked.set()
            return 0

        grid = Grid(store, Ticking(), cutoff_ms=cutoff_ms)
        await grid.start()
        await asyncio.wait_for(asked.wait(), 20)
        await grid.stop()
        assert [event.type for event in store.events(limit=9) if event.seq == 1] == ["granted"]

    run(story)
