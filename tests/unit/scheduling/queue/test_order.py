"""The order of the line: priority, deadlines, shares, need; and what a long wait changes about it."""

from __future__ import annotations

from distributed_grid.domain.events import PolicySet
from distributed_grid.domain.scheduling_policy import HOUR_MS, SchedulingPolicy
from distributed_grid.scheduling.queue.queue import in_order
from tests.support.builders import Scenario, a_node, a_request

DAY_S = 24 * 3600
FOREVER_S = 10**7


def a_full_node() -> Scenario:
    """Four cores, all lent to `full`; who waits for a day is owed its place."""
    story = Scenario(a_node("n1", cores=4))
    story.tell(PolicySet(SchedulingPolicy(starvation_ms=24 * HOUR_MS)))
    story.ask(a_request("full", cores=4, user="else"))
    return story


def order(story: Scenario) -> list[str]:
    return [lease.id for lease in in_order(story.ledger, story.now)]


def wait(story: Scenario, request_id: str, **what: object) -> None:
    story.ask(a_request(request_id, cores=4, wait_s=FOREVER_S, **what))  # type: ignore[arg-type]


def test_who_waited_too_long_comes_before_every_priority():
    story = a_full_node()
    wait(story, "low", priority="low", user="ann")
    story.later(DAY_S)
    wait(story, "urgent", priority="high", user="bob")
    assert order(story) == ["low", "urgent"]


def test_a_moment_earlier_it_does_not():
    story = a_full_node()
    wait(story, "low", priority="low", user="ann")
    story.later(DAY_S - 1)
    wait(story, "urgent", priority="high", user="bob")
    assert order(story) == ["urgent", "low"]


def test_of_each_user_one_is_lifted_and_the_oldest_of_them_is_first():
    story = a_full_node()
    for request_id, user in (("ann1", "ann"), ("bob1", "bob"), ("ann2", "ann")):
        wait(story, request_id, priority="low", user=user)
        story.later(1)
    story.later(2 * DAY_S)
    wait(story, "urgent", priority="high", user="eve")
    assert order(story) == ["ann1", "bob1", "urgent", "ann2"]


def test_after_one_was_lifted_the_next_of_that_user_is_lifted_a_starvation_time_later():
    story = a_full_node()
    for request_id in ("ann1", "ann2"):
        wait(story, request_id, priority="low", user="ann")
        story.later(1)
    story.later(2 * DAY_S)
    story.release("full")
    assert story.ledger.leases["ann1"].holds
    wait(story, "urgent", priority="high", user="eve")
    assert order(story) == ["urgent", "ann2"]
    story.later(DAY_S)
    assert order(story) == ["ann2", "urgent"]


def test_that_a_younger_one_of_the_user_started_by_itself_takes_nothing_from_the_oldest():
    """Else somebody's own high priorities could keep its low one waiting for ever."""
    story = Scenario(a_node("n1", cores=4), a_node("n2", cores=4))
    story.tell(PolicySet(SchedulingPolicy(starvation_ms=24 * HOUR_MS)))
    for node in ("n1", "n2"):
        story.ask(a_request(f"full-{node}", cores=4, user="else", require=[node]))
    wait(story, "old", priority="low", user="ann", require=["n1"])
    story.later(1)
    wait(story, "young", user="ann", require=["n2"])
    story.later(DAY_S)
    story.release("full-n2")
    assert story.ledger.leases["young"].holds
    wait(story, "urgent", priority="high", user="bob")
    assert order(story) == ["old", "urgent"]


def test_a_deadline_that_gets_tight_comes_before_what_has_none():
    story = a_full_node()
    wait(story, "old", user="ann")
    story.later(60)
    deadline = story.now + 3 * HOUR_MS
    wait(story, "dated", user="bob", deadline_ms=deadline, expects_ms=HOUR_MS)
    assert order(story) == ["old", "dated"]
    story.later(1.5 * 3600)
    assert order(story) == ["dated", "old"]


def test_among_equals_the_oldest_comes_first():
    story = a_full_node()
    for request_id in ("b", "a", "c"):
        wait(story, request_id, user="ann")
        story.later(1)
    assert order(story) == ["b", "a", "c"]
