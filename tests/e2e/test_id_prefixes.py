"""An id may be shortened, but not to nothing: the only thing there is must not be meant by accident."""

from __future__ import annotations

import httpx
import pytest

from tests.support.shell import Shell

pytestmark = pytest.mark.e2e

COMMANDS = [
    ("jobs", "cancel"),
    ("jobs", "show"),
    ("jobs", "wait"),
    ("jobs", "logs"),
    ("jobs", "fetch"),
    ("resource-sharing", "release"),
    ("boost", "release"),
    ("boost", "extend"),
    ("boost", "run"),
    ("memory", "deallocate"),
    ("daemon", "token", "revoke"),
    ("daemon", "join-token", "revoke"),
]
ROUTES = [
    ("POST", "/v1/jobs/{}/cancel"),
    ("GET", "/v1/jobs/{}"),
    ("GET", "/v1/jobs/{}/logs"),
    ("GET", "/v1/jobs/{}/explain"),
    ("DELETE", "/v1/leases/{}"),
    ("GET", "/v1/leases/{}"),
    ("GET", "/v1/leases/{}/explain"),
    ("POST", "/v1/leases/{}/extend"),
    ("DELETE", "/v1/boosts/{}"),
    ("GET", "/v1/boosts/{}"),
    ("POST", "/v1/boosts/{}/extend"),
]
MORE = {"extend": ("60",), "run": ("true",)}


def test_no_command_and_no_route_takes_nearly_nothing_for_the_only_thing_there_is(grid: Shell) -> None:
    job = grid.detach("sleep", "300")
    for words in COMMANDS:
        for name in ("", "j", "job-", job[:7]):
            done = grid(*words, name, *MORE.get(words[-1], ()), check=1)
            assert done.stderr.count("\n") == 1
            assert "the beginning of an id needs 4 characters of its own" in done.stderr, (words, name)
    token = (grid.host_dir / "token").read_text().strip()
    address = str(grid.json("daemon", "status")["rest"])
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=address, headers=headers, trust_env=False, verify=grid.trust) as rest:
        for method, route in ROUTES:
            for name in ("j", "job-", job[:7]):
                body = {"seconds": 60} if method == "POST" else None
                answer = rest.request(method, route.format(name), json=body)
                assert answer.status_code == 404, (route, name, answer.text)
                assert "needs 4 characters" in answer.json()["error"]["message"]
    assert grid.job(job)["state"] in ("assigned", "running")
    grid("jobs", "cancel", job[:8], check=0)
