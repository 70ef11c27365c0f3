"""Pressure: of whom nothing is known, who shares a machine, and which forecasts count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.config import ClusterConfig
from distributed_grid.config_mapping import nodes_from, rebalance_rules
from distributed_grid.domain.events import TimePassed
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.rebalancing import Forecast
from distributed_grid.domain.resources import NOTHING, Amounts, ResourceType
from distributed_grid.monitoring.usage_history import ClusterHistory
from distributed_grid.scheduling.pressure.scan import (
    automatic_leases,
    chance_above,
    idle_automatic_leases,
    machine_of,
    percent,
    scan_pressure,
)
from tests.support.builders import GB, Scenario, a_capacity, a_node, a_request, a_submission, thresholds
from tests.support.project import PROJECT
from tests.support.rebalance_rounds import HARD, SHARE, Rounds, a_reading, actions, apart, begin_rounds, rules, three


def test_unknown_nodes_are_neither_helped_nor_asked():
    scenario = begin_rounds()
    assert scenario.round(a_reading("master", memory=None), times=5) == []
    scenario.round(HARD, a_reading("gpu1", memory=None), a_reading("gpu2", memory=None), times=5)
    assert actions(scenario.records) == ["refused"]
    assert "gpu1: not heard from; gpu2: not heard from" in scenario.records[-1].reason


def test_a_node_that_is_suspect_by_the_ledger_is_unknown_whatever_was_read():
    scenario = begin_rounds()
    scenario.now += 60_000
    scenario.heartbeat("gpu1")
    scenario.heartbeat("gpu2")
    scenario.handle(TimePassed())
    assert scenario.read(HARD) == []


def test_on_a_grid_of_one_node_nothing_happens():
    scenario = Rounds(a_node("master"), rules=rules("aggressive"))
    assert scenario.round(HARD, times=5) == []


def test_nodes_that_share_a_machine_have_nothing_to_give_each_other():
    scenario = Rounds(*(a_node(name) for name in ("master", "gpu1", "gpu2")), rules=rules("aggressive"))
    assert scenario.round(HARD, a_reading("gpu1", memory=100), times=5) == []


def test_local_nodes_with_thresholds_of_their_own_count_as_machines():
    nodes = [a_node(name, memory_gb=30, thresholds=thresholds()) for name in ("master", "gpu1")]
    scenario = Rounds(*nodes, rules=rules("aggressive", SHARE))
    scenario.round(HARD)
    assert scenario.leases[0].node == "gpu1"


def test_simulated_nodes_count_as_machines():
    nodes = [replace(a_node(name, memory_gb=30), simulated=True) for name in ("master", "gpu1")]
    scenario = Rounds(*nodes, rules=rules("aggressive", SHARE))
    scenario.round(HARD)
    assert scenario.leases[0].node == "gpu1"


def test_the_master_of_the_shipped_config_borrows_from_gpu2_in_the_third_round():
    config = ClusterConfig.from_yaml(PROJECT / "config/my-cluster-enhanced.yaml")
    shipped = rebalance_rules(config)
    assert shipped is not None
    scenario = Rounds(*nodes_from(config, NOTHING), rules=shipped)
    levels = {node.name: round(1000 * node.background.memory_used) for node in config.nodes}
    readings = [a_reading(name, memory=level) for name, level in levels.items()]
    scenario.round(*readings, times=2)
    assert scenario.leases == []
    scenario.round(*readings)
    assert [(lease.request.target, lease.node) for lease in scenario.leases] == [("gpu-master", "gpu2")]


def test_of_the_nodes_of_one_machine_only_the_head_borrows():
    local = [a_node("alpha", memory_gb=30), replace(a_node("master", memory_gb=30), role="head")]
    scenario = Rounds(*local, apart(a_node("far", memory_gb=60)), rules=rules("aggressive", SHARE))
    scenario.round(HARD, a_reading("alpha", memory=900), times=3)
    assert [lease.request.target for lease in scenario.leases] == ["master"]


SURE = Forecast(900, 50)
VAGUE = Forecast(820, 200)


def test_predictive_acts_before_the_mark_is_crossed():
    scenario = begin_rounds("predictive")
    records = scenario.round(a_reading("master", memory=(600, SURE)), times=3)
    assert len(scenario.leases) == 1
    assert records[2].reason.startswith(
        "memory at 60 %, expected at 90 % (± 5 %) in 300 s, above the mark of 80 %: 5.2 GB of 10.5 GB in excess"
    )


BEAT_MS, FLAT_MS = 2_000, 360_000


def seconds_to_first_lease(policy: str, interval_s: int) -> float:
    """When a policy first borrows for memory that is flat for six minutes, at 40 %, and then fills within so many
    rounds, of at least three seconds each, counted from the moment at which it begins to rise."""
    scenario = Rounds(rules=replace(rules(policy, SHARE), interval_ms=1000 * interval_s))
    history, began, rise_ms = ClusterHistory(), scenario.now, 20_000 * max(interval_s, 3)
    heard = began

    def level(at_ms: int) -> int:
        return 400 + min(max(600 * (at_ms - began - FLAT_MS) // rise_ms, 0), 600)

    while not scenario.leases:
        while heard <= scenario.now:
            used = level(heard) * 10 * GB // 1000
            history.add(
                "master",
                Usage(cpu_busy_milli=0, cpu_outside_milli=0, memory_bytes=used, memory_outside_bytes=used),
                a_capacity(cores=8, memory_gb=10),
                heard,
            )
            heard += BEAT_MS
        reading, ahead_ms = (
            a_reading("master", memory=level(scenario.now)),
            scenario.rules.policy.ahead * 1000 * interval_s,
        )
        if ahead_ms:
            reading = history.with_forecasts(reading, scenario.now, ahead_ms)
        scenario.round(reading)
        assert scenario.now < began + FLAT_MS + 2 * rise_ms
    return (scenario.now - began - FLAT_MS) / 1000 - interval_s


@pytest.mark.parametrize("interval_s", [1, 2, 5, 10, 30])
def test_predictive_borrows_rounds_before_balanced_at_every_interval(interval_s: int):
    predictive, balanced = (seconds_to_first_lease(policy, interval_s) for policy in ("predictive", "balanced"))
    assert predictive > 0, "nothing rises yet"
    assert balanced - predictive >= 3 * interval_s


@pytest.mark.parametrize("policy", ["conservative", "balanced", "aggressive"])
def test_the_others_do_not_look_ahead(policy):
    scenario = begin_rounds(policy)
    assert scenario.round(a_reading("master", memory=(600, SURE)), times=30) == []


def test_a_vague_forecast_is_not_acted_upon():
    scenario = begin_rounds("predictive")
    assert scenario.round(a_reading("master", memory=(600, VAGUE)), times=30) == []


def test_nothing_is_asked_for_at_a_level_at_which_it_would_be_given_back():
    scenario = begin_rounds("predictive")
    assert scenario.round(a_reading("master", memory=(290, SURE)), times=30) == []


def test_predictive_keeps_what_will_be_needed_again():
    scenario = begin_rounds("predictive")
    scenario.round(HARD, times=3)
    assert scenario.leases
    scenario.round(a_reading("master", memory=(100, SURE)), times=9)
    assert scenario.leases
    scenario.round(a_reading("master", memory=(100, Forecast(150, 50))), times=3)
    assert scenario.leases == []


def test_a_lender_that_will_need_it_itself_is_not_asked():
    scenario = begin_rounds("predictive")
    scenario.round(
        HARD, a_reading("gpu1", memory=(600, SURE)), a_reading("gpu2", memory=(100, Forecast(120, 10))), times=3
    )
    assert {lease.node for lease in scenario.leases if lease.request.target == "master"} == {"gpu2"}


@given(st.integers(0, 1000), st.integers(0, 500), st.integers(0, 1000))
def test_a_forecast_is_as_likely_above_a_mark_as_it_is_far_above_it(level, reach, mark):
    chance = chance_above(Forecast(level, reach), mark)
    assert 0 <= chance <= 1000
    assert chance <= chance_above(Forecast(level + 1, reach), mark)
    if reach:
        assert abs(chance + chance_above(Forecast(2 * mark - level, reach), mark) - 1000) <= 1


def test_nine_of_ten_lie_within_the_reach_of_a_forecast():
    assert chance_above(Forecast(500, 100), 400) == 950
    assert chance_above(Forecast(500, 100), 600) == 50
    assert [chance_above(Forecast(level), 500) for level in (499, 500, 501)] == [0, 0, 1000]


@given(st.integers(0, 1000))
def test_a_node_is_never_above_and_below_its_marks_at_once(level):
    scenario = Scenario(*three())
    scan = scan_pressure(scenario.ledger, [a_reading("master", memory=level)], rules(), scenario.now)
    kinds = (scan.is_above("master", ResourceType.MEMORY), scan.is_below("master", ResourceType.MEMORY))
    assert kinds == (level > 800, level < 300)
    assert scan.has_headroom("master") == (level <= 800)
    assert not scan.has_headroom("gpu1"), "nothing is known of it"


def test_half_a_round_is_not_counted():
    scenario = Scenario(*three())
    scan = scan_pressure(scenario.ledger, [], rules(act_after=2, cool_down=1), scenario.now)
    assert [scan.has_lasted(scenario.now - ago) for ago in (44_999, 45_000)] == [False, True]
    assert [scan.has_cooled_down(scenario.now - ago) for ago in (14_999, 15_000)] == [False, True]
    assert not scan.has_lasted(None)
    assert scan.has_cooled_down(None)
    assert not scan.is_unused(None)


def test_a_lease_that_a_command_uses_is_held_but_not_idle():
    scenario = begin_rounds()
    scenario.round(HARD)
    (lease,) = automatic_leases(scenario.ledger)
    assert idle_automatic_leases(scenario.ledger) == [lease]
    scenario.handle(a_submission(replace(a_request("j1", user="ada"), ask=Amounts(), use_lease=lease.id)))
    assert (automatic_leases(scenario.ledger), idle_automatic_leases(scenario.ledger)) == ([lease], [])


def test_local_nodes_are_one_machine_unless_they_are_simulated_or_have_thresholds():
    local = a_node("gpu1")
    assert machine_of(local) == machine_of(a_node("gpu2")) == ""
    own = (replace(local, simulated=True), replace(local, host="far"), a_node("gpu1", thresholds=thresholds()))
    assert [machine_of(node) for node in own] == ["gpu1"] * 3


def test_a_level_reads_well():
    assert [percent(level) for level in (0, 5, 800, 1000)] == ["0 %", "0.5 %", "80 %", "100 %"]
