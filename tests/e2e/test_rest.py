"""REST over a real daemon: every noun, who is let in, and what is never let through."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from distributed_grid.server.access.tokens import split_token
from distributed_grid.server.rest.listener import own_addresses
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e


def address_of(grid: Shell) -> str:
    return str(grid.json("daemon", "status")["rest"])


def rest(grid: Shell, token: str | None = None) -> httpx.Client:
    """A client with the owner's token, or another."""
    grid("status", check=0)
    text = token if token is not None else (grid.host_dir / "token").read_text().strip()
    headers = {"Authorization": f"Bearer {text}"} if text else {}
    address = address_of(grid)  # asking for it makes the certificate
    return httpx.Client(base_url=address, headers=headers, timeout=30, trust_env=False, verify=grid.trust)


@pytest.fixture(scope="module")
def owner(shared_grid: Shell) -> Iterator[httpx.Client]:
    with rest(shared_grid) as client:
        yield client


def submit(client: httpx.Client, *argv: str, key: str | None = None, **fields: Any) -> dict[str, Any]:
    headers = {"Idempotency-Key": key} if key else {}
    answer = client.post("/v1/jobs", json={"argv": argv, **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    job: dict[str, Any] = answer.json()["job"]
    return job


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    found: dict[str, Any] = answer.json()["error"]
    assert set(found) >= {"type", "message", "reasons"}
    return found


# ------------------------------------------------------------------ who is let in


def test_health_needs_no_token_and_tells_nothing_else(shared_grid: Shell) -> None:
    with rest(shared_grid, token="") as nobody:
        answer = nobody.get("/v1/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer x", "Basic Zm9vOmJhcg==", "Bearer grid_0123456789ab_x"])
def test_nobody_without_a_token_is_let_in_on_loopback_either(shared_grid: Shell, header: str | None) -> None:
    with rest(shared_grid, token="") as nobody:
        for path in ("/v1/nodes", "/v1/jobs", "/v1/events", "/metrics", "/openapi.json"):
            answer = nobody.get(path, headers={"Authorization": header} if header else {})
            assert error(answer, 401)["type"] == "Unauthorized"
            assert answer.headers["www-authenticate"] == "Bearer"


def test_the_page_that_would_be_fetched_from_the_internet_is_not_there(owner: httpx.Client) -> None:
    assert {owner.get(path).status_code for path in ("/docs", "/redoc")} == {404}


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7433", "", "127.0.0.1.evil.example", "[::1", "a@b"])
def test_another_host_header_is_refused(owner: httpx.Client, host: str) -> None:
    assert error(owner.get("/v1/nodes", headers={"Host": host}), 403)["type"] == "Forbidden"


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "https://localhost:1"])
def test_a_page_of_another_origin_is_refused(owner: httpx.Client, origin: str) -> None:
    error(owner.get("/v1/nodes", headers={"Origin": origin}), 403)
    error(owner.post("/v1/jobs", json={"argv": ["true"]}, headers={"Origin": origin}), 403)


def test_a_page_of_the_same_origin_is_served(owner: httpx.Client) -> None:
    assert owner.get("/v1/nodes", headers={"Origin": str(owner.base_url).rstrip("/")}).status_code == 200


def test_files_with_secrets_are_for_their_owner_only(shared_grid: Shell, owner: httpx.Client) -> None:
    for name in ("token", "tokens.json", "rest.json"):
        assert (shared_grid.host_dir / name).stat().st_mode & 0o777 == 0o600
    card = json.loads((shared_grid.host_dir / "rest.json").read_text())
    assert card["url"] == address_of(shared_grid)


def test_a_person_is_who_the_token_says_until_it_is_revoked(shared_grid: Shell, owner: httpx.Client) -> None:
    made = shared_grid.json("daemon", "token", "create", "--user", "bo", "--team", "vision", "--ttl", "1h")
    with rest(shared_grid, made["token"]) as bo:
        assert submit(bo, "true")["user"] == "bo"
        listed = shared_grid.json("daemon", "token", "list")
        assert [(one["user"], one["team"], one["admin"]) for one in listed][-1] == ("bo", "vision", False)
        assert made["token"] not in json.dumps(listed)
        shared_grid("daemon", "token", "revoke", made["token_id"][:8], check=0)
        assert bo.get("/v1/nodes").status_code == 401
    assert owner.get("/v1/nodes").status_code == 200


def test_a_token_that_expired_lets_nobody_in(shared_grid: Shell) -> None:
    made = shared_grid.json("daemon", "token", "create", "--user", "bo", "--ttl", "0.3")
    with rest(shared_grid, made["token"]) as bo:
        wait_until(lambda: bo.get("/v1/nodes").status_code == 401)


def test_everybody_sees_a_job_but_only_its_owner_or_the_admin_ends_it(shared_grid: Shell, owner: httpx.Client) -> None:
    tokens = [shared_grid.json("daemon", "token", "create", "--user", name)["token"] for name in ("cy", "di")]
    with rest(shared_grid, tokens[0]) as cy, rest(shared_grid, tokens[1]) as di:
        job = submit(cy, "sleep", "60", amount=0.1)
        held = cy.post("/v1/leases", json={"resource_type": "cpu", "amount": 0.1}).json()["allocation"]
        assert di.get(f"/v1/jobs/{job['uid']}").json()["job"]["user"] == "cy"
        for refused in (
            di.post(f"/v1/jobs/{job['uid']}/cancel"),
            di.delete(f"/v1/leases/{held['allocation_id']}"),
            di.post(f"/v1/leases/{held['allocation_id']}/extend", json={"seconds": 5}),
        ):
            assert "belongs to cy, not to di" in error(refused, 403)["message"]
        assert cy.delete(f"/v1/leases/{held['allocation_id']}").json()["allocation"]["reason"] == "released"
        assert owner.post(f"/v1/jobs/{job['uid']}/cancel").json()["job"]["state"] in ("stopping", "ended")
        wait_until(lambda: owner.get(f"/v1/jobs/{job['uid']}").json()["job"]["outcome"] == "cancelled")


def test_automatic_offloading_is_switched_by_the_admin_alone(shared_grid: Shell, owner: httpx.Client) -> None:
    made = shared_grid.json("daemon", "token", "create", "--user", "ed")
    with rest(shared_grid, made["token"]) as ed:
        assert "may not switch" in error(ed.post("/v1/auto-offload", json={"action": "enable"}), 403)["message"]
        assert ed.get("/v1/auto-offload").json()["auto_offload"]["enabled"] is False
    assert owner.post("/v1/auto-offload", json={"action": "enable"}).json()["auto_offload"]["enabled"] is True
    assert shared_grid.json("offload", "auto", "--status") == owner.get("/v1/auto-offload").json()["auto_offload"]
    assert owner.post("/v1/auto-offload", json={"action": "reset"}).json()["auto_offload"]["enabled"] is False
    assert error(owner.post("/v1/auto-offload", json={"action": "perhaps"}), 400)


@pytest.mark.parametrize("words", [("--user", "a b"), ("--user", ""), ("--user", "x", "--team", "../y")])
def test_a_token_for_nobody_is_not_made(shared_grid: Shell, words: tuple[str, ...]) -> None:
    shared_grid("daemon", "token", "create", *words, check=2)


def test_a_time_that_is_none_is_refused(shared_grid: Shell) -> None:
    assert "is no time" in shared_grid("daemon", "token", "create", "--user", "x", "--ttl", "soon", check=2).stderr


# ------------------------------------------------------------------ nouns


def test_nodes_and_offers_are_those_of_the_command_line(shared_grid: Shell, owner: httpx.Client) -> None:
    shown = shared_grid.json("status")
    nodes = owner.get("/v1/nodes").json()["nodes"]
    assert [set(node) for node in nodes] == [set(node) for node in shown["nodes"]]
    name = nodes[0]["node_id"]
    assert owner.get(f"/v1/nodes/{name}").json()["node"]["cpu_cores"] == shown["nodes"][0]["cpu_cores"]
    offers = owner.get("/v1/offers").json()["offers"]
    assert {offer["resource_type"] for offer in offers} >= {"cpu", "memory"}
    assert "no node is called 'nope'" in error(owner.get("/v1/nodes/nope"), 404)["message"]


def test_a_job_is_the_same_on_the_command_line(shared_grid: Shell, owner: httpx.Client) -> None:
    job = submit(owner, "sh", "-c", "echo out; echo err >&2", key="both-1", job_id="both")
    wait_until(lambda: owner.get("/v1/jobs/both").json()["job"]["state"] == "ended")
    answer = owner.get("/v1/jobs/both").json()
    assert {**answer["job"], "delivery": answer["delivery"]} == shared_grid.json("jobs", "show", "both")
    assert job["uid"] in [one["uid"] for one in owner.get("/v1/jobs", params={"limit": 100}).json()["jobs"]]
    assert owner.get("/v1/jobs/both/logs").content == b"out\n"
    assert owner.get("/v1/jobs/both/logs", params={"stream": "stderr"}).content == b"err\n"
    assert owner.get("/v1/jobs/both/logs", params={"seen": 2}).content == b"t\n"
    assert owner.get("/v1/jobs/both/logs", params={"tail_bytes": 1}).content == b"\n"
    error(owner.get("/v1/jobs/nope/logs"), 404)


def test_jobs_are_listed_by_user_and_state(shared_grid: Shell, owner: httpx.Client) -> None:
    made = shared_grid.json("daemon", "token", "create", "--user", "eve")
    with rest(shared_grid, made["token"]) as eve:
        uid = submit(eve, "true")["uid"]
    wait_until(lambda: owner.get(f"/v1/jobs/{uid}").json()["job"]["state"] == "ended")
    found = owner.get("/v1/jobs", params={"user": "eve", "state": "ended"}).json()["jobs"]
    assert [job["uid"] for job in found] == [uid]
    assert owner.get("/v1/jobs", params={"user": "eve", "state": "running"}).json()["jobs"] == []


def test_a_job_has_a_path_and_what_env_adds_but_its_values_are_shown_nowhere(owner: httpx.Client) -> None:
    job = submit(owner, "sh", "-c", 'echo "$WORD"; command -v python3 >/dev/null', env={"WORD": "hush-hush"})
    done = wait_until(lambda: (j := owner.get(f"/v1/jobs/{job['uid']}").json()["job"])["state"] == "ended" and j)
    assert done["exit_code"] == 0
    assert owner.get(f"/v1/jobs/{job['uid']}/logs").text == "hush-hush\n"
    assert "WORD" in done["environment_names"]
    assert "hush-hush" not in json.dumps(done) + owner.get("/v1/events", params={"limit": 1000}).text


def test_output_is_followed_as_it_comes(owner: httpx.Client) -> None:
    script = "for i in 1 2 3; do echo $i; sleep 0.4; done"
    job = submit(owner, "sh", "-c", script)
    began = time.monotonic()
    with owner.stream("GET", f"/v1/jobs/{job['uid']}/logs", params={"follow": True}) as answer:
        came = [(chunk, time.monotonic() - began) for chunk in answer.iter_bytes()]
    assert b"".join(chunk for chunk, _ in came) == b"1\n2\n3\n"
    assert came[0][1] < came[-1][1] - 0.5


def test_leases_are_asked_for_extended_and_given_back(owner: httpx.Client) -> None:
    asked = {"resource_type": "memory", "amount": 0.1, "duration_seconds": 60}
    first = owner.post("/v1/leases", json=asked, headers={"Idempotency-Key": "lease-1"}).json()["allocation"]
    assert first["state"] == "active"
    lease = f"/v1/leases/{first['allocation_id']}"
    assert first["allocation_id"] in [one["allocation_id"] for one in owner.get("/v1/leases").json()["allocations"]]
    for _ in range(2):  # the same request counts once
        longer = owner.post(f"{lease}/extend", json={"seconds": 60}, headers={"Idempotency-Key": "more-1"})
        later = longer.json()["allocation"]
        assert later["expires_at"] > first["expires_at"]
    assert owner.get(lease).json()["allocation"]["expires_at"] == later["expires_at"]
    error(owner.post(f"{lease}/extend", json={"seconds": 61, "request_id": "more-1"}), 409)
    for _ in range(2):
        assert owner.delete(lease).json()["allocation"]["reason"] == "released"
    assert owner.get(lease).json()["allocation"]["state"] == "ended"
    error(owner.get("/v1/leases/nope"), 404)


def test_a_lease_that_has_to_wait_is_answered_at_once_and_granted_later(owner: httpx.Client) -> None:
    most = max(o["amount"] for o in owner.get("/v1/offers").json()["offers"] if o["resource_type"] == "cpu")
    first = owner.post("/v1/leases", json={"resource_type": "cpu", "amount": most}).json()["allocation"]
    answer = owner.post("/v1/leases", json={"resource_type": "cpu", "amount": most, "wait_seconds": 60}).json()
    assert answer["allocation"]["state"] == "asked"
    assert answer["reasons"] != []
    refused = owner.post("/v1/leases", json={"resource_type": "cpu", "amount": most, "wait_seconds": 0})
    assert error(refused, 409)["reasons"] != []
    owner.delete(f"/v1/leases/{first['allocation_id']}")
    second = f"/v1/leases/{answer['allocation']['allocation_id']}"
    wait_until(lambda: owner.get(second).json()["allocation"]["state"] == "active")
    owner.delete(second)


def test_the_same_request_twice_happens_once_and_another_under_its_key_is_refused(owner: httpx.Client) -> None:
    first, second = (submit(owner, "true", key="once-1") for _ in range(2))
    assert first["uid"] == second["uid"]
    other = owner.post("/v1/jobs", json={"argv": ["false"]}, headers={"Idempotency-Key": "once-1"})
    assert error(other, 409)["type"] == "Conflict"
    assert submit(owner, "true", request_id="once-2")["uid"] == submit(owner, "true", key="once-2")["uid"]
    clash = owner.post("/v1/jobs", json={"argv": ["x"], "request_id": "a"}, headers={"Idempotency-Key": "b"})
    error(clash, 400)
    error(owner.post("/v1/jobs", json={"argv": ["x"]}, headers={"Idempotency-Key": "a.b"}), 400)


def test_dry_run_changes_nothing(owner: httpx.Client) -> None:
    answer = owner.post("/v1/jobs", json={"argv": ["true"], "job_id": "never", "dry_run": True})
    assert answer.json()["job"]["state"] == "assigned"
    error(owner.get("/v1/jobs/never"), 404)


def test_events_are_lines_and_are_followed(owner: httpx.Client) -> None:
    lines = owner.get("/v1/events", params={"limit": 5}).text.splitlines()
    last = json.loads(lines[-1])["seq"]
    with owner.stream("GET", "/v1/events", params={"after": last, "follow": True, "type": "stopped"}) as answer:
        uid = submit(owner, "true")["uid"]
        logged = (json.loads(line) for line in answer.iter_lines())
        event = next(event for event in logged if event["subject"] == uid)
    assert event["type"] == "stopped"
    assert event["seq"] > last


def test_events_are_also_told_the_way_browsers_listen(owner: httpx.Client) -> None:
    headers = {"Accept": "text/event-stream"}
    answer = owner.get("/v1/events", params={"limit": 3}, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    first = answer.text.split("\n\n")[0].splitlines()
    assert [line.partition(": ")[0] for line in first] == ["id", "event", "data"]
    again = owner.get("/v1/events", headers={**headers, "Last-Event-ID": first[0].removeprefix("id: ")}).text
    assert again.startswith(f"id: {int(first[0].removeprefix('id: ')) + 1}\n")


def test_metrics_for_people_and_for_prometheus(shared_grid: Shell, owner: httpx.Client) -> None:
    name = owner.get("/v1/nodes").json()["nodes"][0]["node_id"]
    assert owner.get("/v1/metrics/snapshots").json()["snapshots"][0]["node_id"] == name
    assert owner.get("/v1/metrics/summary").json()["summary"]["nodes"]["total"] == 1
    assert owner.get(f"/v1/metrics/trend/{name}/cpu").json()["trend"]["resource_type"] == "cpu"
    assert isinstance(owner.get(f"/v1/metrics/history/{name}").json()["history"], list)
    error(owner.get("/v1/metrics/trend/nope/cpu"), 404)
    error(owner.get(f"/v1/metrics/trend/{name}/hope"), 400)
    scraped = owner.get("/metrics")
    assert scraped.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert f'grid_node_up{{node="{name}"' in scraped.text


# ------------------------------------------------------------------ invalid requests


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"null", b'"x"', b"\xff", b'{"argv": []}', b'{"argv": "x"}', b'{"argv": ["x"], "surprise": 1}',
     b'{"argv": ["x"], "op": "stop_daemon"}', b'{"argv": ["x\\u0000"]}', b'{"argv": ["x"], "env": [1]}', b"{}", b"",
     b'{"argv": ["x"], "amount": -1}', b'{"argv": ["x"], "request_id": "../x"}', b"[" * 100_000],
)  # fmt: skip
def test_a_body_that_makes_no_sense_is_refused(owner: httpx.Client, body: bytes) -> None:
    assert error(owner.post("/v1/jobs", content=body), 400)["type"] == "BadInput"


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=99999", "state=asleep"])
def test_a_query_that_makes_no_sense_is_refused(owner: httpx.Client, query: str) -> None:
    assert error(owner.get(f"/v1/jobs?{query}"), 400)["type"] == "BadInput"


def test_missing_resource_has_the_same_error_shape(owner: httpx.Client) -> None:
    assert error(owner.get("/v1/nothing"), 404)["type"] == "NotFound"
    answer = owner.put("/v1/jobs")
    error(answer, 405)
    assert "GET" in answer.headers["allow"]


def test_a_request_is_at_most_a_megabyte_whether_or_not_it_says_so(owner: httpx.Client) -> None:
    large = b'{"argv": ["' + b"x" * (1024 * 1024) + b'"]}'
    assert error(owner.post("/v1/jobs", content=large), 413)["type"] == "TooLarge"

    def parts() -> Iterator[bytes]:
        for start in range(0, len(large), 65536):
            yield large[start : start + 65536]

    assert error(owner.post("/v1/jobs", content=parts()), 413)["type"] == "TooLarge"
    assert owner.get("/v1/health").status_code == 200


def test_head_that_is_too_long_and_too_many_types_of_events_are_refused_in_json(owner: httpx.Client) -> None:
    found = error(owner.get("/v1/events", params={"type": ["joined"] * 51}), 400)
    assert "50" in found["message"]
    assert "too long" in error(owner.get("/v1/health", headers={"X-Long": "x" * 70_000}), 400)["message"]


def send_to_the_end(line: socket.socket, noise: bytes) -> None:
    """Send all there is, and wait for an answer or the end of the connection."""
    with contextlib.suppress(ConnectionError, ssl.SSLEOFError):  # the server may hang up before it has read all
        line.sendall(noise)
        line.shutdown(socket.SHUT_WR)
        line.recv(65536)


def test_garbage_bytes_do_not_disturb_the_listener(shared_grid: Shell, owner: httpx.Client) -> None:
    host, port = owner.base_url.host, owner.base_url.port or 0
    for noise in (b"\x16\x03\x01" + os.urandom(200), b"GET\r\n\r\n", b"\0" * 100_000):
        with socket.create_connection((host, port), timeout=10) as line:
            send_to_the_end(line, noise)
        with (
            socket.create_connection((host, port), timeout=10) as plain,
            shared_grid.trust.wrap_socket(plain, server_hostname=host) as line,
        ):
            send_to_the_end(line, noise)
    assert owner.get("/v1/health").status_code == 200


def test_an_agent_without_a_key_is_not_let_in(shared_grid: Shell, owner: httpx.Client) -> None:
    upgrade = {
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }  # fmt: skip
    line = http.client.HTTPSConnection(owner.base_url.host, owner.base_url.port, timeout=10, context=shared_grid.trust)
    for path in ("/v1/agent", "/v1/nodes"):
        for key in ("x.y", owner.headers["authorization"].removeprefix("Bearer ")):
            line.request("GET", path, headers={**upgrade, "Authorization": f"Bearer {key}"})
            assert line.getresponse().status == 401
            line.close()


# ------------------------------------------------------------------ where it listens


def test_a_taken_port_makes_room_for_another_on_this_machine(grid: Shell, shared_grid: Shell) -> None:
    assert address_of(shared_grid)
    grid("status", check=0)
    assert address_of(grid) != address_of(shared_grid)
    with rest(grid) as client:
        assert client.get("/v1/nodes").status_code == 200


def test_nothing_is_loaded_before_somebody_asks(grid: Shell) -> None:
    grid("status", check=0)
    before = _resident(grid.daemon_pid())
    with rest(grid) as client:
        assert client.get("/v1/health").status_code == 200
    assert _resident(grid.daemon_pid()) > before + 5_000_000


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_other_machines_are_never_spoken_to_in_the_clear_by_accident(grid: Shell) -> None:
    mine = own_addresses()
    if not mine:
        pytest.skip("this machine has no address but loopback")
    for option in ("--no-tls", "--force-plain"):
        refused = grid("daemon", "start", "--listen", f"{mine[0]}:0", option, check=2)
        assert "there is no connection without TLS" in refused.stderr
    grid("daemon", "status", check=3)  # nothing was started
    grid("daemon", "start", "--listen", f"{mine[0]}:0", check=0)
    address = address_of(grid)
    assert address.startswith(f"https://{mine[0]}:")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/v1/health", trust_env=False)  # nobody has vouched for this certificate
    trusting = ssl.create_default_context(cafile=str(grid.host_dir / "certificate.pem"))
    assert httpx.get(f"{address}/v1/health", verify=trusting, trust_env=False).json() == {"status": "ok"}
    assert (grid.host_dir / "certificate.key").stat().st_mode & 0o777 == 0o600


def test_a_key_that_is_missing_at_the_first_connection_ends_no_daemon_and_is_used_once_it_is_there(grid: Shell) -> None:
    mine = own_addresses()
    if not mine:
        pytest.skip("this machine has no address but loopback")
    grid("daemon", "start", "--listen", f"{mine[0]}:0", check=0)
    address, pid, key = address_of(grid), grid.daemon_pid(), grid.host_dir / "certificate.key"
    aside = key.rename(key.with_suffix(".aside"))
    with socket.create_connection((mine[0], int(address.rpartition(":")[2]))):
        wait_until(lambda: "the start of REST failed; it begins anew" in (grid.host_dir / "daemon.log").read_text())
    aside.rename(key)
    trusting = ssl.create_default_context(cafile=str(grid.host_dir / "certificate.pem"))
    assert httpx.get(f"{address}/v1/health", verify=trusting, trust_env=False, timeout=30).json() == {"status": "ok"}
    assert grid.daemon_pid() == pid


def test_where_it_listens_is_kept_through_a_crash_and_forgotten_when_stopped(grid: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    grid("daemon", "start", "--listen", f"127.0.0.1:{port}", check=0)
    assert address_of(grid) == f"https://127.0.0.1:{port}"
    grid.kill_daemon()
    grid("status", check=0)
    assert address_of(grid) == f"https://127.0.0.1:{port}"
    grid("daemon", "stop", check=0)
    assert not (grid.host_dir / "rest.json").exists()
    grid("status", check=0)
    assert address_of(grid) != f"https://127.0.0.1:{port}"


def test_an_address_that_cannot_be_had_is_told_and_the_old_one_stays(grid: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        grid("daemon", "start", check=0)
        before = address_of(grid)
        refused = grid("daemon", "start", "--listen", f"127.0.0.1:{taken.getsockname()[1]}", check=1)
    assert "Address already in use" in refused.stderr
    assert address_of(grid) == before
    assert httpx.get(f"{before}/v1/health", trust_env=False, verify=grid.trust).status_code == 200


def test_a_port_that_the_config_names_is_used_or_the_start_fails(grid: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (grid.cwd / "c.yaml").write_text(f"server: {{port: {port}, tls: true}}\n")
        refused = grid("daemon", "start", "-c", "c.yaml", check=1)
        assert f"cannot listen on 127.0.0.1:{port}" in refused.stderr
    grid("daemon", "start", "-c", "c.yaml", check=0)
    assert address_of(grid) == f"https://127.0.0.1:{port}"


def test_leaving_cuts_streams_off_within_a_moment(grid: Shell) -> None:
    with rest(grid) as client:
        job = submit(client, "sleep", "300")
        with client.stream("GET", f"/v1/jobs/{job['uid']}/logs", params={"follow": True}) as answer:
            began = time.monotonic()
            grid("daemon", "stop", check=0)
            took = time.monotonic() - began
            with pytest.raises(httpx.HTTPError):  # not an end: the job goes on
                answer.read()
    assert took < 3


def test_a_stream_keeps_an_idle_daemon_and_its_end_lets_it_go(grid: Shell) -> None:
    grid.env["GRID_IDLE_SECONDS"] = "1"
    with rest(grid) as client:
        pid = grid.daemon_pid()
        with client.stream("GET", "/v1/events", params={"follow": True, "limit": 1}) as answer:
            lines: Any = answer.iter_lines()  # kept: dropping it hangs up
            next(lines)
            time.sleep(2.5)
            assert Path(f"/proc/{pid}").exists()
            lines.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


# ------------------------------------------------------------------ joining


def test_a_join_token_is_good_once(shared_grid: Shell, owner: httpx.Client) -> None:
    made = shared_grid.json("daemon", "join-token", "create", "--node", "far-1", "--ttl", "10m")
    body = {"token": made["join_token"], "key_hash": "a" * 64}
    with rest(shared_grid, token="") as nobody:
        assert nobody.post("/v1/join", json=body).json()["node"] == "far-1"
        assert nobody.post("/v1/join", json=body).json()["node"] == "far-1"
        reused = nobody.post("/v1/join", json={**body, "key_hash": "b" * 64})
        assert "used already" in error(reused, 403)["message"]
        error(nobody.post("/v1/join", json={**body, "token": "gridjoin1_x"}), 400)
        error(nobody.post("/v1/join", json={**body, "key_hash": "short"}), 400)
    (listed,) = (one for one in shared_grid.json("daemon", "join-token", "list") if one["node_id"] == "far-1")
    assert listed["used_by"] == "far-1"
    shared_grid("daemon", "join-token", "revoke", made["token_id"], check=0)
    with rest(shared_grid, token="") as nobody:
        assert "revoked" in error(nobody.post("/v1/join", json=body), 403)["message"]


def test_a_node_of_the_config_cannot_be_joined_as(shared_grid: Shell, owner: httpx.Client) -> None:
    name = owner.get("/v1/nodes").json()["nodes"][0]["node_id"]
    assert "is a node of the config" in shared_grid("daemon", "join-token", "create", "--node", name, check=1).stderr
    made = shared_grid.json("daemon", "join-token", "create")
    body = {"token": made["join_token"], "node": name, "key_hash": "a" * 64}
    with rest(shared_grid, token="") as nobody:
        assert "is a node of the config" in error(nobody.post("/v1/join", json=body), 409)["message"]


def test_secrets_are_in_no_log_and_no_event(shared_grid: Shell, owner: httpx.Client) -> None:
    _, owners = split_token((shared_grid.host_dir / "token").read_text().strip())
    _, made = split_token(shared_grid.json("daemon", "token", "create", "--user", "fay")["token"])
    logged = (shared_grid.host_dir / "daemon.log").read_text() + owner.get("/v1/events", params={"limit": 10000}).text
    stored = (shared_grid.host_dir / "tokens.json").read_text()
    for secret in (owners, made):
        assert len(secret) > 20
        assert secret not in logged + stored


def test_openapi_is_whole(owner: httpx.Client) -> None:
    schema = owner.get("/openapi.json").json()
    paths = {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}
    assert paths >= {
        ("GET", "/v1/nodes"), ("GET", "/v1/nodes/{name}"), ("GET", "/v1/offers"), ("GET", "/v1/leases"),
        ("POST", "/v1/leases"), ("GET", "/v1/leases/{name}"), ("DELETE", "/v1/leases/{name}"),
        ("POST", "/v1/leases/{name}/extend"), ("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/v1/jobs/{name}"),
        ("POST", "/v1/jobs/{name}/cancel"), ("GET", "/v1/jobs/{name}/logs"), ("GET", "/v1/events"),
        ("GET", "/v1/metrics/summary"), ("GET", "/metrics"), ("GET", "/v1/health"), ("POST", "/v1/join"),
    }  # fmt: skip
    unguarded = {(method, path) for path, methods in schema["paths"].items()
                 for method, operation in methods.items() if not operation.get("security")}  # fmt: skip
    assert unguarded == {("get", "/v1/health"), ("post", "/v1/join"), ("post", "/v1/agent-package")}
    assert "422" not in json.dumps(schema)


def test_curl_as_the_docs_show_it(shared_grid: Shell, owner: httpx.Client) -> None:
    command = 'curl -s --cacert "$D/certificate.pem" -H "Authorization: Bearer $(cat "$D/token")" "$U/v1/nodes"'
    env = {**os.environ, "D": str(shared_grid.host_dir), "U": address_of(shared_grid)}
    done = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(done.stdout)["nodes"]


# ------------------------------------------------------------------ what is hardly HTTP


@pytest.mark.parametrize(
    "rest_of_request",
    [
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"Content-Length: 100\r\n\r\nonly this",
        b"Host: another.example\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    ],
)
def test_a_request_that_breaks_off_is_no_bug(shared_grid: Shell, owner: httpx.Client, rest_of_request: bytes) -> None:
    at = httpx.URL(address_of(shared_grid))
    token = (shared_grid.host_dir / "token").read_text().strip().encode()
    with (
        socket.create_connection((at.host, at.port or 0), 30) as plain,
        shared_grid.trust.wrap_socket(plain, server_hostname=at.host) as raw,
    ):
        raw.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer " + token + b"\r\n")
        raw.sendall(rest_of_request)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(4096):
            pass
    assert owner.get("/v1/health").status_code == 200
    assert "Traceback" not in (shared_grid.host_dir / "daemon.log").read_text()
