"""Reading of REST requests: fields come from the path and the query, or from the path and the body."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request

from distributed_grid.api import requests
from distributed_grid.errors import BadInput
from distributed_grid.server.endpoints import Route, delete, get, post
from distributed_grid.server.rest.routes import EVENTS, request_reader

LEASE = get("/leases/{name}", "leases", name="allocation_id")
EXTEND = post("/leases/{name}/extend", "leases", name="allocation_id")
EVERY_JOB = get("/jobs", "jobs", fixed={"all": True})
SUBMIT = post("/jobs", "jobs", hidden=("umask",))


def read(
    route: Route, kind: type[Any], query: str = "", body: object = None, key: str | None = None, **path: str
) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode() if body is not None else b""}

    scope = {
        "type": "http",
        "method": route.method,
        "query_string": query.encode(),
        "headers": [(b"idempotency-key", key.encode())] if key is not None else [],
        "path_params": path,
    }

    async def reading() -> Any:
        return await request_reader(route, kind)(Request(scope, receive))

    return asyncio.run(reading())


def test_parameters_of_the_path_and_the_query_are_converted_to_the_types_of_their_fields() -> None:
    assert read(LEASE, requests.GetLease, name="12") == requests.GetLease("12")
    assert read(EVERY_JOB, requests.ListJobs, "limit=7&state=ended") == requests.ListJobs(True, 7, None, "ended")
    expected = requests.ListEvents(after=3, follow=True, types=("started", "stopped"))
    assert read(EVENTS, requests.ListEvents, "after=3&follow=TRUE&type=started&type=stopped") == expected


def test_a_field_that_is_fixed_hidden_or_unknown_is_ignored_in_a_query() -> None:
    assert read(EVERY_JOB, requests.ListJobs, "all=false&colour=red&op=x") == requests.ListJobs(all=True)
    route = delete("/leases/{name}", "leases", name="allocation_id", hidden=("exact",))
    assert read(route, requests.ReleaseLease, "exact=true", name="a") == requests.ReleaseLease("a")


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("limit=0", "Expected `int` >= 1 - at `$.limit`"),
        ("limit=x", "Expected `int`, got `str` - at `$.limit`"),
        ("state=asleep", "Invalid enum value 'asleep' - at `$.state`"),
        (f"user={'x' * 129}", "length <= 128 - at `$.user`"),
    ],
)
def test_a_query_outside_of_its_bounds_is_refused_with_the_field(query: str, problem: str) -> None:
    with pytest.raises(BadInput, match="invalid request: ") as refused:
        read(EVERY_JOB, requests.ListJobs, query)
    assert problem in str(refused.value)


def test_the_path_wins_over_the_body_whose_numbers_are_no_texts() -> None:
    body = {"seconds": 60, "request_id": "more-1", "allocation_id": "another"}
    assert read(EXTEND, requests.ExtendLease, body=body, name="mine") == requests.ExtendLease("more-1", "mine", 60)
    with pytest.raises(BadInput, match="seconds"):
        read(EXTEND, requests.ExtendLease, body={"seconds": "60"}, name="mine")


def test_a_request_id_is_that_of_the_body_the_key_or_a_new_one() -> None:
    def request_id(body: dict[str, Any], key: str | None = None) -> str:
        return str(read(EXTEND, requests.ExtendLease, body={"seconds": 1, **body}, key=key, name="a").request_id)

    assert request_id({"request_id": "a"}) == request_id({"request_id": "a"}, "a") == request_id({}, "a") == "a"
    assert len({request_id({}), request_id({})}) == 2
    for key, problem in (("b", "say different things"), ("a.b", "Idempotency-Key has letters"), ("", "has letters")):
        with pytest.raises(BadInput, match=problem):
            request_id({"request_id": "a"}, key)


def test_a_field_that_only_the_socket_has_is_unknown_in_a_body() -> None:
    with pytest.raises(BadInput, match="Object contains unknown field `umask`"):
        read(SUBMIT, requests.SubmitJob, body={"argv": ["true"], "umask": 0})


def test_a_request_without_fields_of_its_own_needs_no_body() -> None:
    route = post("/jobs/{name}/cancel", "jobs", name="job_id")
    assert read(route, requests.CancelJob, body=["anything"], name="a") == requests.CancelJob("a")
