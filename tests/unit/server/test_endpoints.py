"""The table of endpoints: every request has one, with a role, and a table with a gap or a double stops the start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from distributed_grid.api import requests
from distributed_grid.errors import GridError
from distributed_grid.server.access.tokens import Caller, Forbidden
from distributed_grid.server.daemon import SERVICES
from distributed_grid.server.endpoints import (
    ADMIN,
    READ,
    USER,
    EndpointTable,
    Kind,
    collect,
    delete,
    endpoint,
    endpoints_of,
    get,
)

OWNER, PERSON = Caller("ada", admin=True), Caller("bob")


class Leases:
    @endpoint(READ, get("/leases/{name}", "leases", name="allocation_id"))
    async def get(self, op: requests.GetLease, caller: Caller) -> str:
        """One lease."""
        return op.allocation_id

    @endpoint(USER, delete("/leases/{name}", "leases", name="allocation_id"))
    async def release(self, op: requests.ReleaseLease, caller: Caller) -> str:
        return f"{op.allocation_id} of {caller.user}"

    @endpoint(ADMIN)
    async def drain(self, op: requests.DrainNode, caller: Caller, report: Callable[[Any], None]) -> str:
        report({"step": op.node})
        return "done"


class MoreLeases:
    @endpoint(READ)
    async def get(self, op: requests.GetLease, caller: Caller) -> str:
        return ""


def test_every_request_type_has_one_endpoint_with_a_role_and_a_typed_answer() -> None:
    declared = [one for one in endpoints_of(*SERVICES) if one.on_socket]
    assert sorted(one.op for one in declared) == sorted(
        str(kind.__struct_config__.tag) for kind in requests.REQUEST_TYPES
    )
    for one in endpoints_of(*SERVICES):
        assert one.role in (READ, USER, ADMIN)
        assert one.answer is not None
        assert one.description, f"{one.function.__qualname__} has no docstring"


def test_a_request_without_an_endpoint_stops_the_start() -> None:
    with pytest.raises(GridError, match=r"no service method declares a role for these requests: .*get_status"):
        collect(Leases())


def test_a_request_with_two_endpoints_stops_the_start() -> None:
    with pytest.raises(GridError, match=r"get_lease has two endpoints: Leases\.get and MoreLeases\.get"):
        collect(Leases(), MoreLeases())


def test_a_method_of_another_form_is_no_endpoint() -> None:
    with pytest.raises(TypeError, match=r"must be \(self, op, caller\)"):

        @endpoint(READ)
        async def odd(self: object, op: requests.GetLease) -> None: ...


def test_a_table_calls_the_methods_of_its_services_and_knows_their_routes() -> None:
    table = EndpointTable([Leases()])
    assert asyncio.run(table.by_request[requests.GetLease].call(requests.GetLease("a"), PERSON)) == "a"
    assert [(route.method, route.path) for route, _ in table.routes] == [
        ("GET", "/v1/leases/{name}"),
        ("DELETE", "/v1/leases/{name}"),
    ]
    assert table.by_request[requests.DrainNode].endpoint.kind is Kind.PROGRESS
    assert table.by_request[requests.GetLease].endpoint.answer is str


def test_the_role_is_checked_whichever_way_a_method_is_called() -> None:
    steps: list[Any] = []
    for call in (Leases().drain, EndpointTable([Leases()]).by_request[requests.DrainNode].call):
        with pytest.raises(Forbidden, match="bob may not drain node: that takes an admin"):
            asyncio.run(call(requests.DrainNode("gpu1"), PERSON, steps.append))
        assert asyncio.run(call(requests.DrainNode("gpu1"), OWNER, steps.append)) == "done"
    assert steps == [{"step": "gpu1"}] * 2
