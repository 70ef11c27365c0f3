"""Owner of the ledger: one batch of events at a time is decided, committed, acted upon and answered.

Events that arrive during a commit go into the next batch. No change is answered or acted upon before it is durable. A
commit that fails discards the ledger in memory and loads the stored one; the callers of that batch get a refusal, or
only the one whose event cannot be stored. Reads wait their turn like events, so no reader sees a change that may still
be undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import UnionType
from typing import Any, Protocol, TypeVar, get_args

from distributed_grid.control.batch import BatchSettler, DecidedBatch, DecisionFailed, Entry, Question
from distributed_grid.domain.events import ControlPlaneStarted, Event, HeartbeatReceived, TimePassed
from distributed_grid.domain.followups import Cause
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import is_boost
from distributed_grid.domain.rows import Row
from distributed_grid.errors import GridError, StoreFailed, StoreRefused
from distributed_grid.ports import Store
from distributed_grid.reactor import decide, pending
from distributed_grid.reactor.decision import Answer
from distributed_grid.supervision import start_essential

SLICE_SECONDS = 0.004
CHUNK_ROWS = 256
T = TypeVar("T")
V = TypeVar("V")
K = TypeVar("K")
TICK_SECONDS = 1.0
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 2.0
KEEP_HISTORY_MS = 30 * 86_400_000
STEP_SECONDS = 0.02
"""CPU time for deciding one batch before other tasks get the event loop; the last entry may exceed it a little."""
Performer = Callable[[Any], None]
"""Performs an effect of one type. It returns at once; an effect that fails is derived again from the ledger."""
HISTORY_READERS = 4
RECENT_JOBS = 256
BOOSTS = "boosts"
log = logging.getLogger(__name__)


def stopwatch() -> Callable[[], bool]:
    """True once the slice that begins now has ended."""
    until = time.monotonic() + SLICE_SECONDS
    return lambda: time.monotonic() > until


class LoopSlices:
    """Gives one slice in each pass of the event loop, to everybody in turn: messages are served between two of them."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def next(self) -> AsyncIterator[Callable[[], bool]]:
        """The next slice, with the test for its end. Nothing may be awaited in it."""
        async with self._turn:
            yield stopwatch()
            await asyncio.sleep(0)

    async def wait(self) -> None:
        """Let others have their turn; for work that is short, but comes many times."""
        async with self.next():
            pass

    async def select(self, rows: Sequence[T], fits: Callable[[T], bool]) -> list[T]:
        return await self._collect(rows, lambda chunk: filter(fits, chunk))

    async def convert(self, rows: Sequence[T], value_of: Callable[[T], V]) -> list[V]:
        return await self._collect(rows, lambda chunk: map(value_of, chunk))

    async def _collect(self, rows: Sequence[T], values: Callable[[Sequence[T]], Iterable[V]]) -> list[V]:
        collected: list[V] = []
        position = 0
        while position < len(rows):
            async with self.next() as is_over:
                while position < len(rows) and not is_over():
                    chunk = rows[position : position + CHUNK_ROWS]
                    collected += values(chunk)
                    position += len(chunk)
        return collected


def event_key(*, type_: str = "", subject: str = "") -> str:
    """Key to watch audit records: all, those of a type, or those about a subject."""
    return f"events/{type_}/{subject}"


def tasks_key(worker: str) -> str:
    """Key to watch the tasks that a pull worker gets or loses."""
    return f"tasks/{worker}"


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since the epoch, never going back."""


class _PendingEntry(Entry):
    """An entry with the future of its caller, unless it is the owner's own."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[Any] | None, event: Cause | None, question: Question | None) -> None:
        super().__init__(event, question)
        self.future = future

    def resolve(self) -> None:
        if self.future is None or self.future.done():
            return
        if self.failure is not None:
            self.future.set_exception(self.failure)
        else:
            self.future.set_result(self.answer)


class Grid:
    """The owner: `handle` events, `read` state, `watch` rows. Effects without a performer are left out.

    `cutoff_ms` turns a time to keep history for into the time of the grid before which it is folded.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        cutoff_ms: Callable[[int], int] | None = None,
    ) -> None:
        self._store = store
        self._cutoff_ms = cutoff_ms or (lambda keep_ms: clock.now_ms() - keep_ms)
        self._clock = clock
        self._performers: dict[type, Performer] = {}
        self._settler = BatchSettler(store)
        self._inbox: list[_PendingEntry] = []
        self._arrived = asyncio.Event()
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="grid-writer")
        self._readers = ThreadPoolExecutor(HISTORY_READERS, thread_name_prefix="grid-reader")
        self._recently_ended: dict[str, Job] = {}
        self._followers: list[Callable[[Sequence[Row]], None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: GridError | None = None
        self._is_store_doubtful = False
        self.slices = LoopSlices()
        self.has_room = True  # the store had room for new work at the last check

    def perform_with(self, performers: Mapping[type | UnionType, Performer]) -> None:
        """Add to the table of effects, by type or union of types, and their performers."""
        for kinds, performer in performers.items():
            self._performers.update(dict.fromkeys(get_args(kinds) or (kinds,), performer))

    async def start(self) -> None:
        """Load the ledger, begin a new epoch, and perform all pending effects."""
        await self._reload()
        self._tasks = [
            start_essential(self._settle_batches(), "the owner of the ledger"),
            start_essential(self._advance_time(), "the clock of the ledger"),
        ]
        await self.handle(ControlPlaneStarted(self.ledger.counters.get("epoch", 0) + 1))
        self._perform(self.now_ms())

    async def stop(self) -> None:
        """Finish the entries that have arrived, then stop; safe to call twice."""
        if self._tasks and self._failure is None:
            await self.read(lambda ledger, now: None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._writer.shutdown()
        self._readers.shutdown(cancel_futures=True)

    async def handle(self, event: Event) -> Answer:
        """The answer to an event, once it is durable. Raises the refusal."""
        answer: Answer = await self._enter(event, None)
        return answer

    async def handle_with_retry(self, event: Event) -> None:
        """Handle an event that must not be dropped: again while the store fails. Raises a refusal that is final."""
        pause = RETRY_SECONDS
        while True:
            try:
                await self.handle(event)
                return
            except GridError as failure:
                if not failure.retryable:
                    raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_SECONDS)

    def observe(self, event: HeartbeatReceived) -> None:
        """Apply a heartbeat at once, also while the store hangs: it renews a hold, and is not stored."""
        self._settler.observe(event, self._clock.now_ms())

    async def handle_all(self, events: Iterable[Event]) -> None:
        """Handle several events, in one batch if none is running; raises the first refusal."""
        await asyncio.gather(*(self.handle(event) for event in events))

    async def dry_run(self, event: Event) -> Answer:
        """The answer or refusal that `handle` would give to an event, without handling it."""

        def question(ledger: Ledger, now: int) -> Answer:
            recalled = self._settler.recall(event)
            return decide(ledger, event, now).answer if recalled is None else recalled

        return await self.read(question)

    async def read(self, question: Callable[[Ledger, int], T]) -> T:
        """The answer of a function that only reads the ledger."""
        answer: T = await self._enter(None, question)
        return answer

    async def scan(self, rows: Callable[[Ledger], Iterable[T]], fits: Callable[[T], bool]) -> list[T]:
        """The rows that fit, as they were at one moment; they are compared in slices, outside of any batch."""
        snapshot = await self.read(lambda ledger, now: tuple(rows(ledger)))
        return await self.slices.select(snapshot, fits)

    async def read_each(
        self,
        keys: Callable[[Ledger], Iterable[K]],
        question: Callable[[Ledger, K, int], Iterable[T]],
        *,
        limit: int | None = None,
    ) -> list[T]:
        """The answers of a function about each key, at most `limit`; each step takes as many keys as there is time for.
        The function leaves out keys that are gone meanwhile."""
        left = await self.read(lambda ledger, now: list(keys(ledger)))
        left.reverse()
        answers: list[T] = []

        def read_some(ledger: Ledger, now: int) -> None:
            is_over = stopwatch()
            while left and not is_over() and (limit is None or len(answers) < limit):
                answers.extend(question(ledger, left.pop(), now))

        while left and (limit is None or len(answers) < limit):
            await self.read(read_some)
        return answers

    async def query(self, question: Callable[[Store], T]) -> T:
        """The answer of a function that reads the history, in another thread."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, question, self._store)
        except StoreRefused:
            self._doubt_store()
            raise

    def recently_ended(self, name: str) -> Job | None:
        """The job of this uid or id, if it was one of the last to end."""
        return self._recently_ended.get(name)

    @property
    def last_event_seq(self) -> int:
        """The number of the last audit record that is durable."""
        return self._settler.last_seq

    def watch(self, key: str, watcher: asyncio.Event | None = None) -> asyncio.Event:
        """An event that is set whenever the row of this key has changed (`event_key`: when an audit record was written;
        `BOOSTS`: when a boost has changed); end it with `unwatch`."""
        watcher = watcher or asyncio.Event()
        self._watchers.setdefault(key, set()).add(watcher)
        return watcher

    def follow(self, follower: Callable[[Sequence[Row]], None]) -> None:
        """Call a function with the changed rows of every durable batch, in their order. It must return at once, and has
        to find changes from before this process by itself."""
        self._followers.append(follower)

    def unwatch(self, key: str, watcher: asyncio.Event) -> None:
        watchers = self._watchers.get(key, set())
        watchers.discard(watcher)
        if not watchers:
            self._watchers.pop(key, None)

    @property
    def ledger(self) -> Ledger:
        """The state as of the last decision, for orders and labels: answers to callers go through `read`."""
        return self._settler.ledger

    @property
    def store(self) -> Store:
        return self._store

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def _enter(self, event: Event | None, question: Question | None) -> asyncio.Future[Any]:
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.append(_PendingEntry(future, event, question))
        self._arrived.set()
        return future

    async def _settle_batches(self) -> None:
        """Settle one batch after another. A failure of this loop fails all waiting entries, and all later ones."""
        entries: list[_PendingEntry] = []
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                entries, self._inbox = self._inbox, []
                if self._is_store_doubtful:
                    self._is_store_doubtful = False
                    await self._reload()
                await self._settle(entries)
                await asyncio.sleep(0)  # a batch that commits nothing never waits: heartbeats have their turn here
        except Exception as failure:
            self._failure = GridError(f"the control plane cannot go on: {failure}")
            for entry in (*entries, *self._inbox):
                entry.failure = self._failure
                entry.resolve()
            raise

    async def _settle(self, entries: list[_PendingEntry]) -> None:
        """Decide as many entries as there is time for, commit once, then act and answer. The others come next."""
        if not self.has_room:
            await self._check_room()
        until, worked = time.monotonic() + STEP_SECONDS, time.thread_time() + STEP_SECONDS

        def is_long() -> bool:  # CPU time of this thread is read late, as that is a system call
            return time.monotonic() > until and time.thread_time() > worked

        try:
            batch = self._settler.decide(entries, self._clock.now_ms(), is_long=is_long, has_room=self.has_room)
        except DecisionFailed as failed:
            log.error("a decision failed: the ledger is loaded again", exc_info=failed.cause)
            await self._start_over(entries, failed)
            return
        self._enter_first(entries[batch.decided :])
        entries = entries[: batch.decided]
        if any(isinstance(entry.failure, StoreRefused) for entry in entries):
            self._doubt_store()
        try:
            stored = self._settler.to_commit(batch)
            if stored is not None:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._writer, self._store.commit, stored)
                self._set_room(self.has_room and self._store.has_room())
                self._settler.committed(stored)
        except Exception as failure:  # whatever the cause, none of its changes are durable
            await self._discard(entries, failure)
            return
        self._perform(batch.now, batch.changes)
        # watchers of these jobs ask for their rows now
        for row in batch.changes:
            if isinstance(row, Job) and row.is_over:
                for name in (row.uid, row.id):
                    self._recently_ended.pop(name, None)
                    self._recently_ended[name] = row
        while len(self._recently_ended) > 2 * RECENT_JOBS:
            del self._recently_ended[next(iter(self._recently_ended))]
        for entry in entries:
            entry.resolve()
        self._wake_watchers(batch)
        for follower in self._followers:
            try:
                follower(batch.changes)
            except Exception:  # whatever it is, it must not stop the owner of the ledger
                log.exception("a follower of changes failed")
        self._enter_first([_PendingEntry(None, event, None) for event in batch.later])

    def _doubt_store(self) -> None:
        """Load the ledger again before the next batch: the store reported damage. If that fails, the owner ends."""
        self._is_store_doubtful = True
        self._arrived.set()

    def _enter_first(self, entries: list[_PendingEntry]) -> None:
        if entries:
            self._inbox[:0] = entries
            self._arrived.set()

    def _perform(self, now: int, touched: Sequence[Row] | None = None) -> None:
        """Perform the effects of the rows. An effect that fails is derived again from the ledger."""
        if not self._performers:
            return
        try:
            effects = pending(self.ledger, now, touched)
        except Exception:  # it is committed, so its callers are answered; the next tick derives it again
            log.exception("effects could not be derived")
            return
        for effect in effects:
            performer = self._performers.get(type(effect))
            if performer is None:
                continue
            try:
                performer(effect)
            except Exception:  # one by one: a bug in one of them must not keep the others from being performed
                log.exception("an effect could not be performed: %s", effect)

    async def _check_room(self) -> None:
        """Fill the reserve of the store, and check whether there is room for new work besides."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._store.fill_reserve)
        except StoreFailed as failure:
            log.warning("the reserve of the store is not filled: %s", failure)
        self._set_room(self._store.has_room())

    def _set_room(self, has_room: bool) -> None:
        if has_room != self.has_room:
            log.warning("there is room on the disk again" if has_room else "the disk is full: new work is refused")
        self.has_room = has_room

    async def _discard(self, entries: list[_PendingEntry], failure: Exception) -> None:
        """Discard a batch that is not durable.

        After a failure of the store its events are refused, and its questions are answered from the stored ledger. Any
        other cause is one event's own: each is settled by itself, so that it fails alone.
        """
        log.error("a commit failed, nothing of it happened", exc_info=failure)
        await self._reload()
        if len(entries) > 1 and not isinstance(failure, StoreFailed | StoreRefused):
            for entry in entries:
                entry.answer = entry.failure = None
                await self._settle([entry])
            return
        questions = [entry for entry in entries if entry.question is not None]
        for entry in questions:
            entry.answer = entry.failure = None
        for entry in entries:
            if entry.question is None:
                entry.failure = entry.failure or _not_done(failure)
                entry.resolve()
        self._enter_first(questions)

    async def _start_over(self, entries: list[_PendingEntry], failed: DecisionFailed) -> None:
        """After a bug: load the stored ledger, fail the one entry, and settle the others again."""
        await self._reload()
        others = []
        for entry in entries:
            if entry is failed.culprit:
                entry.failure = failed.cause
                entry.resolve()
            else:
                entry.failure = entry.answer = None
                others.append(entry)
        self._enter_first(others)

    async def _reload(self) -> None:
        """Load the stored ledger, and try again until the store is readable."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                loaded = await loop.run_in_executor(self._writer, self._store.load)
                break
            except StoreFailed as failure:
                log.error("the store cannot be read, trying again: %s", failure)
                await asyncio.sleep(TICK_SECONDS)
        self._settler.load(loaded)

    def _wake_watchers(self, batch: DecidedBatch) -> None:
        keys = {row.key for row in batch.changes if not row.is_volatile}
        if batch.records:
            keys.add(event_key())
            keys.update(event_key(type_=record.type) for record in batch.records)
            keys.update(event_key(subject=record.subject) for record in batch.records)
        if BOOSTS in self._watchers and any(isinstance(row, Lease) and is_boost(row) for row in batch.changes):
            keys.add(BOOSTS)
        for row in batch.changes:
            if isinstance(row, Job) and row.attempts and row.attempts[-1].node in self.ledger.pull_nodes:
                keys.add(tasks_key(row.attempts[-1].node))
        for key in keys:
            for watcher in self._watchers.get(key, ()):
                watcher.set()

    async def _advance_time(self) -> None:
        """Tick the ledger when a row is due and once a second, and fold old history."""
        ticks = 0
        wait = TICK_SECONDS
        while True:
            await asyncio.sleep(wait)
            try:
                await self.handle(TimePassed())
                await self._check_room()
                if ticks % 3600 == 0:
                    before = self._cutoff_ms(KEEP_HISTORY_MS)
                    fold = partial(self._store.summarise, before_ms=before, limit=2000)
                    while await asyncio.get_running_loop().run_in_executor(self._writer, fold):
                        await asyncio.sleep(0.05)
                due = self.ledger.next_due_ms()
                left = TICK_SECONDS if due is None else (due - self._clock.now_ms()) / 1000
                wait = min(max(left, 0.005), TICK_SECONDS)
            except Exception as failure:  # the outermost loop: the next tick comes, no sooner while the store fails
                log.exception("a tick failed")
                if isinstance(failure, StoreRefused):
                    self._doubt_store()
                wait = TICK_SECONDS
            ticks += 1


def _not_done(failure: Exception) -> Exception:
    """Failure of a caller whose commit failed; the class of the store's failure says whether to try again."""
    if isinstance(failure, StoreFailed | StoreRefused):
        return type(failure)(f"not done, nothing was changed: {failure}")
    return failure
