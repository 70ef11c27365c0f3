"""How the cost of one event grows with the queue: a job's end, a submission, a tick in which all waits expire, and the
end of all that one node lends.

Decide and apply alone, except for the expiry, which goes through `Grid` and its SQLite store as in the daemon. Five
users ask for four shapes and two lengths on ten full nodes. Ratios of medians in one run. A step of the owner is given
in CPU time.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from bench.sizes import sized
from bench.table import Line
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptsListed,
    AttemptStarted,
    Event,
    HeartbeatReceived,
    JobSubmitted,
    LeaseAsked,
    NodeDeclared,
    NodeDrained,
    NodeForgotten,
    NodeStopped,
    TimePassed,
)
from distributed_grid.domain.followups import Cause
from distributed_grid.domain.jobs import Command, Ending, Outcome
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.ports import Batch, EndedRow
from distributed_grid.reactor import step

SHORT, LONG = sized((100, 10_000), smoke=(10, 50))
NODES = 10
LENT = sized(5_000, smoke=20)
SAMPLES = sized(300, smoke=3)
TRUE = Command(("true",))
DONE = Outcome(Ending.EXITED, exit_code=0)
DAY_MS = 86_400_000
WAIT_MS = 60_000


def measure() -> list[Line]:
    """Ends and submissions at a short and at a long queue, in turn; then the expiry of a long one."""
    queues = {size: FullGrid(size) for size in (SHORT, LONG)}
    ends: dict[int, list[float]] = {SHORT: [], LONG: []}
    submissions: dict[int, list[float]] = {SHORT: [], LONG: []}
    gc.collect()
    for _ in range(SAMPLES):
        for size, grid in queues.items():
            ends[size].append(grid.end_one())
            submissions[size].append(grid.submit_one())
    end, submission = ({size: 1000 * statistics.median(times[size]) for size in times} for times in (ends, submissions))
    lines = [
        Line("a job's end at a queue of 100, for orientation", end[SHORT], 0, "ms"),
        Line("the same at 10,000, relative to that", end[LONG] / end[SHORT], 3, "×", lower_is_better=True),
        Line("a submission at a queue of 100, for orientation", submission[SHORT], 0, "ms"),
        Line(
            "the same at 10,000, relative to that", submission[LONG] / submission[SHORT], 3, "×", lower_is_better=True
        ),
    ]
    for what, event in (("waits", a_lease_request), ("waits of jobs", a_submission)):
        with tempfile.TemporaryDirectory(prefix="grid-bench-") as folder:
            in_all, worked, longest = asyncio.run(_expire(Path(folder), LONG, event))
        bar = 0.5 if event is a_lease_request else 0
        lines += [
            Line(f"10,000 {what} expire in one tick, in all, durable", in_all, bar, "s", lower_is_better=True),
            Line("  CPU time of the owner's thread", worked, 0.5, "s", lower_is_better=True),
            Line("  longest time that nothing else got its turn", 1000 * longest, 50, "ms", lower_is_better=True),
        ]
    for what, ending in ENDINGS.items():
        longest = 1000 * LendingNode().longest_step(ending)
        lines.append(Line(f"longest step when a node with 5,000 jobs {what}", longest, 50, "ms", lower_is_better=True))
    lines.append(
        Line("a request id looked up among 100,000 ended jobs", 1000 * _recall(), 1, "ms", lower_is_better=True)
    )
    return lines


def a_request(number: int, wait_ms: int) -> Request:
    ask = Amounts(1000 * (1 + number % 4), 2**30)
    expects_ms = 60_000 * (1 + number % 2)
    return Request(id=f"r{number:06}", user=f"user{number % 5}", ask=ask, wait_ms=wait_ms, expects_ms=expects_ms)


def a_lease_request(number: int, wait_ms: int = DAY_MS) -> Event:
    return LeaseAsked(a_request(number, wait_ms))


def a_submission(number: int, wait_ms: int = DAY_MS) -> Event:
    return JobSubmitted(id=f"j{number:06}", command=TRUE, request=a_request(number, wait_ms))


class FullGrid:
    """Ten full nodes and a queue of so many jobs."""

    def __init__(self, waiting: int) -> None:
        self.now = 0
        self.numbers = count()
        nodes = [Node(name=f"n{at}", capacity=Capacity(16_000, 2**36), offer_ms=DAY_MS) for at in range(NODES)]
        self.ledger = Ledger(nodes)
        for node in nodes:
            self.handle(HeartbeatReceived(name=node.name, usage=Usage()))
        while len(self.ledger.waiting) < waiting:
            self.submit_one()

    def handle(self, event: Event) -> float:
        began = time.perf_counter()
        step(self.ledger, event, self.now)
        return time.perf_counter() - began

    def submit_one(self) -> float:
        self.now += 10
        return self.handle(a_submission(next(self.numbers)))

    def end_one(self) -> float:
        """End the oldest job that holds something; what starts in its place has started."""
        job = next(job for job in self.ledger.jobs.values() if job.attempt is not None)
        attempt = job.attempt
        assert attempt is not None
        self.now += 10
        return self.handle(AttemptEnded(uid=job.uid, number=attempt.number, fence=attempt.fence, outcome=DONE, pid=1))


ENDINGS: dict[str, Event] = {
    "is drained": NodeDrained("big"),
    "is stopped": NodeStopped("big"),
    "is lost": TimePassed(),
    "is named by the config no more": NodeForgotten("big"),
    "comes back after a reboot": AttemptsListed(node="big", attempts=(), boot="boot-2", machine="dir-1"),
}


class LendingNode:
    """A node that runs 5,000 jobs, and a queue of 10,000."""

    def __init__(self) -> None:
        self.now = 0
        self.ledger = Ledger([Node(name="big", capacity=Capacity(LENT * 1000, 2**50), hold_ms=15_000, offer_ms=DAY_MS)])
        for event in (
            HeartbeatReceived(name="big", usage=Usage()),
            AttemptsListed(node="big", attempts=(), boot="boot-1", machine="dir-1"),
        ):
            step(self.ledger, event, self.now)
        for number in range(LENT):
            request = Request(id=f"r{number:06}", user=f"user{number % 5}", ask=Amounts(1000, 2**30))
            step(self.ledger, JobSubmitted(id=f"j{number:06}", command=TRUE, request=request), self.now)
        for job in list(self.ledger.jobs.values()):
            assert job.attempt is not None
            step(
                self.ledger,
                AttemptStarted(uid=job.uid, number=job.attempt.number, fence=job.attempt.fence, pid=1),
                self.now,
            )
        for number in range(LENT, LENT + LONG):
            step(self.ledger, a_submission(number), self.now)

    def longest_step(self, event: Event) -> float:
        """The longest of the steps in which this event, and all that it leads to, is settled."""
        if isinstance(event, TimePassed):
            self.now += 60_000
        gc.collect()
        ahead, longest = deque[Cause]([event, TimePassed(), TimePassed()]), 0.0
        while ahead:
            began = time.thread_time()
            stepped = step(self.ledger, ahead.popleft(), self.now)
            longest = max(longest, time.thread_time() - began)
            ahead.extend(stepped.later)
        return longest


def _recall(ended: int = 100_000) -> float:
    """How long the owner takes to find out that a request id was used before, or was not: the median."""
    with tempfile.TemporaryDirectory(prefix="grid-bench-") as folder:
        store = SqliteStore(Path(folder) / "grid.db")
        a_row = EndedRow("job", "", "", "ada", "n1", 1, 1, "exited", 1000, 2**30, 0, b"{}", "")
        rows = [replace(a_row, key=f"j{number}", request_id=f"r{number}") for number in range(ended)]
        store.commit(Batch(ended=rows))
        times = []
        for number in range(1000):
            began = time.perf_counter()
            store.ended("job", request_id=f"r{number * 2 * ended // 1000}", limit=1)
            times.append(time.perf_counter() - began)
        store.close()
    return statistics.median(times)


class SteppedClock:
    """A clock that jumps when it is told to, and goes on with the real one."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def now_ms(self) -> int:
        return self.ahead_ms + int(time.monotonic() * 1000)


async def _expire(folder: Path, waits: int, event: Callable[[int, int], Event]) -> tuple[float, float, float]:
    """The time until all waits that are over are durably withdrawn; the loop's CPU time, and its longest stall."""
    clock = SteppedClock()
    grid = Grid(SqliteStore(folder / "grid.db"), clock)
    await grid.start()
    for at in range(NODES):
        name = f"n{at}"
        await grid.handle(NodeDeclared(Node(name=name, capacity=Capacity(16_000, 2**36), offer_ms=DAY_MS)))
        await grid.handle(HeartbeatReceived(name=name, usage=Usage()))
    await grid.handle_all(a_submission(10**6 + number) for number in range(400))
    await grid.handle_all(event(number, WAIT_MS) for number in range(waits))
    assert len(grid.ledger.due_by(WAIT_MS + clock.now_ms(), waits)) == waits
    gc.collect()
    stalls = asyncio.create_task(_longest_stall())
    clock.ahead_ms += WAIT_MS + 1
    began, worked = time.perf_counter(), time.thread_time()
    await grid.handle(TimePassed())
    while grid.ledger.due_by(clock.now_ms(), 1):
        await asyncio.sleep(0.001)
    await grid.read(lambda ledger, now: None)
    took, worked = time.perf_counter() - began, time.thread_time() - worked
    stalls.cancel()
    longest = await stalls
    await grid.stop()
    grid.store.close()
    return took, worked, longest


async def _longest_stall() -> float:
    longest, last = 0.0, time.perf_counter()
    try:
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest
