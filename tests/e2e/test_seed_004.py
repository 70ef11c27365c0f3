"""The guide of dynamic resource management: each of its code blocks runs against a real grid."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from distributed_grid.agent.hardware import HardwareDetector
from distributed_grid.config import load_cluster_config
from distributed_grid.orchestration import dynamic_resource_manager, resource_performance_predictor
from distributed_grid.orchestration.cloud_provider_manager import CloudProviderManager
from distributed_grid.orchestration.coordinator import Coordinator, CoordinatorServer
from tests.e2e.guides import Guide
from tests.support.project import PROJECT
from tests.support.scripted_provider import CloudFile, plug_in
from tests.support.shell import Shell, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

WORKER = "worker-1"
HAS = {"cpu": {"cores": 8, "available_cores": 8}, "memory": {"total_mb": 16384, "available_mb": 16384}}


@pytest.fixture(scope="module")
def coordinator(shared_grid: Shell) -> Iterator[Coordinator]:
    shared_grid("daemon", "start", check=0)
    with Coordinator(state_dir=shared_grid.state_dir) as found:
        yield found


def run(block: str, **names: Any) -> dict[str, Any]:
    """The names that a block of the guide leaves behind."""
    exec(compile(block, "the guide", "exec"), names)
    return names


def test_the_guide_from_top_to_bottom(coordinator: Coordinator) -> None:
    guide = Guide("dynamic_resource_management")
    workers_register_and_are_heard(
        coordinator, guide.next("Registration Integration"), guide.next("Heartbeat Integration")
    )
    task = the_fittest_task_is_reserved_for(coordinator, guide.next("Task Scheduling Integration"))
    what_was_reserved_is_released(coordinator, guide.next("Task Completion Integration"), task)
    the_loop_evaluates_scaling(coordinator, guide.next("Scaling Integration"))
    detect, report = guide.next("Resource Detection"), guide.next("Resource Reporting")
    a_worker_reports_what_it_measures(coordinator, detect, report, guide.next("Resource Metrics Collection"))
    constants_are_those_of(guide.next("DynamicResourceManager Configuration"), dynamic_resource_manager)
    constants_are_those_of(guide.next("ResourcePerformancePredictor Configuration"), resource_performance_predictor)
    providers = guide.next("CloudProviderManager Configuration").partition("\n")[2]
    shipped = json.loads((PROJECT / "tests/fixtures/seeds/cloud_providers.json").read_text())
    assert shipped == json.loads(providers)  # loaded by the tests of the config
    guide.assert_all_read()


def workers_register_and_are_heard(coordinator: Coordinator, register: str, heartbeat: str) -> None:
    program = f"{register}\n{heartbeat}"  # the second begins with an `elif` of the first
    said = {"hostname": "host", "capabilities": {"hardware": ["cpu"]}, "websocket": None, "tags": ["fast"]}
    names = run(
        program, self=coordinator, message_type="register", message={"worker_id": WORKER, "resources": HAS}, **said
    )
    assert names["success"] is True
    less = {"cpu": {"cores": 8, "available_cores": 6}, "memory": {"total_mb": 16384, "available_mb": 8192}}
    run(program, self=coordinator, message_type="heartbeat", message={"worker_id": WORKER, "resources": less}, **said)
    known = coordinator.dynamic_resource_manager.worker_resources[WORKER]
    assert (known["cpu"]["available_cores"], known["memory"]["available_mb"]) == (6, 8192)


def the_fittest_task_is_reserved_for(coordinator: Coordinator, block: str) -> dict[str, Any]:
    tasks = coordinator.task_manager
    too_large = tasks.add_task({"type": "test", "requirements": {"cpu_cores": 64}})
    large = tasks.add_task({"type": "test", "requirements": {"cpu_cores": 5}})
    small = tasks.add_task({"type": "test", "requirements": {"cpu_cores": 1, "memory_mb": 256}})
    assert {task["task_id"] for task in tasks.task_queue} == {large, small, too_large}
    manager = coordinator.dynamic_resource_manager
    names = run(  # it reserves what the last task of the queue needs, which here is the fittest one
        block,
        self=tasks,
        dynamic_resource_mgr=manager,
        worker_resources=manager.worker_resources,
        resource_predictor=None,
        worker_id=WORKER,
    )
    scores = {task["task_id"]: score for _, score, task in names["task_fitness_scores"]}
    assert scores[small] > scores[large] > scores[too_large] == 0
    task: dict[str, Any] = names["matching_task"]
    assert task["task_id"] == small
    reservation = manager.resource_reservations[task["resource_reservation_id"]]
    assert (reservation["worker_id"], reservation["task_id"]) == (WORKER, small)
    return task


def what_was_reserved_is_released(coordinator: Coordinator, block: str, task: dict[str, Any]) -> None:
    manager, tasks = coordinator.dynamic_resource_manager, coordinator.task_manager
    run(block, task=task, dynamic_resource_mgr=manager)
    assert task["resource_reservation_id"] not in manager.resource_reservations
    first = tasks.get_next_task(WORKER)
    assert first is not None
    assert first["resource_reservation_id"] in manager.resource_reservations
    assert tasks.complete_task(first)
    run(block, task=first, dynamic_resource_mgr=manager)
    assert first["resource_reservation_id"] not in manager.resource_reservations


def the_loop_evaluates_scaling(coordinator: Coordinator, block: str) -> None:
    """Without a provider there is nothing to start, and nobody is asked to."""
    names = run(block, self=CoordinatorServer(coordinator), provider_name="docker_local")
    decision = names["scaling_decision"]
    assert (decision.action, decision.worker_ids) == ("none", [])
    assert decision.reason


CONFIG = """
nodes: [{{name: home, host: local, cpu_count: 1, memory_gb: 4, trust_declared: true}}]
workers: {{consistency_seconds: 0.3}}
scaling: {{provider: scripted, evaluation_window_seconds: 3600, scale_up_cooldown_seconds: 0, budget_per_hour: 1}}
providers: {{scripted: {{state_file: {cloud}, agent: false}}}}
"""
"""With this window the next evaluation of the control plane's own is a minute away."""


def test_the_loop_starts_the_workers_that_are_missing(
    grid: Shell, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    block = next(
        one.text for one in Guide("dynamic_resource_management").blocks if one.heading == "Scaling Integration"
    )
    cloud = CloudFile(tmp_path / "cloud.json")
    request.addfinalizer(cloud.close)
    grid.env |= {"PYTHONPATH": os.pathsep.join([plug_in(tmp_path / "packages"), str(PROJECT)])}
    (grid.cwd / "cluster.yaml").write_text(CONFIG.format(cloud=cloud.path))
    grid("daemon", "start", "--config", "cluster.yaml", check=0)
    for cores in ("1", "1", "1", "1", "1"):
        grid.detach("-r", "cpu", "-a", cores, "sleep", "300")
    with (
        CloudProviderManager(state_dir=str(grid.state_dir)) as providers,
        Coordinator(state_dir=grid.state_dir, cloud_provider_manager=providers) as coordinator,
    ):
        server = CoordinatorServer(coordinator)
        wait_until(lambda: server.dynamic_resource_manager.evaluate_scaling().action == "scale_up")
        decision = run(block, self=server, provider_name="scripted")["scaling_decision"]
        assert (decision.action, decision.count, decision.provider) == ("scale_up", 2, "scripted")
        assert len(providers.list_workers("scripted")) == 2
        assert server.evaluate_and_scale().action == "none"  # those are on their way
        wait_until(lambda: {one["state"] for one in providers.list_workers("scripted")} == {"booting"})
        for worker in providers.list_workers("scripted"):
            providers.terminate_worker("scripted", worker["worker_id"], force=True)
        wait_until(lambda: not providers.list_workers("scripted"), 40)


def a_worker_reports_what_it_measures(coordinator: Coordinator, detect: str, report: str, collect: str) -> None:
    runner = run(
        collect, Dict=dict, Any=Any, datetime=datetime, psutil=psutil, PSUTIL_AVAILABLE=True, GPUTIL_AVAILABLE=False
    )["_get_hardware_metrics"]
    worker = SimpleNamespace(
        worker_id="measured", task_runner=SimpleNamespace(_get_hardware_metrics=lambda: runner(None))
    )
    run(detect, self=worker, HardwareDetector=HardwareDetector)
    registered = coordinator.process_message(
        {"type": "register", "worker_id": "measured", "hostname": "here", "capabilities": worker.capabilities}
    )
    assert registered["type"] == "registered"
    heartbeat = run(report, self=worker, datetime=datetime)["heartbeat_request"]
    assert coordinator.process_message(heartbeat)["type"] == "heartbeat_ack"
    known = coordinator.dynamic_resource_manager.worker_resources["measured"]
    assert known["cpu"]["cores"] == psutil.cpu_count()
    ours = HardwareDetector().heartbeat("measured")
    assert ours.keys() == heartbeat.keys()
    assert coordinator.process_message(ours)["type"] == "heartbeat_ack"


def constants_are_those_of(block: str, module: object) -> None:
    told = {
        target.id: ast.literal_eval(line.value)
        for line in ast.parse(block).body
        if isinstance(line, ast.Assign)
        for target in line.targets
        if isinstance(target, ast.Name)
    }
    assert told
    assert {name: getattr(module, name) for name in told} == told


def test_the_constants_are_the_defaults_of_the_config(tmp_path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: defaults\n")
    scaling = load_cluster_config(file).scaling
    assert scaling.worker_reassessment_interval_seconds == dynamic_resource_manager.DEFAULT_WORKER_REASSESSMENT_INTERVAL
    assert scaling.target_utilization == dynamic_resource_manager.DEFAULT_TARGET_UTILIZATION
