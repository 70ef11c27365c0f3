"""Where a request goes: required nodes are a must, preferred ones a wish, then slack, with a little weight of priority.

Musts: named nodes, labels, affinity and GPU models, each with its named reason where it is not met.

Who lends to a node that needs more: by what is free, by how hard a node works itself, and a little by priority.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.events import LeaseAsked, LeaseReleased, NodeDeclared, PolicySet
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import GpuUsage, Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity, Claim, GpuDevice
from distributed_grid.domain.scheduling_policy import SchedulingPolicy, Strategy
from distributed_grid.domain.states import JobState
from distributed_grid.errors import BadInput, Refused
from distributed_grid.scheduling.placement.placement import (
    MAX_CACHED_ASKS,
    find_placement,
    fitness_of,
    fitness_rows,
    fitting_rows,
)
from distributed_grid.scheduling.queue.reasons import never_fits, texts, why_not_now
from tests.support.builders import (
    GB,
    NOW,
    Scenario,
    a_capacity,
    a_ledger,
    a_node,
    a_request,
    a_usage,
    an_ask,
    caps,
    thresholds,
)


def where(ledger: Ledger, avoid: frozenset[str] = frozenset(), **request) -> str | None:
    found = find_placement(ledger, a_request(**request), avoid=avoid)
    return None if found is None else found.node


@pytest.fixture
def trio() -> Ledger:
    """Three nodes: a busy-looking small one, a middle one, a large one."""
    return a_ledger(a_node("small", cores=2), a_node("middle", cores=4), a_node("large", cores=8, gpus=1))


def test_the_node_with_most_slack_gets_it():
    scenario = Scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    scenario.ask(a_request("r1", cores=1, require=["gpu1"]))
    assert where(scenario.ledger) == "gpu2"


def test_the_higher_priority_lends_first_where_the_slack_is_about_the_same():
    scenario = Scenario(a_node("gpu1", cores=64, rank=2000), a_node("gpu2", cores=64, rank=1000))
    scenario.ask(a_request("r1", cores=1, require=["gpu1"]))
    assert where(scenario.ledger, cores=1) == "gpu1"
    scenario.ask(a_request("r2", cores=8, require=["gpu1"]))
    assert where(scenario.ledger, cores=1) == "gpu2"


def test_a_preferred_node_comes_before_any_score(trio):
    assert where(trio, prefer=["small"]) == "small"


def test_of_several_preferred_nodes_the_one_with_most_slack_is_taken(trio):
    assert where(trio, cores=2, prefer=["small", "middle", "large"]) == "large"


def test_a_wish_that_cannot_be_granted_is_forgotten(trio):
    assert where(trio, cores=3, prefer=["small"]) == "large"


def test_a_required_node_is_a_must(trio):
    assert where(trio, require=["middle"]) == "middle"
    assert where(trio, cores=5, require=["middle"]) is None


def test_a_name_nobody_has_is_no_place(trio):
    assert where(trio, require=["nowhere"]) is None
    assert where(trio, prefer=["nowhere"]) == "large"


def test_a_node_to_avoid_is_never_taken_not_even_when_required(trio):
    assert where(trio, avoid=frozenset({"large"})) != "large"
    assert where(trio, avoid=frozenset({"large"}), prefer=["large"]) != "large"
    assert where(trio, avoid=frozenset({"large"}), require=["large"]) is None
    assert where(trio, avoid=frozenset({"nowhere"})) == "large"


def test_only_nodes_with_a_fresh_offer_are_considered():
    ledger = Ledger([a_node("gpu1")])
    assert where(ledger) is None
    assert where(ledger, require=["gpu1"]) is None


def test_a_grid_without_nodes_has_no_place():
    assert where(Ledger()) is None


def test_a_node_that_passes_the_filter_but_not_the_detail_is_passed_over():
    ledger = a_ledger(
        a_node("gpu1", gpus=[GpuDevice(0, 8 * GB)], rank=3000),
        a_node("gpu2", gpus=[GpuDevice(0, 24 * GB)], rank=2000),
        a_node("gpu3", custom={"fpga": 1}),
    )
    assert where(ledger, gpus=1, gpu_memory_gb=12) == "gpu2"
    assert where(ledger, custom={"fpga": 1}) == "gpu3"
    assert where(ledger, gpus=1, gpu_memory_gb=48) is None


@pytest.mark.parametrize(
    ("ask", "nodes"),
    [
        (an_ask(cores=3), {"middle", "large"}),
        (an_ask(memory_gb=16), {"small", "middle", "large"}),
        (an_ask(memory_gb=17), set()),
        (an_ask(gpus=1), {"large"}),
        (an_ask(gpus=0.1), {"large"}),
        (an_ask(gpus=2), set()),
    ],
)
def test_the_filter_finds_every_node_with_room(trio, ask, nodes):
    assert {trio.columns.names[row] for row in fitting_rows(trio, ask).nonzero()[0]} == nodes


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=6),
    st.builds(an_ask, cores=st.integers(0, 9), gpus=st.sampled_from([0, 0.5, 1, 2, 3])),
)
def test_a_place_is_found_exactly_where_one_exists_and_no_other_is_clearly_better(shapes, ask):
    """Better is more CPU left, as a part of the node; a tenth of a node is what priorities can outweigh."""
    nodes = [a_node(f"n{i}", cores=cores, gpus=gpus, rank=rank) for i, (cores, gpus, rank) in enumerate(shapes)]
    ledger = a_ledger(*nodes)
    fit = [node for node in nodes if ledger.claims_on(node.name).claim_for(ask, node.lendable) is not None]
    found = find_placement(ledger, a_request(cores=ask.cpu_milli / 1000, gpus=ask.gpu_milli / 1000))
    assert (found is None) == (not fit)
    if found is not None and not ask.gpu_milli:
        left = {node.name: 1 - ask.cpu_milli / node.lendable.cpu_milli for node in fit}
        assert left[found.node] >= max(left.values()) - 0.102


def test_the_same_ledger_and_request_give_the_same_place(trio):
    request = a_request(cores=1)
    assert (
        find_placement(trio, request) == find_placement(trio, request) == find_placement(Ledger(trio.rows()), request)
    )


def test_a_place_is_a_node_and_the_exact_claim_there(trio):
    found = find_placement(trio, a_request(cores=1, memory_gb=2, gpus=0.5))
    assert found is not None
    assert found.claim == trio.claims_on("large").claim_for(an_ask(1, 2, 0.5), trio.lends("large"))
    assert trio.offers["large"].made_at_ms == NOW


ZONES = (
    replace(a_node("a1", cores=2), labels=(("zone", "a"), ("disk", "ssd")), tags=("quiet",)),
    replace(a_node("a2", cores=4), labels=(("zone", "a"),)),
    replace(a_node("b1", cores=8), labels=(("zone", "b"),), tags=("disk",)),
)


@pytest.fixture
def zones() -> Scenario:
    return Scenario(*ZONES)


def rows_allowed(scenario: Scenario, **request) -> str | None:
    found = find_placement(scenario.ledger, a_request(**request))
    return None if found is None else found.node


def test_a_label_is_a_must(zones):
    assert rows_allowed(zones) == "b1"
    assert rows_allowed(zones, labels=(("zone", "a"),)) == "a2"
    assert rows_allowed(zones, labels=(("zone", "a"), ("disk", "ssd"))) == "a1"
    assert rows_allowed(zones, labels=(("zone", "c"),)) is None


def test_a_key_alone_means_the_label_with_any_value_or_the_tag(zones):
    assert rows_allowed(zones, labels=(("disk", ""),)) == "b1"
    assert rows_allowed(zones, labels=(("disk", ""),), cores=1, prefer=["a1"]) == "a1"
    assert rows_allowed(zones, labels=(("quiet", ""),)) == "a1"


def test_labels_follow_the_declaration(zones):
    zones.handle(NodeDeclared(replace(ZONES[2], labels=(("zone", "a"),), tags=())))
    assert rows_allowed(zones, labels=(("zone", "a"),)) == "b1"
    assert rows_allowed(zones, labels=(("zone", "b"),)) is None
    zones.ledger.check()


def test_impossible_constraint_is_refused_with_each_nodes_reason(zones):
    with pytest.raises(Refused, match=r"a1: has no label zone=c; a2: has no label zone=c; b1: has no label zone=c"):
        zones.handle(LeaseAsked(a_request(labels=(("zone", "c"),))))


def test_near_to_a_job_is_where_that_job_is(zones):
    zones.submit(a_request("j1", require=["a2"]), starts=True)
    assert rows_allowed(zones, affinity=("job-j1",)) == "a2"
    assert rows_allowed(zones, anti_affinity=("job-j1",), cores=2) == "b1"
    assert rows_allowed(zones, anti_affinity=("job-j1", "b1")) == "a1"


def test_near_to_a_group_is_where_any_of_it_is(zones):
    zones.ask(a_request("r1", require=["a1"], group="train"))
    zones.ask(a_request("r2", require=["a2"], group="train"))
    assert rows_allowed(zones, affinity=("train",)) == "a2"
    assert rows_allowed(zones, anti_affinity=("train",)) == "b1"
    zones.release("r2")
    assert rows_allowed(zones, affinity=("train",)) == "a1"


def test_affinity_without_a_running_target_waits_with_its_reason(zones):
    lease = zones.ask(a_request("r1", affinity=("job-later",)))
    assert lease.node == ""
    assert texts(why_not_now(zones.ledger, lease.request, zones.now))[0] == (
        "a1: nothing of job-later is running that it could be near to"
    )
    zones.submit(a_request("later", require=["a1"]), starts=True)
    zones.advance(1)
    zones.ask(a_request("r2"))
    zones.release("r2")
    assert zones.ledger.leases["r1"].node == "a1"


def test_anti_affinity_names_its_conflict(zones):
    zones.ask(a_request("r1", require=["a1"], group="train"))
    reasons = texts(why_not_now(zones.ledger, a_request("r2", anti_affinity=("train", "b1"), cores=4), zones.now))
    assert reasons[0] == "a1: train is here, and it must not be near to that"
    assert reasons[2] == "b1: it must not be here"


def test_a_gpu_model_is_a_must_for_every_device_that_is_lent():
    mixed = [GpuDevice(0, 24 * GB, "NVIDIA A10"), GpuDevice(1, 40 * GB, "NVIDIA A100-SXM4-40GB")]
    scenario = Scenario(a_node("mixed", gpus=mixed), a_node("plain", gpus=[GpuDevice(0, 16 * GB, "Tesla T4")]))
    request = replace(a_request(), ask=Amounts(gpu_milli=1000, gpu_models=("a100",)))
    found = find_placement(scenario.ledger, request)
    assert (found.node, [share.index for share in found.claim.gpus]) == ("mixed", [1])
    scenario.handle(LeaseAsked(request))
    again = replace(request, id="r2")
    assert find_placement(scenario.ledger, again) is None
    assert texts(why_not_now(scenario.ledger, again, scenario.now))[1] == "plain: its GPUs are Tesla T4, a100 asked"


def test_a_gpu_model_nobody_has_is_refused_at_once():
    scenario = Scenario(a_node("one", gpus=[GpuDevice(0, 16 * GB, "Tesla T4")]))
    request = replace(a_request(), ask=Amounts(gpu_milli=500, gpu_models=("H100", "A100")))
    with pytest.raises(Refused, match=r"one: its GPUs are Tesla T4, H100 or A100 asked"):
        scenario.handle(LeaseAsked(request))


def test_a_model_without_a_gpu_makes_no_sense():
    scenario = Scenario(a_node("one"))
    with pytest.raises(BadInput, match="together with a GPU"):
        scenario.handle(LeaseAsked(replace(a_request(), ask=Amounts(cpu_milli=1000, gpu_models=("A100",)))))


def donor(scenario: Scenario, **asked) -> str:
    request = a_request("b1", target="master", anti_affinity=("master",), **asked)
    found = find_placement(scenario.ledger, request)
    assert found is not None
    return found.node


def three(**fields) -> Scenario:
    return Scenario(a_node("master", cores=64), a_node("one", cores=8, **fields), a_node("two", cores=8))


def test_the_target_never_lends_to_itself():
    assert donor(three(), cores=1) == "one"


def test_of_two_that_could_as_well_lend_the_one_of_the_higher_priority_does():
    scenario = Scenario(a_node("master"), a_node("one", cores=64), a_node("two", cores=32, rank=2000))
    assert donor(scenario, cores=1) == "two"
    scenario.ask(a_request("r1", cores=4, require=["two"]))
    assert donor(scenario, cores=1) == "one"


def test_of_equal_priority_the_one_with_more_left_lends():
    scenario = three()
    scenario.ask(a_request("r1", cores=2, require=["one"]))
    assert donor(scenario, cores=1) == "two"


def test_of_equal_room_the_one_that_works_less_lends():
    scenario = three()
    scenario.heartbeat("one", Usage(cpu_busy_milli=300))
    assert donor(scenario, cores=1) == "two"


def test_memory_and_gpus_count_as_work_too():
    scenario = three()
    scenario.heartbeat("one", Usage(memory_bytes=4 * GB))
    assert donor(scenario, cores=1) == "two"
    scenario.heartbeat("two", Usage(memory_bytes=4 * GB, gpus=(GpuUsage(0, 900),)))
    assert donor(scenario, cores=1) == "one"


def test_a_little_work_is_no_reason_against_much_room():
    scenario = three()
    scenario.ask(a_request("r1", cores=6, require=["two"]))
    scenario.heartbeat("one", Usage(cpu_busy_milli=200))
    assert donor(scenario, cores=1) == "one"


def test_how_hard_a_node_works_counts_by_what_it_has_now():
    scenario = three()
    scenario.heartbeat("one", Usage(memory_bytes=8 * GB))
    columns = scenario.ledger.columns
    assert columns.pressure[columns.rows["one"]] == 250
    scenario.ledger.check()


def a_busy_node(busy: float) -> Scenario:
    """A node whose owner uses this part of the CPU (limit 30 %), and none of the memory."""
    scenario = Scenario(a_node("gpu1", cores=4, memory_gb=16, gpus=1, thresholds=thresholds(cpu_busy_max=0.3)))
    scenario.heartbeat("gpu1", a_usage(cpu_outside=busy))
    return scenario


@pytest.mark.parametrize("needs", [{"memory_gb": 1}, {"gpus": 1}])
def test_a_command_without_cores_is_not_placed_where_the_owner_keeps_the_cpu(needs):
    scenario, request = a_busy_node(0.97), replace(a_request(**needs), limits_memory=True)
    assert find_placement(scenario.ledger, request) is None
    (reason,) = texts(why_not_now(scenario.ledger, request, scenario.now))[:1]
    assert reason.startswith("gpu1: no command starts there, with or without cores: its owner uses 97 % of the CPU")


@pytest.mark.parametrize("needs", [{"memory_gb": 1}, {"gpus": 1}])
def test_reservation_without_a_command_is_lent_beside_a_busy_cpu(needs):
    scenario = a_busy_node(0.97)
    assert where(scenario.ledger, **needs) == "gpu1"


def test_a_command_without_cores_takes_no_cpu_from_others_and_needs_none_left_by_them():
    scenario = a_busy_node(0)
    scenario.ask(a_request("all", cores=4))
    scenario.submit(replace(a_request("r1", memory_gb=1), limits_memory=True))
    assert scenario.lease_of("r1").claim.cpu_milli == 0


def test_a_cap_of_no_cores_keeps_no_command_away():
    node = a_node("gpu1", cores=4, memory_gb=16, thresholds=thresholds(cpu_busy_max=0.3), caps=caps(cores=0))
    scenario = Scenario(node)
    scenario.heartbeat("gpu1", a_usage())
    request = replace(a_request(memory_gb=1), limits_memory=True)
    assert find_placement(scenario.ledger, request) is not None


def evicted(dwell_s: int = 1200) -> Scenario:
    """Two nodes, and a restartable job that gpu1 has taken back; gpu2 has no room for it."""
    limits = thresholds(dwell_s=dwell_s)
    scenario = Scenario(a_node("gpu1", cores=4, thresholds=limits), a_node("gpu2", cores=1, thresholds=limits))
    for name in ("gpu1", "gpu2"):
        scenario.heartbeat(name, a_usage())
    scenario.submit(a_request("r1", cores=2, wait_s=10**6), starts=True, restartable=True)
    scenario.end("r1", Outcome(Ending.RECLAIMED))
    scenario.heartbeat("gpu1", a_usage())
    return scenario


def pass_time(scenario: Scenario, seconds: int) -> None:
    for _ in range(seconds // 5):
        scenario.advance(5)
        for name in ("gpu1", "gpu2"):
            scenario.heartbeat(name, a_usage())


def test_a_node_that_has_evicted_a_job_is_closed_to_it_for_its_dwell_and_to_no_other():
    scenario = evicted(dwell_s=120)
    pass_time(scenario, 115)
    assert scenario.job("r1").state is JobState.QUEUED
    reasons = texts(why_not_now(scenario.ledger, scenario.lease_of("r1").request, scenario.now))
    assert reasons[0] == "gpu1: it has evicted this job, and does not get it again for a while"
    assert scenario.submit(a_request("r2", cores=2)).state is JobState.ASSIGNED
    scenario.handle(LeaseReleased(scenario.lease_of("r2").id, "ada"))
    pass_time(scenario, 10)
    assert scenario.job("r1").state is JobState.ASSIGNED
    assert scenario.lease_of("r1").request.closed == ()


def test_a_job_that_may_be_placed_again_still_gives_up_by_its_deadline_only():
    scenario = evicted(dwell_s=30)
    pass_time(scenario, 40)
    assert scenario.job("r1").state is JobState.ASSIGNED
    assert len(scenario.job("r1").attempts) == 2


def test_a_node_that_has_evicted_a_job_could_serve_it_some_day():
    scenario = evicted()
    assert never_fits(scenario.ledger, scenario.lease_of("r1").request) is None


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


def best_node(scenario: Scenario, strategy: Strategy, **request) -> str:
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
    assert best_node(scenario, Strategy.LOAD_BALANCED) == "two"


def test_best_fit_takes_the_node_where_the_least_is_left():
    scenario = Scenario(a_node("one", cores=4), a_node("two", cores=4))
    scenario.ask(a_request("r0", cores=2, require=["two"]))
    assert best_node(scenario, Strategy.BEST_FIT) == "two"
    assert best_node(scenario, Strategy.BEST_FIT, cores=3) == "one"


def test_local_first_stays_on_this_machine_while_there_is_room():
    scenario = Scenario(a_node("here", cores=2), far("there", cores=64))
    assert best_node(scenario, Strategy.LOCAL_FIRST) == "here"
    assert best_node(scenario, Strategy.LOCAL_FIRST, cores=3) == "there"


def test_local_first_means_the_node_it_is_for_where_it_is_for_one():
    scenario = Scenario(a_node("here", cores=64), far("master", cores=2))
    assert best_node(scenario, Strategy.LOCAL_FIRST, target="master") == "master"


def test_spread_takes_the_node_with_the_fewest_leases_whatever_their_size():
    scenario = Scenario(a_node("one", cores=4), a_node("two", cores=4))
    scenario.ask(a_request("r0", cores=3, require=["one"]))
    for number in range(2):
        scenario.ask(a_request(f"s{number}", cores=0.5, require=["two"]))
    assert best_node(scenario, Strategy.SPREAD) == "one"


def test_spread_within_a_group_counts_that_group_only():
    scenario = Scenario(a_node("one", cores=8), a_node("two", cores=8))
    for number in range(3):
        scenario.ask(a_request(f"s{number}", cores=1, require=["two"]))
    scenario.ask(a_request("r0", cores=1, require=["one"], group="train"))
    assert best_node(scenario, Strategy.SPREAD, group="train") == "two"
    assert best_node(scenario, Strategy.SPREAD) == "one"


def test_performance_takes_the_fastest_node_that_is_not_busy():
    scenario = Scenario(far("slow", cores=8), far("fast", cores=8, speed_milli=2000))
    assert best_node(scenario, Strategy.PERFORMANCE_OPTIMIZED) == "fast"
    scenario.heartbeat("fast", Usage(cpu_busy_milli=900))
    assert best_node(scenario, Strategy.PERFORMANCE_OPTIMIZED) == "slow"


def test_cost_takes_the_cheapest_node_and_fills_it():
    scenario = Scenario(far("dear", cost_milli=900), far("cheap", cost_milli=100), a_node("own", cores=1))
    assert best_node(scenario, Strategy.COST_OPTIMIZED) == "own"
    assert best_node(scenario, Strategy.COST_OPTIMIZED, cores=2) == "cheap"
    scenario.ask(a_request("r0", cores=1, require=["cheap"]))
    assert best_node(scenario, Strategy.COST_OPTIMIZED, cores=2) == "cheap"


def test_fragmentation_aware_keeps_plain_work_off_the_gpus():
    scenario = Scenario(a_node("gpus", cores=64, gpus=8), a_node("plain", cores=2))
    assert best_node(scenario, Strategy.FRAGMENTATION_AWARE) == "plain"


@pytest.mark.parametrize("strategy", [Strategy.LOAD_BALANCED, Strategy.SPREAD, Strategy.BEST_FIT])
def test_priority_decides_among_nodes_that_are_about_equally_good(strategy):
    scenario = Scenario(a_node("first", cores=64, rank=1000), a_node("second", cores=64, rank=3000))
    less, more = ("first", "second") if strategy is Strategy.BEST_FIT else ("second", "first")
    if strategy is not Strategy.SPREAD:
        scenario.ask(a_request("r0", cores=2, require=[less]))
    assert best_node(scenario, strategy) == "second", f"{more} is better by a thirtieth of a node"


@pytest.mark.parametrize("strategy", [Strategy.LOAD_BALANCED, Strategy.BEST_FIT])
def test_no_priority_outweighs_more_than_a_tenth_of_a_node(strategy):
    scenario = Scenario(a_node("first", cores=8, rank=0), a_node("second", cores=8, rank=10**9))
    scenario.ask(a_request("r0", cores=1, require=["first" if strategy is Strategy.BEST_FIT else "second"]))
    assert best_node(scenario, strategy) == "first"


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
    assert best_node(scenario, Strategy.LOCAL_FIRST, cores=2) == "gpu-master"
    assert best_node(scenario, Strategy.LOCAL_FIRST, cores=5) == "gpu2"
    assert best_node(scenario, Strategy.LOCAL_FIRST, cores=2, target="gpu1") == "gpu1"


def test_local_first_means_the_node_on_which_it_was_typed_where_that_is_known():
    head = replace(a_node("gpu-master", cores=4), role="head")
    scenario = Scenario(head, a_node("gpu1", cores=6), a_node("gpu2", cores=14))
    assert best_node(scenario, Strategy.LOCAL_FIRST, cores=2, origin="gpu1") == "gpu1"
    assert best_node(scenario, Strategy.LOCAL_FIRST, cores=8, origin="gpu1") == "gpu2"
    assert best_node(scenario, Strategy.LOCAL_FIRST, cores=2, origin="gpu1", target="gpu2") == "gpu2"


def test_local_first_stays_here_where_the_head_is_another_machine():
    scenario = Scenario(replace(far("boss", cores=64), role="head"), a_node("here", cores=4))
    assert best_node(scenario, Strategy.LOCAL_FIRST) == "here"


def test_speeds_that_hardly_differ_leave_the_choice_to_the_room():
    scenario = Scenario(far("full", cores=8), far("empty", cores=8))
    scenario.ask(a_request("r0", cores=4, require=["full"]))
    scenario.heartbeat("full", Usage(cpu_busy_milli=10))
    scenario.heartbeat("empty", Usage(cpu_busy_milli=40))
    assert best_node(scenario, Strategy.PERFORMANCE_OPTIMIZED) == "empty"


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
    assert best_node(scenario, Strategy.COST_OPTIMIZED) == "b"
    assert best_node(scenario, Strategy.PERFORMANCE_OPTIMIZED) == "a"
    assert best_node(scenario, Strategy.LOAD_BALANCED) == "a"


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
    assert best_node(scenario, strategy) == "one"
    scenario.ledger.apply([replace(scenario.ledger.nodes["two"], rank=2000)])
    assert best_node(scenario, strategy) == "two"


def test_a_node_that_joins_counts_from_the_next_choice_on():
    scenario = Scenario(a_node("one", cores=8), a_node("two", cores=6))
    assert best_node(scenario, Strategy.LOAD_BALANCED, cores=2) == "one"
    joined = Scenario(a_node("one", cores=8), a_node("two", cores=6), a_node("three", cores=64)).ledger
    scenario.ledger.apply([joined.nodes["three"], joined.offers["three"]])
    assert best_node(scenario, Strategy.LOAD_BALANCED, cores=2) == "three"


def test_more_different_asks_than_are_remembered_are_still_placed_the_same():
    scenario = Scenario(a_node("one", cores=64), a_node("two", cores=63))
    for _ in range(2):
        for number in range(1, MAX_CACHED_ASKS + 10):
            assert best_node(scenario, Strategy.LOAD_BALANCED, cores=number / 10) == "one"


@given(ask=amounts, lends=capacities, extra=more)
def test_a_freer_node_is_never_less_fit(ask: Amounts, lends: Capacity, extra: tuple[int, int, int]) -> None:
    cpu, memory, gpus = extra
    devices = (*lends.gpus, *(GpuDevice(len(lends.gpus) + at, 8 * GB) for at in range(gpus)))
    freer = Capacity(lends.cpu_milli + cpu, lends.memory_bytes + memory, devices)
    assert fitness_of(ask, freer, NodeClaims()) >= fitness_of(ask, lends, NodeClaims())


@given(ask=amounts, lends=capacities, taken=amounts)
def test_more_claims_never_raise_the_fitness(ask: Amounts, lends: Capacity, taken: Amounts) -> None:
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
