"""The shipped files, `grid init`, and every YAML and JSON block of the five guides load as the guides say."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.config import ClusterConfig, ConfigProblems, check_config, cluster_template, load_cluster_config
from distributed_grid.config.cluster_config import differences, meaning_digest, with_live_keys
from distributed_grid.config.sections import PressureMarks, ThresholdConfig
from distributed_grid.errors import BadInput
from tests.support.project import PROJECT
from tests.unit.config.texts import problems_of

SHIPPED = ["my-cluster.yaml", "my-cluster-enhanced.yaml", "cluster_config.yaml"]
GIB = 1024**3


@pytest.fixture(params=SHIPPED)
def shipped(request) -> ClusterConfig:
    return ClusterConfig.from_yaml(PROJECT / "config" / request.param)


def test_each_simulates_the_three_machines_on_this_one(shipped):
    assert [node.name for node in shipped.nodes] == ["gpu-master", "gpu1", "gpu2"]
    assert all(shipped.is_simulated(node) for node in shipped.nodes)
    background = {node.name: round(100 * node.background.memory_used, 1) for node in shipped.nodes}
    assert background == {"gpu-master": 76.6, "gpu1": 34.0, "gpu2": 11.6}
    assert shipped.head.name == "gpu-master"
    assert shipped.warnings == ()


def test_each_leaves_the_owner_of_this_machine_without_thresholds_and_policy(shipped):
    assert {shipped.thresholds_for(node) for node in shipped.nodes} == {None}
    assert {shipped.owner_policy_for(node) for node in shipped.nodes} == {None}


def test_each_lets_the_workers_lend_what_the_guides_ask_for(shipped):
    _, gpu1, gpu2 = (node.resource_sharing for node in shipped.nodes)
    assert gpu2.max_share_memory_bytes >= (10 + 15) * GIB
    assert gpu1.max_share_memory_bytes >= 4 * GIB
    assert gpu2.max_share_cpu_milli >= (2 + 4 + 4) * 1000
    assert gpu1.max_share_gpu_count >= 1
    assert gpu2.max_share_gpu_count >= 1


def test_each_declares_at_least_what_it_lends(shipped):
    for node in shipped.nodes:
        assert node.resource_sharing.max_share_cpu_milli <= node.cpu_milli
        assert node.resource_sharing.max_share_memory_bytes <= node.memory_bytes
        assert node.resource_sharing.max_share_gpu_count <= node.gpu_count


def test_only_the_enhanced_one_asks_for_memory_at_70_percent():
    marks = {
        name: ClusterConfig.from_yaml(PROJECT / "config" / name).resource_sharing.pressure.memory_high
        for name in SHIPPED
    }
    assert marks == {"my-cluster.yaml": 0.8, "my-cluster-enhanced.yaml": 0.7, "cluster_config.yaml": 0.8}


def test_the_template_loads_as_it_is():
    config = ClusterConfig.from_text(cluster_template(), env={})
    assert [node.name for node in config.nodes] == ["here"]
    assert config.warnings == ()


def test_the_template_still_loads_with_its_comments_taken_away():
    lines = cluster_template().split("\n\n", 2)[2].splitlines()
    live = []
    for line in lines:
        bare = line.replace("# ", "", 1) if line.lstrip().startswith("# ") else line
        prose = bare.strip().endswith(".") and ":" not in bare.split(" #")[0]
        live.append(line if prose or "copy this" in line else bare)
    config = ClusterConfig.from_text("\n".join(live), env={"GRID_ALERT_WEBHOOK": "https://example.org/x"})
    assert [node.name for node in config.nodes] == ["here", "gpu1"]
    assert config.quotas["ana"].cpu_milli == 16000
    assert config.warnings == ()


SEEDS = PROJECT / "tests" / "fixtures" / "seeds"


def seed(name: str) -> ClusterConfig:
    return ClusterConfig.from_yaml(SEEDS / name)


@pytest.mark.parametrize("path", sorted(SEEDS.iterdir()), ids=lambda path: path.name)
def test_every_block_loads_and_shows_as_something_that_loads_again(path):
    config = load_cluster_config(path)
    again = ClusterConfig.from_mapping(config.as_dict())
    assert replace(again, warnings=()) == replace(config, warnings=())


def test_the_sharing_guide_gives_percent_mb_and_gb_that_become_ratios_and_bytes():
    sharing = seed("resource_sharing_guide.yaml").resource_sharing
    assert sharing.enabled
    assert sharing.check_interval_seconds == 60
    assert sharing.offer_expiry_seconds == 300
    assert sharing.max_offers_per_node == 5
    assert sharing.thresholds == ThresholdConfig(
        gpu_used_max=0.2,
        gpu_memory_free_min_bytes=GIB,
        memory_used_max=0.5,
        memory_free_min_bytes=2 * GIB,
        cpu_used_max=0.3,
        cpu_free_min_milli=1000,
    )


def test_the_intelligent_sharing_guide_sets_mode_policy_and_pressure_marks():
    sharing = seed("intelligent_sharing.yaml").resource_sharing
    assert (sharing.mode, sharing.policy) == ("dynamic_balancing", "balanced")
    assert sharing.rebalance_interval_seconds == 30
    assert sharing.monitoring_interval_seconds == 10
    assert sharing.pressure == PressureMarks(
        cpu_high=0.8, cpu_low=0.3, memory_high=0.8, memory_low=0.3, gpu_high=0.8, gpu_low=0.3, excess=0.2
    )


def test_its_node_block_sets_the_caps_of_one_node_whose_host_is_its_name():
    (node,) = seed("intelligent_sharing_node.yaml").nodes
    assert (node.name, node.host, node.is_local) == ("gpu-master", "gpu-master", False)
    caps = node.resource_sharing
    assert caps.can_share
    assert caps.max_share_cpu_milli == 4000
    assert caps.max_share_memory_bytes == 16 * GIB
    assert caps.max_share_gpu_count == 0
    assert caps.rank == 1000


def test_the_boost_guide_nests_its_pressure_marks_and_shortens_the_interval():
    sharing = seed("resource_boost.yaml").resource_sharing
    assert sharing.policy == "balanced"
    assert sharing.rebalance_interval_seconds == 30
    assert sharing.pressure == PressureMarks()


def test_the_memory_guide_lowers_the_memory_mark_to_70_percent():
    sharing = seed("distributed_memory.yaml").resource_sharing
    assert sharing.pressure.memory_high == 0.7
    assert sharing.pressure.cpu_high == 0.8


def test_a_file_without_nodes_means_this_machine():
    config = seed("distributed_memory.yaml")
    assert [node.is_local for node in config.nodes] == [True]
    assert config.thresholds_for(config.nodes[0]) is None


def test_the_providers_file_loads_without_its_variables_and_opens_with_them():
    config = seed("cloud_providers.json")
    env = {"AWS_ACCESS_KEY_ID": "an-id", "AWS_SECRET_ACCESS_KEY": "a-secret"}
    aws = config.provider("aws", env)
    assert (aws.region, aws.instance_types["gpu"], aws.spot_instance_enabled) == (
        "us-west-2",
        "g4dn.xlarge",
        True,
    )
    assert aws.secret_access_key.reveal() == "a-secret"
    assert "a-secret" not in repr(aws)

    gcp = config.provider("gcp", {})
    assert (gcp.project, gcp.zone, gcp.preemptible_enabled) == ("your-project-id", "us-central1-a", True)
    assert gcp.machine_types == {"cpu": "n2-standard-4", "gpu": "n1-standard-4-nvidia-tesla-t4"}
    assert gcp.credentials_file == "/path/to/credentials.json"

    docker = config.provider("docker_local", {})
    assert (docker.image, docker.network) == ("ipfs-accelerate-worker:latest", "host")
    assert (docker.cpu_limit_milli, docker.memory_limit_bytes) == (4000, 16 * GIB)


def test_a_config_that_was_read_has_its_file_and_a_changed_copy_is_written_to_one(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("name: a\nnodes: [{name: x, port: 23}]\nproviders: {aws: {region: '${REGION}'}}\n")
    config = ClusterConfig.from_yaml(path)
    assert config.file_for(tmp_path) == str(path)
    changed = replace(config, name="b")
    written = ClusterConfig.from_yaml(changed.file_for(tmp_path))
    assert written == changed
    assert written != config
    assert ClusterConfig.from_text(path.read_text()) == config


def test_all_problems_are_told_at_once_in_the_order_of_the_file():
    a_ratio = "expected a ratio from 0 to 1"
    assert problems_of(
        """\
nodes:
- name: a
  port: abc
- name: a
  memory_gb: -1
resource_sharing:
  enabledd: true
alerts:
  cpu: 30
"""
    ) == [
        "c.yaml:3: nodes[0].port: found 'abc', expected a port number 1-65535",
        "c.yaml:4: nodes[1].name: 'a' is taken by the node on line 2, expected another name",
        "c.yaml:5: nodes[1].memory_gb: found the number -1, expected an amount of memory in GB, more than 0",
        "c.yaml:7: resource_sharing.enabledd: unknown key; did you mean 'enabled'?",
        f"c.yaml:9: alerts.cpu: found the number 30, {a_ratio} (it looks like a percent: write 0.3)",
    ]


def test_a_problem_carries_its_parts_and_the_callers_mistake():
    with pytest.raises(BadInput) as caught:
        ClusterConfig.from_text("name: a\nhold_seconds: soon", "c.yaml")
    assert isinstance(caught.value, ConfigProblems)
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.key) == ("c.yaml", 2, "hold_seconds")
    assert (problem.found, problem.expected) == ("'soon'", "a number of seconds, at least 1")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nodes: [{name: no}]", "nodes[0].name: found the boolean no, expected a name"),
        ("nodes: [{name: 12}]", "for text put it in quotes"),
        (
            "nodes: [{name: 010}]\nhold_seconds: 010",
            "hold_seconds: found '010', expected a number of seconds",
        ),
        ("hold_seconds: 1:30", "found '1:30'"),
        ("hold_seconds: true", "found the boolean true, expected a number"),
        ("hold_seconds: '60'", "without quotes"),
        ("hold_seconds: .nan", "found the number .nan"),
        ("hold_seconds: .inf", "found the number .inf"),
        ("hold_seconds: 1e999", "found the number 1e999"),
        ("hold_seconds: " + "9" * 5000, "found the number 999"),
        ("hold_seconds: -5", "found the number -5"),
        ("hold_seconds: 1e11", "at most ten years"),
        ("alerts: {memory: 101}", "found the number 101, expected a ratio from 0 to 1"),
        ("alerts: {memory: -0.1}", "expected a ratio"),
        ("resource_sharing: {thresholds: {cpu_percent_max: 101}}", "expected a percentage from 0 to 100"),
        ("fairness: {weights: {ana: 0}}", "expected a number, more than 0"),
        ("preemption: {minimum_run_seconds: -1}", "found the number -1, expected a number of seconds, 0 or more"),
        ("preemption: {max_per_job: 1.5}", "found the number 1.5, expected a whole number 0-1000"),
        ("preemption: {max_per_jobs: 1}", "preemption.max_per_jobs: unknown key; did you mean 'max_per_job'?"),
        ("providers: {docker_local: {image: a, memory_limit: 16 parsecs}}", "such as 16g"),
        ("providers: {docker_local: {image: a, memory_limit: 0g}}", "such as 16g"),
        ("logging: {level: 3}", "expected one of debug"),
        ("nodes: [{name: a, tags: {a: b}}]", "expected a list of words"),
        ("quotas: [ana]", "expected a mapping of users or teams"),
        ("hold_seconds: [1]", "found a list"),
        ("trusted_network: 1", "expected true or false"),
        ("nodes: [{name: a, cpu_count: 0}]", "more than 0"),
        ("nodes: [{name: a, gpu_count: 1.5}]", "expected a whole number of GPUs"),
        ("nodes: [{name: a, cpu_count: true}]", "found the boolean true"),
        ("nodes: [{name: a, memory_gb: 16GB}]", "found '16GB'"),
        ("nodes: [{name: a, port: 70000}]", "expected a port number 1-65535"),
        ("nodes: [{name: a, host: ana@box}]", "goes into user:"),
        ("nodes: [{name: a, host: 'box:22'}]", "goes into port:"),
        ("nodes: [{name: a, host: -oProxyCommand=x}]", "expected a host name"),
        ("nodes: [{name: a, user: -l}]", "expected a login name"),
        ("nodes: [{name: ../up}]", "expected a name"),
        ("nodes: [{name: " + "x" * 64 + "}]", "at most 63"),
        ('nodes: [{name: "a\\n"}, {name: "b\\e[31m"}]', "found 'b\\x1b[31m'"),
        ("nodes: [{host: a}]", "nodes[0]: the key 'name' is missing"),
        ("nodes: [a]", "nodes[0]: found 'a', expected a mapping with keys such as name, host"),
        ("nodes: {a: 1}", "expected a list of nodes"),
        ("nodes: [{name: a, role: boss}]", "expected one of head, worker"),
        ("nodes: [{name: a, role: head}, {name: b, role: master}]", "a second head beside 'a'"),
        ("nodes: [{name: a, gpu_count: 1, gpus: []}]", "found 1, but gpus: lists 0"),
        ("nodes: [{name: a, custom: {cpu: 1}}]", "not cpu, gpu or memory"),
        ("nodes: [{name: a, custom: {tpu: 1, TPU: 2}}]", "the same name as another key"),
        ("nodes: [{name: a, thresholds: {cpu_pressure_high: 0.8}}]", "unknown key"),
        ("resource_sharing: {mode: dynamic}", "expected one of offload_only"),
        (
            "resource_sharing: {pressure_thresholds: {cpu: 0.8}}",
            "expected a mapping with keys such as high, low",
        ),
        ("resource_sharing: {pressure_thresholds: {cpu: {high: 0.2}}}", "the low mark 0.3 must be below"),
        ("resource_sharing: yes", "expected a mapping"),
        ("scaling: {min_workers: 5, max_workers: 2}", "min_workers 5 must be at most max_workers 2"),
        ("scaling: {target_utilization: 0.9}", "must be at most scale_up_threshold 0.8"),
        ("owner_policy: gently", "expected one of throttle, pause, evict"),
        ("alerts: {memory: 75}", "write 0.75"),
        ("quotas: {ana: {cpu: -1}}", "quotas.ana.cpu"),
        ("providers: {azure: {}}", "unknown key"),
        ("providers: {aws: {}}", "the key 'region' is missing"),
        ("providers: {docker_local: {image: a, memory_limit: 16}}", "such as 16g"),
        ("node: []", "did you mean 'nodes'?"),
        ("thresholds: {}", "it belongs at 'nodes[].thresholds' or 'resource_sharing.thresholds'"),
        ("aws: {}\nnodes: []", "it belongs at 'providers.aws'"),
        ("nodes: [{name: a, hold_seconds: 5}]", "it belongs at 'hold_seconds'"),
        ("zebra: 1", "expected one of alerts"),
        ("name: ${A", "an unfinished ${"),
        ("name: a\nname: b", "name: given twice, first on line 1"),
        ("- a", "the top level must be a mapping"),
        ("just text", "the top level must be a mapping"),
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("a: b\n---\nc: d", "a second document"),
        ("name: !!python/object/apply:os.system [x]", "is not accepted"),
        ("name: !secret x", "is not accepted"),
        ("name: *nowhere", "has no anchor"),
        ("name: &a [*a]", "contains itself"),
        ("? [a]\n: b", "cannot be a key"),
        ("name: [1", "not YAML"),
        ("name:\tx\n\t- y", "not YAML"),
        ("name: a\x07", "not YAML"),
        ("<<: 5\nname: a", "merges mappings only"),
    ],
)
def test_each_slip_has_a_clear_line(text, line):
    lines = problems_of(text)
    assert any(line in shown for shown in lines), lines


def test_a_sound_file_has_no_problems(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: a")
    assert check_config(path) == []


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
