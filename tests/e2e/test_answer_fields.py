"""Field names of every answer, compared with the recorded ones: a field that was shipped stays.

`answer_fields.json` has the fields of each answer as paths (`job.attempts[].node_id`). `python -m
tests.e2e.test_answer_fields FILE` records those of this version; an answer may have more than the recorded ones.
"""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.api.requests import REQUEST_TYPES
from distributed_grid.client.client import Client
from distributed_grid.state_dir import StateDir
from tests.support.project import PROJECT
from tests.support.scripted_provider import CloudFile, plug_in
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

RECORDED = Path(__file__).with_name("answer_fields.json")
CONFIG = """
name: golden
nodes:
- {{name: left, host: local, simulated: true, cpu_count: 4, memory_gb: 8, tags: [fast], labels: {{zone: a}}}}
- {{name: right, host: local, simulated: true, cpu_count: 4, memory_gb: 8}}
scaling: {{provider: scripted, max_workers: 2, budget_per_hour: 5}}
providers:
  scripted: {{state_file: {state}, agent: false, elsewhere: false, prices: true}}
"""
UNASKED = {
    "hello": "asked by every client",
    "stop_daemon": "would end the grid of the test",
    "manage_cluster": "streams steps",
    "attach_ray": "needs a Ray cluster",
    "detach_ray": "needs a Ray cluster",
    "drain_node": "streams steps",
    "train_predictor": "streams steps",
    "read_logs": "streams output",
    "fetch_files": "streams files",
    "list_events": "streams events",
    "run_in_boost": "answers as submit_job does",
    "run_in_lease": "answers as submit_job does",
    "request_boost": "recorded by its REST answer",
    "reassess_workers": "one number",
    "withdraw_consent": "needs a process with a consent",
}
"""Requests without a recorded answer here, with the reason."""
MAPS = {
    *("by_state", "config", "custom", "data", "degraded", "idle", "labels", "levels", "not_counted", "process"),
    *("thresholds", "utilization", "workers"),
}
"""Fields with keys of the user's own."""


def fields_of(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all fields of a JSON value."""
    if isinstance(value, dict) and (not path or path.rpartition(".")[2] not in MAPS):
        for name, part in value.items():
            yield from fields_of(part, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for part in value:
            yield from fields_of(part, f"{path}[]")
    if path:
        yield path


def ask_everything(grid: Shell) -> dict[str, list[str]]:
    """Fields of the answer to each request, by its name."""
    recorded: dict[str, set[str]] = {}

    def ask(op: str, **arguments: Any) -> Any:
        with Client(StateDir(grid.state_dir), may_start=False, query_only=True) as client:
            answer = client.call(op, **arguments)
        recorded.setdefault(op, set()).update(fields_of(answer))
        return answer

    def identifier() -> str:
        return secrets.token_hex(6)

    argv = ["sh", "-c", "echo out; echo done > result.txt"]
    job = ask("submit_job", request_id=identifier(), argv=argv, resource_type="cpu", amount=1, retries=1)["job"]
    name = job["uid"]
    ask("wait_for_job", job_id=name, timeout_seconds=60)
    ask("get_job", job_id=name)
    long = ask("submit_job", request_id=identifier(), argv=["sleep", "600"], resource_type="cpu", amount=4)["job"][
        "uid"
    ]
    other = ask("submit_job", request_id=identifier(), argv=["sleep", "600"], resource_type="cpu", amount=4)["job"][
        "uid"
    ]
    waiting = ask("submit_job", request_id=identifier(), argv=["true"], resource_type="cpu", amount=4)["job"]["uid"]
    wait_until(lambda: grid.query("get_job", job_id=other)["job"]["state"] == "running")
    ask("detach_job", job_id=long, reason="recorded")
    for subject in (name, long, waiting, "left"):
        ask("explain", id=subject)
    ask("get_status")
    for op in ("list_nodes", "list_offers", "list_recommendations", "list_leases"):
        ask(op)
    ask("get_node", node="left")
    ask("list_jobs", all=True)
    ask("list_live_jobs")
    ask("scan_offload", node="left")
    ask("advise_command", argv=["true"])
    for one in (waiting, other, long):
        ask("cancel_job", job_id=one)
    wait_until(lambda: not grid.query("list_live_jobs")["uids"])
    ask("record_fetch", job_id=name, patterns=["*.txt"], directory="/tmp/recorded", files=1, bytes=5)
    ask("wait_for_delivery", job_id=name, timeout_seconds=0)
    refused = identifier()
    ask("request_lease", request_id=identifier(), resource_type="cpu", amount=1, dry_run=True)
    lease = ask("request_lease", request_id=identifier(), resource_type="cpu", amount=1, duration_seconds=600)[
        "allocation"
    ]["allocation_id"]
    ask("explain", id=lease)
    ask("get_lease", allocation_id=lease)
    ask("extend_lease", request_id=identifier(), allocation_id=lease, seconds=60)
    ask("release_lease", allocation_id=lease)
    assert grid.query("request_lease", request_id=refused, resource_type="cpu", amount=64, wait_seconds=0) is None
    ask("explain", id=refused)
    boost = grid.query("request_boost", request_id=identifier(), target="left", resource_type="cpu", amount=1)["boost"]
    ask("list_boosts")
    ask("get_boost", boost_id=boost["boost_id"])
    ask("extend_boost", request_id=identifier(), boost_id=boost["boost_id"], seconds=60)
    ask("release_boost", boost_id=boost["boost_id"])
    ask("get_lending_report")
    ask("get_lending_report", by="user")
    for kind in ("snapshots", "levels", "summary", "rebalancing", "scheduling", "prometheus"):
        ask("get_metrics", kind=kind)
    ask("get_metrics", kind="trend", node="left", resource_type="cpu")
    ask("get_metrics", kind="history", node="left")
    ask("get_daemon_info")
    ask("get_config")
    ask("reload_config", config_path=str(grid.cwd / "golden.yaml"))
    ask("keep_running")
    ask("get_clocks")
    ask("confirm_clocks")
    resources = {"cpu": {"cores": 2}, "memory": {"total_mb": 2048}}
    ask("register_pull_worker", worker_id="pulled", incarnation="one", resources=resources, hostname="there")
    ask("report_pull_worker", worker_id="pulled", incarnation="one")
    ask("list_worker_resources")
    ask("check_worker_fit", worker_id="pulled", requirements={"cpu_cores": 1})
    held = ask(
        "reserve_on_worker", request_id=identifier(), worker_id="pulled", task_id="t0", requirements={"cpu_cores": 1}
    )
    ask("list_worker_resources")
    ask("release_lease", allocation_id=held["reservation"]["reservation_id"])
    ask("submit_task", request_id=identifier(), task_id="t1", payload={"a": 1}, requirements={"cpu_cores": 1})
    ask("list_tasks")
    taken = ask("take_task", worker_id="pulled", incarnation="one", wait_seconds=10)["task"]
    ask("report_task", worker_id="pulled", task_id="t1", fence=taken["fence"], succeeded=True, result={"b": 2})
    ask("withdraw_ask", worker_id="pulled", incarnation="one", ask_id=identifier())
    ask("explain", id="t1")
    ask("remove_pull_worker", worker_id="pulled", incarnation="one")
    wait_until(lambda: (grid.query("get_memory_stats") or {"nodes": []})["nodes"])
    block = ask("allocate_block", request_id=identifier(), size=4096)["block"]["block_id"]
    ask("find_block", block_id=block)
    ask("name_block", block_id=block, name="named")
    ask("renew_blocks", session="none")
    ask("list_blocks")
    ask("get_memory_stats")
    ask("free_block", block_id=block)
    ask("list_worker_offers")
    ask("create_workers", worker_ids=[identifier()], dry_run=True)
    worker = ask("create_workers", worker_ids=[f"w-{identifier()}"])["workers"][0]["worker_id"]
    ask("list_workers", all=True)
    ask("get_worker", worker_id=worker)
    for op in ("get_scaling", "plan_scaling", "run_scaling"):
        ask(op)
    ask("terminate_workers", worker_ids=[worker], force=True)
    for op in ("list_moves", "list_consents", "get_auto_offload"):
        ask(op)
    ask("set_auto_offload", action="enable")
    ask("get_auto_offload")
    ask("set_auto_offload", action="reset")
    mover = ask(
        "submit_job", request_id=identifier(), argv=["sleep", "600"], resource_type="cpu", amount=1, restartable=True
    )["job"]
    wait_until(lambda: grid.query("get_job", job_id=mover["uid"])["job"]["state"] == "running")
    move = ask("execute_offload", move_id=f"move-{identifier()}", subject=mover["uid"])["move"]["move_id"]
    ask("list_moves", all=True)
    ask("get_move", move_id=move)
    ask("explain", id=move)
    wait_until(lambda: grid.query("get_move", move_id=move)["move"]["end"], 60)
    ask("cancel_move", move_id=move)
    ask("cancel_job", job_id=mover["uid"])
    ask("predict_task", argv=argv)
    ask("record_execution", argv=argv, task_id="recorded", memory_bytes=1 << 20, run_ms=1000, cpu_ms=100)
    ask("predict_task", argv=argv)
    ask("list_task_types")
    ask("get_batch_scaling", task_type="train", base_batch_size=8, batch_size=16)
    digest = "0" * 64
    ask("create_token", token_id="0123456789ab", secret_hash=digest, user="bo")
    ask("identify_token", token_id="0123456789ab", secret_hash=digest)
    ask("list_tokens")
    ask("revoke_token", token_id="0123456789ab")
    ask("create_join_token", token_id="0123456789ac", secret_hash=digest, node="new")
    ask("list_join_tokens")
    ask("revoke_join_token", token_id="0123456789ac")
    return {op: sorted(paths) for op, paths in sorted(recorded.items())}


def golden_grid(folder: Path) -> Shell:
    """A grid of two simulated nodes with a provider of workers."""
    (folder / "here").mkdir(parents=True)
    grid = Shell(folder / "state", folder / "here")
    CloudFile(folder / "cloud.json")
    (grid.cwd / "golden.yaml").write_text(CONFIG.format(state=json.dumps(str(folder / "cloud.json"))))
    grid.env |= {"PYTHONPATH": f"{PROJECT}:{plug_in(folder / 'plug')}"}
    grid("daemon", "start", "--config", "golden.yaml")
    return grid


def test_every_answer_has_the_recorded_fields(tmp_path: Path) -> None:
    grid = golden_grid(tmp_path)
    try:
        answers = ask_everything(grid)
    finally:
        grid.close()
    recorded: dict[str, list[str]] = json.loads(RECORDED.read_text())
    assert recorded.keys() == {str(kind.__struct_config__.tag) for kind in REQUEST_TYPES} - UNASKED.keys()
    missing = {op: sorted({*paths} - {*answers.get(op, ())}) for op, paths in recorded.items()}
    assert not {op: paths for op, paths in missing.items() if paths}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        shell = golden_grid(Path(folder) / "grid")
        try:
            Path(sys.argv[1]).write_text(json.dumps(ask_everything(shell), indent=1) + "\n")
        finally:
            shell.close()
