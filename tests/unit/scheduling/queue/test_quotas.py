"""Quotas: what one user, or a team together, may hold at once; who is beyond is in nobody's way."""

from __future__ import annotations

import pytest

from distributed_grid.domain.events import PolicySet
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy
from distributed_grid.errors import Refused
from distributed_grid.scheduling.queue.quotas import Quotas, never_within
from tests.support.builders import GB, Scenario, a_node, a_request

FOREVER_S = 10**7


def a_story(*quotas: Quota) -> Scenario:
    story = Scenario(a_node("n1", cores=16, memory_gb=64, gpus=4, custom={"fpga": 4}))
    story.tell(PolicySet(SchedulingPolicy(quotas=quotas)))
    return story


def state_of(story: Scenario, request_id: str) -> str:
    return str(story.ledger.leases[request_id].state)


def test_beyond_its_quota_a_request_waits_for_its_own_side():
    story = a_story(Quota("ann", cpu_milli=4000))
    story.ask(a_request("a1", cores=3, user="ann"))
    story.ask(a_request("a2", cores=2, user="ann", wait_s=FOREVER_S))
    assert state_of(story, "a2") == "asked"
    assert Quotas(story.ledger).beyond(a_request("x", cores=2, user="ann")) == (
        "quota of ann: 3 of 4 cores held, 2 asked"
    )
    story.release("a1")
    assert state_of(story, "a2") == "active"


def test_nobody_waits_for_who_is_beyond_its_quota():
    """It has waited for long, and everything it asks for is kept from nobody."""
    story = a_story(Quota("ann", cpu_milli=16_000))
    story.ask(a_request("a1", cores=10, user="ann"))
    story.ask(a_request("a2", cores=10, user="ann", wait_s=FOREVER_S))
    story.later(3600)
    story.ask(a_request("b1", cores=6, user="bob"))
    assert state_of(story, "b1") == "active"


def test_a_team_holds_its_quota_together():
    story = a_story(Quota("vision", ("ann", "bob"), cpu_milli=4000))
    story.ask(a_request("a1", cores=3, user="ann"))
    story.ask(a_request("b1", cores=2, user="bob", wait_s=FOREVER_S))
    story.ask(a_request("e1", cores=2, user="eve", team="vision", wait_s=FOREVER_S))
    story.ask(a_request("f1", cores=2, user="fay"))
    assert [state_of(story, one) for one in ("a1", "b1", "e1", "f1")] == ["active", "asked", "asked", "active"]


@pytest.mark.parametrize(
    ("quota", "ask", "words"),
    [
        (Quota("ann", memory_bytes=8 * GB), {"memory_gb": 9}, "quota of ann: at most 8.0 GB, 9.0 asked"),
        (Quota("ann", gpu_milli=1000), {"gpus": 2}, "quota of ann: at most 1 GPU, 2 asked"),
        (Quota("ann", custom=(("fpga", 1),)), {"custom": {"fpga": 2}}, "quota of ann: at most 1 fpga, 2 asked"),
        (Quota("ann", leases=1), {"cores": 1, "gang": 2}, "quota of ann: at most 1 leases, 2 asked"),
        (Quota("ann", cpu_milli=2500), {"cores": 1, "gang": 3}, "quota of ann: at most 2.5 cores, 3 asked"),
    ],
)
def test_more_than_a_quota_at_once_is_refused_with_numbers(quota, ask, words):
    story = a_story(quota)
    assert never_within(story.ledger, a_request("x", user="ann", **ask)) == words
    with pytest.raises(Refused, match="quota of ann"):
        story.ask(a_request("x", user="ann", **ask))
    assert "x" not in story.ledger.leases


def test_what_a_quota_does_not_name_is_not_limited():
    story = a_story(Quota("ann", cpu_milli=1000))
    assert never_within(story.ledger, a_request("x", user="ann", memory_gb=60, gpus=4)) is None


def test_the_number_of_leases_can_be_limited():
    story = a_story(Quota("ann", leases=2))
    for number in range(3):
        story.ask(a_request(f"a{number}", user="ann", wait_s=FOREVER_S))
    assert [state_of(story, f"a{number}") for number in range(3)] == ["active", "active", "asked"]


def test_whatever_comes_and_goes_a_quota_is_never_exceeded():
    story = a_story(Quota("ann", cpu_milli=5000), Quota("team", ("ann", "bob"), cpu_milli=8000))
    for number in range(60):
        user = ("ann", "bob")[number % 2]
        story.ask(a_request(f"r{number}", cores=1 + number % 3, user=user, wait_s=FOREVER_S))
        if number % 4 == 3:
            held = [lease.id for lease in story.ledger.leases.values() if lease.holds]
            story.release(held[number % len(held)])
        ann, bob = (story.ledger.held_by(user).cpu_milli for user in ("ann", "bob"))
        assert ann <= 5000
        assert ann + bob <= 8000
