"""Differences between configs: by meaning, not by bytes; and which keys a running control plane takes over."""

from __future__ import annotations

import pytest

from distributed_grid.config import ClusterConfig
from distributed_grid.config.differences import differences, meaning_digest, with_live_keys

BASE = """
name: lab
nodes:
- {name: gpu1, host: gpu1.lan, cpu_count: 4, tags: [fast], resource_sharing: {max_share_cpu: 2}}
- {name: gpu2, host: local}
resource_sharing: {thresholds: {cpu_percent_max: 30}, check_interval: 60}
alerts: {memory: 0.8, webhook: "https://example.org/${HOOK}"}
"""
ENV = {"HOOK": "one"}
BASE_CONFIG = ClusterConfig.from_text(BASE, env=ENV)


def changed(text: str, env: dict[str, str] | None = None) -> list[tuple[str, bool]]:
    """The keys that differ from the base, and whether they are live."""
    return [tuple(one) for one in differences(BASE_CONFIG, ClusterConfig.from_text(text, env=env or ENV))]


@pytest.mark.parametrize(
    "text",
    [
        BASE + "# a comment\n",
        BASE.replace("{name: gpu1, host: gpu1.lan", "{host: gpu1.lan, name: gpu1"),
        BASE.replace("name: lab\n", "") + "name: lab\n",
        BASE.replace("check_interval: 60", "check_interval_seconds: 60"),
        BASE.replace("cpu_percent_max: 30", "cpu_percent_max: 30.0, memory_percent_max: 50"),
        BASE.replace("host: gpu1.lan", "host: gpu1.lan, port: 22, role: worker"),
        BASE.replace("resource_sharing: {thresholds", "execution: {resource_sharing: {thresholds").replace(
            "check_interval: 60}", "check_interval: 60}}"
        ),
    ],
    ids=["comment", "order in a node", "order of keys", "spelling", "defaults", "defaults of a node", "place"],
)
def test_two_files_that_mean_the_same_are_the_same(text: str) -> None:
    assert changed(text) == []
    assert meaning_digest(ClusterConfig.from_text(text, env=ENV)) == meaning_digest(BASE_CONFIG)


@pytest.mark.parametrize(
    ("old", "new", "key", "live"),
    [
        ("cpu_percent_max: 30", "cpu_percent_max: 40", "resource_sharing.thresholds.cpu_percent_max", True),
        ("max_share_cpu: 2", "max_share_cpu: 3", "nodes.gpu1.resource_sharing.max_share_cpu", True),
        ("tags: [fast]", "tags: [slow]", "nodes.gpu1.tags", True),
        ("tags: [fast]", "tags: [fast], dedicated: true", "nodes.gpu1.dedicated", True),
        ("memory: 0.8", "memory: 0.7", "alerts.memory", True),
        ("name: lab", "name: lab\nquotas: {ann: {cpu: 4}}", "quotas.ann", True),
        ("name: lab", "name: lab\nowner_policy: {evict: false}", "owner_policy.evict", True),
        ("host: gpu1.lan", "host: gpu3.lan", "nodes.gpu1.host", False),
        ("cpu_count: 4", "cpu_count: 5", "nodes.gpu1.cpu_count", False),
        ("- {name: gpu2, host: local}\n", "", "nodes.gpu2", False),
        ("name: lab", "name: lab\nserver: {port: 7000}", "server.port", False),
        ("name: lab", "name: lab\nproviders: {docker_local: {image: x}}", "providers.docker_local", False),
    ],
)
def test_a_key_with_another_value_is_named_and_is_live_or_not(old: str, new: str, key: str, live: bool) -> None:
    assert old in BASE
    assert changed(BASE.replace(old, new)) == [(key, live)]


def test_another_value_of_a_variable_is_a_difference_and_secrets_are_compared() -> None:
    assert changed(BASE, {"HOOK": "two"}) == [("alerts.webhook", True)]
    assert meaning_digest(ClusterConfig.from_text(BASE, env={"HOOK": "two"})) != meaning_digest(BASE_CONFIG)


def test_the_order_of_nodes_counts_where_it_makes_another_one_the_head() -> None:
    two = "nodes: [{name: a, host: a}, {name: b, host: b}]"
    other = "nodes: [{name: b, host: b}, {name: a, host: a}]"
    one, swapped = ClusterConfig.from_text(two), ClusterConfig.from_text(other)
    assert [tuple(found) for found in differences(one, swapped)] == [("nodes", False)]
    same_head = [ClusterConfig.from_text(text.replace("name: a,", "name: a, role: head,")) for text in (two, other)]
    assert differences(*same_head) == []


def test_live_keys_are_taken_over_and_all_others_stay() -> None:
    text = BASE.replace("host: gpu1.lan", "host: gpu3.lan").replace("tags: [fast]", "tags: [slow]")
    new = ClusterConfig.from_text(text.replace("cpu_percent_max: 30", "cpu_percent_max: 40"), env=ENV)
    merged = with_live_keys(BASE_CONFIG, new)
    assert (merged.nodes[0].host, merged.nodes[0].tags) == ("gpu1.lan", ("slow",))
    assert merged.thresholds.cpu_used_max == 0.4
    assert [tuple(found) for found in differences(merged, new)] == [("nodes.gpu1.host", False)]
