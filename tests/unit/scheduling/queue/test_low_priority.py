"""`low` takes what nobody else who waits could use."""

from __future__ import annotations

from tests.support.builders import Scenario, a_node, a_request

FOREVER_S = 10**7


def state_of(story: Scenario, request_id: str) -> str:
    return str(story.ledger.leases[request_id].state)


def test_low_does_not_take_what_a_waiting_one_could_use():
    """Without patience nothing would be kept yet: anybody else could take the two cores."""
    story = Scenario(a_node("n1", cores=4))
    story.ask(a_request("half", cores=2))
    story.ask(a_request("waits", cores=3, wait_s=FOREVER_S))
    story.ask(a_request("low", cores=1, priority="low", wait_s=FOREVER_S))
    assert state_of(story, "low") == "asked"
    story.ask(a_request("medium", cores=1))
    assert state_of(story, "medium") == "active"


def test_low_takes_what_is_over_before_the_other_could_start():
    story = Scenario(a_node("n1", cores=4))
    story.ask(a_request("half", cores=2, duration_s=100))
    story.ask(a_request("waits", cores=3, wait_s=FOREVER_S))
    story.ask(a_request("low", cores=2, priority="low", duration_s=90))
    assert state_of(story, "low") == "active"


def test_low_takes_what_is_left_even_when_the_other_has_started():
    story = Scenario(a_node("n1", cores=4))
    story.ask(a_request("half", cores=2, duration_s=100))
    story.ask(a_request("waits", cores=3, wait_s=FOREVER_S))
    story.ask(a_request("low", cores=1, priority="low"))
    assert state_of(story, "low") == "active"


def test_low_takes_a_node_that_the_other_cannot_use():
    story = Scenario(a_node("n1", cores=4), a_node("n2", cores=2))
    story.ask(a_request("full", cores=4, require=["n1"]))
    story.ask(a_request("waits", cores=4, wait_s=FOREVER_S))
    story.ask(a_request("low", cores=2, priority="low"))
    assert story.ledger.leases["low"].node == "n2"


def test_low_takes_other_kinds_than_those_waited_for():
    story = Scenario(a_node("n1", cores=4, memory_gb=16))
    story.ask(a_request("full", cores=4))
    story.ask(a_request("waits", cores=1, wait_s=FOREVER_S))
    story.ask(a_request("low", memory_gb=4, priority="low"))
    assert state_of(story, "low") == "active"


def test_low_is_served_when_nobody_else_waits():
    story = Scenario(a_node("n1", cores=4))
    story.ask(a_request("low", cores=4, priority="low"))
    assert state_of(story, "low") == "active"
