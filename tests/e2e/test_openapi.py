"""Requests that OpenAPI allows, and requests that it does not, made up by the dozen: no answer is a server error,
every answer has the shape it promises, and nothing is told to who has no token."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from tests.support.shell import Shell

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
EXAMPLES = 12
TOO_LARGE = 413
PROMISES: list[CheckFunction] = [
    not_a_server_error,
    checks.response_schema_conformance,
    checks.content_type_conformance,
    checks.status_code_conformance,
    checks.ignored_auth,
]
OPERATIONS = [
    "GET /v1/health", "POST /v1/join", "POST /v1/agent-package",
    "GET /v1/nodes", "GET /v1/nodes/{name}", "GET /v1/offers", "GET /v1/leases",
    "GET /v1/recommendations", "GET /v1/metrics/rebalancing", "GET /v1/metrics/scheduling",
    "GET /v1/leases/{name}/explain", "GET /v1/jobs/{name}/explain", "GET /v1/ledger",
    "POST /v1/leases", "GET /v1/leases/{name}", "DELETE /v1/leases/{name}", "POST /v1/leases/{name}/extend",
    "GET /v1/boosts", "POST /v1/boosts", "GET /v1/boosts/{name}", "DELETE /v1/boosts/{name}",
    "POST /v1/boosts/{name}/extend",
    "GET /v1/jobs", "POST /v1/jobs", "GET /v1/jobs/{name}", "POST /v1/jobs/{name}/cancel",
    "GET /v1/proposals", "GET /v1/moves", "POST /v1/moves", "GET /v1/moves/{name}", "POST /v1/moves/{name}/cancel",
    "GET /v1/auto-offload", "POST /v1/auto-offload",
    "GET /v1/jobs/{name}/logs", "GET /v1/events", "GET /v1/metrics/snapshots", "GET /v1/metrics/summary",
    "GET /v1/metrics/trend/{name}/{resource_type}", "GET /v1/metrics/history/{name}", "GET /metrics",
]  # fmt: skip

CAN_BE_WRONG = {
    "POST /v1/join", "POST /v1/agent-package",
    "POST /v1/leases", "POST /v1/leases/{name}/extend", "GET /v1/jobs", "POST /v1/jobs",
    "GET /v1/boosts", "POST /v1/boosts", "POST /v1/boosts/{name}/extend", "POST /v1/moves",
    "POST /v1/auto-offload",
    "GET /v1/jobs/{name}/logs", "GET /v1/events", "GET /v1/metrics/trend/{name}/{resource_type}", "GET /v1/ledger",
}  # fmt: skip


class Api:
    """The schema as the daemon tells it, and the token."""

    def __init__(self, grid: Shell) -> None:
        url = grid.json("daemon", "start")["rest"]
        self.headers = {"Authorization": f"Bearer {(grid.host_dir / 'token').read_text().strip()}"}
        self.trust, certificate = grid.trust, str(grid.host_dir / "certificate.pem")
        self.schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=self.headers, verify=certificate)
        self.schema.config.tls_verify = certificate
        found = (result.ok() for result in self.schema.get_all_operations())
        self.there = {
            "nodes": grid.json("status")["nodes"][0]["node_id"],
            "jobs": grid.job(grid.detach("echo", "hello"))["uid"],
            "leases": self.lease(url),
            "boosts": "none",  # one node has nobody to lend to it
            "moves": "none",  # and nothing can leave it
        }
        self.there |= {"history": self.there["nodes"], "trend": self.there["nodes"]}
        self.operations = {f"{one.method.upper()} {one.path}": one for one in found}

    def lease(self, url: str) -> str:
        asked = {"resource_type": "cpu", "amount": 0.1, "duration_seconds": 600}
        answer = httpx.post(
            f"{url}/v1/leases", json=asked, headers=self.headers, trust_env=False, timeout=30, verify=self.trust
        )
        return str(answer.json()["allocation"]["allocation_id"])

    def name_what_is_there(self, case: Any) -> None:
        """Turn a request about something made up into one about something real."""
        if case.path_parameters and "name" in case.path_parameters:
            noun = case.operation.path.partition("/{name}")[0].rpartition("/")[2]
            case.path_parameters["name"] = self.there[noun]
        if isinstance(case.body, dict) and "resource_type" in case.body:
            case.body |= {"resource_type": "cpu", "amount": 0.1, "priority": "low", "dry_run": True}
            if not case.operation.path.endswith("/boosts"):
                case.body |= {"prefer": [], "require": [], "target": ""}


@pytest.fixture(scope="module")
def api(shared_grid: Shell) -> Api:
    return Api(shared_grid)


def test_no_operation_is_left_out(api: Api) -> None:
    assert sorted(api.operations) == sorted(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_whatever_is_allowed_is_answered_as_promised(api: Api, name: str) -> None:
    ask(api, name, GenerationMode.POSITIVE, PROMISES)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name in CAN_BE_WRONG])
def test_whatever_is_not_allowed_is_refused_as_promised(api: Api, name: str) -> None:
    refused = [checks.negative_data_rejection] if name.startswith("POST") else []  # a query is all text
    ask(api, name, GenerationMode.NEGATIVE, [*PROMISES, *refused])


def ask(api: Api, name: str, mode: GenerationMode, promises: list[CheckFunction]) -> None:
    """Make requests up, and hold each answer against the promises."""

    @given(case=api.operations[name].as_strategy(generation_mode=mode), known=st.booleans())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def one(case: Any, known: bool) -> None:
        if known and mode is GenerationMode.POSITIVE:
            api.name_what_is_there(case)
        if case.query and str(case.query.get("follow")).lower() not in ("none", "false", "0", "no", "off"):
            case.query["follow"] = "false"  # what is followed has no end
        if name == "POST /v1/jobs" and isinstance(case.body, dict) and "argv" in case.body:
            case.body["dry_run"] = True  # what was made up is not run
        answer = case.call(headers=api.headers, timeout=20)
        kept = promises if answer.status_code != TOO_LARGE else PROMISES  # refused before it was read
        case.validate_response(answer, checks=kept, headers=api.headers)

    one()
