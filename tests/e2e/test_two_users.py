"""Two users with tokens of one grid: neither sees the command, environment, output, files or texts of the other's work.

Every route of the REST application has a line in `READS` or `WRITES`; one without a line fails a test.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from distributed_grid.server.daemon import SERVICES
from distributed_grid.server.endpoints import endpoints_of
from distributed_grid.server.rest.routes import HAND_ROUTES
from tests.e2e.test_rest import rest, submit
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

MARKER = "xyzzy"  # in everything that ann's work says and does
CONFIG = """
nodes:
- {name: left, host: local, simulated: true, cpu_count: 4, memory_gb: 8}
- {name: right, host: local, simulated: true, cpu_count: 4, memory_gb: 8}
"""
FORBIDDEN, SHOWN = 403, 200

READS: dict[str, tuple[int, ...]] = {
    "/v1/health": (SHOWN,),
    "/v1/nodes": (SHOWN,),
    "/v1/nodes/{node}": (SHOWN,),
    "/v1/offers": (SHOWN,),
    "/v1/recommendations": (SHOWN,),
    "/v1/leases": (SHOWN,),
    "/v1/leases/{lease}": (SHOWN,),
    "/v1/leases/{lease}/explain": (FORBIDDEN,),
    "/v1/ledger": (SHOWN,),
    "/v1/boosts": (SHOWN,),
    "/v1/boosts/{boost}": (SHOWN,),
    "/v1/jobs": (SHOWN,),
    "/v1/jobs?limit=10000": (SHOWN,),
    "/v1/jobs/{running}": (SHOWN,),
    "/v1/jobs/{ended}": (SHOWN,),
    "/v1/jobs/{failed}": (SHOWN,),
    "/v1/jobs/{running}/explain": (FORBIDDEN,),
    "/v1/jobs/{failed}/explain": (FORBIDDEN,),
    "/v1/jobs/{running}/logs": (FORBIDDEN,),
    "/v1/jobs/{ended}/logs": (FORBIDDEN,),
    "/v1/jobs/{ended}/logs?stream=stderr": (FORBIDDEN,),
    "/v1/jobs/{running}/logs?follow=true": (FORBIDDEN,),
    "/v1/proposals?node=left": (SHOWN,),
    "/v1/proposals?node=right": (SHOWN,),
    "/v1/moves": (SHOWN,),
    "/v1/moves?all=true": (SHOWN,),
    "/v1/moves/{move}": (SHOWN,),
    "/v1/auto-offload": (SHOWN,),
    "/v1/events?limit=10000": (SHOWN,),
    "/v1/events?limit=10000&subject={failed}": (SHOWN,),
    "/v1/metrics/snapshots": (SHOWN,),
    "/v1/metrics/summary": (SHOWN,),
    "/v1/metrics/rebalancing": (SHOWN,),
    "/v1/metrics/scheduling": (SHOWN,),
    "/v1/metrics/trend/{node}/cpu": (SHOWN,),
    "/v1/metrics/history/{node}": (SHOWN,),
    "/metrics": (SHOWN,),
    "/openapi.json": (SHOWN,),
}
WRITES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "POST /v1/join": ((400, 403), {}),
    "POST /v1/agent-package": ((400, 403), {}),
    "POST /v1/leases": ((409,), {"request_id": "ann-lease", "resource_type": "cpu", "amount": 1}),
    "DELETE /v1/leases/{lease}": ((403,), {}),
    "POST /v1/leases/{lease}/extend": ((403,), {"seconds": 60}),
    "POST /v1/boosts": ((409,), {"request_id": "ann-boost", "target": "left", "resource_type": "cpu", "amount": 1}),
    "DELETE /v1/boosts/{boost}": ((403,), {}),
    "POST /v1/boosts/{boost}/extend": ((403,), {"seconds": 60}),
    "POST /v1/jobs": ((409,), {"request_id": "ann-runs", "argv": ["true"]}),
    "POST /v1/jobs/{running}/cancel": ((403,), {}),
    "POST /v1/moves": ((403,), {"subject": "{running}", "target": "left"}),
    "POST /v1/moves/{move}/cancel": ((403,), {}),
    "POST /v1/auto-offload": ((403,), {"action": "enable"}),
}
"""The answers to bob, with a body that names ann's work: by its id, or by the key of her request."""


class World(NamedTuple):
    """A grid in which ann has work of every kind; `names` are the ids of that work."""

    grid: Shell
    ann: httpx.Client
    bob: httpx.Client
    admin: httpx.Client
    names: dict[str, str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp("two")
    cwd = folder / f"cwd-{MARKER}"
    cwd.mkdir()
    (folder / "pair.yaml").write_text(CONFIG)
    grid = Shell(folder / "state", folder)
    grid("daemon", "start", "--config", "pair.yaml", check=0)
    tokens = [grid.json("daemon", "token", "create", "--user", user)["token"] for user in ("ann", "bob")]
    with rest(grid, tokens[0]) as ann, rest(grid, tokens[1]) as bob, rest(grid) as admin:
        yield World(grid, ann, bob, admin, _ann_works(ann, cwd))
    grid.close()


def _ann_works(ann: httpx.Client, cwd: Path) -> dict[str, str]:
    common: dict[str, Any] = {"cwd": str(cwd), "env": {f"VARIABLE_{MARKER}": MARKER}, "fetch": [f"{MARKER}.txt"]}
    writes = f"echo output-{MARKER}; echo output-{MARKER} >&2; echo {MARKER} > {MARKER}.txt"
    ended = submit(ann, "sh", "-c", writes, **common)
    failed = submit(ann, f"/nowhere/{MARKER}", **common)
    on_right: dict[str, Any] = {"require": ["right"], "restartable": True}
    running = submit(ann, "sh", "-c", f"echo {MARKER}; exec sleep 600", key="ann-runs", **common, **on_right)
    for job in (ended, failed):
        wait_until(lambda job=job: ann.get(f"/v1/jobs/{job['job_id']}").json()["job"]["state"] == "ended")
    wait_until(lambda: ann.get(f"/v1/jobs/{running['job_id']}").json()["job"]["state"] == "running")
    lease = ann.post("/v1/leases", json={"request_id": "ann-lease", "resource_type": "cpu", "amount": 0.5})
    boost = {"request_id": "ann-boost", "target": "left", "resource_type": "cpu", "amount": 0.5, "wait_seconds": 30}
    boosted = ann.post("/v1/boosts", json=boost)
    moved = submit(ann, "sh", "-c", f"exec sleep 600 # {MARKER}", **common, prefer=["left"], restartable=True)
    wait_until(lambda: ann.get(f"/v1/jobs/{moved['job_id']}").json()["job"]["state"] == "running")
    at = ann.get(f"/v1/jobs/{moved['job_id']}").json()["job"]["node_id"]
    target = "right" if at == "left" else "left"
    move = ann.post("/v1/moves", json={"subject": moved["job_id"], "target": target})
    for answer in (lease, boosted, move):
        assert answer.status_code == 200, answer.text
    return {
        "node": "left",
        "ended": ended["job_id"],
        "failed": failed["job_id"],
        "running": running["job_id"],
        "lease": lease.json()["allocation"]["allocation_id"],
        "boost": boosted.json()["boost"]["boost_id"],
        "move": move.json()["move"]["move_id"],
    }


def _route(path: str) -> str:
    """A path of the tables as the application declares it."""
    bare = path.partition("?")[0]
    for mine, theirs in (("trend/{node}/cpu", "trend/{name}/{resource_type}"), ("{node}", "{name}")):
        bare = bare.replace(mine, theirs)
    for name in ("lease", "boost", "running", "ended", "failed", "move"):
        bare = bare.replace(f"{{{name}}}", "{name}")
    return bare


def test_every_route_has_a_rule() -> None:
    mounted = [route for declared in endpoints_of(*SERVICES) for route in declared.routes]
    declared = {f"{route.method} {route.path}" for route in (*mounted, *HAND_ROUTES)}
    ruled = {f"GET {_route(path)}" for path in READS} | {_route(line) for line in WRITES}
    assert declared <= ruled, f"say in this file who may see the answers of {sorted(declared - ruled)}"


@pytest.mark.parametrize("path", READS)
def test_what_a_user_reads_says_nothing_of_anothers_work(world: World, path: str) -> None:
    answer = world.bob.get(path.format_map(world.names))
    assert answer.status_code in READS[path], answer.text
    assert MARKER not in answer.text
    assert MARKER not in str(answer.headers)
    if answer.status_code == FORBIDDEN:
        assert "belongs to ann, not to bob" in answer.json()["error"]["message"]


@pytest.mark.parametrize("line", WRITES)
def test_what_a_user_changes_is_not_anothers_and_says_nothing_of_it(world: World, line: str) -> None:
    statuses, body = WRITES[line]
    method, path = line.split(" ")
    text = json.dumps(body).replace("{running}", world.names["running"])
    answer = world.bob.request(method, path.format_map(world.names), content=text)
    assert answer.status_code in statuses, answer.text
    assert MARKER not in answer.text


def test_owner_and_admin_see_all_of_it(world: World) -> None:
    names = world.names
    for reader in (world.ann, world.admin):
        job = reader.get(f"/v1/jobs/{names['ended']}").json()
        for part in (job["job"]["command"], job["job"]["cwd"], str(job["job"]["environment_names"])):
            assert MARKER in part
        assert MARKER in str(job["delivery"])
        assert MARKER in reader.get(f"/v1/jobs/{names['failed']}").json()["job"]["detail"]
        for path in (
            "jobs/{ended}/logs",
            "jobs/{failed}/explain",
            "moves/{move}",
            "events?limit=10000&subject={failed}",
        ):
            assert MARKER in reader.get(f"/v1/{path.format_map(names)}").text, path


def test_others_see_that_the_work_is_there_whose_it_is_and_what_it_takes(world: World) -> None:
    job = world.bob.get(f"/v1/jobs/{world.names['running']}").json()["job"]
    mine = world.ann.get(f"/v1/jobs/{world.names['running']}").json()["job"]
    assert job.keys() == mine.keys()
    assert job["command"] == "(of another user)"
    assert (job["cwd"], job["environment_names"], job["result"], job["detail"]) == (None, [], None, None)
    for name in ("job_id", "user", "state", "node_id", "resources", "submitted_at", "priority"):
        assert job[name] == mine[name]


def test_new_token_comes_with_a_line_about_the_account_that_its_jobs_run_under(world: World) -> None:
    made = world.grid("daemon", "token", "create", "--user", "eve", check=0)
    assert made.stdout.startswith("grid_")
    assert len(made.stdout.split()) == 1
    assert "run under the account of each node's agent" in made.stderr
