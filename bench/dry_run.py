"""Fidelity of `--dry-run`: 5,000 random requests, each first only asked about, then made, on the same state.

Every answer is compared in full (place, claim, reasons, choice, confidence), every refusal by its class and words. A
dry run must leave ledger and audit trail as they were.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from random import Random

from bench.sizes import sized
from bench.table import Line
from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    HeartbeatReceived,
    LeaseReleased,
    NodeDeclared,
    TimePassed,
)
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Usage
from distributed_grid.errors import GridError, Refused
from distributed_grid.reactor import JobAnswer, LeaseAnswer
from distributed_grid.reactor.decision import Answer
from tests.support import random_cases

REQUESTS = sized(5_000, smoke=20)
REQUESTS_PER_STATE = 250
"""So many requests are made of one crowd of nodes; then another comes."""


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.ms = 1_000_000_000

    def now_ms(self) -> int:
        return self.ms


def measure() -> list[Line]:
    """How many of the verdicts were the same, and what kinds of verdict there were."""
    same, kinds = asyncio.run(compare(REQUESTS, seed=1))
    verdicts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    print(f"  verdicts: {verdicts}", file=sys.stderr)
    return [Line(f"dry runs that were the verdict, of {REQUESTS:,}", same, REQUESTS, "")]


async def compare(requests: int, *, seed: int) -> tuple[int, Counter[str]]:
    """Ask, then do, so many times; how often both were the same, and which verdicts there were."""
    dice, same, kinds = Random(seed), 0, Counter[str]()
    for first in range(0, requests, REQUESTS_PER_STATE):
        crowd = RandomEvents(Random(dice.random()))
        await crowd.come()
        for number in range(min(REQUESTS_PER_STATE, requests - first)):
            await crowd.live_on()
            event = crowd.next_event(number)
            before = crowd.facts()
            asked = await crowd.verdict(event, dry=True)
            untouched = crowd.facts() == before
            done = await crowd.verdict(event, dry=False)
            same += untouched and asked == done
            kinds[kind_of(done)] += 1
        await crowd.grid.stop()
    return same, kinds


def kind_of(verdict: object) -> str:
    """A word for a verdict."""
    if isinstance(verdict, tuple):
        return str(verdict[0])
    assert isinstance(verdict, LeaseAnswer | JobAnswer)
    lease = verdict.lease
    if lease is None or lease.is_over:
        return "recalled"
    if not lease.holds:
        return "waits"
    if verdict.choice is None:
        return "known already"
    return "displaces" if verdict.choice.displaced else "gang granted" if lease.gang else "granted"


class RandomEvents:
    """A grid with random nodes, in which something always goes on."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.clock = Clock()
        self.store = InMemoryStore()
        self.grid = Grid(self.store, self.clock)
        self._made: list[Event] = []

    def next_event(self, number: int) -> Event:
        """Somebody asks; now and then with the very words that were used before."""
        again = self._made and self.dice.random() < 0.04
        event = self.dice.choice(self._made) if again else random_cases.a_random_event(self.dice, number, self.clock.ms)
        self._made.append(event)
        return event

    async def come(self) -> None:
        await self.grid.start()
        await self.grid.handle(random_cases.a_random_policy(self.dice))
        for name in random_cases.NODES:
            await self.grid.handle(NodeDeclared(random_cases.a_random_node(self.dice, name)))
            await self.grid.handle(HeartbeatReceived(name=name, usage=Usage()))

    async def live_on(self) -> None:
        """Time passes: nodes are heard, jobs start and end, leases are given back."""
        self.clock.ms += self.dice.choice((10, 2_000, 40_000))
        for name in random_cases.NODES:
            if self.dice.random() < 0.9:
                await self.grid.handle(
                    HeartbeatReceived(name=name, usage=Usage(cpu_outside_milli=self.dice.choice((0, 100, 900))))
                )
        await self.grid.handle(TimePassed())
        for event in await self.grid.read(self._other_events):
            try:
                await self.grid.handle(event)
            except Refused:  # another of these has ended it
                continue

    def _other_events(self, ledger: Ledger, now: int) -> list[Event]:
        found: list[Event] = []
        for job in list(ledger.jobs.values()):
            attempt = job.attempt
            if attempt is None:
                continue
            if not attempt.pid and self.dice.random() < 0.7:
                found.append(AttemptStarted(uid=job.uid, number=attempt.number, fence=attempt.fence, pid=7))
            elif job.stop is not None or self.dice.random() < 0.02 * (1 + job.request.priority):
                outcome = Outcome(Ending.EXITED, exit_code=0)
                found.append(
                    AttemptEnded(uid=job.uid, number=attempt.number, fence=attempt.fence, outcome=outcome, pid=7)
                )
        plain = [lease for lease in ledger.leases.values() if not lease.job]
        if len(plain) > 8:
            first = max(plain, key=lambda lease: (lease.request.priority, lease.id))
            found.append(LeaseReleased(first.id, "ann"))
        return found

    def facts(self) -> tuple[object, object]:
        """Everything that a dry run must leave as it is."""
        return self.grid.ledger.rows(), self.store.load().last_event_seq

    async def verdict(self, event: Event, *, dry: bool) -> Answer | tuple[str, ...]:
        """The answer, or the refusal as its class and words."""
        try:
            return await (self.grid.dry_run(event) if dry else self.grid.handle(event))
        except GridError as refusal:
            return (type(refusal).__name__, str(refusal), *getattr(refusal, "reasons", ()))
