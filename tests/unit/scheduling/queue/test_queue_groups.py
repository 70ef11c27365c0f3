"""The grouped queue decides as the plain one does, whoever waits."""

from __future__ import annotations

import contextlib
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.events import (
    AttemptEnded,
    Event,
    HeartbeatReceived,
    JobSubmitted,
    LeaseAsked,
    LeaseReleased,
    NodeDeclared,
    PolicySet,
    TimePassed,
)
from distributed_grid.domain.jobs import Command, Ending, Outcome
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.errors import GridError
from distributed_grid.reactor import decide, step
from distributed_grid.scheduling.queue import queue
from tests.support import plain_queue
from tests.support.builders import NOW
from tests.support.random_cases import NODES, a_random_node, a_random_policy, a_random_request

DONE = Outcome(Ending.EXITED, exit_code=0)


class Crowd:
    """A busy grid whose users ask for few different things again and again."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        self.now = NOW
        self.ledger = Ledger()
        self.shapes = [a_random_request(self.dice, 0, self.now) for _ in range(self.dice.randint(1, 6))]
        policy = a_random_policy(self.dice).policy
        self.handle(PolicySet(self._impatient(policy)))
        for name in NODES[: self.dice.randint(1, len(NODES))]:
            self.handle(NodeDeclared(a_random_node(self.dice, name)))
            self.handle(HeartbeatReceived(name, Usage()))

    def _impatient(self, policy: SchedulingPolicy) -> SchedulingPolicy:
        """Waits of seconds already get a reservation, and of minutes a promotion."""
        return replace(
            policy,
            reserve_after_ms=self.dice.choice((0, 2_000, 30_000)),
            starvation_ms=self.dice.choice((0, 5_000, 60_000, 3_600_000)),
        )

    def handle(self, event: Event, *, scans: bool = True) -> None:
        """Have an event decided; without `scans` nobody of the queue is granted what it frees."""
        with contextlib.suppress(GridError):
            if scans:
                step(self.ledger, event, self.now)
            else:
                self.ledger.apply(decide(self.ledger, event, self.now).changes)

    def request(self, number: int) -> Request:
        shape = self.dice.choice(self.shapes)
        changed = {"user": self.dice.choice(("ann", "bob", "eve", "dan"))} if self.dice.random() < 0.3 else {}
        wait_ms = self.dice.choice((20_000, 3_600_000))
        return replace(shape, id=f"r{self.dice.randrange(10**6)}x{number}", wait_ms=wait_ms, **changed)

    def happen(self, number: int) -> None:
        """Somebody asks, something ends, or time passes."""
        ledger, dice = self.ledger, self.dice
        self.now += dice.choice((0, 0, 1, 500, 3_000))
        what = dice.random()
        request = self.request(number)
        if what < 0.4:
            self.handle(JobSubmitted(f"job-{request.id}", Command(("true",)), request))
        elif what < 0.75:
            self.handle(LeaseAsked(request))
        elif what < 0.9:
            held = [lease for lease in ledger.leases.values() if lease.holds and lease.gang in ("", lease.id)]
            if held:
                self._end(dice.choice(held))
        else:
            for name in ledger.nodes:
                self.handle(HeartbeatReceived(name, Usage()))
            self.handle(TimePassed())

    def _end(self, lease: Lease) -> None:
        job = self.ledger.jobs.get(lease.job)
        attempt = job.attempt if job is not None else None
        scans = self.dice.random() < 0.5
        if job is not None and attempt is not None:
            self.handle(AttemptEnded(job.uid, attempt.number, attempt.fence, DONE), scans=scans)
        else:
            self.handle(LeaseReleased(lease.id, lease.request.user), scans=scans)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_grouped_queue_decides_as_the_plain_one(seed):
    crowd = Crowd(seed)
    for number in range(60):
        crowd.happen(number)
        _compare(crowd, number)
    crowd.ledger.check()


def _compare(crowd: Crowd, number: int) -> None:
    ledger, now = crowd.ledger, crowd.now + crowd.dice.choice((0, 0, 1_000, 40_000))
    assert queue.next_grant(ledger, now) == plain_queue.next_grant(ledger, now)
    assert list(queue.queue_order(ledger, now).in_order()) == plain_queue.queue_order(ledger, now)
    request = replace(crowd.request(number), id="newcomer")
    newcomer = Lease(request.id, request, now, job=crowd.dice.choice(("", "newcomer")))
    assert queue.place_newcomer(ledger, newcomer, now) == plain_queue.place_newcomer(ledger, newcomer, now)
    assert queue.reserved_nodes(ledger, newcomer, now) == plain_queue.reserved_nodes(ledger, newcomer, now)
    ordered = plain_queue.queue_order(ledger, now, newcomer=newcomer)
    grouped = queue.queue_order(ledger, now, newcomer=newcomer)
    assert list(grouped.in_order()) == ordered
    assert len(grouped) == len(ordered)
    for at in crowd.dice.sample(range(len(ordered)), min(len(ordered), 3)):
        assert grouped.position(ordered[at]) == at
    if ledger.waiting:
        lease = ledger.leases[crowd.dice.choice(ledger.waiting)[2]]
        assert queue.reserved_nodes(ledger, lease, now) == plain_queue.reserved_nodes(ledger, lease, now)
