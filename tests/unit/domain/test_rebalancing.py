"""The table in docs/guide/rebalancing.md is the table in the code."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
import pytest

from distributed_grid.config import ClusterConfig
from distributed_grid.config.sections import ResourceSharing
from distributed_grid.config_mapping import nodes_from, rebalance_rules
from distributed_grid.domain.rebalancing import SHARING_POLICIES, RebalancePolicy, SharingMode
from distributed_grid.domain.resources import Capacity
from tests.support.project import PROJECT

PAGE = (PROJECT / "docs/guide/rebalancing.md").read_text()
INTERVAL = round(ResourceSharing().rebalance_interval_seconds)


def _rounds(number: int) -> str:
    return f"{number} ({number * INTERVAL} s)"


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


ROWS = {
    "act_after": (
        "acts after so long beyond a mark",
        lambda policy: _rounds(policy.act_after) if policy.act_after else "0 (at once)",
    ),
    "portion_milli": (
        "asks for so much of the excess at once",
        lambda policy: f"{policy.portion_milli // 10} %",
    ),
    "leases_max": ("automatic leases for one node, at most", lambda policy: str(policy.leases_max)),
    "term": ("term of a lease", lambda policy: _rounds(policy.term)),
    "renew_at": ("renewed when so much is left", lambda policy: _rounds(policy.renew_at)),
    "unused_after": ("goes back when nothing has used it for", lambda policy: _rounds(policy.unused_after)),
    "cool_down": ("rests after an action", lambda policy: _rounds(policy.cool_down)),
    "ahead": ("looks ahead", lambda policy: _rounds(policy.ahead) if policy.ahead else "no"),
    "sure_milli": (
        "believes a forecast that is so sure",
        lambda policy: f"{policy.sure_milli // 10} %" if policy.sure_milli else "no",
    ),
    "spread_milli": (
        "evens out nodes that differ by more than",
        lambda policy: f"{policy.spread_milli // 10} %" if policy.spread_milli else "no",
    ),
    "priority": ("priority of its leases", lambda policy: policy.priority.name.lower()),
    "shares": ("borrows, where the mode does", lambda policy: _yes(policy.shares)),
    "evens_out": ("evens out, where the mode does", lambda policy: _yes(policy.evens_out)),
}


def the_table() -> list[list[str]]:
    section = PAGE.split("\n## Policies\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_number_of_every_policy_is_in_the_page():
    head, _, *rows = the_table()
    assert [name.strip("`") for name in head[1:]] == list(SHARING_POLICIES)
    assert rows == [[words, *(show(policy) for policy in SHARING_POLICIES.values())] for words, show in ROWS.values()]
    assert list(ROWS) == [field.name for field in msgspec.structs.fields(RebalancePolicy)]


def test_the_policies_and_modes_are_those_that_a_config_may_name():
    types = {field.name: field.type for field in msgspec.structs.fields(ResourceSharing)}
    assert get_args(types["policy"]) == tuple(SHARING_POLICIES)
    assert get_args(types["mode"]) == tuple(str(mode) for mode in SharingMode)


@pytest.mark.parametrize("policy", SHARING_POLICIES.values(), ids=SHARING_POLICIES)
def test_the_numbers_of_a_policy_make_sense_together(policy: RebalancePolicy):
    assert 0 < policy.renew_at < policy.term  # renewed in time, with rounds to spare
    assert policy.cool_down >= 1
    assert policy.leases_max * policy.portion_milli >= 500
    assert bool(policy.ahead) is bool(policy.sure_milli)
    assert bool(policy.spread_milli) is policy.evens_out


def test_only_predictive_looks_ahead():
    assert [name for name, policy in SHARING_POLICIES.items() if policy.ahead] == ["predictive"]


def test_the_rules_are_what_the_config_says():
    config = ClusterConfig.from_text(
        """
execution:
  resource_sharing:
    mode: offload_only
    policy: conservative
    rebalance_interval_seconds: 5
    thresholds: {memory_pressure_high: 0.7, memory_pressure_low: 0.25, gpu_pressure_high: 0.95, excess_threshold: 0.4}
"""
    )
    rules = rebalance_rules(config)
    assert rules is not None
    assert (rules.mode, rules.policy, rules.interval_ms) == (
        SharingMode.OFFLOAD_ONLY,
        SHARING_POLICIES["conservative"],
        5000,
    )
    assert (rules.memory.high, rules.memory.low, rules.cpu.high, rules.gpu.high) == (700, 250, 800, 950)
    assert rules.excess_milli == 400


def test_without_a_word_the_excess_threshold_is_a_fifth_for_automatic_leases_and_none_for_others():
    config = ClusterConfig.from_text("nodes: [{name: far}]")
    rules = rebalance_rules(config)
    assert rules is not None
    assert rules.excess_milli == 200
    assert config.resource_sharing.pressure.excess is None
    assert ClusterConfig.from_mapping(config.as_dict()).resource_sharing.pressure.excess is None


def test_an_excess_threshold_that_is_set_holds_for_nodes_with_idle_thresholds():
    text = """
nodes: [{name: far}, {name: dedicated, dedicated: true}, {name: here, host: local}]
resource_sharing: {thresholds: {excess_threshold: 0.25}}
"""
    far, dedicated, here = nodes_from(ClusterConfig.from_text(text), Capacity())
    assert far.thresholds is not None
    assert far.thresholds.excess_milli == 250
    assert (dedicated.thresholds, here.thresholds) == (None, None)
    silent = nodes_from(ClusterConfig.from_text("nodes: [{name: far}]"), Capacity())
    assert silent[0].thresholds is not None
    assert silent[0].thresholds.excess_milli == 0


def test_sharing_that_is_switched_off_is_not_balanced():
    assert rebalance_rules(ClusterConfig.from_text("resource_sharing: {enabled: false}")) is None


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_every_example_of_the_page_loads(block):
    assert ClusterConfig.from_text(block).warnings == ()
