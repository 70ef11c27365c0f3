"""The OpenAPI document: parameters and bodies as they are read, answers by their types."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from distributed_grid.api import requests
from distributed_grid.server.endpoints import Route, get, post
from distributed_grid.server.rest.openapi import Operation, openapi_document
from distributed_grid.server.rest.routes import EVENTS


class Lease(TypedDict):
    name: str


class Boost(Struct):
    source: str | None = None


def described(route: Route, request: type[Struct] | None, answer: Any = None) -> dict[str, Any]:
    """The document of one operation."""

    async def serve(request: Request) -> Response:
        return Response()

    operation = Operation(route=route, id="one", description="One.", serve=serve, request=request, answer=answer)
    return openapi_document([operation])


def operation_of(route: Route, request: type[Struct] | None, answer: Any = None) -> dict[str, Any]:
    described_operation: dict[str, Any] = described(route, request, answer)["paths"][route.path][route.method.lower()]
    return described_operation


def test_a_query_has_the_names_and_bounds_of_its_fields_and_no_null() -> None:
    parameters = {one["name"]: one for one in operation_of(EVENTS, requests.ListEvents)["parameters"]}
    assert list(parameters) == ["after", "follow", "subject", "type", "limit"]
    assert parameters["after"]["schema"] == {"type": "integer", "minimum": 0, "maximum": 2**62}
    assert parameters["limit"]["schema"] == {"type": "integer", "minimum": 1, "maximum": 1_000_000, "default": 100}
    assert parameters["subject"]["description"] == "Only events about this job, lease or node."
    assert not any(one["required"] for one in parameters.values())
    jobs = operation_of(get("/jobs", "jobs", fixed={"all": True}), requests.ListJobs)
    (state,) = (one["schema"]["enum"] for one in jobs["parameters"] if one["name"] == "state")
    assert sorted(state) == ["assigned", "ended", "paused", "queued", "running", "stopping"]
    assert "all" not in {one["name"] for one in jobs["parameters"]}


def test_a_parameter_of_the_path_is_required_and_not_empty() -> None:
    route = get("/metrics/trend/{name}/{resource_type}", "metrics", name="node", fixed={"kind": "trend"})
    node, resource, window = operation_of(route, requests.GetMetrics)["parameters"]
    assert node == {
        "name": "name",
        "in": "path",
        "required": True,
        "schema": {"minLength": 1, "type": "string", "maxLength": 128},
        "description": "Name of a node.",
    }
    assert resource["schema"]["enum"] == ["cpu", "memory", "gpu"]
    assert (window["name"], window["in"]) == ("window", "query")


def test_a_body_has_neither_the_path_nor_hidden_fields_and_its_id_is_optional() -> None:
    extend = operation_of(post("/leases/{name}/extend", "leases", name="allocation_id"), requests.ExtendLease)
    body = extend["requestBody"]["content"]["application/json"]["schema"]
    assert (sorted(body["properties"]), body["required"]) == (["request_id", "seconds"], ["seconds"])
    assert body["additionalProperties"] is False
    assert [one["name"] for one in extend["parameters"]] == ["name", "Idempotency-Key"]
    submit = operation_of(post("/jobs", "jobs", hidden=("umask",)), requests.SubmitJob)
    properties = submit["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert "argv" in properties
    assert not {"umask", "op"} & properties.keys()
    assert "requestBody" not in operation_of(post("/jobs/{name}/cancel", "jobs", name="job_id"), requests.CancelJob)


@pytest.mark.parametrize(
    ("answer", "schema"),
    [
        (Lease, {"$ref": "#/components/schemas/Lease"}),
        (Boost, {"$ref": "#/components/schemas/Boost"}),
        (Lease | Boost, {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Lease", "Boost")]}),
        (dict[str, Any], {"type": "object"}),
    ],
    ids=["typed dict", "struct", "either", "any object"],
)
def test_an_answer_is_described_by_its_type_and_a_failure_by_one_for_all(answer: Any, schema: dict[str, Any]) -> None:
    responses = operation_of(get("/leases", "leases"), None, answer)["responses"]
    assert responses["200"]["content"]["application/json"]["schema"] == schema
    assert responses["default"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorAnswer"}
    components = described(get("/leases", "leases"), None, answer)["components"]["schemas"]
    assert components["ErrorAnswer"]["required"] == ["error"]
