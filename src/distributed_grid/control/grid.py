"""The single owner of the ledger: events in, decided, committed, then acted upon, then answered.

Rule 1: everything that arrives while a commit runs goes into the next one.
Rule 2: nobody hears of, and nothing acts on, what is not durable.
Rule 3: a commit that fails throws the state in memory away and loads the stored one; the callers of that
batch hear that nothing happened.
Rule 4: reading waits its turn like an event, so nobody sees what may still be undone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from distributed_grid.control.batch import batch_of, refusal_record
from distributed_grid.domain.effects import Effect, EngineEffect, MemoryEffect
from distributed_grid.domain.events import ControlPlaneStarted, Event, JobSubmitted, LeaseAsked, TimePassed
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import VOLATILE, Row, decode_row
from distributed_grid.errors import Conflict, GridError, IllegalStep, StoreFailed
from distributed_grid.ports import Store
from distributed_grid.reactor import (
    JobAnswer,
    LeaseAnswer,
    Record,
    decide,
    lent_for,
    pending,
    pending_for,
    step,
    unsettled_for,
)
from distributed_grid.reactor.decision import Answer

T = TypeVar("T")
TICK_SECONDS, RETRY_SECONDS = 1.0, 0.5
KEEP_HISTORY_MS = 30 * 86_400_000
BOOSTS = "boosts"
log = logging.getLogger(__name__)


class Clock(Protocol):
    """The grid's own time."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch, never going back."""


class _Entry:
    """An event or a question on its way, and who waits for the answer."""

    __slots__ = ("answer", "event", "failure", "future", "question")

    def __init__(
        self, future: asyncio.Future[Any], event: Event | None, question: Callable[[Ledger, int], Any] | None
    ) -> None:
        self.future = future
        self.event = event
        self.question = question
        self.answer: Any = None
        self.failure: Exception | None = None


class Grid:
    """The owner: `handle` events, `read` state, `watch` rows."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        perform: Callable[[list[Effect]], None],
        reserve: Callable[[list[EngineEffect]], None] = lambda effects: None,
        lend: Callable[[list[MemoryEffect]], None] = lambda effects: None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._perform = perform
        self._reserve = reserve
        self._lend = lend
        self._ledger = Ledger()
        self._over: dict[str, Lease | Job] = {}
        self._seq = 0
        self._inbox: list[_Entry] = []
        self._arrived = asyncio.Event()
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="grid-writer")
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load the ledger and begin a new epoch; what is pending is performed again."""
        await self._reload()
        self._tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._keep_time())]
        await self.handle(ControlPlaneStarted(self._ledger.counters.get("epoch", 0) + 1))
        self._perform(pending(self._ledger))

    async def stop(self) -> None:
        """Finish what has arrived, then stop; safe to call twice."""
        if self._tasks:
            await self.read(lambda ledger, now: None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._writer.shutdown()

    async def handle(self, event: Event) -> Answer:
        """What became of an event, once that is durable. Raises the refusal."""
        answer: Answer = await self._enter(event, None)
        return answer

    async def handle_with_retry(self, event: Event) -> None:
        """Have a fact in the ledger, however long the disk is full; raises what trying again will not change."""
        while True:
            try:
                await self.handle(event)
                return
            except GridError as failure:
                if not failure.retryable:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    async def dry_run(self, event: Event) -> Answer:
        """What would become of an event, without it happening: what `handle` would answer, or raise."""

        def question(ledger: Ledger, now: int) -> Answer:
            recalled = self._recall(event)
            return decide(ledger, event, now).answer if recalled is None else recalled

        return await self.read(question)

    async def read(self, question: Callable[[Ledger, int], T]) -> T:
        """The answer of a function that only reads the ledger."""
        answer: T = await self._enter(None, question)
        return answer

    def watch(self, key: str) -> asyncio.Event:
        """An event that is set whenever the row of this key has changed (`events`: when anything was told; `BOOSTS`:
        when anything that is lent to a node has changed); give it back with `unwatch`."""
        watcher = asyncio.Event()
        self._watchers.setdefault(key, set()).add(watcher)
        return watcher

    def unwatch(self, key: str, watcher: asyncio.Event) -> None:
        watchers = self._watchers.get(key, set())
        watchers.discard(watcher)
        if not watchers:
            self._watchers.pop(key, None)

    @property
    def ledger(self) -> Ledger:
        """The state as of the last decision, for orders and labels: an answer to anybody goes through `read`."""
        return self._ledger

    @property
    def store(self) -> Store:
        """The history; only for reading."""
        return self._store

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def _enter(self, event: Event | None, question: Callable[[Ledger, int], Any] | None) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.append(_Entry(future, event, question))
        self._arrived.set()
        return future

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            entries, self._inbox = self._inbox, []
            await self._settle(entries)

    async def _settle(self, entries: list[_Entry]) -> None:
        """One batch: decide all, commit once, then act and answer."""
        now = self._clock.now_ms()
        changes: list[Row] = []
        records: list[Record] = []
        self._over.clear()
        for place, entry in enumerate(entries):
            try:
                self._take(entry, now, changes, records)
            except GridError as refusal:
                entry.failure = refusal
                if isinstance(refusal, IllegalStep):
                    log.exception("an illegal step: the state is loaded anew")
                    await self._start_over(entries, place, refusal)
                    return
                refused = refusal_record(entry.event, refusal) if entry.event is not None else None
                if refused is not None:
                    records.append(refused)
            except Exception as bug:  # the outermost loop: a bug in one decision must not stop the grid
                log.exception("a decision failed: the state is loaded anew")
                await self._start_over(entries, place, bug)
                return
        if any(row.kind not in VOLATILE for row in changes) or records:
            try:
                await self._commit(changes, records, now)
            except Exception as failure:  # whatever keeps it from being durable, nothing of it has happened
                await self._undo(entries, failure)
                return
        self._perform(pending_for(self._ledger, changes))
        self._reserve(unsettled_for(self._ledger, changes))
        if self._ledger.blocks:
            self._lend(lent_for(self._ledger, changes))
        for entry in entries:
            _answer(entry)
        self._tell(changes, records)

    def _take(self, entry: _Entry, now: int, changes: list[Row], records: list[Record]) -> None:
        if entry.question is not None:
            entry.answer = entry.question(self._ledger, now)
            return
        assert entry.event is not None
        entry.answer = self._recall(entry.event)
        if entry.answer is None:
            stepped = step(self._ledger, entry.event, now)
            changes += stepped.changes
            records += stepped.records
            entry.answer = stepped.answer
            for row in stepped.changes:
                if isinstance(row, Lease | Job) and row.is_over:
                    self._over[row.request.id] = row

    def _recall(self, event: Event) -> Answer:
        """The outcome of a request that is over already, when it is repeated."""
        if not isinstance(event, LeaseAsked | JobSubmitted) or event.request.id in self._ledger.by_request:
            return None
        if isinstance(event, LeaseAsked) and event.again:
            return None
        kind = "lease" if isinstance(event, LeaseAsked) else "job"
        row: Row | None = self._over.get(event.request.id)
        if row is None:
            found = self._store.ended(kind, request_id=event.request.id, limit=1)
            if not found:
                return None
            row = decode_row(kind, found[0].blob)
        if not isinstance(row, Lease | Job) or not _is_of(row, event):
            raise Conflict(f"request {event.request.id} was used before for something else")
        return LeaseAnswer(row) if isinstance(row, Lease) else JobAnswer(row)

    async def _commit(self, changes: list[Row], records: list[Record], now: int) -> None:
        batch = batch_of(changes, records, now, self._seq)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._store.commit, batch)
        self._seq += len(batch.events)

    async def _undo(self, entries: list[_Entry], failure: Exception) -> None:
        """Throw the undurable state away; nobody was told anything but that."""
        log.error("a commit failed, nothing of it happened", exc_info=failure)
        await self._reload()
        for entry in entries:
            entry.failure = entry.failure or StoreFailed(f"not done, nothing was changed: {failure}")
            _answer(entry)

    async def _start_over(self, entries: list[_Entry], culprit: int, bug: Exception) -> None:
        """After a bug: load the stored state, fail the one event, and settle the others again."""
        await self._reload()
        entries[culprit].failure = bug
        _answer(entries[culprit])
        others = [entry for entry in entries if entry is not entries[culprit]]
        for entry in others:
            entry.failure = entry.answer = None
        self._inbox = others + self._inbox
        self._arrived.set()

    async def _reload(self) -> None:
        """Have the stored state, however long the store takes to be readable again."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                loaded = await loop.run_in_executor(self._writer, self._store.load)
                break
            except StoreFailed as failure:
                log.error("the store cannot be read, trying again: %s", failure)
                await asyncio.sleep(TICK_SECONDS)
        volatile = [row for row in self._ledger.rows() if row.kind in VOLATILE]
        self._seq = loaded.last_event_seq
        self._ledger = Ledger(decode_row(row.kind, row.blob) for row in loaded.live if row.blob is not None)
        self._ledger.apply(volatile)

    def _tell(self, changes: list[Row], records: list[Record]) -> None:
        """Wake those who watch what has changed."""
        keys = {row.key for row in changes if row.kind not in VOLATILE}
        if records:
            keys.add("events")
        if BOOSTS in self._watchers and any(isinstance(row, Lease) and row.request.target for row in changes):
            keys.add(BOOSTS)
        for key in keys:
            for watcher in self._watchers.get(key, ()):
                watcher.set()

    async def _keep_time(self) -> None:
        """Make time pass for the ledger: when something is due, and once a second; fold old history."""
        ticks = 0
        while True:
            now = self._clock.now_ms()
            due = self._ledger.next_due_ms()
            wait = TICK_SECONDS if due is None else min(max((due - now) / 1000, 0.005), TICK_SECONDS)
            await asyncio.sleep(wait)
            try:
                await self.handle(TimePassed())
                if ticks % 3600 == 0:
                    await self._fold_history()
            except Exception:  # the outermost loop: time goes on
                log.exception("time could not pass")
            ticks += 1

    async def _fold_history(self) -> None:
        before = self._clock.now_ms() - KEEP_HISTORY_MS
        loop = asyncio.get_running_loop()

        def fold() -> int:
            return self._store.summarise(before_ms=before, limit=2000)

        while await loop.run_in_executor(self._writer, fold):
            await asyncio.sleep(0.05)


def _is_of(row: Lease | Job, event: LeaseAsked | JobSubmitted) -> bool:
    """Whether this is what became of that very request: its content too, not only its id."""
    if row.request != event.request or isinstance(row, Job) != isinstance(event, JobSubmitted):
        return False
    if isinstance(row, Job) and isinstance(event, JobSubmitted):
        return (row.id, row.command) == (event.id, event.command)
    return True


def _answer(entry: _Entry) -> None:
    if entry.future.done():
        return
    if entry.failure is not None:
        entry.future.set_exception(entry.failure)
    else:
        entry.future.set_result(entry.answer)
