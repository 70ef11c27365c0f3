"""REST operations: the endpoint table, mounted on Starlette, and by hand streams and requests of other callers."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from distributed_grid.api import requests
from distributed_grid.api.answers.access import JoinedNode
from distributed_grid.api.answers.daemon import Health
from distributed_grid.api.answers.jobs import JobNotice
from distributed_grid.api.framing import STDERR, STDOUT
from distributed_grid.errors import BadInput
from distributed_grid.monitoring.prometheus import CONTENT_TYPE
from distributed_grid.server.access.admission import Admission, bearer_token
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.answers import EncodedAnswer
from distributed_grid.server.endpoints import BoundEndpoint, Route, get, post
from distributed_grid.server.rest.listener import RestServices
from distributed_grid.server.rest.openapi import Operation
from distributed_grid.server.rest.request_checks import body_of, idempotency_key
from distributed_grid.server.rest.responses import (
    NDJSON,
    EncodedResponse,
    JsonResponse,
    StreamResponse,
    Unauthorized,
    Write,
    json_line,
)
from distributed_grid.server.services.records import check_event_types
from distributed_grid.server.workers.agent_packages import CHUNK_BYTES

BYTES = "application/octet-stream"
SSE = "text/event-stream"
ZIP = "application/zip"
HEALTH = get("/health", "health")
JOIN = post("/join", "joining")
AGENT_PACKAGE = post("/agent-package", "joining")
LOGS = get("/jobs/{name}/logs", "jobs", name="job_id")
EVENTS = get("/events", "events", type="types")
PROMETHEUS = Route(method="GET", path="/metrics", tag="metrics")
HAND_ROUTES = (HEALTH, JOIN, AGENT_PACKAGE, LOGS, EVENTS, PROMETHEUS)
T = TypeVar("T", bound=Struct)


class JobOutputQuery(Struct, frozen=True):
    """One stream of a job's output, as REST asks for it."""

    job_id: requests.JobName
    follow: requests.Follow = False
    stream: Literal["stdout", "stderr"] = "stdout"
    seen: Annotated[requests.Count, Meta(description="Bytes that a returning reader has, dropped ones included.")] = 0
    tail_bytes: requests.Count | None = None


class RestApi:
    """The operations of REST."""

    def __init__(self, services: RestServices, admission: Admission) -> None:
        self._table = services.endpoints()
        self._jobs = services.jobs
        self._packages = services.packages
        self._admission = admission
        self._read_output_query = request_reader(LOGS, JobOutputQuery)
        self._read_events_query = request_reader(EVENTS, requests.ListEvents)

    def operations(self) -> list[Operation]:
        return [
            *(self._mounted(route, bound) for route, bound in self._table.routes),
            Operation(
                route=HEALTH,
                id="get_health",
                description="Whether the control plane answers; needs no token.",
                serve=self._health,
                answer=Health,
                needs_token=False,
            ),
            Operation(
                route=JOIN,
                id="join",
                description="Exchange a join token for the right to connect with a key; only its hash is sent.",
                serve=self._join,
                request=requests.JoinRequest,
                answer=JoinedNode,
                needs_token=False,
            ),
            Operation(
                route=AGENT_PACKAGE,
                id="fetch_agent_package",
                description="The agent for a machine that has only Python, as a zip of packages. Needs a join token, "
                "and does not use it.",
                serve=self._agent_package,
                request=requests.FetchAgentPackage,
                content={ZIP: {"type": "string", "format": "binary"}},
                needs_token=False,
            ),
            Operation(
                route=LOGS,
                id="read_logs",
                description="The output of a job, as it comes; for its owner and the admin. A line `[grid: N bytes …]` "
                "stands for bytes that were dropped: they count as seen, the line does not.",
                serve=self._logs,
                request=JobOutputQuery,
                content={BYTES: {}},
            ),
            Operation(
                route=EVENTS,
                id="list_events",
                description="Events, the oldest first: the newest `limit`, or those after a number. One event a line, "
                "or server-sent events where they are accepted.",
                serve=self._events,
                request=requests.ListEvents,
                content={NDJSON: {}, SSE: {}},
            ),
            Operation(
                route=PROMETHEUS,
                id="get_prometheus_metrics",
                description="Metrics in the text format of Prometheus; scrape them with a bearer token.",
                serve=self._prometheus,
                content={"text/plain": {}},
            ),
        ]

    def caller_of(self, request: Request) -> Caller:
        """The user of the bearer token; Unauthorized without a valid one."""
        token = self._admission.tokens.user_of(bearer_token(request.headers.get("authorization", "")))
        if token is None:
            raise Unauthorized("a token is needed: Authorization: Bearer …; see grid daemon token create")
        return Caller(token.user, token.admin, token.team)

    def _mounted(self, route: Route, bound: BoundEndpoint) -> Operation:
        """The operation of a route in the endpoint table."""
        read = request_reader(route, bound.endpoint.request)

        async def serve(request: Request) -> Response:
            caller = self.caller_of(request)
            answer = await bound.call(await read(request), caller)
            return EncodedResponse(answer) if isinstance(answer, EncodedAnswer) else JsonResponse(answer)

        endpoint = bound.endpoint
        values = [str(value) for value in route.fixed.values()] if len(endpoint.routes) > 1 else []
        return Operation(
            route=route,
            id="_".join([endpoint.op, *values]),
            description=endpoint.description,
            serve=serve,
            request=endpoint.request,
            answer=endpoint.answer,
        )

    async def _health(self, request: Request) -> Response:
        return JsonResponse(Health("ok"))

    async def _join(self, request: Request) -> Response:
        op = requests.convert(await body_of(request), requests.JoinRequest)
        return JsonResponse(await self._admission.join(op))

    async def _agent_package(self, request: Request) -> Response:
        op = requests.convert(await body_of(request), requests.FetchAgentPackage)
        self._admission.check_join_token(op.token)
        package = await self._packages.package(op)

        async def produce(write: Write) -> None:
            for start in range(0, len(package.data), CHUNK_BYTES):
                await write(package.data[start : start + CHUNK_BYTES])

        headers = {"Content-Length": str(len(package.data)), "Content-Digest": package.digest_header}
        return StreamResponse(produce, ZIP, headers)

    async def _logs(self, request: Request) -> Response:
        caller = self.caller_of(request)
        query = await self._read_output_query(request)
        await self._jobs.find_own(query.job_id, caller)  # an error comes before anything is streamed
        op = requests.ReadLogs(
            job_id=query.job_id,
            follow=query.follow,
            tail_bytes=query.tail_bytes,
            **{f"{query.stream}_seen": query.seen},
        )

        async def produce(write: Write) -> None:
            stream = STDOUT if query.stream == "stdout" else STDERR
            await self._jobs.read_logs(op, caller, _StreamOutput(stream, write))

        return StreamResponse(produce, BYTES)

    async def _events(self, request: Request) -> Response:
        caller = self.caller_of(request)
        op = await self._read_events_query(request)
        last_id = request.headers.get("last-event-id", "")
        if last_id.isdigit() and len(last_id) < 19:
            op = msgspec.structs.replace(op, after=int(last_id))
        check_event_types(op.types)
        as_sse = SSE in request.headers.get("accept", "")

        async def produce(write: Write) -> None:
            async with contextlib.aclosing(self._table.by_request[requests.ListEvents].call(op, caller)) as events:
                async for event in events:
                    line = json_line(event)
                    head = f"id: {event.seq}\nevent: {event.type}\ndata: " if as_sse else ""
                    await write(head.encode() + line + (b"\n" if as_sse else b""))

        return StreamResponse(produce, SSE if as_sse else NDJSON)

    async def _prometheus(self, request: Request) -> Response:
        call = self._table.by_request[requests.GetMetrics].call
        answer = await call(requests.GetMetrics("prometheus"), self.caller_of(request))
        return Response(answer.text, headers={"Content-Type": CONTENT_TYPE})


def request_reader(route: Route, kind: type[T]) -> Callable[[Request], Awaitable[T]]:
    """Reads requests of a route: from its path and its query, or with POST from its path and the body."""
    in_path, fields = route.path_fields, route.open_fields(kind)
    lists = {field.name for field in msgspec.structs.fields(kind) if field.default == ()}
    takes_id = route.id_field in fields

    def settled(request: Request) -> Mapping[str, Any]:
        return {**route.fixed, **{field: request.path_params[name] for name, field in in_path.items()}}

    async def read_body(request: Request) -> T:
        given = await body_of(request) if fields else {}
        for name in route.hidden:
            if name in given:
                raise BadInput(f"invalid request: Object contains unknown field `{name}`")
        if takes_id:
            given = {"request_id": idempotency_key(request, given) or uuid.uuid4().hex, **given}
        if route.adapt is not None:
            route.adapt(given)
        return requests.convert({**given, **settled(request)}, kind)

    async def read_query(request: Request) -> T:
        query = request.query_params
        given = {
            field: query.getlist(name) if field in lists else query[name]
            for name, field in fields.items()
            if name in query
        }
        return requests.convert({**given, **settled(request)}, kind, strict=False)

    return read_body if route.method == "POST" else read_query


class _StreamOutput:
    """One stream of a job's output; a line in brackets stands for dropped bytes."""

    def __init__(self, stream: bytes, write: Write) -> None:
        self._stream = stream
        self._write = write

    async def send(self, kind: bytes, chunk: bytes) -> None:
        if kind == self._stream:
            await self._write(chunk)

    async def skip(self, kind: bytes, dropped: int, message: str) -> None:
        await self.send(kind, f"[grid: {message}]\n".encode())

    async def notify(self, notice: JobNotice) -> None:
        """Notices are not part of the output."""
