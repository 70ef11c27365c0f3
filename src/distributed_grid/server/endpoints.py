"""Endpoints: the one table from request type to service method, for the socket, REST, OpenAPI and the typed client.

A service method declares itself; its request and its answer are its annotations:

    @endpoint(USER, post("/leases/{name}/extend", "leases", name="allocation_id"))
    async def extend(self, op: requests.ExtendLease, caller: Caller) -> AllocationDetail: ...

The role is checked around the method itself, so no way to reach it goes past the check. A method with a fourth
parameter `report` sends progress before its answer; a stream is sent by hand, on the socket and by REST.
"""

from __future__ import annotations

import enum
import functools
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from distributed_grid.api import requests
from distributed_grid.errors import GridError
from distributed_grid.server.access.tokens import Caller, Forbidden

REST_PREFIX = "/v1"
F = TypeVar("F", bound=Callable[..., Any])


class Role(enum.IntEnum):
    """The least that a caller must be; each role includes those before it."""

    READ = 1
    USER = 2
    ADMIN = 3


READ, USER, ADMIN = Role


class Kind(enum.Enum):
    """How an endpoint answers."""

    ANSWER = "answer"
    PROGRESS = "progress"
    STREAM = "stream"


class Route(Struct, frozen=True, kw_only=True):
    """A REST route of an endpoint; its parameters and its body are fields of the request."""

    method: str
    path: str
    tag: str
    names: Mapping[str, str] = {}  # parameters whose field has another name, with that name
    fixed: Mapping[str, Any] = {}  # fields with a value of the route's own
    hidden: tuple[str, ...] = ()  # fields that only the socket has
    id_field: str = "request_id"  # optional in a body: derived from the Idempotency-Key, or random
    adapt: Callable[[dict[str, Any]], None] | None = None  # changes the fields of a body, before they are converted

    @property
    def path_fields(self) -> dict[str, str]:
        """The fields of the path's parameters, by their names."""
        return {name: self.names.get(name, name) for name in re.findall(r"{(\w+)}", self.path)}

    def open_fields(self, request: type[Struct]) -> dict[str, str]:
        """The fields of the query, or of the body of a POST, by their names."""
        names = {field: name for name, field in self.names.items()}
        settled = {*self.path_fields.values(), *self.fixed, *self.hidden}
        return {names.get(field, field): field for field in request.__struct_fields__ if field not in settled}


def _route(
    method: str,
    path: str,
    tag: str,
    *,
    fixed: Mapping[str, Any] = {},
    hidden: tuple[str, ...] = (),
    id_field: str = "request_id",
    adapt: Callable[[dict[str, Any]], None] | None = None,
    **names: str,
) -> Route:
    """A route; another keyword is a parameter with the name of its field."""
    return Route(
        method=method,
        path=REST_PREFIX + path,
        tag=tag,
        names=names,
        fixed=fixed,
        hidden=hidden,
        id_field=id_field,
        adapt=adapt,
    )


get = functools.partial(_route, "GET")
post = functools.partial(_route, "POST")
delete = functools.partial(_route, "DELETE")


class ServiceEndpoint(Struct, frozen=True, kw_only=True):
    """A service method as it has declared itself."""

    request: type[requests.Message]
    role: Role
    kind: Kind
    routes: tuple[Route, ...]
    on_socket: bool
    keeps_config: bool  # it starts nothing: it may be answered with another config than the one that a client names
    act: str  # the words for it in a refusal
    function: Callable[..., Any]

    @property
    def op(self) -> str:
        """Name of the request on the wire."""
        return str(self.request.__struct_config__.tag)

    @property
    def description(self) -> str:
        return self.function.__doc__ or self.request.__doc__ or ""

    @property
    def answer(self) -> Any:
        """Type of the answer, read from the annotation with the imports of its module."""
        answer = typing.get_type_hints(self.function)["return"]
        origin, parameters = typing.get_origin(answer), typing.get_args(answer)
        return parameters[0] if origin is not None and getattr(origin, "is_encoded", False) else answer

    def must_admit(self, caller: Caller) -> None:
        """Forbidden for a caller without the role."""
        if self.role > (ADMIN if caller.admin else USER):
            raise Forbidden(f"{caller.user} may not {self.act}: that takes an admin")


def endpoint(
    role: Role,
    *routes: Route,
    streams: bool = False,
    on_socket: bool = True,
    keeps_config: bool = False,
    act: str = "",
) -> Callable[[F], F]:
    """Declare a service method `verb(self, op, caller)` as the endpoint of its request type.

    With `on_socket=False` it has its REST routes only: another method answers the same request on the socket. Every
    request of the role READ keeps the config of the control plane, and one that only ends or shows something may.
    """

    def declare(function: F) -> F:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        if names[:3] != ("self", "op", "caller"):
            raise TypeError(f"{function.__qualname__} must be (self, op, caller), not ({', '.join(names)})")
        request = eval(function.__annotations__["op"], function.__globals__)  # noqa: S307 - its own annotation
        kind = Kind.STREAM if streams else Kind.PROGRESS if "report" in names else Kind.ANSWER

        @functools.wraps(function)
        def checked(self: object, op: requests.Message, caller: Caller, *rest: Any) -> Any:
            declared.must_admit(caller)
            return function(self, op, caller, *rest)

        declared = ServiceEndpoint(
            request=request,
            role=role,
            kind=kind,
            routes=routes,
            on_socket=on_socket,
            keeps_config=keeps_config or role is READ,
            act=act or str(request.__struct_config__.tag).replace("_", " "),
            function=function,
        )
        checked.__endpoint__ = declared  # type: ignore[attr-defined]
        return typing.cast(F, checked)

    return declare


def endpoints_of(*services: type) -> Iterator[ServiceEndpoint]:
    """The endpoints that these classes declare."""
    for service in services:
        for member in vars(service).values():
            declared = getattr(member, "__endpoint__", None)
            if isinstance(declared, ServiceEndpoint):
                yield declared


class BoundEndpoint(Struct, frozen=True):
    """An endpoint of a service object; `call` takes the request, the caller, and the `report` or sink of its kind."""

    endpoint: ServiceEndpoint
    call: Callable[..., Any]


class EndpointTable:
    """Every endpoint of some services: `by_request` for the socket, `routes` for REST."""

    def __init__(self, services: Iterable[object]) -> None:
        self.by_request: dict[type[requests.Message], BoundEndpoint] = {}
        self.routes: list[tuple[Route, BoundEndpoint]] = []
        for service in services:
            for declared in endpoints_of(type(service)):
                bound = BoundEndpoint(declared, getattr(service, declared.function.__name__))
                self.routes += [(route, bound) for route in declared.routes]
                if not declared.on_socket:
                    continue
                if (other := self.by_request.get(declared.request)) is not None:
                    names = [double.endpoint.function.__qualname__ for double in (other, bound)]
                    raise GridError(f"the request {declared.op} has two endpoints: {names[0]} and {names[1]}")
                self.by_request[declared.request] = bound


def collect(*services: object) -> EndpointTable:
    """The endpoints of all services; GridError where a request type has none, or several."""
    table = EndpointTable(services)
    if missing := set(requests.REQUEST_TYPES) - table.by_request.keys():
        names = ", ".join(sorted(str(kind.__struct_config__.tag) for kind in missing))
        raise GridError(f"no service method declares a role for these requests: {names}")
    return table
