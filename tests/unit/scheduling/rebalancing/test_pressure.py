"""Pressure: of whom nothing is known, who shares a machine, and which forecasts count."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.config import ClusterConfig
from distributed_grid.config_mapping import nodes_from, rebalance_rules
from distributed_grid.domain.events import TimePassed
from distributed_grid.domain.rebalancing import Forecast
from distributed_grid.domain.resources import NOTHING
from tests.support.builders import a_node, thresholds
from tests.support.project import PROJECT
from tests.support.rebalance_rounds import HARD, SHARE, Rounds, a_reading, actions, apart, begin_rounds, rules


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
