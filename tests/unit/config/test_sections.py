"""Keys of the sections: whatever the spelling, the grid sees one normal form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import ValidationError
from msgspec.structs import replace
from rich.pretty import pretty_repr

from distributed_grid.config import ClusterConfig, ConfigProblems, NodeConfig
from distributed_grid.config.sections import Background, OwnerPolicy, ResourceSharing, ThresholdConfig
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.errors import BadInput
from tests.unit.config.texts import load

GIB = 1024**3


def test_the_embedded_grid_is_this_machine_alone_without_thresholds_and_policy():
    config = ClusterConfig.embedded("my host!")
    (node,) = config.nodes
    assert (node.name, node.is_local) == ("my-host-", True)
    assert config.thresholds_for(node) is None
    assert config.owner_policy_for(node) is None
    assert ClusterConfig.embedded("").nodes[0].name == "localhost"
    assert len(ClusterConfig.embedded("x" * 200).nodes[0].name) == 63


def test_defaults_are_those_the_guides_name():
    config = load("name: a")
    sharing = config.resource_sharing
    assert (config.hold_seconds, sharing.check_interval_seconds, sharing.offer_expiry_seconds) == (
        60,
        60,
        300,
    )
    assert (sharing.monitoring_interval_seconds, sharing.rebalance_interval_seconds) == (10, 30)
    assert sharing.enabled
    assert sharing.max_offers_per_node == 5
    assert sharing.pressure.memory_high == 0.8
    scaling = config.scaling
    assert (scaling.target_utilization, scaling.scale_up_threshold, scaling.scale_down_threshold) == (
        0.7,
        0.8,
        0.3,
    )
    assert (scaling.scale_up_cooldown_seconds, scaling.scale_down_cooldown_seconds) == (300, 600)
    assert (scaling.worker_reassessment_interval_seconds, scaling.history_retention_seconds) == (3600, 86400)


def test_execution_wins_over_the_top_level_key_by_key_whatever_the_spelling():
    config = load(
        """
execution:
  resource_sharing:
    rebalance_interval_seconds: 20
    thresholds: {cpu_pressure_high: 0.9}
resource_sharing:
  policy: aggressive
  rebalance_interval: 45
  pressure_thresholds: {cpu: {high: 0.7, low: 0.2}}
"""
    )
    sharing = config.resource_sharing
    assert sharing.policy == "aggressive"
    assert sharing.rebalance_interval_seconds == 20
    assert (sharing.pressure.cpu_high, sharing.pressure.cpu_low) == (0.9, 0.2)


def test_the_same_thing_said_twice_alike_is_fine_and_differently_is_not():
    load("resource_sharing: {check_interval: 30, check_interval_seconds: 30}")
    with pytest.raises(ConfigProblems, match="keep one of the two"):
        load("resource_sharing: {check_interval: 30, check_interval_seconds: 31}")


def test_cluster_thresholds_hold_for_other_machines_and_a_nodes_own_for_itself():
    config = load(
        """
resource_sharing: {thresholds: {cpu_percent_max: 40}}
owner_policy: {notice_seconds: 7}
nodes:
- {name: away}
- {name: here, host: local}
- {name: strict, host: local, thresholds: {memory_percent_max: 20}, owner_policy: evict}
"""
    )
    away, here, strict = config.nodes
    assert config.thresholds_for(away) == ThresholdConfig(cpu_used_max=0.4)
    assert config.thresholds_for(here) is None
    assert config.thresholds_for(strict) == ThresholdConfig(cpu_used_max=0.4, memory_used_max=0.2)
    assert config.owner_policy_for(away) == OwnerPolicy(notice_seconds=7)
    assert config.owner_policy_for(here) is None
    assert config.owner_policy_for(strict) == OwnerPolicy(throttle=False, pause=False, notice_seconds=7)


def test_a_node_has_every_field_in_base_units():
    (node,) = load(
        """
nodes:
- name: box.1
  host: 10.0.0.7
  port: 2222
  user: ana
  ssh_key_path: ~/.ssh/id
  known_hosts: ~/.ssh/known
  accept_new: yes
  proxy_jump: ana@gate:2222, box.2
  role: master
  cpu_count: 7.5
  memory_gb: 30.4
  gpus: [{name: A100, memory_gb: 40}, {memory_gb: 16}]
  custom: {TPU: 4}
  tags: [a, b]
  labels: {zone: "1"}
  python: /usr/bin/python3
  trust_declared: true
  resource_sharing: {max_share_custom: {tpu: 2}, priority: 2.5}
"""
    ).nodes
    assert node.cpu_milli == 7500
    assert node.memory_bytes == round(30.4 * GIB)
    assert node.memory_gb == pytest.approx(30.4)
    assert node.gpu_count == 2
    assert [gpu.memory_bytes for gpu in node.gpus] == [40 * GIB, 16 * GIB]
    assert node.role == "head"
    assert node.proxy_jump == "ana@gate:2222, box.2"
    assert node.custom == {"tpu": 4}
    assert node.resource_sharing.max_share_custom == {"tpu": 2}
    assert node.resource_sharing.rank == 2500
    assert node.labels == {"zone": "1"}


def test_several_nodes_of_one_machine_are_simulated_unless_they_say_otherwise():
    several = "nodes: [{name: a, host: local}, {name: b, host: local, simulated: false}, {name: c, host: far}]"
    config = load(several)
    assert [config.is_simulated(node) for node in config.nodes] == [True, False, False]
    single = load("nodes: [{name: a, host: local, role: head}, {name: c, host: far}]")
    assert not any(single.is_simulated(node) for node in single.nodes)
    alone = load("nodes: [{name: a, host: local, simulated: true, background: {cpu: 5, memory: 76.6, gpu: 10}}]")
    assert alone.is_simulated(alone.nodes[0])
    assert alone.nodes[0].background == Background(cpu_used=0.05, memory_used=76.6 / 100, gpu_used=0.1)
    assert ClusterConfig.from_mapping(alone.as_dict()).nodes == alone.nodes


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ("{name: a, host: far, simulated: true}", "only a node on this machine"),
        ("{name: a, host: local, background: {cpu: 5}}", "only a simulated node has one"),
        ("{name: a, host: local, simulated: false, background: {cpu: 5}}, {name: b, host: local}", "only a simulated"),
        ("{name: a, host: local, simulated: true, background: {cpu: 101}}", "a percentage from 0 to 100"),
        ("{name: a, host: local, simulated: true, background: {disk: 1}}", "unknown key"),
    ],
)
def test_impossible_simulation_is_refused_in_one_line(nodes, problem):
    with pytest.raises(ConfigProblems, match=problem) as refused:
        load(f"nodes: [{nodes}]")
    assert len(refused.value.problems) == 1


def test_custom_resources_of_nodes_are_declared_unless_there_is_a_list():
    assert load("nodes: [{name: a, custom: {tpu: 1}}]").custom_resources == ("tpu",)
    assert load("custom_resources: [fpga, TPU]").custom_resources == ("fpga", "tpu")
    with pytest.raises(ConfigProblems, match="did you mean 'tpu'"):
        load("custom_resources: [tpu]\nnodes: [{name: a, custom: {tpuu: 1}}]")


def test_quotas_fairness_alerts_scaling_and_logging_are_read():
    config = load(
        """
quotas:
  ana: {cpu: 4, memory_gb: 8, gpu: 0.5, jobs: 3}
  vision: {members: [ana, bo], memory: 64}
fairness: {half_life_hours: 12, weights: {ana: 2}}
preemption: {minimum_run: 30, max_per_job: 1}
alerts: {memory: 0.9, gpu: 0.95, command: notify}
scaling: {min_workers: 1, max_workers: 3, budget_per_hour: 1.5, budget_per_day: 20, scale_up_cooldown: 10}
logging: {level: WARN, format: json, file: grid.log}
trusted_network: on
hold_seconds: 90
"""
    )
    assert config.quotas["ana"].gpu_milli == 500
    assert config.quotas["vision"].members == ("ana", "bo")
    assert config.quotas["vision"].memory_bytes == 64 * GIB
    assert config.fairness.half_life_seconds == 12 * 3600
    assert (config.preemption.minimum_run_seconds, config.preemption.max_per_job) == (30, 1)
    assert (config.alerts.memory_high, config.alerts.gpu_high) == (0.9, 0.95)
    assert (config.scaling.budget_usd_per_hour, config.scaling.scale_up_cooldown_seconds) == (1.5, 10)
    assert (config.logging.level, config.trusted_network, config.hold_seconds) == ("warning", True, 90)


def test_a_provider_is_only_opened_when_used_and_names_what_is_missing():
    config = load("providers: {docker_local: {image: '${IMAGE}', cpu_limit: '${CPUS}'}}")
    with pytest.raises(ConfigProblems, match="the environment variable IMAGE to be set"):
        config.provider("docker_local", {})
    assert config.provider("docker_local", {"IMAGE": "x", "CPUS": "2"}).cpu_limit_milli == 2000
    with pytest.raises(BadInput, match="no provider 'aws'"):
        config.provider("aws")


def test_secrets_show_nowhere():
    config = load(
        """
alerts: {webhook: "https://hooks.example.org/${TOKEN}"}
providers:
  aws:
    region: us-west-2
    credentials: {access_key_id: hunter2, secret_access_key: "${S}", session_token: "a${S}"}
""",
        TOKEN="hunter3",
        S="hunter4",
    )
    seen = repr(config) + str(config) + pretty_repr(config) + json.dumps(config.as_dict())
    assert "hunter" not in seen
    assert config.as_dict()["providers"]["aws"]["credentials"]["secret_access_key"] == "${S}"
    assert "hunter" not in repr(config.provider("aws", {"S": "hunter4"}))


def test_oddities_are_warnings():
    config = load(
        """
hold_seconds: 3
resource_sharing: {thresholds: {cpu_percent_max: 0.3}, offer_expiry: 5}
nodes: [{name: a, host: localhost, cpu_count: 2, resource_sharing: {max_share_cpu: 4}}]
scaling: {provider: aws}
"""
    )
    text = "\n".join(config.warnings)
    for part in ("0.3 %", "write local", "cpu_count", "hold_seconds", "no aws", "computed anew"):
        assert part in text


def test_the_normal_form_cannot_be_changed():
    with pytest.raises(AttributeError, match="immutable"):
        load("name: a").name = "b"


@pytest.mark.parametrize(
    ("section", "values", "problem"),
    [
        (NodeConfig, {"name": "../etc"}, "NodeConfig.name"),
        (NodeConfig, {"name": "a\n"}, "NodeConfig.name"),
        (NodeConfig, {"name": None}, "NodeConfig.name"),
        (NodeConfig, {"name": "a", "port": 0}, "NodeConfig.port: Expected `int` >= 1"),
        (NodeConfig, {"name": "a", "port": "22"}, "NodeConfig.port: Expected `int`, got `str`"),
        (NodeConfig, {"name": "a", "role": "boss"}, "NodeConfig.role"),
        (NodeConfig, {"name": "a", "gpus": [{"memory_bytes": -1}]}, "NodeConfig.gpus"),
        (NodeConfig, {"name": "a", "background": OwnerPolicy()}, "NodeConfig.background"),
        (ThresholdConfig, {"cpu_used_max": 1.01}, "ThresholdConfig.cpu_used_max"),
        (OwnerPolicy, {"throttle": 1}, "OwnerPolicy.throttle"),
        (OwnerPolicy, {"grace_seconds": float("inf")}, "OwnerPolicy.grace_seconds"),
        (OwnerPolicy, {"grace_seconds": float("nan")}, "OwnerPolicy.grace_seconds"),
        (ClusterConfig, {}, "ClusterConfig.nodes"),
        (ClusterConfig, {"nodes": [{"name": "a"}], "hold_seconds": 0.5}, "ClusterConfig.hold_seconds"),
    ],
)
def test_a_section_made_in_python_holds_only_what_its_fields_can(section, values, problem):
    with pytest.raises(ValidationError) as refused:
        section(**values)
    assert str(refused.value).startswith(problem)


def test_a_section_made_in_python_has_no_unknown_fields_and_all_that_are_needed():
    with pytest.raises(TypeError, match="nmae"):
        NodeConfig(name="a", nmae="b")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="name"):
        NodeConfig()  # type: ignore[call-arg]


def test_a_section_made_in_python_is_brought_to_the_normal_form():
    sharing = {"strategy": "spread"}
    given: dict[str, Any] = {"nodes": [{"name": "a", "tags": ["x"]}], "hold_seconds": 90, "resource_sharing": sharing}
    config = ClusterConfig(**given)
    assert config.nodes == (NodeConfig(name="a", host="a", tags=("x",)),)
    assert isinstance(config.hold_seconds, float)
    assert config.resource_sharing.strategy is Strategy.SPREAD
    assert replace(config, hold_seconds=60, resource_sharing=ResourceSharing()) == ClusterConfig(nodes=config.nodes)
    with pytest.raises(ValidationError, match=r"ClusterConfig\.hold_seconds"):
        replace(config, hold_seconds=0)


def test_without_a_word_there_is_a_token_and_the_dashboard_is_for_the_head_alone():
    ray = ClusterConfig.from_text("name: x").ray
    assert (ray.auth, ray.dashboard_host, ray.port, ray.client_port, ray.dashboard_port, ray.python, ray.tls) == (
        *("token", "127.0.0.1", 6379, 10001, 8265, None, False),
    )


def test_every_ray_key_can_be_set():
    text = (
        "ray: {python: ~/ray/bin/python, port: 7000, client_port: 7001, dashboard_port: 7002, dashboard_host: 0.0.0.0, "
        "min_worker_port: 7100, max_worker_port: 7200, object_store_memory_gb: 0.5, auth: token, tls: true}\n"
        "nodes: [{name: a, ray_python: /opt/ray/bin/python, ray_address: 10.0.0.1}]"
    )
    config = ClusterConfig.from_text(text)
    assert (config.ray.object_store_memory_bytes, config.ray.max_worker_port) == (512 * 1024**2, 7200)
    assert (config.nodes[0].ray_python, config.nodes[0].ray_address) == ("/opt/ray/bin/python", "10.0.0.1")
    assert ClusterConfig.from_mapping(config.as_dict()) == config


def test_ray_without_a_token_is_warned_about():
    assert "run anything as you" in ClusterConfig.from_text("ray: {auth: none}").warnings[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ray: {port: 0}", "a port number 1-65535"),
        ("ray: {auth: password}", "one of token, none"),
        ("ray: {tls: 1}", "true or false"),
        ("ray: {dashboard_host: 'a b'}", "a host name or address"),
        ("ray: {object_store_memory_gb: 0}", "more than 0"),
        ("ray: {min_worker_port: 21000}", "must be at most max_worker_port 20999"),
        ("ray: {client_port: 20500}", "20500 is taken by the ports of the workers"),
        ("ray: {dashboard_port: 6379}", "6379 is taken by port"),
        ("ray: {pyhton: x}", "did you mean 'python'"),
        ("nodes: [{name: a, ray_address: 'ana@b'}]", "a host name or address alone"),
    ],
)
def test_meaningless_values_are_reported(text, message):
    with pytest.raises(ConfigProblems, match=message):
        ClusterConfig.from_text(text)


def test_without_a_word_it_is_this_machine_only():
    server = ClusterConfig.from_text("name: x").server
    assert (server.host, server.port, server.tls, server.force_plain, server.names) == (
        "127.0.0.1",
        None,
        None,
        False,
        (),
    )


def test_every_server_key_can_be_set():
    text = "server: {host: 0.0.0.0, port: 1234, names: [a.example], tls: true, certificate: c.pem, key: k.pem}"
    config = ClusterConfig.from_text(text)
    assert (config.server.host, config.server.port, config.server.names) == ("0.0.0.0", 1234, ("a.example",))
    assert ClusterConfig.from_mapping(config.as_dict()).server == config.server


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server: {certificate: c.pem}", "there is no key to go with it"),
        ("server: {key: c.pem}", "there is no certificate to go with it"),
        ("server: {port: 70000}", "a port number 0-65535"),
        ("server: {host: 'a b'}", "a host name or address"),
        ("server: {prot: 1}", "did you mean 'port'?"),
    ],
)
def test_contradictions_are_reported(text, message):
    with pytest.raises(ConfigProblems, match=message):
        ClusterConfig.from_text(text)


@pytest.mark.parametrize("text", ["tls: false", "tls: no, host: 0.0.0.0", "force_plain: true, host: 10.0.0.1"])
def test_connections_without_tls_are_refused(text):
    with pytest.raises(ConfigProblems, match="there is no connection without TLS: remove this key"):
        ClusterConfig.from_text(f"server: {{{text}}}")
    assert ClusterConfig.from_text("server: {tls: true, force_plain: false}").server.tls is True
