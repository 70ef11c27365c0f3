"""Asking why, asking before, and asking who lent whom: with the real daemon, at the command line and over REST."""

from __future__ import annotations

import json
import sqlite3

import pytest

from distributed_grid.client.client import Client
from distributed_grid.state_dir import StateDir
from tests.e2e.test_rest import rest
from tests.support.project import copy_configs
from tests.support.shell import Shell, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture
def cluster(grid: Shell) -> Shell:
    """The shipped three local nodes."""
    copy_configs(grid.cwd / "config")
    return grid


def running(grid: Shell, name: str) -> None:
    wait_until(lambda: grid.job(name)["state"] == "running")


def audit_trail(grid: Shell) -> int:
    """How many events the database has."""
    with sqlite3.connect(f"file:{grid.host_dir / 'grid.db'}?mode=ro", uri=True) as db:
        return int(db.execute("SELECT count(*) FROM events").fetchone()[0])


def test_a_job_that_runs_tells_why_it_is_there(cluster: Shell) -> None:
    cluster.detach("-j", "mine", "-a", "2", "--expects", "120", "sleep", "300")
    running(cluster, "mine")
    lines = cluster("explain", "mine", check=0).stdout.splitlines()
    assert lines[0] == "mine runs on gpu2"
    assert "gpu2 is the best of 3 nodes that fit, by load_balanced" in lines[3]
    assert any(line.strip().startswith("next best") and "gpu1" in line for line in lines)
    found = cluster.json("explain", "mine")
    decision = found["placements"][0]["decision"]
    assert decision["confidence"] > 0.99
    assert [one["node_id"] for one in decision["alternatives"]] == ["gpu1", "gpu-master"]
    assert any(line.startswith("gpu2 has most room: 14 of 14 cores, ") for line in decision["reasoning"])
    scores = decision["scores"]
    assert [one["node_id"] for one in scores] == ["gpu2", "gpu1", "gpu-master"]
    assert [one["priority"] for one in scores] == [0.1, 0.067, 0.033]
    assert any(
        line.strip().startswith("scores  ") and f"room {scores[0]['room']:g} + priority 0.1" in line for line in lines
    )
    assert [event["type"] for event in found["events"]] == ["requested", "granted", "started"]
    uid = found["job"]["uid"]
    assert cluster.json("explain", uid[:10])["id"] == "mine"
    assert cluster.json("explain", f"{uid}.1")["id"] == "mine"


def test_a_job_that_waits_tells_for_what_and_until_when(cluster: Shell) -> None:
    cluster.detach("-j", "held", "-r", "gpu", "-a", "2", "--expects", "600", "sleep", "300")
    cluster.detach("-j", "first", "-r", "gpu", "-a", "2", "--expects", "60", "true")
    cluster.detach("-j", "mine", "-r", "gpu", "-a", "2", "-w", "500", "true")
    waiting = cluster.json("explain", "mine")["waiting"]
    assert (waiting["position"], waiting["of"]) == (2, 2)
    assert [one["job_id"] for one in waiting["ahead"]] == ["first"]
    assert {one["node_id"]: one["why"] for one in waiting["reasons"]} == {
        "gpu-master": "0 GPUs at most, 2 GPUs asked",
        "gpu1": "1 GPU at most, 2 GPUs asked",
        "gpu2": "0 GPUs free, 2 GPUs asked",
    }
    assert waiting["estimated_start"] > cluster.json("explain", "first")["waiting"]["estimated_start"]
    text = cluster("explain", "mine", check=0).stdout
    assert text.startswith("mine waits\n")
    assert "in queue      2 of 2" in text
    assert "gpu2        0 GPUs free, 2 GPUs asked" in text
    assert waiting["gives_up_at"] is not None
    assert cluster.json("jobs", "show", "mine")["wait_seconds"] == 500


def test_a_detached_job_waits_without_a_limit_unless_one_is_given(cluster: Shell) -> None:
    cluster.detach("-j", "held", "-r", "gpu", "-a", "2", "sleep", "300")
    cluster.detach("-j", "patient", "-r", "gpu", "-a", "2", "true")
    cluster.detach("-j", "limited", "-r", "gpu", "-a", "2", "-w", "60", "true")
    assert ", without a limit\n" in cluster("explain", "patient", check=0).stdout
    assert "waits:        until it starts or is cancelled\n" in cluster("jobs", "show", "patient", check=0).stdout
    assert cluster.job("patient")["wait_seconds"] is None
    assert ", until " in cluster("explain", "limited", check=0).stdout
    assert "waits:        at most 60 s for resources\n" in cluster("jobs", "show", "limited", check=0).stdout
    followed = cluster.start("run-shared", "-j", "followed", "-r", "gpu", "-a", "2", "true")
    assert followed.stderr is not None
    assert followed.stderr.readline().startswith(b"grid: followed waits: ")
    assert cluster.job("followed")["wait_seconds"] == 300


def test_a_displaced_job_tells_by_whom_and_both_attempts(cluster: Shell) -> None:
    script = "trap 'exit 1' TERM; while :; do sleep 0.1; done"
    cluster.detach("-j", "victim", "-r", "gpu", "-a", "2", "-p", "low", "--shell", script)
    running(cluster, "victim")
    cluster("run-shared", "-j", "boss", "-r", "gpu", "-a", "2", "-p", "urgent", "true", check=0)
    running(cluster, "victim")
    text = cluster("explain", "victim", check=0).stdout
    assert "attempt 1     gpu2" in text
    assert "preempted: made room for urgent request" in text
    assert "(boss of " in text
    first, second = cluster.json("explain", "victim")["placements"]
    assert (first["outcome"], first["made_room_for"]["job_id"]) == ("preempted", "boss")
    assert second["outcome"] is None
    (place,) = cluster.json("explain", "boss")["placements"]
    assert place["displaced"] == [first["allocation_id"]]
    assert place["decision"]["reasoning"][0] == "nothing was free: 1 lease makes room on gpu2"


def test_a_refused_request_tells_why_and_nothing_else_is_known(cluster: Shell) -> None:
    cluster.json("status")
    refused = cluster("run-shared", "-j", "huge", "-a", "500", "true", check=1).stderr
    text = cluster("explain", "huge", check=0).stdout
    assert text.startswith("huge was refused\n")
    assert refused.removeprefix("grid: ").strip() in text
    (event,) = [
        json.loads(line) for line in cluster("events", "--type", "refused", "--json", check=0).stdout.splitlines()
    ]
    assert cluster.json("explain", event["subject"])["refusal"]["reason"] in refused
    unknown = cluster("explain", "nothing-like-that", check=1)
    assert unknown.stdout == ""
    assert len(unknown.stderr.splitlines()) == 1
    assert "nothing is called 'nothing-like-that'" in unknown.stderr


def test_an_ended_job_is_explained_after_a_restart_too(cluster: Shell) -> None:
    cluster("run-shared", "-j", "done", "true", check=0)
    cluster("run-shared", "-j", "failed", "false", check=1)
    before = cluster.json("explain", "done")
    cluster("daemon", "stop", check=0)
    after = cluster.json("explain", "done")
    explained, again = (found["placements"][0]["decision"] for found in (before, after))
    assert again["reasoning"] == explained["reasoning"]
    assert (again["node_id"], again["confidence"]) == ("gpu2", explained["confidence"])
    assert [event["type"] for event in after["events"]] == [event["type"] for event in before["events"]]
    assert after["end"]["reason"] == "exited"
    assert cluster("explain", "failed", check=0).stdout.startswith("failed is over: exit 1\n")


def test_dry_runs_are_the_verdict_and_leave_no_trace(cluster: Shell) -> None:
    cluster.json("status")
    before = audit_trail(cluster)
    words = ("run-shared", "--json", "--dry-run", "-a", "2", "--strategy", "spread", "true")
    asked = json.loads(cluster(*words, check=0).stdout)
    assert asked["verdict"] == "run"
    cluster("run-shared", "--dry-run", "-a", "500", "true", check=1)
    cluster("run-shared", "--dry-run", "-r", "unicorns", "true", check=2)
    with Client(StateDir(cluster.state_dir), may_start=False) as client:
        dry = client.call("request_lease", request_id="r1", resource_type="cpu", amount=2, dry_run=True)
        assert audit_trail(cluster) == before
        real = client.call("request_lease", request_id="r1", resource_type="cpu", amount=2)
        assert dry["decision"] | {"estimated_start": None} == real["decision"] | {"estimated_start": None}
        assert asked["decision"].keys() == real["decision"].keys()
        client.call("release_lease", allocation_id="r1")
    assert audit_trail(cluster) > before


def test_the_lending_ledger_counts_what_is_over_and_what_is_held(cluster: Shell) -> None:
    assert cluster("ledger", check=0).stdout.startswith("nothing was lent since ")
    cluster("run-shared", "-a", "2", "sleep", "0.5", check=0)
    cluster.detach("-j", "held", "-r", "memory", "-a", "3", "--also", "cpu=1", "sleep", "300")
    running(cluster, "held")
    found = cluster.json("ledger", "--since", "1h")
    (row,) = found["rows"]
    assert (row["node_id"], row["target_node"], row["leases"]) == ("gpu2", None, 2)
    assert (row["held_leases"], row["held_cores"], row["held_gb"]) == (1, 1.0, 3.0)
    assert 2 * 0.5 / 3600 < row["core_hours"] < 2 * 60 / 3600
    assert found["lenders"][0]["core_hours"] == found["borrowers"][0]["core_hours"] == found["total"]["core_hours"]
    text = cluster("ledger", "--by", "node", check=0).stdout.splitlines()
    assert text[0].split() == ["LENDER", "LEASES", "CORE", "HOURS", "GB", "HOURS", "GPU", "HOURS", "HELD", "NOW"]
    assert text[1].endswith("1 lease: 1 core, 3 GB")
    assert "--since needs a time" in cluster("ledger", "--since", "soon", check=2).stderr
    assert len(cluster.json("ledger", "--by", "day")["rows"]) == 1


def test_rest_explains_and_keeps_the_ledger_too(cluster: Shell) -> None:
    cluster.detach("-j", "mine", "sleep", "300")
    running(cluster, "mine")
    with rest(cluster) as owner:
        dry = owner.post("/v1/leases", json={"resource_type": "cpu", "amount": 1, "dry_run": True}).json()
        assert dry["decision"]["node_id"] == "gpu2"
        lease = owner.post("/v1/leases", json={"resource_type": "cpu", "amount": 1}).json()["allocation"]
        assert owner.get("/v1/jobs/mine/explain").json()["placements"][0]["decision"]["strategy"] == "load_balanced"
        explained = owner.get(f"/v1/leases/{lease['allocation_id']}/explain").json()
        assert (explained["kind"], explained["state"]) == ("lease", "active")
        assert owner.get("/v1/jobs/nothing/explain").status_code == 404
        assert owner.get("/v1/leases/mine/explain").status_code == 404
        ledger = owner.get("/v1/ledger", params={"since_seconds": 3600, "by": "user"}).json()
        assert ledger["rows"][0]["held_leases"] == 2
        assert owner.get("/v1/ledger", params={"by": "colour"}).status_code == 400
        owner.delete(f"/v1/leases/{lease['allocation_id']}")
