"""The line: priority, then age; who waited long gets a node kept.

The order of the line: priority, deadlines, shares, need; and what a long wait changes about it. The grouped queue
decides as the plain one does, whoever waits.
"""

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
from distributed_grid.domain.scheduling_policy import HOUR_MS, SchedulingPolicy
from distributed_grid.errors import GridError
from distributed_grid.reactor import decide, step
from distributed_grid.scheduling.queue import queue
from distributed_grid.scheduling.queue.order import queue_order
from distributed_grid.scheduling.queue.queue import fit_key, next_grant, reserved_nodes
from tests.support import plain_queue
from tests.support.builders import NOW, Scenario, a_node, a_request
from tests.support.random_cases import NODES, a_random_node, a_random_policy, a_random_request

PATIENCE_S = SchedulingPolicy().reserve_after_ms / 1000


def a_full_node() -> Scenario:
    """Four cores, all lent to `full`."""
    scenario = Scenario(a_node("gpu1", cores=4, memory_gb=16))
    scenario.ask(a_request("full", cores=4))
    return scenario


def served(scenario: Scenario) -> list[str]:
    return [lease.id for lease in scenario.ledger.leases.values() if lease.holds and lease.id != "full"]


def kept(scenario: Scenario, request: Request) -> frozenset[str]:
    """The nodes that are kept from somebody who comes now."""
    return reserved_nodes(
        scenario.ledger, Lease(id=request.id, request=request, asked_at_ms=scenario.now), scenario.now
    )


def test_the_highest_priority_goes_first():
    scenario = a_full_node()
    for request_id, priority in (("low", "low"), ("medium", "medium"), ("high", "high")):
        scenario.ask(a_request(request_id, cores=4, priority=priority))
    scenario.release("full")
    assert served(scenario) == ["high"]
    scenario.release("high")
    assert served(scenario) == ["medium"]


def test_among_equals_the_oldest_goes_first():
    scenario = a_full_node()
    for request_id in ("b", "a"):
        scenario.ask(a_request(request_id, cores=4))
        scenario.advance(1)
    scenario.release("full")
    assert served(scenario) == ["b"]


def test_as_many_as_fit_are_served_at_once():
    scenario = a_full_node()
    for number in range(5):
        scenario.ask(a_request(f"r{number}", cores=1))
        scenario.advance(0.001)
    scenario.release("full")
    assert served(scenario) == ["r0", "r1", "r2", "r3"]


def test_a_later_request_goes_first_while_the_earlier_does_not_fit():
    scenario = Scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=1))
    scenario.ask(a_request("full", cores=4, require=["gpu1"]))
    scenario.ask(a_request("r2", cores=1, require=["gpu2"]))
    scenario.ask(a_request("big", cores=4))
    scenario.ask(a_request("small", cores=1))
    scenario.release("r2")
    assert served(scenario) == ["small"]


def test_request_waiting_beyond_the_limit_gets_a_reservation():
    scenario = a_full_node()
    scenario.release("full")
    scenario.ask(a_request("half", cores=2))
    scenario.ask(a_request("big", cores=4, wait_s=600))
    scenario.advance(PATIENCE_S + 1)
    assert scenario.ask(a_request("late", cores=1)).state == "asked"
    scenario.release("half")
    assert "big" in served(scenario)
    assert "late" not in served(scenario)


def test_within_patience_nobody_behind_is_held_up():
    scenario = a_full_node()
    scenario.release("full")
    scenario.ask(a_request("half", cores=2))
    scenario.ask(a_request("big", cores=4, wait_s=600))
    scenario.advance(PATIENCE_S)
    assert scenario.ask(a_request("late", cores=1)).state == "active"


def test_only_the_kinds_that_are_waited_for_are_kept():
    scenario = a_full_node()
    scenario.ask(a_request("big", cores=4, wait_s=600))
    scenario.advance(PATIENCE_S + 1)
    assert scenario.ask(a_request("memory", memory_gb=1)).state == "active"


def test_a_more_important_request_does_not_wait_for_a_kept_node():
    scenario = a_full_node()
    scenario.release("full")
    scenario.ask(a_request("half", cores=2))
    scenario.ask(a_request("big", cores=4, wait_s=600))
    scenario.advance(PATIENCE_S + 1)
    assert scenario.ask(a_request("vip", cores=1, priority="high")).state == "active"


def test_one_node_is_kept_and_the_others_go_on():
    scenario = Scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    scenario.ask(a_request("a", cores=2, require=["gpu1"]))
    scenario.ask(a_request("b", cores=3, require=["gpu2"]))
    scenario.ask(a_request("big", cores=4, wait_s=600))
    scenario.advance(PATIENCE_S + 1)
    assert kept(scenario, a_request("x")) == {"gpu1"}
    assert scenario.ask(a_request("late", cores=1)).node == "gpu2"


def test_two_who_waited_long_get_a_node_each():
    scenario = Scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    scenario.ask(a_request("a", cores=2, require=["gpu1"]))
    scenario.ask(a_request("b", cores=3, require=["gpu2"]))
    for request_id in ("big1", "big2", "big3"):
        scenario.ask(a_request(request_id, cores=4, wait_s=600))
    scenario.advance(PATIENCE_S + 1)
    assert kept(scenario, a_request("x")) == {"gpu1", "gpu2"}


def test_a_node_that_could_never_serve_is_not_kept():
    scenario = Scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=8, rank=1))
    scenario.ask(a_request("a", cores=8, require=["gpu2"]))
    scenario.ask(a_request("big", cores=8, wait_s=600))
    scenario.advance(PATIENCE_S + 1)
    assert kept(scenario, a_request("x")) == {"gpu2"}
    assert scenario.ask(a_request("late", cores=4)).node == "gpu1"


def test_a_node_nobody_hears_is_not_kept():
    scenario = a_full_node()
    scenario.ask(a_request("big", cores=4, wait_s=600, require=["gpu1"]))
    scenario.advance(PATIENCE_S + 1, heard=False)
    assert kept(scenario, a_request("x")) == frozenset()


def test_when_the_one_who_waited_gives_up_those_behind_are_served():
    scenario = a_full_node()
    scenario.release("full")
    scenario.ask(a_request("half", cores=2))
    scenario.ask(a_request("big", cores=4, wait_s=40))
    scenario.advance(PATIENCE_S + 1)
    scenario.ask(a_request("late", cores=1))
    assert "late" not in served(scenario)
    scenario.advance(10)
    assert "late" in served(scenario)


def test_a_kept_gpu_and_a_kept_custom_resource_are_kept_too():
    scenario = Scenario(a_node("gpu1", cores=4, gpus=2, custom={"fpga": 2}))
    scenario.ask(a_request("one", gpus=1, custom={"fpga": 1}))
    scenario.ask(a_request("both", memory_gb=1, gpus=2, custom={"fpga": 2}, wait_s=600))
    scenario.advance(PATIENCE_S + 1)
    for ask in ({"gpus": 1}, {"custom": {"fpga": 1}}, {"memory_gb": 1}):
        assert kept(scenario, a_request("x", **ask)) == {"gpu1"}
    assert kept(scenario, a_request("x", cores=1)) == frozenset()


def test_nobody_has_a_turn_in_an_empty_line():
    assert next_grant(Scenario(a_node()).ledger, 0) is None


def test_requests_of_one_shape_fit_or_fail_together():
    assert fit_key(a_request("a", cores=2, priority="low")) == fit_key(a_request("b", cores=2, priority="high"))
    assert fit_key(a_request("a", cores=2)) != fit_key(a_request("a", cores=2, require=["gpu1"]))


def test_a_shape_that_was_tried_is_not_tried_again():
    scenario = a_full_node()
    scenario.ask(a_request("r1", cores=1))
    tried = frozenset({fit_key(a_request("x", cores=1))})
    assert next_grant(scenario.ledger, scenario.now, tried) is None


DAY_S = 24 * 3600
FOREVER_S = 10**7


def a_full_node_with_queue() -> Scenario:
    """Four cores, all lent to `full`; who waits for a day is owed its place."""
    scenario = Scenario(a_node("n1", cores=4))
    scenario.handle(PolicySet(SchedulingPolicy(starvation_ms=24 * HOUR_MS)))
    scenario.ask(a_request("full", cores=4, user="else"))
    return scenario


def order(scenario: Scenario) -> list[str]:
    return [lease.id for lease in queue_order(scenario.ledger, scenario.now).in_order()]


def wait(scenario: Scenario, request_id: str, **what: object) -> None:
    scenario.ask(a_request(request_id, cores=4, wait_s=FOREVER_S, **what))  # type: ignore[arg-type]


def test_starved_request_comes_before_every_priority():
    scenario = a_full_node_with_queue()
    wait(scenario, "low", priority="low", user="ann")
    scenario.advance(DAY_S)
    wait(scenario, "urgent", priority="high", user="bob")
    assert order(scenario) == ["low", "urgent"]


def test_a_moment_earlier_it_does_not():
    scenario = a_full_node_with_queue()
    wait(scenario, "low", priority="low", user="ann")
    scenario.advance(DAY_S - 1)
    wait(scenario, "urgent", priority="high", user="bob")
    assert order(scenario) == ["urgent", "low"]


def test_of_each_user_one_is_lifted_and_the_oldest_of_them_is_first():
    scenario = a_full_node_with_queue()
    for request_id, user in (("ann1", "ann"), ("bob1", "bob"), ("ann2", "ann")):
        wait(scenario, request_id, priority="low", user=user)
        scenario.advance(1)
    scenario.advance(2 * DAY_S)
    wait(scenario, "urgent", priority="high", user="eve")
    assert order(scenario) == ["ann1", "bob1", "urgent", "ann2"]


def test_after_one_was_lifted_the_next_of_that_user_is_lifted_a_starvation_time_later():
    scenario = a_full_node_with_queue()
    for request_id in ("ann1", "ann2"):
        wait(scenario, request_id, priority="low", user="ann")
        scenario.advance(1)
    scenario.advance(2 * DAY_S)
    scenario.release("full")
    assert scenario.ledger.leases["ann1"].holds
    wait(scenario, "urgent", priority="high", user="eve")
    assert order(scenario) == ["urgent", "ann2"]
    scenario.advance(DAY_S)
    assert order(scenario) == ["ann2", "urgent"]


def test_that_a_younger_one_of_the_user_started_by_itself_takes_nothing_from_the_oldest():
    """Else somebody's own high priorities could keep its low one waiting for ever."""
    scenario = Scenario(a_node("n1", cores=4), a_node("n2", cores=4))
    scenario.handle(PolicySet(SchedulingPolicy(starvation_ms=24 * HOUR_MS)))
    for node in ("n1", "n2"):
        scenario.ask(a_request(f"full-{node}", cores=4, user="else", require=[node]))
    wait(scenario, "old", priority="low", user="ann", require=["n1"])
    scenario.advance(1)
    wait(scenario, "young", user="ann", require=["n2"])
    scenario.advance(DAY_S)
    scenario.release("full-n2")
    assert scenario.ledger.leases["young"].holds
    wait(scenario, "urgent", priority="high", user="bob")
    assert order(scenario) == ["old", "urgent"]


def test_a_deadline_that_gets_tight_comes_before_what_has_none():
    scenario = a_full_node_with_queue()
    wait(scenario, "old", user="ann")
    scenario.advance(60)
    deadline = scenario.now + 3 * HOUR_MS
    wait(scenario, "dated", user="bob", deadline_ms=deadline, expects_ms=HOUR_MS)
    assert order(scenario) == ["old", "dated"]
    scenario.advance(1.5 * 3600)
    assert order(scenario) == ["dated", "old"]


def test_among_equals_the_oldest_comes_first():
    scenario = a_full_node_with_queue()
    for request_id in ("b", "a", "c"):
        wait(scenario, request_id, user="ann")
        scenario.advance(1)
    assert order(scenario) == ["b", "a", "c"]


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
            self.handle(HeartbeatReceived(name=name, usage=Usage()))

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
            self.handle(JobSubmitted(id=f"job-{request.id}", command=Command(("true",)), request=request))
        elif what < 0.75:
            self.handle(LeaseAsked(request))
        elif what < 0.9:
            held = [lease for lease in ledger.leases.values() if lease.holds and lease.gang in ("", lease.id)]
            if held:
                self._end(dice.choice(held))
        else:
            for name in ledger.nodes:
                self.handle(HeartbeatReceived(name=name, usage=Usage()))
            self.handle(TimePassed())

    def _end(self, lease: Lease) -> None:
        job = self.ledger.jobs.get(lease.job)
        attempt = job.attempt if job is not None else None
        scans = self.dice.random() < 0.5
        if job is not None and attempt is not None:
            self.handle(
                AttemptEnded(uid=job.uid, number=attempt.number, fence=attempt.fence, outcome=DONE), scans=scans
            )
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
    assert list(queue_order(ledger, now).in_order()) == plain_queue.queue_order(ledger, now)
    request = replace(crowd.request(number), id="newcomer")
    newcomer = Lease(id=request.id, request=request, asked_at_ms=now, job=crowd.dice.choice(("", "newcomer")))
    assert queue.place_newcomer(ledger, newcomer, now) == plain_queue.place_newcomer(ledger, newcomer, now)
    assert queue.reserved_nodes(ledger, newcomer, now) == plain_queue.reserved_nodes(ledger, newcomer, now)
    ordered = plain_queue.queue_order(ledger, now, newcomer=newcomer)
    grouped = queue_order(ledger, now, newcomer=newcomer)
    assert list(grouped.in_order()) == ordered
    assert len(grouped) == len(ordered)
    for at in crowd.dice.sample(range(len(ordered)), min(len(ordered), 3)):
        assert grouped.position(ordered[at]) == at
    if ledger.waiting:
        lease = ledger.leases[crowd.dice.choice(ledger.waiting)[2]]
        assert queue.reserved_nodes(ledger, lease, now) == plain_queue.reserved_nodes(ledger, lease, now)
