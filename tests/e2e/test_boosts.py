"""Boosts and resource sharing as a person uses them, on the shipped config: the guides, crashes, broken files."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from distributed_grid.client.client import Client
from distributed_grid.config import load_cluster_config
from distributed_grid.control.boost_file import ResourceBoostPersistence
from distributed_grid.core import SSHManager
from distributed_grid.errors import BadInput
from distributed_grid.orchestration.resource_boost_manager import (
    ResourceBoost,
    ResourceBoostManager,
    ResourceBoostRequest,
)
from distributed_grid.orchestration.resource_sharing import ResourceType
from distributed_grid.orchestration.resource_sharing_manager import AllocationPriority
from distributed_grid.state_dir import StateDir
from tests.support.project import copy_configs
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

BOOST_GUIDE = """
poetry run grid boost request gpu-master cpu 2.0 --priority high
poetry run grid boost request gpu-master gpu 1 --duration 1800
poetry run grid boost request gpu-master memory 4.0 --source gpu2
poetry run grid boost request gpu-master cpu 4.0
poetry run grid boost request gpu-master cpu 4.0 --priority high --duration 1800
poetry run grid boost request gpu-master gpu 1 --priority critical --duration 3600
poetry run grid boost request gpu-master memory 8.0 --source gpu2 --duration 7200
poetry run grid boost status
poetry run grid boost status --node gpu-master
poetry run grid boost release <boost-id>
poetry run grid cluster status
poetry run grid resource-sharing status
"""


@pytest.fixture(scope="module")
def cluster(shared_grid: Shell) -> Shell:
    """The shipped three local nodes; every test gives back what it borrows."""
    copy_configs(shared_grid.cwd / "config")
    return shared_grid


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        cluster: Shell = request.getfixturevalue("cluster")
        with Client(StateDir(cluster.state_dir)) as client:
            for boost in client.call("list_boosts")["boosts"]:
                client.call("release_boost", boost_id=boost["boost_id"])


@pytest.fixture
def own(grid: Shell) -> Shell:
    """A grid of one's own, whose files may be broken."""
    copy_configs(grid.cwd / "config")
    return grid


def boost(shell: Shell, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = shell.json("boost", "request", "gpu-master", *words)
    return found


def ids(shell: Shell) -> list[str]:
    return [row["boost_id"] for row in shell.json("boost", "status")["boosts"]]


def kept(shell: Shell) -> list[str]:
    path = shell.state_dir / "resource_boosts.json"
    return [row["boost_id"] for row in json.loads(path.read_text())["boosts"]] if path.exists() else []


def typed(shell: Shell, script: str) -> list[subprocess.CompletedProcess[str]]:
    """A command of a guide, with the ids of an earlier command filled in."""
    lines = script.replace("\\\n", "").replace("poetry run ", "").strip().splitlines()
    done: list[subprocess.CompletedProcess[str]] = []
    for line in lines:
        shown = "\n".join(one.stdout for one in done)
        found = re.findall(r"(?:boost|allocation) ([0-9a-f]{32})", shown)
        words = [found[0] if word.startswith("<") else word for word in shlex.split(line.replace("-id>", "_id>"))]
        assert words[0] == "grid"
        done.append(shell(*words[1:], check=0))
    return done


def test_the_commands_of_the_boost_guide(cluster: Shell) -> None:
    *requested, status, of_node, released, nodes, sharing = typed(cluster, BOOST_GUIDE)
    assert all("for gpu-master, until " in one.stdout for one in requested)
    assert "4 GB from gpu2 for gpu-master" in requested[2].stdout
    assert "enforced by grid alone" in requested[0].stdout
    assert status.stdout.startswith("7 active boosts: 10 cores, 2 GPUs, 12 GB\n")
    headings = ["ID", "SOURCE", "TARGET", "TYPE", "AMOUNT", "STATE", "ALLOCATED", "EXPIRES", "ENFORCED BY"]
    assert re.split(r"  +", status.stdout.splitlines()[2]) == headings
    assert of_node.stdout == status.stdout
    assert released.stdout.endswith(": released\n")
    assert "gpu2" in nodes.stdout
    assert "sharing is on: mode dynamic_balancing, policy balanced" in sharing.stdout


def test_a_boost_in_json_has_the_promised_fields(cluster: Shell) -> None:
    one = boost(cluster, "cpu", "0.5", "--priority", "critical")
    assert (one["target_node"], one["resource_type"], one["amount"]) == ("gpu-master", "cpu", 0.5)
    assert (one["priority"], one["state"], one["is_active"]) == ("urgent", "active", True)
    assert (one["enforced_by"], one["placement_group"]) == ("grid", None)
    assert {"boost_id", "source_node", "allocated_at", "expires_at", "user"} <= set(one)
    status = cluster.json("boost", "status")
    assert (status["active_boosts"], status["totals"], status["warnings"]) == (1, {"cpu": 0.5}, [])
    assert status["boosts"] == [one]
    assert cluster.json("--config", "config/my-cluster-enhanced.yaml", "boost", "status") == status
    assert cluster.json("boost", "status", "--config", "config/my-cluster-enhanced.yaml") == status


def test_gpus_of_an_allocation_are_a_list_before_while_and_after_it_is_held(cluster: Shell) -> None:
    made = boost(cluster, "gpu", "1")
    held = find_allocation(cluster, made["boost_id"])
    assert [(gpu["index"], gpu["amount"]) for gpu in held["resources"]["gpus"]] == [(0, 1.0)]
    released = cluster.json("resource-sharing", "release", made["boost_id"])
    assert (released["state"], released["resources"]["gpus"]) == (
        "ended",
        [{"index": None, "amount": 1.0, "memory_gb": 0.0}],
    )
    plain = cluster.json("resource-sharing", "request", "--node", "gpu-master", "--type", "cpu", "--amount", "1")
    assert find_allocation(cluster, plain["allocation_id"])["resources"]["gpus"] == []
    assert cluster.json("resource-sharing", "release", plain["allocation_id"])["resources"]["gpus"] == []


def find_allocation(shell: Shell, name: str) -> dict[str, Any]:
    return next(one for one in shell.json("shared-status")["allocations"] if one["allocation_id"] == name)


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_numbers_that_are_none_are_named_in_one_line(cluster: Shell, number: str) -> None:
    made = boost(cluster, "cpu", "0.5")
    sharing = ("resource-sharing", "request", "--node", "gpu-master", "--type", "cpu", "--amount")
    for words, field in (
        (("boost", "request", "gpu-master", "cpu", number), "amount"),
        (("boost", "request", "gpu-master", "cpu", "1", "--duration", number), "duration_seconds"),
        (("boost", "extend", made["boost_id"], number), "seconds"),
        ((*sharing, number), "amount"),
        ((*sharing, "1", "--duration", number), "duration_seconds"),
    ):
        refused = cluster(*words)
        assert (refused.returncode, refused.stdout) == (2, ""), words
        assert refused.stderr == f"grid: invalid request: {field} must be a finite number, not {number}\n"
    assert cluster.json("boost", "status")["boosts"] == [made]


def test_two_boosts_never_get_the_same_gpu_and_the_refusal_names_each_node(cluster: Shell) -> None:
    sources = [boost(cluster, "gpu", "1")["source_node"] for _ in range(3)]
    assert sorted(sources) == ["gpu1", "gpu2", "gpu2"]
    refused = cluster("boost", "request", "gpu-master", "gpu", "1", check=1).stderr
    assert refused.startswith("grid: No nodes have sufficient available resources: ")
    assert len(refused.splitlines()) == 1
    for reason in ("gpu1: 0 GPUs free, 1 GPU asked", "gpu2: 0 GPUs free", "grid cluster status"):
        assert reason in refused
    waiting = cluster.start("boost", "request", "gpu-master", "gpu", "1", "--wait", "60")

    def warnings_shown() -> list[str]:
        return [note for note in cluster.json("resource-sharing", "status")["notes"] if note.startswith("Tasks not")]

    assert wait_until(warnings_shown)[0].startswith("Tasks not scheduling: 1 request waits; `grid explain ID` says why")
    waiting.kill()
    waiting.wait()
    wait_until(lambda: cluster.observe("status")["waiting"] == 0)
    waited = cluster("boost", "request", "gpu-master", "gpu", "1", "--wait", "0.3", check=124).stderr
    assert waited.startswith("grid: No nodes have sufficient available resources: waited 0.3 s: ")
    dry = cluster("boost", "request", "gpu-master", "gpu", "1", "--wait", "9", "--dry-run", check=0).stdout
    assert dry.startswith("would wait for 1 GPU: ")


def test_the_source_is_never_the_target_and_is_honoured_or_refused(cluster: Shell) -> None:
    assert boost(cluster, "cpu", "1", "--source", "gpu1")["source_node"] == "gpu1"
    much = cluster("boost", "request", "gpu-master", "cpu", "7", "--source", "gpu1", "--only", check=1).stderr
    assert "gpu1: 6 cores at most, 7 cores asked" in much
    assert "gpu2" not in much
    other = cluster("boost", "request", "gpu-master", "cpu", "7", "--source", "gpu1", check=0)
    assert other.stderr == "grid: gpu2 lends it instead of gpu1: 6 cores at most, 7 cores asked\n"
    assert "7 cores from gpu2 for gpu-master" in other.stdout
    assert "--only goes with --source NODE" in cluster("boost", "request", "gpu1", "cpu", "1", "--only", check=2).stderr
    self = cluster("boost", "request", "gpu1", "cpu", "1", "--source", "gpu1", check=1).stderr
    assert "gpu1 cannot be its own source" in self
    unknown = cluster("boost", "request", "gpu-master", "cpu", "1", "--source", "gpu7", check=1).stderr
    assert "the source gpu7 is no node of this cluster" in unknown


def test_a_target_that_is_not_there_is_said_so(cluster: Shell) -> None:
    for words in (("boost", "request", "gpu7", "cpu", "1"), ("boost", "status", "--node", "gpu7")):
        refused = cluster(*words, check=1).stderr
        assert refused == (
            "grid: Target node not found in cluster: no node is called gpu7; the nodes are: gpu-master, gpu1, gpu2\n"
        )


def test_any_unique_prefix_will_do_and_twice_is_harmless(cluster: Shell) -> None:
    first = boost(cluster, "cpu", "1", "--duration", "600")
    later = cluster.json("boost", "extend", first["boost_id"][:8], "60")
    assert later["expires_at"] > first["expires_at"]
    with Client(StateDir(cluster.state_dir)) as client:
        for name in ("feed-1", "feed-2"):
            client.call("request_boost", request_id=name, target="gpu-master", resource_type="cpu", amount=0.001)
    ambiguous = cluster("boost", "release", "feed", check=1).stderr
    assert "'feed' fits several: feed-1, feed-2" in ambiguous
    released = [cluster("boost", "release", first["boost_id"][:12], check=0).stdout for _ in range(2)]
    assert released[0].endswith(": released\n")
    assert re.search(r": already released at \d\d:\d\d:\d\d\n$", released[1])
    assert "no boost is called 'zz'" in cluster("boost", "release", "zz", check=1).stderr


def test_the_programming_interface_of_the_guide(cluster: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRID_STATE_DIR", str(cluster.state_dir))
    config = load_cluster_config(cluster.cwd / "config/my-cluster-enhanced.yaml")

    async def story() -> None:
        manager = ResourceBoostManager(config, SSHManager(config))
        await manager.initialize()
        request = ResourceBoostRequest(
            target_node="gpu-master",
            resource_type=ResourceType.GPU,
            amount=1.0,
            priority=AllocationPriority.CRITICAL,
            duration_seconds=1800,
            preferred_source="gpu2",
        )
        boost_id = await manager.request_boost(request)
        assert boost_id is not None
        (one,) = await manager.get_active_boosts(target_node="gpu-master")
        assert isinstance(one, ResourceBoost)
        assert (one.boost_id, one.source_node, one.amount, one.is_active) == (boost_id, "gpu2", 1.0, True)
        assert one.priority is AllocationPriority.CRITICAL
        assert one.expires_at is not None
        assert one.allocated_at is not None
        assert (one.expires_at - one.allocated_at).total_seconds() == 1800
        assert await manager.get_active_boosts("gpu1") == []
        status = await manager.get_boost_status()
        assert (status["active_boosts"], status["totals"]) == (1, {"gpu": 1.0})
        for _ in range(2):  # the same request counts once
            longer = await manager.extend_boost(boost_id, 60, request_id="more-time")
        assert longer.expires_at == one.expires_at + timedelta(seconds=60)
        assert await manager.request_boost(ResourceBoostRequest("gpu-master", ResourceType.CPU, 1000.0)) is None
        assert str(manager.last_refusal).startswith("No nodes have sufficient available resources: ")
        assert await manager.request_boost(ResourceBoostRequest("gpu7", ResourceType.CPU, 1.0)) is None
        assert str(manager.last_refusal).startswith("Target node not found in cluster: ")
        assert await manager.request_boost(ResourceBoostRequest("gpu-master", ResourceType.CPU, -1.0)) is None
        for seconds in (float("nan"), float("inf")):
            with pytest.raises(BadInput, match=f"seconds must be a finite number, not {seconds:g}"):
                await manager.extend_boost(boost_id, seconds)
        assert await manager.release_boost(boost_id)
        assert await manager.release_boost(boost_id)
        assert not await manager.release_boost("zz")
        assert await manager.get_active_boosts() == []
        await manager.stop()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_node_that_cools_down_gives_everything_back_and_lends_again_when_told(cluster: Shell) -> None:
    one = boost(cluster, "cpu", "1", "--source", "gpu2")
    cluster.detach("-j", "work", "-n", "gpu2", "sleep", "300")
    wait_until(lambda: cluster.job("work")["state"] == "running")
    done = cluster("resource-sharing", "cooldown", "--node", "gpu2", check=0)
    assert done.stdout == "gpu2: its owner has everything back, 2 leases given back\n"
    assert "gpu2: waiting for 1 lease to be given back" in done.stderr
    wait_until(lambda: cluster.job("work")["state"] == "running")
    work = cluster.job("work")
    assert [attempt["outcome"] for attempt in work["attempts"]] == ["reclaimed", None]
    assert work["node_id"] != "gpu2"
    assert cluster.json("boost", "release", one["boost_id"])["reason"] == "reclaimed"
    assert cluster.json("resource-sharing", "status")["cooling"] == ["gpu2"]
    for view in (("status",), ("cluster", "status")):
        assert re.search(r"gpu2 .*cooling down", cluster(*view, check=0).stdout)
    cluster("daemon", "stop", check=0)
    refused = cluster("boost", "request", "gpu-master", "cpu", "1", "--source", "gpu2", "--only", check=1).stderr
    assert "gpu2: cooling down" in refused, "it stays so over a restart"
    assert cluster("resource-sharing", "cooldown", "--node", "gpu2", "--off", check=0).stdout == "gpu2: lends again\n"
    assert boost(cluster, "cpu", "1", "--source", "gpu2")["source_node"] == "gpu2"
    cluster("jobs", "cancel", "work", check=0)
    assert "no node is called gpu7" in cluster("resource-sharing", "cooldown", "--node", "gpu7", check=1).stderr


def test_boosts_outlive_the_control_plane_and_end_without_anybody_asking(cluster: Shell) -> None:
    long, short = boost(cluster, "cpu", "1"), boost(cluster, "cpu", "1", "--duration", "4")
    wait_until(lambda: set(kept(cluster)) == {long["boost_id"], short["boost_id"]})
    cluster("daemon", "stop", check=0)
    assert long["boost_id"] in ids(cluster)
    cluster.kill_daemon()
    assert long["boost_id"] in ids(cluster)
    wait_until(lambda: kept(cluster) == [long["boost_id"]])
    assert cluster.json("boost", "release", short["boost_id"])["reason"] == "expired"


def test_a_boost_that_ended_while_no_daemon_ran_is_not_active_in_the_first_answer(own: Shell) -> None:
    long, short = boost(own, "cpu", "1"), boost(own, "cpu", "1", "--duration", "1")
    own.kill_daemon()
    ends = datetime.fromisoformat(short["expires_at"])
    wait_until(lambda: datetime.now(UTC) > ends)
    assert ids(own) == [long["boost_id"]]
    assert own.json("boost", "release", short["boost_id"])["reason"] == "expired"


def test_without_the_database_boosts_are_recovered_from_the_file(own: Shell) -> None:
    one = boost(own, "gpu", "1", "--source", "gpu2", "--priority", "high")
    wait_until(lambda: kept(own) == [one["boost_id"]])
    assert (own.state_dir / "resource_boosts.json").stat().st_mode & 0o777 == 0o600
    own("daemon", "stop", check=0)
    for file in own.host_dir.glob("grid.db*"):
        file.unlink()
    wait_until(lambda: own.observe("boost", "status")["active_boosts"] == 1)
    (again,) = own.json("boost", "status")["boosts"]
    times = ("allocated_at", "expires_at")
    assert {**one, **{name: again[name] for name in times}} == again
    for name in times:
        shift = datetime.fromisoformat(again[name]) - datetime.fromisoformat(one[name])
        assert abs(shift.total_seconds()) < 1
    events = [json.loads(line) for line in own("events", "--json", check=0).stdout.splitlines()]
    about = [event["type"] for event in events if event["subject"] == one["boost_id"]]
    assert about == ["recovered", "confirmed"]
    assert "gpu2: 1 GPU free" in own("boost", "request", "gpu-master", "gpu", "2", "--source", "gpu2", check=1).stderr
    own("boost", "release", one["boost_id"], check=0)
    wait_until(lambda: kept(own) == [])


def test_a_broken_file_is_told_of_and_costs_nothing(own: Shell) -> None:
    path = own.state_dir / "resource_boosts.json"
    one = boost(own, "cpu", "1")
    wait_until(lambda: kept(own) == [one["boost_id"]])
    own("daemon", "stop", check=0)
    path.write_text('{"version": 1, "boosts": [{"boost_id":')
    shown = own("boost", "status", check=0).stdout
    assert shown.startswith("1 active boost: 1 core\n")
    assert f"warning: Persistence file corrupted: it was set aside as {path}.corrupt-1" in shown
    assert kept(own) == [one["boost_id"]]
    assert ResourceBoostPersistence(state_dir=own.state_dir).load()[0].boost_id == one["boost_id"]
    path.unlink()
    path.mkdir()
    own("boost", "extend", one["boost_id"], "60", check=0)
    (first, *_) = wait_until(lambda: [w for w in own.observe("boost", "status")["warnings"] if "not persisting" in w])
    assert first.startswith(f"Boosts not persisting across CLI commands: {path} cannot be written (Is a directory)")
    assert ids(own) == [one["boost_id"]]


def test_boosts_by_rest(cluster: Shell) -> None:
    url = cluster.json("daemon", "start")["rest"]
    token = (cluster.host_dir / "token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False, verify=cluster.trust) as rest:
        asked = {"target": "gpu-master", "resource_type": "cpu", "amount": 0.5, "request_id": uuid.uuid4().hex}
        made = rest.post("/v1/boosts", json=asked).json()["boost"]
        assert rest.post("/v1/boosts", json=asked).json()["boost"] == made
        assert (made["is_active"], made["target_node"]) == (True, "gpu-master")
        assert rest.get("/v1/boosts", params={"node": "gpu-master"}).json()["boosts"] == [made]
        assert rest.get("/v1/boosts", params={"node": "gpu1"}).json()["active_boosts"] == 0
        name = made["boost_id"]
        assert rest.post(f"/v1/boosts/{name[:8]}/extend", json={"seconds": 9}).json()["boost"]["boost_id"] == name
        for path, field in (("", "amount"), (f"/{name}/extend", "seconds")):
            for word, shown in (("NaN", "nan"), ("Infinity", "inf"), ("1e999", "inf")):
                refused = rest.post(f"/v1/boosts{path}", content=f'{{"{field}": {word}}}')
                assert refused.status_code == 400
                problem = refused.json()["error"]
                line = f"invalid request: {field} must be a finite number, not {shown}"
                assert (problem["type"], problem["message"]) == ("BadInput", line)
        refused = rest.post("/v1/boosts", json=asked | {"amount": 99, "request_id": "much"})
        assert refused.json()["error"]["message"].startswith("No nodes have sufficient available resources: ")
        for _ in range(2):
            assert rest.delete(f"/v1/boosts/{name}").json()["boost"]["reason"] == "released"
        assert rest.get(f"/v1/boosts/{name}").json()["boost"]["state"] == "ended"
        assert rest.get("/v1/boosts/zz").status_code == 404


def test_sharing_that_is_switched_off_lends_no_boosts(own: Shell) -> None:
    config = own.cwd / "off.yaml"
    config.write_text(
        "resource_sharing:\n  enabled: false\nnodes:\n- {name: a, host: local}\n- {name: b, host: local}\n"
    )
    refused = own("boost", "request", "a", "cpu", "1", "-c", str(config), check=1).stderr
    assert refused.startswith("grid: Resource sharing not enabled: set resource_sharing.enabled to true")
    status = own("resource-sharing", "status", check=0).stdout
    assert status.startswith("Resource sharing not enabled: ")
    assert "Resources not being shared: set resource_sharing.enabled to true" in status
