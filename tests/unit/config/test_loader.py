"""Problems of a configuration: each on one line with its position, all at once, never a traceback."""

from __future__ import annotations

import pytest

from distributed_grid.config import ClusterConfig, ConfigProblems, check_config
from distributed_grid.errors import BadInput
from tests.unit.config.texts import problems_of


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
