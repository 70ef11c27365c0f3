"""Workers without an agent against a real control plane: tasks, reservations, the WebSocket, and what may go wrong."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from distributed_grid.errors import BadInput, Conflict, NotFound, Refused
from distributed_grid.orchestration.coordinator import Coordinator, CoordinatorServer, TaskManager
from distributed_grid.orchestration.dynamic_resource_manager import DynamicResourceManager
from tests.e2e.test_rest import rest
from tests.support.project import PROJECT
from tests.support.shell import Shell, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

HAS = {
    "cpu": {"cores": 8, "physical_cores": 4, "available_cores": 8.0},
    "memory": {"total_mb": 16384, "available_mb": 16384},
    "gpu": {"devices": 0},
}


@pytest.fixture(scope="module")
def coordinator(shared_grid: Shell) -> Iterator[Coordinator]:
    shared_grid("daemon", "start", check=0)
    with Coordinator(state_dir=shared_grid.state_dir) as found:
        yield found


@pytest.fixture(scope="module")
def server(coordinator: Coordinator) -> Iterator[CoordinatorServer]:
    with CoordinatorServer(coordinator) as found:
        yield found


@pytest.fixture
def worker(coordinator: Coordinator, request: pytest.FixtureRequest) -> Iterator[str]:
    """A worker that is registered, and gone when the test ends."""
    name = f"w-{abs(hash(request.node.name)) % 10**8}"
    assert coordinator.worker_manager.register_worker(name, "host", {}, None, ["cuda"], HAS)
    yield name
    coordinator.worker_manager.remove_worker(name)


def manager(coordinator: Coordinator) -> DynamicResourceManager:
    return coordinator.dynamic_resource_manager


def test_a_task_goes_through_a_worker_and_its_result_is_kept(coordinator: Coordinator, worker: str, shared_grid: Shell):
    tasks = coordinator.task_manager
    task_id = tasks.add_task({"type": "test", "model": "bert", "requirements": {"cpu_cores": 2, "memory_mb": 512}})
    assert task_id in [one["task_id"] for one in tasks.task_queue]
    task = tasks.get_next_task(worker)
    assert task is not None
    assert (task["task_id"], task["type"], task["model"]) == (task_id, "test", "bert")
    assert tasks.get_next_task(worker) == task  # it is asked again
    held = manager(coordinator).resource_reservations[task["resource_reservation_id"]]
    assert held["requirements"] == {"cpu_cores": 2, "memory_mb": 512}
    assert manager(coordinator).worker_tasks[worker] == {task_id}
    assert shared_grid.job(task_id)["node_id"] == worker
    receipt = tasks.complete_task(task, result={"accuracy": 0.93})
    assert receipt
    assert tasks.get_task_result(task_id) == {"accuracy": 0.93}
    shown = shared_grid.job(task_id)
    assert (shown["outcome"], shown["exit_code"], shown["result"]) == ("exited", 0, {"accuracy": 0.93})
    assert 'result:       {"accuracy": 0.93}' in shared_grid("jobs", "show", task_id, check=0).stdout
    assert manager(coordinator).release_resources(task["resource_reservation_id"])  # the guide does so; it is harmless
    again = tasks.complete_task(task, result={"accuracy": 0.93})
    assert again.accepted
    assert again.repeated
    with TaskManager(state_dir=shared_grid.state_dir) as others:
        assert others.get_task_result(task_id) == {"accuracy": 0.93}


def test_a_failed_task_is_run_again_as_often_as_it_allows(coordinator: Coordinator, worker: str, shared_grid: Shell):
    tasks = coordinator.task_manager
    task_id = tasks.add_task({"type": "flaky", "max_retries": 1})
    for _ in range(2):
        task = tasks.get_next_task(worker)
        assert task is not None
        assert tasks.fail_task(task, error="no such model")
    shown = shared_grid.job(task_id)
    assert (shown["exit_code"], shown["detail"], len(shown["attempts"])) == (1, "no such model", 2)


def test_reports_that_do_not_count_say_so(coordinator: Coordinator, worker: str):
    tasks = coordinator.task_manager
    tasks.add_task({"type": "test"})
    task = tasks.get_next_task(worker)
    assert task is not None
    stale = tasks.complete_task({**task, "fence": task["fence"] - 1})
    assert not stale
    assert "stale" in str(stale.reason)
    other = tasks.complete_task(task["task_id"], "somebody-else", fence=task["fence"])
    assert "another worker" in str(other.reason)
    assert "there is no task" in str(tasks.complete_task("nothing", worker, fence=1).reason)
    with pytest.raises(BadInput, match="needs the fence"):
        tasks.complete_task(task["task_id"], worker)
    with pytest.raises(BadInput, match="65,536 are allowed"):
        tasks.complete_task(task, result="x" * 100_000)
    assert tasks.complete_task(task)


def test_a_second_report_that_contradicts_the_first_is_not_accepted(coordinator: Coordinator, worker: str):
    tasks = coordinator.task_manager
    task_id = tasks.add_task({"type": "test", "retries": 1})
    task = tasks.get_next_task(worker)
    assert task is not None
    assert tasks.complete_task(task, result=1)
    for second in (tasks.fail_task(task, error="late"), tasks.complete_task(task, result=2)):
        assert (second.accepted, second.repeated) == (False, False)
        assert second.reason == f"this attempt of {task_id} was reported before, as completed: that report counts"
    assert tasks.complete_task(task, result=1).repeated
    assert tasks.get_task_result(task_id) == 1
    task_id = tasks.add_task({"type": "test", "retries": 1})
    task = tasks.get_next_task(worker)
    assert task is not None
    assert tasks.fail_task(task, error="broken")
    refused = tasks.complete_task(task)
    assert refused.reason == f"this attempt of {task_id} was reported before, as failed: that report counts"
    assert tasks.fail_task(task, error="broken").repeated
    again = tasks.get_next_task(worker)
    assert again is not None
    assert tasks.complete_task(again)


def test_the_newer_registration_wins(coordinator: Coordinator, worker: str):
    tasks, workers = coordinator.task_manager, coordinator.worker_manager
    workers.register_worker(worker, resources=HAS, incarnation="old")
    tasks.add_task({"type": "test", "retries": 1})
    old = tasks.get_next_task(worker, incarnation="old")
    assert old is not None
    workers.register_worker(worker, resources=HAS, incarnation="new")
    with pytest.raises(Refused, match="registered by another process"):
        tasks.get_next_task(worker, incarnation="old")
    late = tasks.complete_task(old)
    assert not late
    assert "given up" in str(late.reason)
    new = tasks.get_next_task(worker, incarnation="new")
    assert new is not None
    assert (new["task_id"], new["attempt"]) == (old["task_id"], 2)
    assert tasks.complete_task(new)


def test_a_task_with_a_command_runs_on_a_node_with_an_agent_too(coordinator: Coordinator, shared_grid: Shell):
    task_id = coordinator.task_manager.add_task({"command": ["echo", "hello"], "type": "shell"})
    ended = shared_grid("jobs", "wait", task_id, "--timeout", "30", check=0)
    assert shared_grid("jobs", "logs", task_id, check=0).stdout == "hello\n", ended.stdout


def test_reservations_hold_what_heartbeats_report(coordinator: Coordinator, worker: str):
    drm = manager(coordinator)
    needs = {"cpu": {"cores": 6}, "memory": {"total_mb": 1024}}
    assert drm.check_resource_availability(worker, needs) == {"available": True, "reasons": []}
    before = drm.calculate_task_worker_fitness(worker, {"cpu_cores": 1})
    reservation = drm.reserve_resources(worker, "task-1", needs)
    assert drm.task_reservation["task-1"] == reservation
    drm.update_worker_resources(worker, HAS)
    assert drm.worker_resources[worker]["cpu"] == {"cores": 8, "physical_cores": 4, "available_cores": 2}
    assert 0 < drm.calculate_task_worker_fitness(worker, {"cpu_cores": 1}) < before
    refused = drm.check_resource_availability(worker, needs)
    assert refused == {"available": False, "reasons": ["2 cores free, 6 cores asked"]}
    with pytest.raises(Refused, match="2 cores free, 6 cores asked"):
        drm.reserve_resources(worker, "task-2", needs)
    with pytest.raises(Conflict, match="release it first"):
        drm.reserve_resources(worker, "task-1", {"cpu_cores": 1})
    assert drm.release_resources(reservation)
    assert drm.release_resources(reservation)
    assert not drm.release_resources("nothing-of-the-kind")
    assert "task-1" not in drm.task_reservation
    with pytest.raises(TypeError):
        drm.worker_resources["mine"] = {}  # type: ignore[index]


def test_an_update_keeps_the_totals_that_it_does_not_name(coordinator: Coordinator):
    drm = manager(coordinator)
    has = {
        "cpu": {"cores": 8, "available_cores": 6},
        "memory": {"total_mb": 16384, "available_mb": 10000},
        "gpu": {"devices": 2, "available_devices": 1, "total_memory_mb": 32768},
    }
    assert drm.register_worker("partial", has)
    assert drm.update_worker_resources("partial", {"cpu": {"cores": 8, "available_cores": 4}})
    now = drm.worker_resources["partial"]
    assert (now["cpu"]["cores"], now["cpu"]["available_cores"]) == (8, 4)
    assert now["memory"] == {"total_mb": 16384, "available_mb": 10000}
    assert (now["gpu"]["devices"], now["gpu"]["available_devices"], now["gpu"]["total_memory_mb"]) == (2, 1, 32768)
    heartbeat = {"type": "heartbeat", "worker_id": "partial", "resources": {"memory": {"available_mb": 5000}}}
    assert coordinator.process_message(heartbeat)["type"] == "heartbeat_ack"
    assert drm.update_worker_resources("partial", {"gpu": {"available_devices": 2}})
    now = drm.worker_resources["partial"]
    assert (now["cpu"]["cores"], now["cpu"]["available_cores"]) == (8, 4)
    assert now["memory"] == {"total_mb": 16384, "available_mb": 5000}
    assert (now["gpu"]["available_devices"], now["gpu"]["total_memory_mb"]) == (2, 32768)
    assert drm.register_worker("partial", {"cpu": {"cores": 4}})  # a registration names all that the worker has
    now = drm.worker_resources["partial"]
    assert (now["cpu"]["cores"], now["memory"]["total_mb"], now["gpu"]["devices"]) == (4, 0, 0)
    coordinator.worker_manager.remove_worker("partial")


def test_nobody_is_fit_who_is_unknown_or_too_small(coordinator: Coordinator, worker: str):
    drm = manager(coordinator)
    assert drm.calculate_task_worker_fitness("nobody", {"cpu_cores": 1}) == 0
    assert drm.calculate_task_worker_fitness(worker, {"cpu_cores": 9}) == 0
    assert drm.calculate_task_worker_fitness(worker, {"gpu_memory_mb": 1}) == 0
    assert drm.check_resource_availability("nobody", {})["reasons"] == ["no worker is called nobody"]


@pytest.mark.parametrize(
    ("resources", "line"),
    [
        ({"cpu": {"cores": -1}}, "cpu.cores must be more than 0"),
        ({"cpu": {"cores": float("nan")}}, "cpu.cores must be a finite number"),
        ({"cpu": {"cores": 1e300}}, "cpu.cores is larger than any machine"),
        ({"cpu": {"cores": 4, "available_cores": 5}}, "available_cores must be at most 4"),
        ({"cpu": {"cores": "four"}}, "cpu.cores must be a number"),
        ({"cpu": {"cores": True}}, "cpu.cores must be a number"),
        ({"memory": {"available_mb": 16385}}, "memory.available_mb must be at most 16384"),
        ({"cpu": {"cores": 4}, "tpu": {}}, "resources have no 'tpu'"),
        ({"cpu": {"cores": 4}, "gpu": {"devices": 10**9}}, "gpu.devices must be at most 1024"),
    ],
)
def test_a_lie_about_resources_is_one_line_and_changes_nothing(coordinator: Coordinator, worker: str, resources, line):
    drm = manager(coordinator)
    before = drm.worker_resources[worker]
    with pytest.raises(BadInput, match=line):
        drm.update_worker_resources(worker, resources)
    reply = coordinator.process_message({"type": "heartbeat", "worker_id": worker, "resources": resources})
    assert reply["type"] == "error"
    assert line in reply["message"]
    assert "\n" not in reply["message"]
    assert drm.worker_resources[worker] == before


def test_two_hundred_workers_that_ask_at_once_get_a_task_each(coordinator: Coordinator):
    tasks, names = coordinator.task_manager, [f"many-{number}" for number in range(200)]
    for name in names:
        coordinator.worker_manager.register_worker(name, resources=HAS)
    added = {tasks.add_task({"type": "many"}) for _ in names}
    with ThreadPoolExecutor(20) as pool:
        taken = list(pool.map(tasks.get_next_task, names))
        assert {task["task_id"] for task in taken if task is not None} == added
        assert all(pool.map(tasks.complete_task, taken))
        list(pool.map(coordinator.worker_manager.remove_worker, names))


def test_assigned_and_reported_tasks_survive_kill_9(coordinator: Coordinator, worker: str, shared_grid: Shell):
    tasks = coordinator.task_manager
    first, second = tasks.add_task({"type": "first"}), tasks.add_task({"type": "second"})
    done = tasks.get_next_task(worker)
    assert done is not None
    assert done["task_id"] == first
    assert tasks.complete_task(done, result=1)
    taken = tasks.get_next_task(worker)
    assert taken is not None
    reservation = manager(coordinator).reserve_resources(worker, "held", {"cpu_cores": 1})
    shared_grid.kill_daemon()
    assert tasks.get_task_result(first) == 1  # acknowledged, so it is there
    assert tasks.get_next_task(worker) == taken  # the same attempt, with its fence
    assert manager(coordinator).task_reservation["held"] == reservation
    assert tasks.complete_task(taken, result=2)
    assert shared_grid.job(second)["result"] == 2
    assert len(shared_grid.job(second)["attempts"]) == 1
    assert manager(coordinator).release_resources(reservation)


def test_a_worker_that_dies_loses_what_it_ran_and_nothing_else(
    coordinator: Coordinator, worker: str, shared_grid: Shell
):
    tasks = coordinator.task_manager
    hello = {"type": "register", "worker_id": "mortal", "resources": HAS, "hold_seconds": 1}
    assert coordinator.process_message(hello)["hold_seconds"] == 1
    again, once = tasks.add_task({"type": "again", "retries": 1}), tasks.add_task({"type": "once"})
    first, second = tasks.get_next_task("mortal"), tasks.get_next_task("mortal", running=(again,))
    assert first is not None
    assert second is not None
    assert (first["task_id"], second["task_id"]) == (again, once)
    lost = wait_until(lambda: (job := shared_grid.job(once))["state"] == "ended" and job)  # it is not heard any more
    assert (lost["outcome"], lost["attempts"][0]["node_id"]) == ("lost", "mortal")
    late = tasks.complete_task(second, result="too late")
    assert not late
    assert "not heard from" in str(late.reason)
    rerun = wait_until(lambda: tasks.get_next_task(worker))
    assert (rerun["task_id"], rerun["attempt"]) == (again, 2)
    assert tasks.complete_task(rerun)


def test_a_worker_hears_what_it_is_to_stop(coordinator: Coordinator, worker: str, shared_grid: Shell):
    tasks = coordinator.task_manager
    task_id = tasks.add_task({"type": "long"})
    task = tasks.get_next_task(worker)
    assert task is not None
    shared_grid("jobs", "cancel", task_id, check=0)
    told = coordinator.process_message({"type": "heartbeat", "worker_id": worker})["stop"]
    assert [(one["task_id"], one["fence"]) for one in told] == [(task_id, task["fence"])]
    assert tasks.fail_task(task, error="stopped").state == "ended"
    assert shared_grid.job(task_id)["outcome"] == "cancelled"


def test_a_node_with_an_agent_is_a_worker_to_reserve_on_too(coordinator: Coordinator):
    drm = manager(coordinator)
    name = next(name for name, has in drm.worker_resources.items() if has["cpu"]["available_cores"] >= 1)
    reservation = drm.reserve_resources(name, "on-an-agent", {"cpu_cores": 0.5})
    assert drm.worker_tasks[name] == {"on-an-agent"}
    assert drm.release_resources(reservation)
    with pytest.raises(Refused, match="a node with an agent"):
        coordinator.worker_manager.register_worker(name, resources=HAS)


def test_status_shows_pull_workers_and_their_tasks(coordinator: Coordinator, worker: str, shared_grid: Shell):
    task_id = coordinator.task_manager.add_task({"type": "shown"})
    task = coordinator.task_manager.get_next_task(worker)
    assert task is not None
    status = shared_grid.json("status")
    assert [one["host"] for one in status["nodes"] if one["node_id"] == worker] == ["pull"]
    assert [one["command"] for one in status["jobs"] if one["job_id"] == task_id] == ['task {"type":"shown"}']
    assert worker in shared_grid("distribute", "status", check=0).stdout
    assert worker not in {one["node_id"] for one in status["offers"]}  # nobody else can have what it offers
    row = next(one for one in shared_grid.json("cluster", "status") if one["node_id"] == worker)
    assert (row["address"], row["jobs"]) == ("pull", 1)
    assert coordinator.task_manager.complete_task(task)


def test_loops_run_under_the_names_of_the_guide(coordinator: Coordinator, worker: str):
    drm = DynamicResourceManager(state_dir=None, session=coordinator.session)
    drm.start()
    drm.start()
    try:
        assert {"resource_tracker", "worker_reassessment"} <= {thread.name for thread in threading.enumerate()}
        assert wait_until(lambda: drm.utilization)["cpu"] >= 0
    finally:
        drm.stop()
        drm.stop()
    assert "resource_tracker" not in {thread.name for thread in threading.enumerate()}
    assert drm.reassess_workers() >= 1
    asked = coordinator.process_message({"type": "heartbeat", "worker_id": worker})
    assert asked["report_resources"] is True
    told = coordinator.process_message({"type": "heartbeat", "worker_id": worker, "resources": HAS})
    assert told["report_resources"] is False


def test_workers_report_anew_as_often_as_the_config_says(grid: Shell):
    config = grid.cwd / "cluster.yaml"
    config.write_text("scaling: {worker_reassessment_interval_seconds: 1}\n")
    grid("daemon", "start", "--config", str(config), check=0)
    with Coordinator(state_dir=grid.state_dir) as coordinator:
        assert coordinator.worker_manager.register_worker("w1", resources=HAS)
        wait_until(lambda: coordinator.process_message({"type": "heartbeat", "worker_id": "w1"})["report_resources"])


def test_the_programs_of_the_guide_run(shared_grid: Shell, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GRID_STATE_DIR", str(shared_grid.state_dir))
    page = (PROJECT / "docs/guide/coordinator.md").read_text()
    coordinating, working, reserving = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for program in (coordinating, working):
        exec(compile(program, "the guide", "exec"), names)
    try:
        names["work"](names["server"].url, names["server"].certificate, token(shared_grid), "of-the-guide", 1)
        assert names["tasks"].get_task_result(names["task_id"]) == {"module": "parser", "passed": 12}
        names["coordinator"].worker_manager.remove_worker("of-the-guide")
    finally:
        names["server"].stop()
        names["coordinator"].close()
    exec(compile(reserving, "the guide", "exec"), names)
    assert not names["manager"].resource_reservations
    coordinator.worker_manager.remove_worker("bench-1")
    names["manager"].stop()


# ------------------------------------------------------------------ over the WebSocket


def token(grid: Shell) -> str:
    return (grid.host_dir / "token").read_text().strip()


def dial(server: CoordinatorServer, bearer: str) -> ClientConnection:
    trusted, headers = ssl.create_default_context(cafile=server.certificate), {"Authorization": f"Bearer {bearer}"}
    return connect(server.url, ssl=trusted, additional_headers=headers, max_size=None)


def ask(connection: ClientConnection, **message: Any) -> dict[str, Any]:
    connection.send(json.dumps(message))
    answer: dict[str, Any] = json.loads(connection.recv(timeout=30))
    return answer


def test_a_worker_lives_over_the_websocket(server: CoordinatorServer, coordinator: Coordinator, shared_grid: Shell):
    with dial(server, token(shared_grid)) as worker:
        hello = {"worker_id": "ws-1", "hostname": "far", "capabilities": {}, "tags": [], "resources": HAS}
        registered = ask(worker, type="register", **hello)
        assert registered["type"] == "registered"
        added = ask(worker, type="add_task", task={"type": "test", "retries": 2})
        task = ask(worker, type="get_task", worker_id="ws-1", wait_seconds=20)["task"]
        assert task["task_id"] == added["task_id"]
        assert ask(worker, type="heartbeat", worker_id="ws-1", resources=HAS)["tasks"] == [task["task_id"]]
    with dial(server, token(shared_grid)) as worker:  # the connection was lost; it is the same process
        assert ask(worker, type="heartbeat", worker_id="ws-1")["error"] == "Refused"
        ask(worker, type="register", **hello, incarnation=registered["incarnation"])
        assert ask(worker, type="next_task", worker_id="ws-1", request_id=7) == {
            "type": "task",
            "task": task,
            "request_id": 7,
        }
        done = {"worker_id": "ws-1", "task_id": task["task_id"], "fence": task["fence"], "result": [1, 2]}
        assert ask(worker, type="task_result", **done)["accepted"] is True
        assert ask(worker, type="task_status", task_id=task["task_id"])["result"] == [1, 2]
        assert ask(worker, type="fail", **done)["accepted"] is False  # it was reported as completed
        assert ask(worker, type="status")["workers"]["ws-1"] == "alive"
        assert ask(worker, type="unregister", worker_id="ws-1")["removed"] is True


def test_the_older_of_two_connections_of_one_worker_does_not_count(server: CoordinatorServer, shared_grid: Shell):
    bearer = token(shared_grid)
    with dial(server, bearer) as old, dial(server, bearer) as new:
        for connection in (old, new):
            assert ask(connection, type="register", worker_id="ws-2", resources=HAS)["type"] == "registered"
        assert "another process" in ask(old, type="get_task", worker_id="ws-2")["message"]
        assert ask(new, type="get_task", worker_id="ws-2")["type"] == "task"
        ask(new, type="unregister", worker_id="ws-2")


def test_a_waiting_worker_gets_a_task_as_soon_as_there_is_one(
    server: CoordinatorServer, coordinator: Coordinator, shared_grid: Shell
):
    with dial(server, token(shared_grid)) as worker:
        ask(worker, type="register", worker_id="ws-3", resources=HAS)
        worker.send(json.dumps({"type": "get_task", "worker_id": "ws-3", "wait_seconds": 30}))
        task_id = coordinator.task_manager.add_task({"type": "late"})
        task = json.loads(worker.recv(timeout=25))["task"]  # before the time is over that it waits for
        assert task["task_id"] == task_id
        coordinator.task_manager.complete_task(task)
        ask(worker, type="unregister", worker_id="ws-3")


WAITING_WORKER = """
import json, ssl, sys
from websockets.sync.client import connect

url, certificate, bearer, name, wait_seconds, resources = sys.argv[1:]
trusted = ssl.create_default_context(cafile=certificate)
with connect(url, ssl=trusted, additional_headers={"Authorization": f"Bearer {bearer}"}) as worker:
    worker.send(json.dumps({"type": "register", "worker_id": name, "resources": json.loads(resources)}))
    worker.recv()
    worker.send(json.dumps({"type": "get_task", "worker_id": name, "wait_seconds": float(wait_seconds)}))
    print("waits", flush=True)
    print(worker.recv(), flush=True)
"""
WAITING_CALLER = """
import sys
from distributed_grid.orchestration.coordinator import TaskManager

print("waits", flush=True)
print(TaskManager(state_dir=sys.argv[1]).get_next_task(sys.argv[2], wait_seconds=60), flush=True)
"""


@pytest.mark.parametrize("over", ["websocket", "socket"])
def test_a_worker_that_is_killed_while_it_waits_gets_no_task(
    server: CoordinatorServer, coordinator: Coordinator, shared_grid: Shell, over: str
):
    tasks, dead, alive = coordinator.task_manager, f"dead-{over}", f"alive-{over}"
    coordinator.worker_manager.register_worker(alive, resources=HAS)
    if over == "websocket":
        bearer = token(shared_grid)
        words = [WAITING_WORKER, server.url, server.certificate, bearer, dead, "60", json.dumps(HAS)]
    else:
        coordinator.worker_manager.register_worker(dead, resources=HAS)
        words = [WAITING_CALLER, str(shared_grid.state_dir), dead]
    with subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        time.sleep(1)  # its request is on its way: nothing shows that it has arrived
        process.kill()
    task_id = tasks.add_task({"type": "test"})
    began = time.monotonic()
    task = tasks.get_next_task(alive, wait_seconds=20)
    assert task is not None
    assert time.monotonic() - began < 3, "the dead one was waited for"
    assert (task["task_id"], task["worker_id"]) == (task_id, alive)
    assert tasks.complete_task(task)
    started = [one for one in shared_grid.job(task_id)["attempts"] if one["started_at"]]
    assert len(started) == 1
    for name in (dead, alive):
        coordinator.worker_manager.remove_worker(name)


@pytest.mark.parametrize("bearer", ["", "grid_00000000_wrong", "nonsense"])
def test_without_a_token_nobody_gets_in(server: CoordinatorServer, bearer: str):
    with pytest.raises(InvalidStatus) as refused, dial(server, bearer):
        pass
    assert refused.value.response.status_code == 401


@pytest.mark.parametrize("body", ["", "{", "[]", "null", '"x"', '{"type": 7}', '{"type": "register"}', "[" * 100_000])
def test_nonsense_is_answered_with_one_line(server: CoordinatorServer, shared_grid: Shell, body: str):
    with dial(server, token(shared_grid)) as worker:
        worker.send(body)
        answer = json.loads(worker.recv(timeout=30))
        assert answer["type"] == "error"
        assert "\n" not in answer["message"]
        assert ask(worker, type="status")["type"] == "status"


def test_a_message_that_is_too_long_ends_its_connection(server: CoordinatorServer, shared_grid: Shell):
    with dial(server, token(shared_grid)) as worker, pytest.raises(ConnectionClosed):
        ask(worker, type="status", filler="x" * 300_000)


def _send_often(connection: ClientConnection, question: str) -> None:
    """Ask for megabytes of answers, and read none."""
    for _ in range(100_000):
        connection.send(question)


def test_a_client_that_does_not_read_is_cut_off(coordinator: Coordinator, shared_grid: Shell, worker: str):
    task_id = coordinator.task_manager.add_task({"type": "long"})
    task = coordinator.task_manager.get_next_task(worker)
    assert task is not None
    assert coordinator.task_manager.complete_task(task, result="x" * 60_000)
    question = json.dumps({"type": "task_status", "task_id": task_id})
    with CoordinatorServer(coordinator, send_seconds=0.2) as server, dial(server, token(shared_grid)) as silent:
        silent.socket.settimeout(30)
        with pytest.raises(ConnectionClosed):
            _send_often(silent, question)
        with dial(server, token(shared_grid)) as other:
            assert ask(other, type="status")["type"] == "status"


def test_a_task_without_needs_is_sized_from_its_earlier_runs(coordinator: Coordinator, shared_grid: Shell, worker: str):
    tasks = coordinator.task_manager
    for _ in range(8):
        tasks.add_task({"type": "learned", "requirements": {"cpu_cores": 1}})
        task = tasks.get_next_task(worker)
        assert task is not None
        assert tasks.complete_task(task, peak_memory_mb=700, cpu_seconds=1)

    def sized() -> Any:
        shown = shared_grid.json("predict", "show", "--type", "learned")
        return shown["samples"] >= 8 and shown

    wait_until(sized)
    task_id = tasks.add_task({"type": "learned", "retries": 1})
    task = tasks.get_next_task(worker)
    assert task is not None
    given = task["requirements"]["memory_mb"]
    assert 700 <= given < 2000
    assert tasks.fail_task(task, error="out of memory", over_limit=True, peak_memory_mb=given)
    again = tasks.get_next_task(worker)
    assert again is not None
    assert again["task_id"] == task_id
    assert again["requirements"]["memory_mb"] > given
    assert tasks.complete_task(again)
    once = tasks.add_task({"type": "learned"})
    task = tasks.get_next_task(worker)
    assert task is not None
    assert tasks.fail_task(task, error="out of memory", over_limit=True, peak_memory_mb=given)
    job = shared_grid.job(once)
    assert (job["outcome"], len(job["attempts"])) == ("over_limit", 1)
    assert "only --restartable or --retries allow" in job["detail"]


def test_reports_of_a_pull_worker_do_not_size_jobs(server: CoordinatorServer, shared_grid: Shell):
    (shared_grid.cwd / "own.py").write_text("print('done')\n")
    command = ["python3", "own.py"]
    eve = shared_grid.json("daemon", "token", "create", "--user", "eve")["token"]
    with dial(server, eve) as worker:
        ask(worker, type="register", worker_id="ws-eve", hostname="far", capabilities={}, tags=["eve"], resources=HAS)
        for number in range(8):
            added = {"command": command, "task_id": f"eve-{number}", "labels": ["eve"]}
            assert ask(worker, type="add_task", task=added)["type"] == "task_added"
            task = ask(worker, type="get_task", worker_id="ws-eve", wait_seconds=20)["task"]
            done = {"worker_id": "ws-eve", "task_id": task["task_id"], "fence": task["fence"]}
            assert ask(worker, type="complete", **done, peak_memory_mb=1, cpu_seconds=1)["accepted"] is True
        ask(worker, type="unregister", worker_id="ws-eve")

    def is_known() -> bool:
        types = shared_grid.json("predict", "show")["task_types"]
        return any(row["samples"] == 8 and row["key"].endswith("python own.py") for row in types)

    wait_until(is_known)
    assert shared_grid.job("eve-0")["user"] == "eve"
    own = json.loads(shared_grid("--json", "run-shared", "--dry-run", *command, check=0).stdout)
    assert own["job"]["sizing"] is None
    with rest(shared_grid, eve) as client:
        body = {"argv": command, "cwd": str(shared_grid.cwd), "dry_run": True}
        assert client.post("/v1/jobs", json=body).json()["job"]["sizing"] is None


def test_reports_of_another_users_worker_do_not_size_tasks(
    server: CoordinatorServer, coordinator: Coordinator, shared_grid: Shell
):
    eve = shared_grid.json("daemon", "token", "create", "--user", "eve")["token"]
    tasks = coordinator.task_manager
    with dial(server, eve) as worker:
        ask(worker, type="register", worker_id="ws-spy", hostname="far", capabilities={}, tags=["spy"], resources=HAS)
        for _ in range(8):
            tasks.add_task({"type": "spied", "labels": ["spy"]})
            task = ask(worker, type="get_task", worker_id="ws-spy", wait_seconds=20)["task"]
            done = {"worker_id": "ws-spy", "task_id": task["task_id"], "fence": task["fence"]}
            assert ask(worker, type="complete", **done, peak_memory_mb=16000, cpu_seconds=1)["accepted"] is True
        tasks.add_task({"type": "spied", "labels": ["spy"]})
        task = ask(worker, type="get_task", worker_id="ws-spy", wait_seconds=20)["task"]
        assert "memory_mb" not in task["requirements"]
        ask(worker, type="unregister", worker_id="ws-spy")
    assert all(row["key"] != "type:spied" for row in shared_grid.json("predict", "show")["task_types"])


def test_other_machines_only_reach_it_with_tls(coordinator: Coordinator):
    with pytest.raises(BadInput, match="reached from other machines"):
        CoordinatorServer(coordinator, "0.0.0.0")


def test_on_this_machine_it_has_the_certificate_of_the_control_plane(server: CoordinatorServer, shared_grid: Shell):
    assert server.url.startswith("wss://127.0.0.1:")
    assert server.certificate == str(shared_grid.host_dir / "certificate.pem")
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(server.url, additional_headers={"Authorization": f"Bearer {token(shared_grid)}"})


def test_a_worker_must_be_registered_first(coordinator: Coordinator):
    with pytest.raises(NotFound, match="register it first"):
        coordinator.task_manager.get_next_task("stranger")
    assert coordinator.process_message({"type": "heartbeat", "worker_id": "stranger"})["error"] == "NotFound"
