"""What each strategy counts: the same three nodes, another choice for each reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.events import PolicySet
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.scheduling_policy import SchedulingPolicy, Strategy
from distributed_grid.errors import BadInput
from distributed_grid.scheduling.placement.placement import find_placement
from distributed_grid.scheduling.placement.scores import MAX_CACHED_ASKS
from tests.support.builders import Scenario, a_ledger, a_node, a_request


def where(scenario: Scenario, strategy: Strategy, **request) -> str:
    found = find_placement(scenario.ledger, a_request(strategy=strategy, **request))
    assert found is not None
    assert found.strategy is strategy
    return found.node


def far(name: str, **fields) -> Node:
    """A node on another machine."""
    extra = {key: fields.pop(key) for key in ("speed_milli", "cost_milli", "labels", "tags") if key in fields}
    return replace(a_node(name, **fields), host=name, **extra)


def test_work_without_a_gpu_is_not_drawn_to_nodes_that_have_one():
    scenario = Scenario(a_node("plain", cores=4), a_node("gpus", cores=4, gpus=4))
    assert scenario.ask(a_request("r1", cores=1)).node == "plain"
    assert scenario.ask(a_request("r2", cores=1)).node == "gpus"


def test_balanced_takes_the_node_with_the_most_room():
    scenario = Scenario(a_node("one", cores=4), a_node("two", cores=4))
    scenario.ask(a_request("r0", cores=2, require=["one"]))
    assert where(scenario, Strategy.LOAD_BALANCED) == "two"


def test_best_fit_takes_the_node_where_the_least_is_left():
    scenario = Scenario(a_node("one", cores=4), a_node("two", cores=4))
    scenario.ask(a_request("r0", cores=2, require=["two"]))
    assert where(scenario, Strategy.BEST_FIT) == "two"
    assert where(scenario, Strategy.BEST_FIT, cores=3) == "one"


def test_local_first_stays_on_this_machine_while_there_is_room():
    scenario = Scenario(a_node("here", cores=2), far("there", cores=64))
    assert where(scenario, Strategy.LOCAL_FIRST) == "here"
    assert where(scenario, Strategy.LOCAL_FIRST, cores=3) == "there"


def test_local_first_means_the_node_it_is_for_where_it_is_for_one():
    scenario = Scenario(a_node("here", cores=64), far("master", cores=2))
    assert where(scenario, Strategy.LOCAL_FIRST, target="master") == "master"


def test_spread_takes_the_node_with_the_fewest_leases_whatever_their_size():
    scenario = Scenario(a_node("one", cores=4), a_node("two", cores=4))
    scenario.ask(a_request("r0", cores=3, require=["one"]))
    for number in range(2):
        scenario.ask(a_request(f"s{number}", cores=0.5, require=["two"]))
    assert where(scenario, Strategy.SPREAD) == "one"


def test_spread_within_a_group_counts_that_group_only():
    scenario = Scenario(a_node("one", cores=8), a_node("two", cores=8))
    for number in range(3):
        scenario.ask(a_request(f"s{number}", cores=1, require=["two"]))
    scenario.ask(a_request("r0", cores=1, require=["one"], group="train"))
    assert where(scenario, Strategy.SPREAD, group="train") == "two"
    assert where(scenario, Strategy.SPREAD) == "one"


def test_performance_takes_the_fastest_node_that_is_not_busy():
    scenario = Scenario(far("slow", cores=8), far("fast", cores=8, speed_milli=2000))
    assert where(scenario, Strategy.PERFORMANCE_OPTIMIZED) == "fast"
    scenario.heartbeat("fast", Usage(cpu_busy_milli=900))
    assert where(scenario, Strategy.PERFORMANCE_OPTIMIZED) == "slow"


def test_cost_takes_the_cheapest_node_and_fills_it():
    scenario = Scenario(far("dear", cost_milli=900), far("cheap", cost_milli=100), a_node("own", cores=1))
    assert where(scenario, Strategy.COST_OPTIMIZED) == "own"
    assert where(scenario, Strategy.COST_OPTIMIZED, cores=2) == "cheap"
    scenario.ask(a_request("r0", cores=1, require=["cheap"]))
    assert where(scenario, Strategy.COST_OPTIMIZED, cores=2) == "cheap"


def test_fragmentation_aware_keeps_plain_work_off_the_gpus():
    scenario = Scenario(a_node("gpus", cores=64, gpus=8), a_node("plain", cores=2))
    assert where(scenario, Strategy.FRAGMENTATION_AWARE) == "plain"


def test_the_rank_of_the_owner_decides_before_how_full_a_node_is():
    scenario = Scenario(a_node("first", cores=4, rank=2000), a_node("second", cores=4))
    scenario.ask(a_request("r0", cores=2, require=["first"]))
    for strategy in (Strategy.LOAD_BALANCED, Strategy.BEST_FIT):
        assert where(scenario, strategy) == "first"


def test_without_a_strategy_of_its_own_a_request_goes_by_the_grids():
    scenario = Scenario(a_node("one", cores=4), a_node("two", cores=4))
    scenario.ask(a_request("r0", cores=2, require=["two"]))
    scenario.handle(PolicySet(SchedulingPolicy(strategy=Strategy.BEST_FIT)))
    assert find_placement(scenario.ledger, a_request()).node == "two"
    assert find_placement(scenario.ledger, a_request(strategy=Strategy.LOAD_BALANCED)).node == "one"


def test_a_word_for_a_strategy_may_have_dashes_and_capitals_but_must_be_one():
    assert Strategy.parse("Best-Fit") is Strategy.BEST_FIT
    with pytest.raises(BadInput, match="no strategy 'fastest': use one of load_balanced, "):
        Strategy.parse("fastest")


def test_huge_ranks_costs_and_speeds_stay_in_order():
    big = 10**8
    scenario = Scenario(
        replace(far("a", cost_milli=big), rank=10**12, speed_milli=10**5), far("b", cost_milli=big - 1, speed_milli=999)
    )
    assert where(scenario, Strategy.COST_OPTIMIZED) == "b"
    assert where(scenario, Strategy.PERFORMANCE_OPTIMIZED) == "a"
    assert where(scenario, Strategy.LOAD_BALANCED) == "a"


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2), st.integers(500, 3000)), min_size=1, max_size=6),
    st.sampled_from(Strategy),
    st.integers(1, 4),
)
def test_the_runners_up_are_the_next_choices_in_their_order(sizes, strategy, cores):
    ledger = a_ledger(*(a_node(f"n{i}", cores=c, gpus=g, rank=r) for i, (c, g, r) in enumerate(sizes)))
    request = a_request(cores=cores, strategy=strategy)
    found = find_placement(ledger, request)
    if found is None:
        assert all(cores > c for c, _, _ in sizes)
        return
    assert found.fits == sum(cores <= c for c, _, _ in sizes)
    again = find_placement(ledger, request, avoid=frozenset({found.node}))
    assert ([name for name, _ in found.runners_up[:1]]) == ([] if again is None else [again.node])
    assert [found.score, *(score for _, score in found.runners_up)] == sorted(
        [found.score, *(score for _, score in found.runners_up)], reverse=True
    )


@pytest.mark.parametrize("strategy", [s for s in Strategy if s is not Strategy.NODE_SPECIFIC])
def test_another_rank_counts_from_the_next_choice_on(strategy):
    scenario = Scenario(a_node("one", cores=4), a_node("two", cores=4))
    assert where(scenario, strategy) == "one"
    scenario.ledger.apply([replace(scenario.ledger.nodes["two"], rank=2000)])
    assert where(scenario, strategy) == "two"


def test_a_node_that_joins_counts_from_the_next_choice_on():
    scenario = Scenario(a_node("one", cores=8), a_node("two", cores=6))
    assert where(scenario, Strategy.LOAD_BALANCED, cores=2) == "one"
    joined = Scenario(a_node("one", cores=8), a_node("two", cores=6), a_node("three", cores=64)).ledger
    scenario.ledger.apply([joined.nodes["three"], joined.offers["three"]])
    assert where(scenario, Strategy.LOAD_BALANCED, cores=2) == "three"


def test_more_different_asks_than_are_remembered_are_still_placed_the_same():
    scenario = Scenario(a_node("one", cores=64), a_node("two", cores=63))
    for _ in range(2):
        for number in range(1, MAX_CACHED_ASKS + 10):
            assert where(scenario, Strategy.LOAD_BALANCED, cores=number / 10) == "one"
