"""Workers in real containers: they join, run jobs, take their cores from this machine, and leave nothing behind."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.adapters.clouds.boot_script import boot_script
from tests.e2e.guides import page_blocks
from tests.support.bare_machine import order_for
from tests.support.docker_engines import LocalDockerEngine
from tests.support.project import PROJECT
from tests.support.shell import Shell, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

GUIDE = "docs/guide/docker-workers.md"
LENDS = """
name: lends
resource_sharing:
  thresholds: {cpu_percent_max: 100, cpu_min_cores: 0, memory_percent_max: 100, memory_min_gb: 0}
"""
"""Nodes that lend beside whatever else runs on this machine."""
CONFIG = """
name: containers
workers: {{exit_seconds: 3, call_seconds: 5}}
resource_sharing:
  thresholds: {{cpu_percent_max: 100, cpu_min_cores: 0, memory_percent_max: 100, memory_min_gb: 0}}
providers:
  docker_local:
    endpoint_url: {url}
    cpu_limit: 1
    memory_limit: 256m
"""


@pytest.fixture(scope="module")
def grid(engine: LocalDockerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A grid of this machine that starts workers on the engine."""
    folder = tmp_path_factory.mktemp("workers")
    (folder / "here").mkdir()
    shell = Shell(folder / "state", folder / "here")
    config = folder / "containers.yaml"
    config.write_text(CONFIG.format(url=engine.url))
    shell("daemon", "start", "--config", str(config), check=0)
    yield shell
    shell.close()


@pytest.fixture(autouse=True)
def _cleared(grid: Shell) -> Iterator[None]:
    """No test leaves a worker to the next."""
    yield
    living = [one["worker_id"] for one in grid.json("workers", "list")["workers"]]
    if living:
        grid("workers", "terminate", "--force", "--discard-results", "--wait", "40", *living, check=0)


def create(grid: Shell, *words: str) -> dict[str, Any]:
    """A worker that has joined."""
    found: dict[str, Any] = grid.json("workers", "create", "--wait", "60", *words)["workers"][0]
    return found


def containers(engine: LocalDockerEngine) -> dict[str, str]:
    """Every container of the engine, by name, with its state."""
    with engine.client() as client:
        return {one["Names"][0].lstrip("/"): one["State"] for one in client.containers(all=True)}


def workers(grid: Shell, *words: str) -> dict[str, dict[str, Any]]:
    return {one["worker_id"]: one for one in grid.observe("workers", "list", *words)["workers"]}


def test_the_guide_leads_from_nothing_to_a_job_in_a_container(engine: LocalDockerEngine, tmp_path: Path) -> None:
    image, walk = page_blocks(GUIDE, "bash")
    config, scaled = page_blocks(GUIDE, "yaml")
    assert image == "make worker-image\n", "it is what the engine of these tests was set up with"
    shell = Shell(tmp_path / "state", tmp_path)
    here = f"    endpoint_url: {engine.url}\n"
    (tmp_path / "containers.yaml").write_text(config + here)
    (tmp_path / "scaled.yaml").write_text(scaled + here)
    try:
        done = subprocess.run(
            ["bash", "-ec", walk], cwd=tmp_path, env=shell.env, capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (worker,) = workers(shell, "--all")
        assert f"\n{worker}\n" in done.stdout, "the job has printed the name of its host"
        assert f"{worker}-host" in done.stdout
        assert f"{worker}: gone" in done.stdout
        assert containers(engine) == {}
        shell("config", "check", "scaled.yaml", check=0)
    finally:
        shell.close()


def test_the_testing_guide_runs_a_suite_in_a_container(engine: LocalDockerEngine, tmp_path: Path) -> None:
    page = "docs/DISTRIBUTED_TESTING_GUIDE.md"
    (walk,) = [block for block in page_blocks(page, "bash") if "testing.yaml" in block]
    (config,) = page_blocks(page, "yaml")
    shell = Shell(tmp_path / "state", PROJECT)
    with_engine = config.replace("memory_limit: 512m", f"memory_limit: 512m, endpoint_url: '{engine.url}'")
    (tmp_path / "testing.yaml").write_text(with_engine)
    walk = walk.replace("testing.yaml", str(tmp_path / "testing.yaml"))
    try:
        done = subprocess.run(
            ["bash", "-ec", walk], cwd=PROJECT, env=shell.env, capture_output=True, text=True, timeout=150, check=False
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert "test_every_even_number_is_a_sum_of_two_primes" in said
        assert said.count("\nOK\n") == 2
        (worker,) = workers(shell, "--all")
        jobs = shell.json("jobs", "list", "--all")
        assert [job["node_id"] for job in jobs] == [worker, worker]
        assert "OK" in shell("jobs", "logs", jobs[0]["job_id"], check=0).stderr, "brought home"
        assert containers(engine) == {}
    finally:
        shell.close()


def test_workers_are_started_and_ended_from_python(grid: Shell) -> None:
    (program,) = page_blocks("docs/guide/workers.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", program], env=grid.env, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    offer, state = done.stdout.splitlines()
    assert offer.endswith(" 0.0")
    assert state in ("wanted", "asked", "booting", "joined")
    wait_until(lambda: workers(grid) == {}, 60)


def test_a_job_runs_in_the_container_and_nothing_is_left_of_it(grid: Shell, engine: LocalDockerEngine) -> None:
    worker = create(grid)
    name = worker["worker_id"]
    assert (worker["state"], worker["cpu_cores"], worker["memory_gb"]) == ("joined", 1.0, 0.25)
    assert containers(engine) == {name: "running"}
    script = "hostname; cat /proc/self/cgroup; cat /var/lib/distributed-grid/join-token"
    done = grid(
        "run-shared", "-r", "cpu", "-a", "1", "-n", name, "--strategy", "node_specific", "sh", "-c", script, check=0
    )
    assert done.stdout.splitlines()[0] == name
    with engine.client() as client:
        found = client.inspect_container(name)
    assert found["Id"] in done.stdout, "the job's control group is the container's"
    assert found["HostConfig"]["NanoCpus"] == 1_000_000_000
    token = done.stdout.splitlines()[-1]
    assert len(token) > 40
    assert token not in str(found), "whoever may inspect containers would see the token"
    grid("workers", "terminate", name, "--wait", "40", check=0)
    assert containers(engine) == {}
    assert workers(grid) == {}
    assert workers(grid, "--all")[name]["state"] == "gone"
    assert name not in {node["node_id"] for node in grid.json("status")["nodes"]}


def test_what_a_container_may_use_is_leased_from_this_machine(grid: Shell, engine: LocalDockerEngine) -> None:
    name = create(grid)["worker_id"]
    leases = {one["allocation_id"]: one for one in grid.json("shared-status")["allocations"]}
    assert (leases[f"{name}-host"]["amount"], leases[f"{name}-host"]["state"]) == (1.0, "active")
    refused = grid("resource-sharing", "release", f"{name}-host", check=1)
    assert f"to end it type: grid workers terminate {name}" in refused.stderr
    machine = leases[f"{name}-host"]["node_id"]
    here = ("-r", "cpu", "-n", machine, "--strategy", "node_specific")
    taken = grid("run-shared", *here, "-w", "0", "-a", str(os.cpu_count()), "true", check=1)
    assert "cores free" in taken.stderr or "core free" in taken.stderr, "the worker's core is not lent a second time"
    rest = grid.detach(*here, "-a", str((os.cpu_count() or 1) - 1), "sleep", "100")
    wait_until(lambda: grid.job(rest)["state"] == "running")
    refused = grid("workers", "create", check=1)
    assert f"{machine}, on which it would run, cannot lend what it needs" in refused.stderr
    grid("jobs", "cancel", rest, check=0)
    assert list(containers(engine)) == [name]
    grid("workers", "terminate", name, "--wait", "40", check=0)
    assert grid.json("shared-status")["allocations"] == []


def test_more_than_the_machine_has_is_clamped_and_said(grid: Shell, engine: LocalDockerEngine, tmp_path: Path) -> None:
    shell = Shell(tmp_path / "state", tmp_path)
    config = tmp_path / "large.yaml"
    config.write_text(CONFIG.format(url=engine.url).replace("cpu_limit: 1", "cpu_limit: 512"))
    try:
        shell("daemon", "start", "--config", str(config), check=0)
        worker = create(shell)
        assert "cores instead of 512" in worker["warning"]
        assert "cores instead of 512" in shell("workers", "list", check=0).stdout
        shell("workers", "terminate", worker["worker_id"], "--wait", "40", check=0)
    finally:
        shell.close()


def test_a_missing_image_is_one_clear_line(engine: LocalDockerEngine, tmp_path: Path) -> None:
    shell = Shell(tmp_path / "state", tmp_path)
    config = tmp_path / "missing.yaml"
    config.write_text(CONFIG.format(url=engine.url) + "    image: ipfs-accelerate-worker:latest\n")
    try:
        shell("config", "check", str(config), check=0)
        shell("daemon", "start", "--config", str(config), check=0)
        said = shell("workers", "create", "--wait", "30", check=1)
        assert "image ipfs-accelerate-worker:latest is not there: make worker-image" in said.stderr
        assert containers(engine) == {}
        assert shell.json("shared-status")["allocations"] == []
    finally:
        shell.close()


def test_the_providers_file_of_the_guide_is_used_as_it_is(engine: LocalDockerEngine, tmp_path: Path) -> None:
    """Image and all; only the engine is this test's own."""
    written = json.loads((PROJECT / "tests/fixtures/seeds/cloud_providers.json").read_text())
    written["docker_local"]["endpoint_url"] = engine.url
    (tmp_path / "providers.json").write_text(json.dumps(written))
    shell = Shell(tmp_path / "state", tmp_path)
    missing = 'image ipfs-accelerate-worker:latest is not there: make worker-image IMAGE_ARGS="--image ipfs'
    program = """
from distributed_grid.orchestration.cloud_provider_manager import CloudProviderManager
with CloudProviderManager("providers.json") as manager:
    print(manager.add_provider("docker_local")[0]["offer"])
    print(manager.create_worker("docker_local", {"cpu_cores": 1, "memory_mb": 256})["worker_id"])
"""
    try:
        checked = json.loads(shell("config", "check", "providers.json", "--providers", "--json", check=1).stdout)
        report = {one["provider"]: one for one in checked["providers"]}["docker_local"]
        assert not report["ok"]
        assert missing in report["problems"][0]
        run = [sys.executable, "-c", program]
        done = subprocess.run(run, env=shell.env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
        offer, worker = done.stdout.split()
        assert offer == "docker-cpu"
        gone = wait_until(lambda: (one := workers(shell, "--all")[worker])["state"] == "gone" and one)
        assert missing in gone["reason"]
        assert containers(engine) == {}
    finally:
        shell.close()


def test_containers_in_a_network_of_their_own_need_a_control_plane_that_they_reach(
    engine: LocalDockerEngine, tmp_path: Path
) -> None:
    shell = Shell(tmp_path / "state", tmp_path)
    config = tmp_path / "bridge.yaml"
    text = CONFIG.format(url=engine.url) + "    network: grid-test\n"
    with engine.network("grid-test", "10.213.77.0/24") as gateway:
        try:
            config.write_text(text)
            shell("daemon", "start", "--config", str(config), check=0)
            refused = shell("workers", "create", check=1)
            assert "could not reach this control plane, which listens on this machine only" in refused.stderr
            assert containers(engine) == {}
            shell("daemon", "stop", check=0)
            config.write_text(f"server: {{host: {gateway}}}\n{text}")
            shell("daemon", "start", "--config", str(config), check=0)
            name = create(shell)["worker_id"]
            where = ("-n", name, "--strategy", "node_specific")
            done = shell("run-shared", "-r", "cpu", "-a", "1", *where, "cat", "/etc/hosts", check=0)
            assert f"10.213.77.2\t{name}" in done.stdout
            shell("workers", "terminate", name, "--wait", "40", check=0)
        finally:
            shell.close()


def test_an_engine_that_is_killed_and_started_anew_is_used_again(grid: Shell, engine: LocalDockerEngine) -> None:
    first = create(grid)["worker_id"]
    engine.kill()
    try:
        second = grid.json("workers", "create", "--cpu", "0.5")["workers"][0]["worker_id"]
        waiting = wait_until(lambda: (one := workers(grid)[second])["problem"] and one)
        assert "no answer from the Docker engine" in waiting["problem"]
    finally:
        engine.start()
    wait_until(lambda: workers(grid)[second]["state"] == "joined", 60)
    done = grid(
        "run-shared", "-r", "cpu", "-a", "0.5", "-n", second, "--strategy", "node_specific", "hostname", check=0
    )
    assert done.stdout.strip() == second
    # The engine ended the first container when it began anew: it is removed, and its lease given back.
    wait_until(lambda: first not in workers(grid), 60)
    assert containers(engine) == {second: "running"}
    allocations = grid.json("shared-status")["allocations"]  # on a busy machine the grid may have borrowed for itself
    held = [name for one in allocations if not (name := one["allocation_id"]).startswith("auto-")]
    assert held == [f"{second}-host"]


def test_a_container_without_a_control_plane_ends_itself(engine: LocalDockerEngine, tmp_path: Path) -> None:
    shell = Shell(tmp_path / "state", tmp_path)
    config = tmp_path / "alone.yaml"
    config.write_text(CONFIG.format(url=engine.url))
    try:
        shell("daemon", "start", "--config", str(config), check=0)
        name = create(shell)["worker_id"]
        shell.kill_daemon()
        wait_until(lambda: containers(engine)[name] == "exited", 60)
        shell("daemon", "start", "--config", str(config), check=0)
        wait_until(lambda: not workers(shell), 60)
        assert containers(engine) == {}
    finally:
        shell.close()


SCALED = """
name: scaled
nodes:
- {{name: small, host: local, simulated: true, cpu_count: 1, memory_gb: 1}}
workers: {{consistency_seconds: 1, call_seconds: 5}}
scaling:
  provider: docker_local
  max_workers: 1
  evaluation_window_seconds: 2
  scale_up_cooldown_seconds: 1
  scale_down_cooldown_seconds: 1
providers:
  docker_local:
    endpoint_url: {url}
    cpu_limit: 1
    memory_limit: 256m
"""


def test_a_growing_queue_starts_a_container_which_is_gone_when_it_is_idle(
    engine: LocalDockerEngine, tmp_path: Path
) -> None:
    shell = Shell(tmp_path / "state", tmp_path)
    config = tmp_path / "scaled.yaml"
    config.write_text(SCALED.format(url=engine.url))
    gate = tmp_path / "gate"
    try:
        shell("daemon", "start", "--config", str(config), check=0)
        busy = shell.detach("-r", "cpu", "-a", "1", "sh", "-c", f"until [ -e {gate} ]; do sleep 0.1; done")
        wait_until(lambda: shell.job(busy)["state"] == "running")
        engine.kill()
        queued = shell.detach("-r", "cpu", "-a", "1", "sh", "-c", "hostname; cat /proc/self/cgroup")
        asked = wait_until(lambda: [one for one in workers(shell).values() if one["problem"]])
        assert "no answer from the Docker engine" in asked[0]["problem"]
        engine.start()
        done = shell("jobs", "wait", queued, "--timeout", "60", check=0)
        said = shell("jobs", "logs", queued, check=0).stdout
        name = shell.job(queued)["node_id"]
        assert said.splitlines()[0] == name, done.stdout
        with engine.client() as client:
            assert client.inspect_container(name)["Id"] in said
        assert [one["state"] for one in workers(shell).values()] == ["joined"]
        wait_until(lambda: not workers(shell), 60)
        assert containers(engine) == {}
        # What it printed was brought home before it went.
        assert shell("jobs", "logs", queued, check=0).stdout == said
        lines = shell("events", "--subject", name, "--json", check=0).stdout.splitlines()
        steps = [json.loads(line)["type"] for line in lines]
        assert [one for one in steps if one.startswith("worker-")] == [
            "worker-wanted", "worker-problem", "worker-booting", "worker-joined", "worker-draining",
            "worker-terminating", "worker-gone",
        ]  # fmt: skip
        assert shell.job(busy)["state"] == "running"
    finally:
        gate.touch()
        shell.close()


def test_the_boot_script_makes_a_bare_container_a_node(engine: LocalDockerEngine, tmp_path: Path) -> None:
    """A machine with Python and the usual commands, as root, and no grid on it."""
    shell = Shell(tmp_path / "state", tmp_path)
    stub = "printf '#!/bin/sh\\necho off > /off' > /usr/bin/shutdown; chmod 755 /usr/bin/shutdown"
    prepare = f"rm -r /usr/local/bin/grid /opt/grid; {stub}"
    try:
        config = tmp_path / "lends.yaml"
        config.write_text(LENDS)
        shell("daemon", "start", "--config", str(config), "--listen", "127.0.0.1:0", "--tls", check=0)
        token = shell("daemon", "join-token", "create", "--node", "bare", check=0).stdout.strip()
        with engine.client() as client:
            host = client.create_host_config(network_mode="host")
            command = ["sh", "-c", f"{prepare}; exec sh /user-data"]
            made = client.create_container("grid-worker:latest", name="bare", command=command, host_config=host)
            client.put_archive(made["Id"], "/", one_file("user-data", boot_script(order_for("bare", token)).encode()))
            client.start(made["Id"])
            try:
                nodes = wait_until(
                    lambda: (
                        [one for one in shell.observe("status")["nodes"] if one["node_id"] == "bare"]
                        or client.inspect_container("bare")["State"]["Status"] == "exited"
                    ),
                    60,
                )
                assert nodes is not True, client.logs("bare").decode()
                where = ("-n", "bare", "--strategy", "node_specific", "--workdir", "none")
                done = shell("run-shared", "-r", "cpu", "-a", "0.1", *where, "ls", "/var/lib/distributed-grid", check=0)
                assert done.stdout.split() == ["agent", "agent-program", "agent_download.py", "home"]
                assert b"starting the agent of bare" in client.logs("bare")
            finally:
                client.remove_container("bare", force=True)
    finally:
        shell.close()


def one_file(name: str, content: bytes) -> bytes:
    """A tar with one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(content), 0o700
        archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
