"""What each strategy counts: the same three nodes, another choice for each reason; fitness, in both its forms.

The table of `docs/guide/scheduling.md`, one workload by every strategy, is what the reactor decides.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.events import PolicySet
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity, Claim, GpuDevice
from distributed_grid.domain.scheduling_policy import SchedulingPolicy, Strategy
from distributed_grid.scheduling.placement.placement import find_placement
from distributed_grid.scheduling.placement.scores import MAX_CACHED_ASKS, fitness_of, fitness_rows
from tests.support.builders import GB, Scenario, a_capacity, a_ledger, a_node, a_request, an_ask, caps, thresholds

amounts = st.builds(
    lambda cores, memory, gpus: Amounts(cores * 500, memory * GB, gpus * 1000),
    st.integers(0, 8),
    st.integers(0, 16),
    st.integers(0, 2),
)

capacities = st.builds(
    lambda cores, memory, gpus: Capacity(cores * 500, memory * GB, tuple(GpuDevice(at, 8 * GB) for at in range(gpus))),
    st.integers(0, 16),
    st.integers(0, 32),
    st.integers(0, 3),
)

more = st.tuples(st.integers(0, 8000), st.integers(0, 8 * GB), st.integers(0, 2))


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


@pytest.mark.parametrize("strategy", [Strategy.LOAD_BALANCED, Strategy.SPREAD, Strategy.BEST_FIT])
def test_priority_decides_among_nodes_that_are_about_equally_good(strategy):
    scenario = Scenario(a_node("first", cores=64, rank=1000), a_node("second", cores=64, rank=3000))
    less, more = ("first", "second") if strategy is Strategy.BEST_FIT else ("second", "first")
    if strategy is not Strategy.SPREAD:
        scenario.ask(a_request("r0", cores=2, require=[less]))
    assert where(scenario, strategy) == "second", f"{more} is better by a thirtieth of a node"


@pytest.mark.parametrize("strategy", [Strategy.LOAD_BALANCED, Strategy.BEST_FIT])
def test_no_priority_outweighs_more_than_a_tenth_of_a_node(strategy):
    scenario = Scenario(a_node("first", cores=8, rank=0), a_node("second", cores=8, rank=10**9))
    scenario.ask(a_request("r0", cores=1, require=["first" if strategy is Strategy.BEST_FIT else "second"]))
    assert where(scenario, strategy) == "first"


@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=6),
    st.sampled_from([one for one in Strategy if one is not Strategy.NODE_SPECIFIC]),
    st.integers(1, 10**6),
)
def test_equal_priorities_change_nothing(nodes, strategy, rank):
    """Which number all of them have does not matter either."""
    places = []
    for one in (1000, rank):
        scenario = Scenario(
            *(a_node(f"n{i}", cores=cores, gpus=gpus, rank=one) for i, (cores, gpus, _) in enumerate(nodes))
        )
        for i, (cores, _, held) in enumerate(nodes):
            if 0 < held <= cores:
                scenario.ask(a_request(f"h{i}", cores=held, require=[f"n{i}"]))
        found = find_placement(scenario.ledger, a_request(cores=1, strategy=strategy))
        places.append(found and (found.node, [name for name, _ in found.runners_up]))
    assert places[0] == places[1]


def test_nine_jobs_of_two_cores_are_balanced_in_proportion_to_what_is_free():
    """Whatever the priorities: 24 cores are free, and each node gets its part of the jobs, to within one."""
    free = {"gpu-master": 4, "gpu1": 6, "gpu2": 14}
    for ranks in ((1000, 2000, 3000), (3000, 2000, 1000), (1000, 1000, 1000)):
        scenario = Scenario(*(a_node(name, cores=c, rank=r) for (name, c), r in zip(free.items(), ranks, strict=True)))
        places = Counter(scenario.ask(a_request(f"r{number}", cores=2)).node for number in range(9))
        assert all(abs(places[name] - 9 * cores / 24) < 1 for name, cores in free.items()), places


def test_balancing_goes_by_what_is_offered_and_not_by_what_a_node_has():
    """A node whose owner uses half of it gets half as many as its equal."""
    scenario = Scenario(a_node("half", cores=16, thresholds=thresholds()), a_node("whole", cores=16))
    scenario.heartbeat("half", Usage(cpu_busy_milli=500, cpu_outside_milli=500))
    places = Counter(scenario.ask(a_request(f"r{number}", cores=1)).node for number in range(18))
    assert places == {"whole": 12, "half": 6}


def test_spread_gives_every_node_one_before_any_has_two_whatever_their_priorities():
    ranks = {"small": 1000, "middle": 2000, "large": 9000}
    scenario = Scenario(*(a_node(name, cores=4, rank=rank) for name, rank in ranks.items()))
    for turn in range(3):
        asked = [a_request(f"r{turn}-{number}", cores=1, strategy=Strategy.SPREAD) for number in range(3)]
        assert {scenario.ask(request).node for request in asked} == set(ranks)


def test_local_first_means_the_head_where_several_nodes_are_on_this_machine():
    head = replace(a_node("gpu-master", cores=4), role="head")
    scenario = Scenario(a_node("gpu1", cores=6, rank=2000), head, a_node("gpu2", cores=14, rank=3000))
    assert where(scenario, Strategy.LOCAL_FIRST, cores=2) == "gpu-master"
    assert where(scenario, Strategy.LOCAL_FIRST, cores=5) == "gpu2"
    assert where(scenario, Strategy.LOCAL_FIRST, cores=2, target="gpu1") == "gpu1"


def test_local_first_means_the_node_on_which_it_was_typed_where_that_is_known():
    head = replace(a_node("gpu-master", cores=4), role="head")
    scenario = Scenario(head, a_node("gpu1", cores=6), a_node("gpu2", cores=14))
    assert where(scenario, Strategy.LOCAL_FIRST, cores=2, origin="gpu1") == "gpu1"
    assert where(scenario, Strategy.LOCAL_FIRST, cores=8, origin="gpu1") == "gpu2"
    assert where(scenario, Strategy.LOCAL_FIRST, cores=2, origin="gpu1", target="gpu2") == "gpu2"


def test_local_first_stays_here_where_the_head_is_another_machine():
    scenario = Scenario(replace(far("boss", cores=64), role="head"), a_node("here", cores=4))
    assert where(scenario, Strategy.LOCAL_FIRST) == "here"


def test_speeds_that_hardly_differ_leave_the_choice_to_the_room():
    scenario = Scenario(far("full", cores=8), far("empty", cores=8))
    scenario.ask(a_request("r0", cores=4, require=["full"]))
    scenario.heartbeat("full", Usage(cpu_busy_milli=10))
    scenario.heartbeat("empty", Usage(cpu_busy_milli=40))
    assert where(scenario, Strategy.PERFORMANCE_OPTIMIZED) == "empty"


def test_without_a_strategy_of_its_own_a_request_goes_by_the_grids():
    scenario = Scenario(a_node("one", cores=4), a_node("two", cores=4))
    scenario.ask(a_request("r0", cores=2, require=["two"]))
    scenario.handle(PolicySet(SchedulingPolicy(strategy=Strategy.BEST_FIT)))
    assert find_placement(scenario.ledger, a_request()).node == "two"
    assert find_placement(scenario.ledger, a_request(strategy=Strategy.LOAD_BALANCED)).node == "one"


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


@given(ask=amounts, lends=capacities, extra=more)
def test_a_freer_node_is_never_less_fit(ask: Amounts, lends: Capacity, extra: tuple[int, int, int]) -> None:
    cpu, memory, gpus = extra
    devices = (*lends.gpus, *(GpuDevice(len(lends.gpus) + at, 8 * GB) for at in range(gpus)))
    freer = Capacity(lends.cpu_milli + cpu, lends.memory_bytes + memory, devices)
    assert fitness_of(ask, freer, NodeClaims()) >= fitness_of(ask, lends, NodeClaims())


@given(ask=amounts, lends=capacities, taken=amounts)
def test_what_is_taken_makes_nobody_fitter(ask: Amounts, lends: Capacity, taken: Amounts) -> None:
    claim = NodeClaims().claim_for(taken, lends)
    assume(claim is not None)
    assert claim is not None
    assert fitness_of(ask, lends, NodeClaims([claim])) <= fitness_of(ask, lends, NodeClaims())


@given(ask=amounts, lends=capacities)
def test_fitness_is_zero_for_the_unfit_and_from_a_half_to_one_for_the_fit(ask: Amounts, lends: Capacity) -> None:
    fits = NodeClaims().claim_for(ask, lends) is not None
    found = fitness_of(ask, lends, NodeClaims())
    assert 0.5 <= found <= 1 if fits else found == 0


@pytest.mark.parametrize(
    ("ask", "free", "fitness"),
    [
        (an_ask(cores=4), a_capacity(4, 16), 0.5),
        (an_ask(cores=1), a_capacity(4, 16), 0.875),
        (an_ask(cores=2, memory_gb=4), a_capacity(4, 16), 0.8125),
        (an_ask(cores=8), a_capacity(4, 16), 0.0),
        (an_ask(gpus=1), a_capacity(4, 16, 2), 0.75),
    ],
)
def test_the_formula(ask: Amounts, free: Capacity, fitness: float) -> None:
    assert fitness_of(ask, free, NodeClaims()) == fitness


@given(ask=amounts, sizes=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 32)), min_size=1, max_size=6))
def test_the_columns_say_the_same(ask: Amounts, sizes: list[tuple[int, int]]) -> None:
    nodes = [a_node(f"n{at}", cores=cores, memory_gb=memory) for at, (cores, memory) in enumerate(sizes)]
    ledger = a_ledger(*nodes)
    scores = fitness_rows(ledger, ask)
    for node in nodes:
        alone = fitness_of(ask, ledger.lends(node.name), ledger.claims_on(node.name))
        if alone:
            assert scores[ledger.columns.rows[node.name]] == pytest.approx(1_000_000 * alone, abs=2)


def test_a_claim_counts() -> None:
    held = NodeClaims([Claim(cpu_milli=3000)])
    assert fitness_of(an_ask(cores=1), a_capacity(4, 16), held) == 0.5


PAGE = Path(__file__).parents[4] / "docs" / "guide" / "scheduling.md"
STRATEGIES = [one for one in Strategy if one is not Strategy.NODE_SPECIFIC]


def the_nodes() -> list[Node]:
    """The nodes of the shipped cluster files, but that one is faster than usual and costs money."""
    head = a_node("gpu-master", cores=16, memory_gb=30, gpus=1, rank=1000, caps=caps(cores=4, memory_gb=16, gpus=0))
    fast = a_node("gpu1", cores=8, memory_gb=15, gpus=1, rank=2000, caps=caps(cores=6, memory_gb=12))
    large = a_node("gpu2", cores=16, memory_gb=31, gpus=2, rank=3000, caps=caps(cores=14, memory_gb=28))
    return [replace(head, role="head"), replace(fast, speed_milli=1500, cost_milli=500), large]


def placements(strategy: Strategy) -> list[str]:
    """Where nine jobs go: 2 cores each, and every third of them half a GPU, too."""
    scenario = Scenario(*the_nodes())
    asked = (a_request(f"r{n}", cores=2, gpus=0.5 if n % 3 == 2 else 0, strategy=strategy, wait_s=0) for n in range(9))
    return [scenario.ask(request).node or "-" for request in asked]


def row(strategy: Strategy) -> str:
    places = placements(strategy)
    count = Counter(places)
    totals = " | ".join(str(count[node.name]) for node in the_nodes())
    return f"| `{strategy}` | {' '.join(_short(place) for place in places)} | {totals} |"


def _short(node: str) -> str:
    return {"gpu-master": "m", "gpu1": "1", "gpu2": "2"}.get(node, node)


def test_the_table_of_the_page_is_what_the_reactor_decides():
    wanted = [row(strategy) for strategy in STRATEGIES]
    found = [line for line in PAGE.read_text().splitlines() if line in wanted]
    assert found == wanted, "docs/guide/scheduling.md must have:\n" + "\n".join(wanted)
