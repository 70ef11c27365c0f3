"""Cost of one event in queues of every mix: requests that are all equal, and requests that all differ in one field.

For each mix a queue is filled by submissions on ten full nodes, each with the estimate of its start as in the answer
to the submission; then jobs end. Only decide, apply and estimate are measured, in CPU time.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from itertools import count

from msgspec.structs import replace

from bench.sizes import sized
from bench.table import Line
from distributed_grid.domain.events import AttemptEnded, Event, HeartbeatReceived, JobSubmitted
from distributed_grid.domain.jobs import Command, Ending, Outcome
from distributed_grid.domain.leases import MAX_NAMES, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity, Priority
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.reactor import step
from distributed_grid.scheduling.queue.start_estimate import estimate_newcomer_start

WAITING = sized(5_000, smoke=60)
SAMPLES = sized(100, smoke=3)
NODES, TAGS = 10, 13
TRUE = Command(("true",))
DONE = Outcome(Ending.EXITED, exit_code=0)
DAY_MS = 86_400_000
Vary = Callable[[Request, int], Request]
"""Makes the request of a number differ from those of all other numbers."""


def measure() -> list[Line]:
    """Filling and ends of each mix, relative to the mix of equal requests in the same run."""
    equal = MixedQueue(MIXES["nothing"])
    equal_end = _end_of(equal)
    filling, ends = {}, {}
    for name, vary in MIXES.items():
        if name != "nothing":
            queue = MixedQueue(vary)
            filling[name], ends[name] = queue.filling_s, _end_of(queue)
    slowest, longest = (max(times, key=times.__getitem__) for times in (filling, ends))
    return [
        Line(f"{WAITING:,} equal submissions, for orientation", equal.filling_s, 0, "s"),
        Line(
            f"{WAITING:,} submissions with different deadlines, relative to that",
            filling["deadline"] / equal.filling_s,
            1.5,
            "×",
            lower_is_better=True,
        ),
        Line(
            f"slowest of {len(filling)} mixes ({slowest}), relative to that",
            filling[slowest] / equal.filling_s,
            5,
            "×",
            lower_is_better=True,
        ),
        Line(f"a job's end among {WAITING:,} equal requests", 1000 * equal_end, 0, "ms"),
        Line(f"a job's end in the slowest mix ({longest})", 1000 * ends[longest], 20, "ms", lower_is_better=True),
    ]


def _end_of(queue: MixedQueue) -> float:
    """The median of the ends of some jobs."""
    gc.collect()
    return statistics.median(queue.end_one() for _ in range(SAMPLES))


def _subset(names: list[str], number: int) -> tuple[str, ...]:
    """A different choice of names for each number below 2 ** len(names), never empty."""
    return tuple(name for at, name in enumerate(names) if (number + 1) >> at & 1)


_NODES = [f"n{at}" for at in range(NODES)]
_TAGS = [f"tag{at}" for at in range(TAGS)]


def _some_nodes(number: int) -> tuple[str, ...]:
    """Nodes in an order of their own for each number."""
    dice = random.Random(number)
    return tuple(dice.sample(_NODES, NODES))


def _names(number: int) -> tuple[str, ...]:
    return tuple(f"job-{number}-{at}" for at in range(MAX_NAMES))


def _anything(one: Request, number: int) -> Request:
    """Several fields at once, by a dice of its own for each number."""
    dice = random.Random(number)
    fields = [name for name in MIXES if name not in ("nothing", "everything", "affinity", "tight deadline")]
    for name in dice.sample(fields, 4):
        one = MIXES[name](one, number)
    return replace(one, priority=dice.choice(list(Priority)), strategy=dice.choice([None, Strategy.BEST_FIT]))


MIXES: dict[str, Vary] = {
    "nothing": lambda one, _: one,
    "deadline": lambda one, at: replace(one, deadline_ms=DAY_MS * 10 + at),
    "tight deadline": lambda one, at: replace(one, expects_ms=DAY_MS, deadline_ms=DAY_MS + 10_000_000 + at),
    "expects": lambda one, at: replace(one, expects_ms=60_000 + at),
    "duration": lambda one, at: replace(one, duration_ms=60_000 + at),
    "memory": lambda one, at: replace(one, ask=replace(one.ask, memory_bytes=2**30 + at)),
    "user": lambda one, at: replace(one, user=f"user{at}"),
    "team": lambda one, at: replace(one, team=f"team{at}"),
    "group": lambda one, at: replace(one, group=f"group{at}"),
    "labels": lambda one, at: replace(one, labels=tuple((tag, "") for tag in _subset(_TAGS, at))),
    "prefer": lambda one, at: replace(one, prefer=_some_nodes(at)),
    "require": lambda one, at: replace(one, require=_some_nodes(at)),
    "affinity": lambda one, at: replace(one, affinity=(f"job-{at}",)),
    "anti_affinity": lambda one, at: replace(one, anti_affinity=(f"job-{at}",)),
    "anti_affinity of as many names as may be": lambda one, at: replace(one, anti_affinity=_names(at)),
    "low priority and expects": lambda one, at: replace(one, priority=Priority.LOW, expects_ms=60_000 + at),
    "high priority and expects": lambda one, at: replace(one, priority=Priority.HIGH, expects_ms=60_000 + at),
    "everything": _anything,
}


class MixedQueue:
    """Ten full nodes, and a queue of requests that one function makes different from each other."""

    def __init__(self, vary: Vary, waiting: int = WAITING) -> None:
        self.now = 0
        self.numbers = count()
        self._vary = vary
        nodes = [
            Node(name=name, capacity=Capacity(16_000, 2**36), offer_ms=DAY_MS, tags=tuple(_TAGS), labels=())
            for name in _NODES
        ]
        self.ledger = Ledger(nodes)
        for node in nodes:
            self._step(HeartbeatReceived(name=node.name, usage=Usage()))
        for number in range(NODES * 16):
            self._submit(Request(id=f"s{number}", user=f"user{number % 5}", ask=Amounts(1000, 2**30)))
        gc.collect()
        self.filling_s = sum(self.submit_next() for _ in range(waiting))

    def submit_next(self) -> float:
        number = next(self.numbers)
        request = Request(id=f"r{number:06}", user=f"user{number % 5}", ask=Amounts(1000, 2**30), wait_ms=DAY_MS)
        return self._submit(self._vary(request, number))

    def _submit(self, request: Request) -> float:
        self.now += 10
        began = time.thread_time()
        step(self.ledger, JobSubmitted(id=f"j{request.id}", command=TRUE, request=request), self.now)
        lease_id = self.ledger.by_request.get(request.id, "")
        lease = self.ledger.leases.get(lease_id) or next(reversed(self.ledger.leases.values()))
        estimate_newcomer_start(self.ledger, lease, self.now)
        return time.thread_time() - began

    def end_one(self) -> float:
        """End the oldest job that holds something."""
        job = next(job for job in self.ledger.jobs.values() if job.attempt is not None)
        attempt = job.attempt
        assert attempt is not None
        self.now += 10
        return self._step(AttemptEnded(uid=job.uid, number=attempt.number, fence=attempt.fence, outcome=DONE, pid=1))

    def _step(self, event: Event) -> float:
        began = time.thread_time()
        step(self.ledger, event, self.now)
        return time.thread_time() - began
