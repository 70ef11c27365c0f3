"""Loans for nodes under pressure: how much is asked for at a time, and what a lender never gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.rebalancing import SHARING_POLICIES
from distributed_grid.domain.resources import Capacity, Priority, ResourceType
from distributed_grid.scheduling.pressure.loans import (
    UNITS,
    amounts_of,
    asked_amount,
    request_id,
    surplus,
    total_of,
    whole_units,
)
from distributed_grid.scheduling.pressure.scan import scan_pressure
from tests.support.builders import GB, Scenario, a_capacity, a_node, a_request, a_usage, caps
from tests.support.rebalance_rounds import (
    HARD,
    IDLE,
    SHARE,
    Rounds,
    a_reading,
    actions,
    apart,
    begin_rounds,
    rules,
    three,
)


def test_a_part_of_the_excess_is_asked_for_at_once_and_the_rest_after_the_cool_down():
    scenario = begin_rounds("balanced", unused_after=1000)
    scenario.round(HARD, times=3)
    (first,) = scenario.leases
    assert abs(first.request.ask.memory_bytes - 5.25 * GB) < 1024**2
    scenario.round(HARD, times=3)
    assert len(scenario.leases) == 1
    scenario.round(HARD)
    assert len(scenario.leases) == 2
    scenario.round(HARD, times=40)
    assert len(scenario.leases) == 2  # all of the excess is covered


def test_a_node_never_gets_more_leases_than_the_policy_says():
    scenario = begin_rounds(portion_milli=100, leases_max=3, cool_down=1)
    scenario.round(HARD, times=30)
    assert len(scenario.leases) == 3


def test_cpu_is_borrowed_the_same_way():
    scenario = begin_rounds()
    scenario.round(a_reading("master", cpu=900))
    (lease,) = scenario.leases
    assert lease.request.ask.cpu_milli == 2800
    scenario.round(a_reading("master", cpu=200), times=2)
    assert scenario.leases == []


def test_memory_comes_before_cpu():
    scenario = begin_rounds(leases_max=1)
    scenario.round(a_reading("master", memory=850, cpu=1000))
    assert scenario.leases[0].request.ask.memory_bytes


def test_gpus_are_borrowed_in_parts_and_from_one_on_whole():
    nodes = [apart(a_node(name, gpus=count)) for name, count in (("master", 4), ("gpu1", 4))]
    scenario = Rounds(*nodes, rules=rules("aggressive", SHARE))
    scenario.round(a_reading("master", gpu=900))
    (lease,) = scenario.leases
    assert lease.request.ask.gpu_milli == 1000
    scenario.round(a_reading("master", gpu=900))
    assert [lease.request.ask.gpu_milli for lease in scenario.leases] == [1000, 400]
    small = Rounds(*(apart(a_node(name, gpus=1)) for name in ("master", "gpu1")), rules=rules("aggressive", SHARE))
    small.round(a_reading("master", gpu=900))
    assert small.leases[0].request.ask.gpu_milli == 300


def test_nothing_is_taken_from_a_node_above_its_own_marks():
    scenario = begin_rounds()
    scenario.round(HARD, a_reading("gpu1", cpu=850), a_reading("gpu2", memory=810))
    assert scenario.leases == []
    assert actions(scenario.records) == 3 * ["refused"]  # each needs something, and none can help another
    (reason,) = [record.reason for record in scenario.records if record.node == "master"]
    assert reason == (
        "memory at 90 %, above the mark of 80 %, and nobody can help: "
        "gpu1: cpu at 85 % itself, above the mark of 80 %; gpu2: memory at 81 % itself, above the mark of 80 %"
    )


def test_only_the_free_share_above_the_excess_threshold_is_taken():
    scenario = begin_rounds(excess=500)
    scenario.round(HARD, a_reading("gpu1", memory=300), a_reading("gpu2", memory=400))
    (lease,) = scenario.leases
    assert lease.node == "gpu1"
    assert lease.request.ask.memory_bytes == 6 * GB


def test_a_node_whose_free_share_is_below_the_excess_threshold_lends_nothing():
    scenario = begin_rounds(excess=500)
    scenario.round(HARD, a_reading("gpu1", memory=500), a_reading("gpu2", memory=700))
    assert scenario.leases == []


def test_what_is_lent_already_is_not_free():
    scenario = begin_rounds()
    scenario.ask(a_request("r1", memory_gb=22, require=("gpu1",)))
    scenario.ask(a_request("r2", memory_gb=20, require=("gpu2",)))
    scenario.round(HARD)
    (lease,) = scenario.leases
    assert lease.node == "gpu2"
    assert lease.request.ask.memory_bytes == 4 * GB


def test_what_is_lent_and_not_used_yet_comes_on_top_of_what_the_owner_uses():
    scenario = begin_rounds()
    scenario.ask(a_request("r1", memory_gb=8, require=("gpu2",)))
    scenario.heartbeat("gpu2", a_usage(memory_outside_gb=12))
    scenario.read(HARD, a_reading("gpu1", memory=900), a_reading("gpu2", memory=400))
    (lease,) = [lease for lease in scenario.leases if lease.request.target == "gpu1"]
    assert lease.request.ask.memory_bytes == 4 * GB  # of 30: 12 are in use, 8 are lent, 6 are kept


def test_never_so_much_that_the_lender_would_come_above_its_own_mark():
    scenario = begin_rounds(high=600, low=200, excess=0)
    scenario.round(a_reading("master", memory=950), a_reading("gpu1", memory=500), a_reading("gpu2", memory=550))
    (lease,) = scenario.leases
    assert lease.node == "gpu1"
    assert lease.request.ask.memory_bytes == 3 * GB


def test_the_caps_of_a_lender_hold():
    nodes = (apart(a_node("master", memory_gb=30)), apart(a_node("gpu1", memory_gb=30, caps=caps(memory_gb=2))))
    scenario = Rounds(*nodes, rules=rules("aggressive", SHARE))
    scenario.round(HARD)
    assert scenario.leases[0].request.ask.memory_bytes == 2 * GB


def test_what_nobody_can_help_with_is_told_once():
    scenario = begin_rounds()
    scenario.round(HARD, a_reading("gpu1", memory=900), a_reading("gpu2", memory=900), times=100)
    assert actions(scenario.records) == 3 * ["refused"]  # once for each of the three
    scenario.round(IDLE, times=2)
    scenario.round(HARD, a_reading("gpu1", memory=900), a_reading("gpu2", memory=900), times=5)
    assert actions(scenario.records).count("refused") == 4 + 2  # the others were idle, too, in between


def test_while_users_wait_for_a_resource_the_grid_does_not_ask_for_it():
    scenario = begin_rounds()
    for name in ("gpu1", "gpu2"):
        scenario.ask(a_request(f"full-{name}", memory_gb=15, require=(name,)))
    scenario.ask(a_request("big", memory_gb=28, require=("gpu1", "gpu2")))
    assert "big" in scenario.ledger.leases
    scenario.round(HARD, times=5)
    assert scenario.leases == []


def test_the_priority_is_never_above_a_users_usual_one():
    assert all(policy.priority <= Priority.MEDIUM for policy in SHARING_POLICIES.values())


KINDS = st.sampled_from([ResourceType.MEMORY, ResourceType.CPU, ResourceType.GPU])


@given(KINDS, st.integers(0, 2**45))
def test_an_amount_in_units_can_be_asked_for_and_is_no_more_than_is_wanted(kind, size):
    units = whole_units(kind, size)
    assert 0 <= units <= size
    assert whole_units(kind, units) == units
    assert units or size < UNITS[kind]
    ask = amounts_of(kind, units)
    assert asked_amount(ask, kind) == units
    assert not units or units > 2**40 or ask.problem() is None


@given(st.text(min_size=1, max_size=100), KINDS, st.integers(1, 10**9))
def test_the_id_of_a_request_fits_wherever_ids_are_asked_for(node, kind, number):
    found = request_id(node, kind, number)
    assert len(found) <= 64
    assert found.endswith(f"-{kind}-{number}")
    assert a_request(found).problem() is None


def test_a_total_is_in_base_units_and_a_gpu_that_is_not_there_counts_nothing():
    has = a_capacity(4, 8, gpus=2)
    assert [total_of(has, kind) for kind in ResourceType] == [
        {"cpu": 4000, "memory": 8 * GB, "gpu": 2000}[kind] for kind in ResourceType
    ]
    assert not any(total_of(Capacity(), kind) for kind in ResourceType)


@given(level=st.integers(0, 1000), outside=st.integers(0, 30), lent=st.integers(0, 30), high=st.integers(300, 1000))
def test_a_lender_never_spares_so_much_that_it_comes_above_its_own_mark(level, outside, lent, high):
    scenario = Scenario(*three())
    if lent:
        scenario.ask(a_request("r1", memory_gb=lent, require=["gpu1"]))
    scenario.heartbeat("gpu1", a_usage(memory_outside_gb=outside))
    readings = [a_reading("gpu1", memory=level)]
    scan = scan_pressure(scenario.ledger, readings, rules(high=high, low=200, excess=0), scenario.now)
    spared = surplus(scan, "gpu1", ResourceType.MEMORY)
    assert spared >= 0
    if spared:
        assert spared + (lent + outside) * GB <= 30 * GB * high // 1000
        assert spared + 30 * GB * level // 1000 <= 30 * GB * high // 1000


def test_nothing_is_spared_by_a_node_that_is_not_known_or_lends_nothing():
    scenario = Scenario(*three())
    scan = scan_pressure(scenario.ledger, [a_reading("gpu1")], rules(), scenario.now)
    assert surplus(scan, "gpu1", ResourceType.MEMORY) > 0
    assert surplus(scan, "gpu2", ResourceType.MEMORY) == 0
    assert surplus(scan, "gpu1", ResourceType.GPU) == 0, "it has none"
