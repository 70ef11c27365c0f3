"""Whom an urgent request displaces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.resources import Priority
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.scheduling.preemption.preemption import PreemptionPlan, plan_preemption
from tests.support.builders import Scenario, a_node, a_request

MINIMUM_RUN_MS = SchedulingPolicy().minimum_run_ms
LONG_S = 10 * MINIMUM_RUN_MS / 1000


def running(scenario: Scenario, *jobs: tuple[str, float, str], node: str = "gpu1", seconds: float = LONG_S) -> None:
    """Jobs as (uid, cores, priority), one after the other, then so much time."""
    for uid, cores, priority in jobs:
        scenario.submit(a_request(uid, cores=cores, priority=priority, require=[node]), starts=True)
        scenario.advance(1)
    scenario.advance(seconds)


def way_for(scenario: Scenario, **request) -> PreemptionPlan | None:
    return plan_preemption(scenario.ledger, a_request("vip", **{"priority": "urgent", **request}), scenario.now)


def victims(scenario: Scenario, **request) -> list[str] | None:
    way = way_for(scenario, **request)
    return None if way is None else sorted(victim.split(".")[0] for victim in way.victims)


def test_only_the_urgent_displace():
    scenario = Scenario(a_node(cores=4))
    running(scenario, ("a", 4, "low"))
    assert victims(scenario, cores=1) == ["a"]
    assert victims(scenario, cores=1, priority="high") is None


def test_the_urgent_do_not_displace_each_other():
    scenario = Scenario(a_node(cores=4))
    running(scenario, ("a", 4, "urgent"))
    assert way_for(scenario, cores=1) is None


def test_low_yields_before_medium_before_high():
    scenario = Scenario(a_node(cores=3))
    running(scenario, ("a", 1, "high"), ("b", 1, "low"), ("c", 1, "medium"))
    assert victims(scenario, cores=1) == ["b"]
    assert victims(scenario, cores=2) == ["b", "c"]
    assert victims(scenario, cores=3) == ["a", "b", "c"]


def test_among_equals_the_one_that_ran_least_yields():
    scenario = Scenario(a_node(cores=2))
    running(scenario, ("old", 1, "low"), ("young", 1, "low"))
    assert victims(scenario, cores=1) == ["young"]


def test_one_goes_instead_of_two_that_are_no_less_important():
    scenario = Scenario(a_node(cores=4))
    running(scenario, ("two", 2, "low"), ("one", 1, "low"), ("another", 1, "low"))
    assert victims(scenario, cores=2) == ["two"]


def test_two_low_go_before_one_high():
    scenario = Scenario(a_node(cores=4))
    running(scenario, ("two", 2, "high"), ("one", 1, "low"), ("another", 1, "low"))
    assert victims(scenario, cores=2) == ["another", "one"]


def test_nobody_goes_who_could_stay():
    scenario = Scenario(a_node(cores=4))
    running(scenario, ("large", 3, "low"), ("small", 1, "low"))
    assert victims(scenario, cores=3) == ["large"]


def test_the_node_with_fewest_victims_is_taken():
    scenario = Scenario(a_node("gpu1", cores=2), a_node("gpu2", cores=2))
    running(scenario, ("a", 1, "low"), ("b", 1, "low"))
    running(scenario, ("c", 2, "low"), node="gpu2", seconds=60)
    assert victims(scenario, cores=2) == ["c"]


def test_among_nodes_with_as_many_victims_the_least_work_is_lost():
    scenario = Scenario(a_node("gpu1", cores=2), a_node("gpu2", cores=2))
    running(scenario, ("old", 2, "low"))
    running(scenario, ("young", 2, "low"), node="gpu2")
    assert victims(scenario, cores=2) == ["young"]


def test_a_preferred_node_is_cleared_first_and_a_required_one_only():
    scenario = Scenario(a_node("gpu1", cores=2), a_node("gpu2", cores=2))
    running(scenario, ("old", 2, "low"))
    running(scenario, ("young", 2, "low"), node="gpu2")
    assert victims(scenario, cores=2, prefer=["gpu1"]) == ["old"]
    assert victims(scenario, cores=2, require=["gpu1"]) == ["old"]
    assert way_for(scenario, cores=2, require=["nowhere"]) is None


def test_job_below_the_minimum_run_time_is_not_preempted():
    scenario = Scenario(a_node(cores=1))
    scenario.submit(a_request("a", cores=1, priority="low"), starts=True)
    scenario.advance((MINIMUM_RUN_MS - 1) / 1000)
    assert way_for(scenario, cores=1) is None
    scenario.advance(0.001)
    assert victims(scenario, cores=1) == ["a"]


def test_lease_that_has_not_started_is_not_preempted():
    scenario = Scenario(a_node(cores=1))
    scenario.submit(a_request("a", cores=1, priority="low"))
    scenario.advance(LONG_S)
    assert way_for(scenario, cores=1) is None


def test_nobody_is_displaced_on_a_node_that_is_not_heard():
    scenario = Scenario(a_node(cores=1))
    running(scenario, ("a", 1, "low"))
    scenario.advance(7, heard=False)
    assert way_for(scenario, cores=1) is None


def test_nobody_is_displaced_where_that_would_not_be_enough():
    scenario = Scenario(a_node(cores=4))
    running(scenario, ("a", 2, "low"), ("b", 2, "urgent"))
    assert way_for(scenario, cores=3) is None


def test_lease_being_released_is_awaited_and_not_preempted_twice():
    scenario = Scenario(a_node(cores=4))
    running(scenario, ("a", 2, "low"), ("b", 2, "low"))
    scenario.submit(a_request("first", cores=1, priority="urgent"))
    way = way_for(scenario, cores=1)
    assert way is not None
    assert way.victims == ()
    assert way.awaits == ("b.1",)


def test_the_second_in_a_hurry_takes_another_victim_and_waits_for_both():
    scenario = Scenario(a_node(cores=4))
    running(scenario, ("a", 2, "low"), ("b", 2, "low"))
    scenario.submit(a_request("first", cores=2, priority="urgent"))
    way = way_for(scenario, cores=2)
    assert way is not None
    assert way.victims == ("a.1",)
    assert set(way.awaits) == {"a.1", "b.1"}


def test_a_gpu_is_cleared_device_by_device():
    scenario = Scenario(a_node(cores=4, gpus=2))
    for uid in ("a", "b"):
        scenario.submit(a_request(uid, gpus=0.6, priority="low"), starts=True)
        scenario.advance(1)
    scenario.advance(LONG_S)
    way = way_for(scenario, gpus=1)
    assert way is not None
    assert way.victims == ("b.1",)
    assert [share.index for share in way.claim.gpus] == [1]


leases = st.lists(st.tuples(st.integers(1, 4), st.sampled_from(Priority), st.integers(0, 3)), max_size=8)


@given(leases, st.integers(1, 12))
def test_preemption_is_sufficient_minimal_and_within_the_rules(held, cores):
    scenario = Scenario(a_node(cores=12, memory_gb=64))
    for number, (size, priority, wait_s) in enumerate(held):
        if scenario.ledger.claims_on("gpu1").cpu_milli + size * 1000 <= 12_000:
            scenario.submit(a_request(f"j{number}", cores=size, priority=priority), starts=True)
        scenario.advance(wait_s)
    request = a_request("vip", cores=cores, priority="urgent")
    way = plan_preemption(scenario.ledger, request, scenario.now)
    free = 12_000 - scenario.ledger.claims_on("gpu1").cpu_milli
    able = [
        lease
        for lease in scenario.ledger.leases.values()
        if lease.request.priority < Priority.URGENT and scenario.now - lease.granted_at_ms >= MINIMUM_RUN_MS
    ]
    could = free + sum(lease.request.ask.cpu_milli for lease in able)
    if way is None:
        assert could < cores * 1000 or free >= cores * 1000
        return
    gone = [scenario.ledger.leases[victim] for victim in way.victims]
    assert all(lease in able for lease in gone)
    sizes = [lease.request.ask.cpu_milli for lease in gone]
    assert free + sum(sizes) >= cores * 1000
    assert all(free + sum(sizes) - size < cores * 1000 for size in sizes)
    worst = max((lease.request.priority for lease in gone), default=Priority.LOW)
    if len(gone) > 1:
        peers = [lease for lease in able if lease.request.priority <= worst]
        assert not any(free + lease.request.ask.cpu_milli >= cores * 1000 for lease in peers)
    staying = [lease.claim for lease in scenario.ledger.leases.values() if lease.id not in way.victims and lease.claim]
    assert NodeClaims([*staying, way.claim]).excess_over(scenario.ledger.lends("gpu1")) is None
