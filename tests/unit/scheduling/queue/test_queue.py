"""The line: priority, then age; who waited long gets a node kept.

The order of the line: priority, deadlines, shares, need; and what a long wait changes about it.
"""

from __future__ import annotations

from distributed_grid.domain.events import PolicySet
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.scheduling_policy import HOUR_MS, SchedulingPolicy
from distributed_grid.scheduling.queue.queue import fit_key, next_grant, queue_order, reserved_nodes
from tests.support.builders import Scenario, a_node, a_request

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
    return reserved_nodes(scenario.ledger, Lease(request.id, request, scenario.now), scenario.now)


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


def test_who_waited_beyond_patience_gets_a_node_kept():
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


def test_who_waited_too_long_comes_before_every_priority():
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
