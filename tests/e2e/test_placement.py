"""Where jobs go, as a person says it: strategies, labels, being near and apart, GPU models, deadlines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.shell import GRID, Shell, wait_until

CONFIG = """\
name: placing
resource_sharing: {strategy: best_fit}
nodes:
- {name: small, host: local, cpu_count: 2, memory_gb: 2, trust_declared: true, labels: {zone: a}, tags: [quiet]}
- {name: large, host: local, cpu_count: 8, memory_gb: 8, trust_declared: true, labels: {zone: b}, cost_per_hour: 2.5}
- name: gpus
  host: local
  cpu_count: 8
  memory_gb: 8
  trust_declared: true
  speed: 3.0
  gpus: [{name: Tesla T4, memory_gb: 16}, {name: NVIDIA A100-SXM4-40GB, memory_gb: 40}]
"""
WHERE = ("sh", "-c", "echo $GRID_NODE")


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder: Path = tmp_path_factory.mktemp("placing")
    (folder / "here").mkdir()
    shell = Shell(folder / "state", folder / "here")
    (folder / "placing.yaml").write_text(CONFIG)
    shell.env["GRID_CONFIG"] = str(folder / "placing.yaml")
    shell("daemon", "start", check=0)
    wait_until(lambda: {node["state"] for node in shell.observe("status")["nodes"]} == {"alive"})
    yield shell
    shell.close()


def ran_on(grid: Shell, *options: str) -> str:
    return grid("run-shared", *options, *WHERE, check=0).stdout.strip()


def test_each_strategy_has_its_own_mind(grid: Shell) -> None:
    assert ran_on(grid) == "small", "best_fit, as the config says"
    assert ran_on(grid, "--strategy", "load_balanced") == "large"
    assert ran_on(grid, "--strategy", "performance_optimized") == "gpus"
    assert ran_on(grid, "--strategy", "cost_optimized", "-a", "3") == "gpus"
    assert ran_on(grid, "--strategy", "fragmentation_aware", "-a", "3") == "large"
    assert ran_on(grid, "--strategy", "node_specific", "-n", "large") == "large"


def test_a_label_or_a_tag_is_a_must(grid: Shell) -> None:
    assert ran_on(grid, "--label", "zone=b") == "large"
    assert ran_on(grid, "--label", "quiet", "--strategy", "load_balanced") == "small"
    refused = grid("run-shared", "--label", "zone=z", "true")
    assert refused.returncode == 1
    assert "small: has no label zone=z; large: has no label zone=z; gpus: has no label zone=z" in refused.stderr


def test_local_first_means_the_node_of_the_job_in_which_it_is_typed(grid: Shell) -> None:
    assert ran_on(grid, "--strategy", "local_first") == "gpus", "the first by name stands for this machine"
    inside = shlex.join(["env", *(f"{name}={value}" for name, value in grid.env.items()), *GRID, "run-shared"])
    inside += f" --strategy local_first {shlex.join(WHERE)}"
    assert grid("run-shared", "-n", "large", "sh", "-c", inside, check=0).stdout.strip() == "large"
    for nonsense in ("nowhere", "x" * 1000, "\udc80"):
        done = grid("run-shared", "--strategy", "local_first", *WHERE, env={"GRID_NODE": nonsense}, check=0)
        assert done.stdout.strip() == "gpus", "a name that means nothing is no preference"


def test_near_and_apart_and_spread_out(grid: Shell) -> None:
    jobs = [grid.detach("--strategy", "spread", "--group", "web", "sleep", "60") for _ in range(2)]
    places = {grid.job(job)["node_id"] for job in jobs}
    assert len(places) == 2
    (third,) = {"small", "large", "gpus"} - places
    assert ran_on(grid, "--apart-from", "web") == third
    assert ran_on(grid, "--near", jobs[0]) == grid.job(jobs[0])["node_id"]
    words = ("run-shared", "--json", "--dry-run", "--apart-from", "web", "--apart-from", third, "true")
    verdict = json.loads(grid(*words, check=0).stdout)
    assert verdict["verdict"] == "wait"
    assert f"{third}: it must not be here" in verdict["reasons"]
    for job in jobs:
        grid("jobs", "cancel", job, check=0)


def test_a_gpu_is_had_by_its_model_and_memory_and_with_more_beside_it(grid: Shell) -> None:
    devices = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    gpu = ("run-shared", "-r", "gpu", "-a", "1", "--also", "cpu=2", "--also", "memory=1")
    assert grid(*gpu, "--gpu-model", "a100", *devices, check=0).stdout == "1\n"
    assert grid(*gpu, "--gpu-memory", "20", *devices, check=0).stdout == "1\n"
    assert grid(*gpu, *devices, check=0).stdout == "0\n"
    job = grid.detach("-r", "gpu", "-a", "0.5", "--also", "memory=2", "sleep", "60")
    assert grid.job(job)["resources"]["memory_gb"] == 2
    grid("jobs", "cancel", job, check=0)
    refused = grid("run-shared", "-r", "gpu", "--gpu-model", "H100", "true")
    assert "No node can ever lend 1 GPU of H100" in refused.stderr


def test_job_that_cannot_meet_its_deadline_is_not_started(grid: Shell) -> None:
    assert ran_on(grid, "--expects", "5", "--deadline", "+60") == "small"
    refused = grid("run-shared", "--expects", "100", "--deadline", "+10", "true")
    assert refused.returncode == 1
    assert "it takes 100 s, but its deadline is in" in refused.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--strategy", "fastest"], "'fastest' is not one of"),
        (["--strategy", "node_specific"], "needs a node: -n NODE"),
        (["--also", "memory"], "--also needs TYPE=AMOUNT"),
        (["--also", "cpu=1"], "a resource is asked for twice"),
        (["--also", "time=1"], "no resource is called 'time'"),
        (["--label", "=a"], "a label needs a key"),
        (["--deadline", "soon"], "--deadline needs +SECONDS"),
        (["--deadline", "2001-01-01"], "is over already"),
        (["--gpu-model", "A100"], "can only be asked for together with a GPU"),
    ],
)
def test_bad_input_gets_one_clear_line_and_changes_nothing(grid: Shell, options: list[str], said: str) -> None:
    before = len(grid.json("jobs", "list"))
    refused = grid("run-shared", *options, "true")
    assert refused.returncode in (1, 2)
    assert said in refused.stderr
    assert len(grid.json("jobs", "list")) == before
