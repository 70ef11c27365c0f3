"""Asking for resources: waiting, refusals, priorities, preemption, dry runs, nodes of a config."""

from __future__ import annotations

import json
import os
import socket
import uuid
from typing import Any

import pytest

from distributed_grid.api.framing import JSON, Unpacker, frame
from distributed_grid.client.conversation import ClientConfig, hello
from distributed_grid.posix.sockets import short_path
from distributed_grid.state_dir import StateDir
from tests.support.project import copy_configs
from tests.support.shell import Shell, wait_until

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def cluster(grid: Shell) -> Shell:
    """The shipped three local nodes, found the way a clone finds them."""
    copy_configs(grid.cwd / "config")
    return grid


def _hold_everything(grid: Shell, name: str, *options: str) -> None:
    grid.detach("-j", name, "-a", str(CORES), *options, "sleep", "300")
    wait_until(lambda: grid.job(name)["state"] == "running")


def test_a_wait_that_is_in_vain_ends_with_124_and_the_reason(grid: Shell) -> None:
    _hold_everything(grid, "all")
    done = grid("run-shared", "-w", "0.5", "true", check=124)
    assert "No resource offers available" in done.stderr
    assert "0 cores free, 1 core asked" in done.stderr


def test_request_without_a_wait_is_refused_at_once(grid: Shell) -> None:
    _hold_everything(grid, "all")
    done = grid("run-shared", "-w", "0", "true", check=1)
    assert done.stderr.startswith("grid: No resource offers available: ")
    assert len(done.stderr.splitlines()) == 1


def test_impossible_request_is_refused_at_once(grid: Shell) -> None:
    done = grid("run-shared", "-a", "100000", "true", check=1, timeout=20)
    assert f"{CORES} core" in done.stderr
    assert "100000 cores asked" in done.stderr


def test_a_request_that_waits_is_served_when_capacity_comes_free(grid: Shell) -> None:
    _hold_everything(grid, "all")
    waiting = grid.start("run-shared", "echo", "my turn")
    wait_until(lambda: grid.observe("status")["waiting"] == 1)
    grid("jobs", "cancel", "all", check=0)
    assert waiting.communicate(timeout=20)[0] == b"my turn\n"


def test_the_line_is_ordered_by_priority_then_age(grid: Shell) -> None:
    _hold_everything(grid, "all")
    order = grid.cwd / "order"
    for name, priority in (("low", "low"), ("first", "normal"), ("second", "medium"), ("high", "high")):
        grid.detach("-j", name, "-p", priority, "-a", str(CORES), "--shell", f"echo {name} >> {order}")
    grid("jobs", "cancel", "all")
    grid("jobs", "wait", "low", check=0)
    assert order.read_text().split() == ["high", "first", "second", "low"]


def test_urgent_work_displaces_and_the_victim_runs_again(grid: Shell) -> None:
    runs = grid.cwd / "runs"
    script = f"echo run >> {runs}; exec sleep 2"
    grid.detach("-j", "victim", "-p", "low", "-a", str(CORES), "--grace", "1", "--shell", script)
    wait_until(runs.exists)
    # A lease younger than a second is left alone, so the urgent request first waits in the line.
    assert grid("run-shared", "-p", "urgent", "-a", str(CORES), "echo", "urgent", check=0).stdout == "urgent\n"
    grid("jobs", "wait", "victim", check=0)
    victim = grid.job("victim")
    assert [attempt["outcome"] for attempt in victim["attempts"]] == ["preempted", "exited"]
    assert runs.read_text() == "run\nrun\n"
    assert victim["retries_left"] == 0


def test_urgent_work_does_not_displace_urgent_work(grid: Shell) -> None:
    _hold_everything(grid, "all", "-p", "urgent")
    grid("run-shared", "-p", "urgent", "-w", "2", "true", check=124)
    assert grid.job("all")["state"] == "running"


def test_a_dry_run_says_what_would_happen_and_changes_nothing(grid: Shell) -> None:
    assert grid("run-shared", "--dry-run", "touch", "made", check=0).stdout.startswith("would run on ")
    _hold_everything(grid, "all")
    assert grid("run-shared", "--dry-run", "true", check=0).stdout.startswith("would wait for 1 core: ")
    verdict = grid("run-shared", "--json", "--dry-run", "true", check=0).stdout
    assert json.loads(verdict)["verdict"] == "wait"
    grid("run-shared", "--dry-run", "-w", "0", "true", check=1)
    assert [job["job_id"] for job in grid.json("status")["jobs"]] == ["all"]
    assert not (grid.cwd / "made").exists()


def test_the_config_of_a_clone_is_found_and_said(cluster: Shell) -> None:
    done = cluster("status", check=0)
    hint = "3 simulated nodes; for this machine alone: --config none"
    assert done.stderr == f"grid: using ./config/my-cluster-enhanced.yaml: {hint}\n"
    assert {node["node_id"] for node in cluster.json("status")["nodes"]} == {"gpu-master", "gpu1", "gpu2"}


def test_preferred_nodes_come_first_and_insisting_is_obeyed(cluster: Shell) -> None:
    where = cluster("run-shared", "-n", "gpu1", "--shell", "echo $GRID_NODE", check=0).stdout
    assert where == "gpu1\n"
    cluster.detach("-j", "full", "-r", "gpu", "-n", "gpu1", "sleep", "300")
    elsewhere = cluster("run-shared", "-r", "gpu", "-n", "gpu1", "--shell", "echo $GRID_NODE", check=0).stdout
    assert elsewhere == "gpu2\n"
    insisting = ["run-shared", "--strategy", "node_specific", "-n", "gpu1", "-r", "gpu", "-w", "0", "true"]
    assert "gpu1: 0 GPUs free, 1 GPU asked" in cluster(*insisting, check=1).stderr


def test_gpu_leases_see_exactly_their_devices(cluster: Shell) -> None:
    show = ("--strategy", "node_specific", "-n", "gpu2", "--shell", 'echo "$CUDA_VISIBLE_DEVICES"; exec sleep 300')
    for name in ("one", "two"):
        cluster.detach("-j", name, "-r", "gpu", *show)

    def seen() -> set[str] | None:
        logs = [cluster("jobs", "logs", name, check=0).stdout.strip() for name in ("one", "two")]
        return set(logs) if all(logs) else None

    assert wait_until(seen) == {"0", "1"}


def test_halves_of_a_gpu_share_a_device(cluster: Shell) -> None:
    for name in ("one", "two"):
        cluster.detach("-j", name, "-r", "gpu", "-a", "0.5", "-n", "gpu1", "sleep", "300")
    wait_until(lambda: all(cluster.job(name)["state"] == "running" for name in ("one", "two")))
    shares = [lease["resources"]["gpus"] for lease in cluster.json("shared-status")["allocations"]]
    assert [(share["index"], share["amount"]) for (share,) in shares] == [(0, 0.5), (0, 0.5)]


def test_declared_custom_resources_are_lent_like_the_others(grid: Shell) -> None:
    config = grid.cwd / "custom.yaml"
    config.write_text("nodes:\n- name: here\n  host: local\n  custom: {tpu: 2}\n")
    grid.detach("-c", str(config), "-j", "first", "-r", "tpu", "-a", "1", "sleep", "300")
    refused = grid("run-shared", "-r", "TPU", "-a", "2", "-w", "0", "true", check=1)
    assert "here: 1 tpu free, 2 asked" in refused.stderr
    grid("run-shared", "-r", "tpu", "-a", "1", "-w", "0", "true", check=0)
    assert "there is cpu, gpu, memory, tpu" in grid("run-shared", "-r", "fpga", "true", check=2).stderr


def test_sharing_that_is_switched_off_refuses(grid: Shell) -> None:
    config = grid.cwd / "off.yaml"
    config.write_text("resource_sharing:\n  enabled: false\n")
    done = grid("run-shared", "-c", str(config), "true", check=1)
    assert "Resource sharing not enabled" in done.stderr


def test_thresholds_set_on_a_local_node_are_kept(grid: Shell) -> None:
    """No machine has a terabyte free: the node says why it lends nothing."""
    config = grid.cwd / "strict.yaml"
    config.write_text(
        "nodes:\n- name: here\n  host: local\n  cpu_count: 2\n  trust_declared: true\n  memory_gb: 4000\n"
        "  thresholds:\n    memory_min_gb: 5000\n"
    )
    words = ("run-shared", "-c", str(config), "-r", "memory", "-a", "1", "-w", "0", "true")

    def refusal() -> str:
        said = grid(*words, check=1).stderr
        return "" if "not measured yet" in said else said

    refused = wait_until(refusal)
    assert refused.startswith("grid: No resource offers available: here: ")
    assert "needed to lend any" in refused


def test_every_step_is_in_the_audit_trail(grid: Shell) -> None:
    grid("run-shared", "-j", "audited", "true", check=0)
    grid("run-shared", "-r", "gpu", "true", check=1)
    lines = [line for line in grid("events", "--json", check=0).stdout.splitlines() if line]
    types = [json.loads(line)["type"] for line in lines]
    for expected in ("requested", "granted", "started", "released", "stopped", "refused"):
        assert expected in types


@pytest.mark.parametrize(
    "words",
    [
        ("run-shared", "-a", "0", "true"),
        ("run-shared", "-a", "-1", "true"),
        ("run-shared", "-a", "nan", "true"),
        ("run-shared", "-a", "inf", "true"),
        ("run-shared", "-a", "1e30", "true"),
        ("run-shared", "-a", "0.0001", "true"),
        ("run-shared", "-r", "gpu", "-a", "1.5", "true"),
        ("run-shared", "-r", "bananas", "true"),
        ("run-shared", "-p", "whenever", "true"),
        ("run-shared", "-n", "nowhere", "true"),
        ("run-shared", "-j", "../escape", "true"),
        ("run-shared", "-e", "=x", "true"),
        ("run-shared", "-e", "NOT_SET_ANYWHERE", "true"),
        ("run-shared", "--shell", "echo", "two words"),
        ("run-shared", "--strategy", "node_specific", "true"),
        ("run-shared", ""),
        ("run-shared",),
        ("run-shared", "--no-such-option", "true"),
        ("jobs", "show", "nobody"),
        ("jobs", "cancel", "nobody"),
        ("jobs", "logs", ""),
        ("no-such-command",),
        ("--config", "no-such-file", "run-shared", "true"),
    ],
)
def test_bad_input_gets_a_clear_line_and_changes_nothing(shared_grid: Shell, words: tuple[str, ...]) -> None:
    done = shared_grid(*words, timeout=30)
    assert done.returncode in (1, 2, 127)
    assert done.stdout == ""
    assert 1 <= len(done.stderr.strip().splitlines()) <= 4
    assert "bug" not in done.stderr
    assert shared_grid.json("status")["allocations"] == []


def test_submissions_that_are_sent_together_are_answered_in_order_each_for_itself(grid: Shell) -> None:
    grid("status", check=0)
    bad: dict[str, object] = {"op": "submit_job", "request_id": "bad", "argv": []}
    submissions = [
        {"op": "submit_job", "request_id": uuid.uuid4().hex, "argv": ["true"], "amount": 1} for _ in range(12)
    ]
    submissions.insert(3, bad)
    last = submissions[-1]
    sent = [hello(ClientConfig()), *submissions, last, {"op": "wait_for_job", "job_id": last["request_id"]}]
    with socket.socket(socket.AF_UNIX) as client, short_path(StateDir(grid.state_dir).socket) as path:
        client.connect(path)
        client.settimeout(60)
        client.sendall(b"".join(frame(JSON, json.dumps(message).encode()) for message in sent))
        unpacker = Unpacker()
        answers: list[dict[str, Any]] = []
        while len(answers) < len(sent):
            answers += [json.loads(body) for _, body in unpacker.feed(client.recv(65536))]
    _, *submitted, again, waited = answers
    assert submitted.pop(3)["error"]["type"] == "BadInput"
    assert [row["job"]["uid"] for row in submitted] == [row["request_id"] for row in submissions if row != bad]
    assert again["job"]["uid"] == last["request_id"]
    assert waited["job"]["exit_code"] == 0
    assert len(grid.json("jobs", "list")) == 12
