"""REST routes: each parses a request and returns what the service answers."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from starlette.responses import Response

from distributed_grid.api import requests
from distributed_grid.api.answers.jobs import JobNotice
from distributed_grid.api.framing import STDERR, STDOUT
from distributed_grid.client.job_payload import caller_environment
from distributed_grid.domain.moves import MOVE_PREFIX
from distributed_grid.errors import BadInput
from distributed_grid.monitoring.prometheus import CONTENT_TYPE
from distributed_grid.server.rest import answer_models as views
from distributed_grid.server.rest.auth import Authenticated, AuthenticatedRequest, body_of, takes
from distributed_grid.server.rest.responses import (
    NDJSON,
    EncodedResponse,
    JsonResponse,
    StreamResponse,
    Write,
    json_line,
)
from distributed_grid.server.services.records import check_event_types
from distributed_grid.server.workers.agent_packages import CHUNK_BYTES

ZIP = "application/zip"
SSE = "text/event-stream"
NodeName = Annotated[str, Path(min_length=1, max_length=128, description="The node's name.")]
LeaseName = Annotated[str, Path(min_length=1, max_length=128, description="A lease's id, or any unique prefix.")]
BoostName = Annotated[str, Path(min_length=1, max_length=128, description="A boost's id, or any unique prefix.")]
JobName = Annotated[str, Path(min_length=1, max_length=128, description="A job's id or uid, or any unique prefix.")]
MoveName = Annotated[str, Path(min_length=1, max_length=128, description="A move's id, or any unique prefix.")]
JobState = Literal["queued", "assigned", "running", "paused", "stopping", "ended"]
Bytes = Annotated[int, Query(ge=0, le=2**62)]
Minutes = Annotated[int | None, Query(ge=1, le=1440, description="How far back, in minutes.")]
Key = Annotated[str | None, Header(alias="Idempotency-Key", description="The same key and body do nothing twice.")]
ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": views.ErrorAnswer, "description": "Why the request failed."}
}
LOCAL_FIELDS = ("fetch_to", "overwrite", "umask")
"""Fields of a submission that are about a directory of the control plane's own user."""
router = APIRouter(prefix="/v1", responses=ERRORS)
prometheus_router = APIRouter(tags=["metrics"], responses=ERRORS)


# ------------------------------------------------------------------ without a token


@router.get("/health", response_model=views.Health, tags=["health"])
async def health() -> JsonResponse:
    """Whether the control plane answers; needs no token."""
    return JsonResponse({"status": "ok"})


@router.post("/join", response_model=views.JoinAnswer, openapi_extra=takes(requests.JoinRequest), tags=["joining"])
async def join(request: Request) -> JsonResponse:
    """Exchange a join token for the right to connect with a key of one's own, of which only the hash is sent."""
    op = requests.convert(await body_of(request), requests.JoinRequest)
    return JsonResponse(await request.app.state.admission.join(op))


@router.post(
    "/agent-package",
    response_class=Response,
    responses={200: {"content": {ZIP: {"schema": {"type": "string", "format": "binary"}}}}},
    openapi_extra=takes(requests.FetchAgentPackage),
    tags=["joining"],
)
async def agent_package(request: Request) -> Response:
    """The agent for a machine that has only Python, as a zip of packages. Needs a join token, and does not use it."""
    op = requests.convert(await body_of(request), requests.FetchAgentPackage)
    request.app.state.admission.check_join_token(op.token)
    package = await request.app.state.services.packages.package(op)

    async def produce(write: Write) -> None:
        for start in range(0, len(package.data), CHUNK_BYTES):
            await write(package.data[start : start + CHUNK_BYTES])

    headers = {"Content-Length": str(len(package.data)), "Content-Digest": package.digest_header}
    return StreamResponse(produce, ZIP, headers)


# ------------------------------------------------------------------ nodes


@router.get("/nodes", response_model=views.NodeList, tags=["nodes"])
async def nodes(call: Authenticated) -> EncodedResponse:
    """Every node: what it has, what it lends, how hard it works."""
    return EncodedResponse(await call.services.nodes.list(requests.ListNodes(), call.caller))


@router.get("/nodes/{name}", response_model=views.NodeDetail, tags=["nodes"])
async def node(call: Authenticated, name: NodeName) -> JsonResponse:
    """One node."""
    return JsonResponse(await call.services.nodes.get(requests.GetNode(name), call.caller))


@router.get("/offers", response_model=views.OfferList, tags=["nodes"])
async def offers(call: Authenticated) -> EncodedResponse:
    """What can be had right now."""
    return EncodedResponse(await call.services.nodes.offers(requests.ListOffers(), call.caller))


@router.get("/recommendations", response_model=views.RecommendationList, tags=["nodes"])
async def recommendations(call: Authenticated) -> EncodedResponse:
    """The work that should move from one node to another, and why."""
    return EncodedResponse(await call.services.nodes.recommendations(requests.ListRecommendations(), call.caller))


# ------------------------------------------------------------------ leases


@router.get("/leases", response_model=views.AllocationList, tags=["leases"])
async def leases(call: Authenticated) -> EncodedResponse:
    """The leases that hold something."""
    return EncodedResponse(await call.services.nodes.allocations(requests.ListLeases(), call.caller))


@router.get("/leases/{name}", response_model=views.AllocationDetail, tags=["leases"])
async def lease(call: Authenticated, name: LeaseName) -> JsonResponse:
    """One lease, alive or ended."""
    return JsonResponse(await call.services.leases.get(requests.GetLease(name), call.caller))


@router.get("/leases/{name}/explain", response_model=views.Explanation, tags=["leases"])
async def explain_lease(call: Authenticated, name: LeaseName) -> JsonResponse:
    """Why a lease waits, why it is there, why it ended, when it will start."""
    return JsonResponse(await call.services.reports.explain(requests.Explain(name, "lease"), call.caller))


@router.post(
    "/leases", response_model=views.AllocationDetail, openapi_extra=takes(requests.RequestLease), tags=["leases"]
)
async def request_lease(call: Authenticated, _key: Key = None) -> JsonResponse:
    """Request resources to hold, without a command. The answer never waits: a lease whose `state` is `asked` is
    queued for `wait_seconds`; look at it again."""
    op = requests.convert(await call.fields_with_id(), requests.RequestLease)
    return JsonResponse(await call.services.leases.request(op, call.caller))


@router.delete("/leases/{name}", response_model=views.AllocationDetail, tags=["leases"])
async def release_lease(call: Authenticated, name: LeaseName) -> JsonResponse:
    """Release a lease; a second time is harmless. Only its owner or the admin may."""
    return JsonResponse(await call.services.leases.release(requests.ReleaseLease(name), call.caller))


@router.post(
    "/leases/{name}/extend",
    response_model=views.AllocationDetail,
    openapi_extra=takes(requests.ExtendLease, "allocation_id"),
    tags=["leases"],
)
async def extend_lease(call: Authenticated, name: LeaseName, _key: Key = None) -> JsonResponse:
    """More time for a lease, counted from its end. Only its owner or the admin may."""
    op = requests.convert({**await call.fields_with_id(), "allocation_id": name}, requests.ExtendLease)
    return JsonResponse(await call.services.leases.extend(op, call.caller))


@router.get("/ledger", response_model=views.LendingReport, tags=["leases"])
async def ledger(
    call: Authenticated,
    since_seconds: Annotated[float, Query(gt=0, le=3.2e9, description="How far back.")] = 30 * 86_400.0,
    by: Annotated[Literal["user", "node", "day"] | None, Query(description="Summed up by this alone.")] = None,
) -> JsonResponse:
    """Who lent whom how much."""
    return JsonResponse(
        await call.services.reports.lending(requests.GetLendingReport(since_seconds, by or ""), call.caller)
    )


# ------------------------------------------------------------------ boosts


@router.get("/boosts", response_model=views.BoostStatus, tags=["boosts"])
async def boosts(
    call: Authenticated, node: Annotated[str, Query(max_length=128, description="Only what is lent to this node.")] = ""
) -> JsonResponse:
    """The boosts that hold something, summed up by type and one by one."""
    return JsonResponse(await call.services.boosts.list(requests.ListBoosts(node), call.caller))


@router.get("/boosts/{name}", response_model=views.BoostDetail, tags=["boosts"])
async def boost(call: Authenticated, name: BoostName) -> JsonResponse:
    """One boost, alive or ended."""
    return JsonResponse(await call.services.boosts.get(requests.GetBoost(name), call.caller))


@router.post("/boosts", response_model=views.BoostDetail, openapi_extra=takes(requests.RequestBoost), tags=["boosts"])
async def request_boost(call: Authenticated, _key: Key = None) -> JsonResponse:
    """Lend a node what another can spare. The answer never waits: a boost that is not `active` yet is queued for
    `wait_seconds`, or is being reserved; look at it again. A dry run has no `boost`."""
    op = requests.convert(await call.fields_with_id(), requests.RequestBoost)
    return JsonResponse(await call.services.boosts.request(op, call.caller))


@router.delete("/boosts/{name}", response_model=views.BoostDetail, tags=["boosts"])
async def release_boost(call: Authenticated, name: BoostName) -> JsonResponse:
    """Release a boost; a second time is harmless. Only its owner or the admin may."""
    return JsonResponse(await call.services.boosts.release(requests.ReleaseBoost(name), call.caller))


@router.post(
    "/boosts/{name}/extend",
    response_model=views.BoostDetail,
    openapi_extra=takes(requests.ExtendBoost, "boost_id"),
    tags=["boosts"],
)
async def extend_boost(call: Authenticated, name: BoostName, _key: Key = None) -> JsonResponse:
    """More time for a boost, counted from its end. Only its owner or the admin may."""
    op = requests.convert({**await call.fields_with_id(), "boost_id": name}, requests.ExtendBoost)
    return JsonResponse(await call.services.boosts.extend(op, call.caller))


# ------------------------------------------------------------------ jobs


@router.get("/jobs", response_model=views.JobList, tags=["jobs"])
async def jobs(
    call: Authenticated,
    state: Annotated[JobState | None, Query(description="Only those.")] = None,
    user: Annotated[str | None, Query(max_length=128, description="Only this user's.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Of those that ended, so many newest.")] = 20,
) -> EncodedResponse:
    """The living jobs, and those that ended last."""
    op = requests.ListJobs(all=True, limit=limit, user=user, state=state)
    return EncodedResponse(await call.services.jobs.list(op, call.caller))


@router.get("/jobs/{name}", response_model=views.JobDetail, tags=["jobs"])
async def job(call: Authenticated, name: JobName) -> JsonResponse:
    """One job, alive or ended."""
    return JsonResponse(await call.services.jobs.get(requests.GetJob(name), call.caller))


@router.get("/jobs/{name}/explain", response_model=views.Explanation, tags=["jobs"])
async def explain_job(call: Authenticated, name: JobName) -> JsonResponse:
    """Why a job waits, why it is there, why it was stopped, when it will start."""
    return JsonResponse(await call.services.reports.explain(requests.Explain(name, "job"), call.caller))


@router.post(
    "/jobs", response_model=views.JobDetail, openapi_extra=takes(requests.SubmitJob, *LOCAL_FIELDS), tags=["jobs"]
)
async def submit_job(call: Authenticated, _key: Key = None) -> JsonResponse:
    """Submit a command. It gets the control plane's clean environment and what `env` adds. Files that fit `fetch` come
    into a directory of the control plane's own."""
    fields = await call.fields_with_id()
    for name in LOCAL_FIELDS:
        if name in fields:
            raise BadInput(f"invalid request: Object contains unknown field `{name}`")
    op = requests.convert({**fields, "env": _environment(fields.get("env"))}, requests.SubmitJob)
    return JsonResponse(await call.services.jobs.submit(op, call.caller))


@router.post("/jobs/{name}/cancel", response_model=views.JobDetail, tags=["jobs"])
async def cancel_job(call: Authenticated, name: JobName) -> JsonResponse:
    """Stop a job for good; a second time is harmless. Only its owner or the admin may."""
    return JsonResponse(await call.services.jobs.cancel(requests.CancelJob(name), call.caller))


@router.get(
    "/jobs/{name}/logs",
    status_code=200,
    response_class=StreamResponse,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The bytes as the job wrote them."}},
    tags=["jobs"],
)
async def read_logs(
    call: Authenticated,
    name: JobName,
    follow: Annotated[bool, Query(description="Go on until the job is over.")] = False,
    stream: Annotated[Literal["stdout", "stderr"], Query()] = "stdout",
    seen: Bytes = 0,
    tail_bytes: Annotated[int | None, Query(ge=0, le=2**62)] = None,
) -> StreamResponse:
    """The output of a job, as it comes; only its owner or the admin may. `seen` is how many bytes a returning reader
    already has; dropped bytes, which a line `[grid: N bytes …]` stands for, count, and that line does not."""
    await call.services.jobs.find_own(name, call.caller)  # an error comes before anything is streamed
    wanted = STDOUT if stream == "stdout" else STDERR
    position = {"stdout_seen" if wanted == STDOUT else "stderr_seen": seen}
    op = requests.ReadLogs(name, follow, tail_bytes, **position)
    return StreamResponse(lambda write: _write_logs(call, op, wanted, write), "application/octet-stream")


async def _write_logs(call: AuthenticatedRequest, op: requests.ReadLogs, wanted: bytes, write: Write) -> None:
    await call.services.jobs.read_logs(op, call.caller, _StreamOutput(wanted, write))


class _StreamOutput:
    """One stream of a job's output; a line in brackets stands for dropped bytes."""

    def __init__(self, wanted: bytes, write: Write) -> None:
        self._wanted = wanted
        self._write = write

    async def send(self, kind: bytes, chunk: bytes) -> None:
        if kind == self._wanted:
            await self._write(chunk)

    async def skip(self, kind: bytes, dropped: int, message: str) -> None:
        await self.send(kind, f"[grid: {message}]\n".encode())

    async def notify(self, notice: JobNotice) -> None:
        """Only the bytes of the job are sent."""


def _environment(given: object) -> object:
    """A clean base and what was given; anything but a mapping is left for the parser to refuse."""
    if not isinstance(given, dict | None):
        return given
    return {**caller_environment({}), **(given or {})}


# ------------------------------------------------------------------ moves


@router.get("/proposals", response_model=views.ProposalList, tags=["moves"])
async def proposals(
    call: Authenticated,
    node: Annotated[str, Query(max_length=128, description="The work of this node; else of all above a mark.")] = "",
) -> JsonResponse:
    """Work that could run elsewhere: by which way, where to, how sure; and why the rest cannot."""
    return JsonResponse(await call.services.offloading.scan(requests.ScanOffload(node), call.caller))


@router.get("/moves", response_model=views.MoveList, tags=["moves"])
async def moves(
    call: Authenticated, ended: Annotated[bool, Query(alias="all", description="Also those that ended.")] = False
) -> JsonResponse:
    """The moves that go on, and with `all` those that have ended last."""
    return JsonResponse(await call.services.offloading.list(requests.ListMoves(ended), call.caller))


@router.get("/moves/{name}", response_model=views.MoveDetail, tags=["moves"])
async def move(call: Authenticated, name: MoveName) -> JsonResponse:
    """One move, over or not."""
    return JsonResponse(await call.services.offloading.get(requests.GetMove(name), call.caller))


@router.post(
    "/moves", response_model=views.MoveDetail, openapi_extra=takes(requests.ExecuteOffload, "move_id"), tags=["moves"]
)
async def execute_move(call: Authenticated, _key: Key = None) -> JsonResponse:
    """Move a job or a process to another node. The answer never waits: look at the move again. Only the owner of the
    work or the admin may."""
    fields = await call.fields_with_id()
    move_id = f"{MOVE_PREFIX}{fields.pop('request_id')}"
    op = requests.convert({"move_id": move_id, **fields}, requests.ExecuteOffload)
    return JsonResponse(await call.services.offloading.execute(op, call.caller))


@router.post("/moves/{name}/cancel", response_model=views.MoveDetail, tags=["moves"])
async def cancel_move(call: Authenticated, name: MoveName) -> JsonResponse:
    """Leave the original as it was; refused once that is too late. Only the owner of the work or the admin may."""
    return JsonResponse(await call.services.offloading.cancel(requests.CancelMove(name), call.caller))


@router.get("/auto-offload", response_model=views.AutoOffloadStatus, tags=["moves"])
async def auto_offload(call: Authenticated) -> JsonResponse:
    """Whether work moves by itself, by whose word, and what the last look decided for each node."""
    return JsonResponse(await call.services.auto_offload.status(requests.GetAutoOffload(), call.caller))


@router.post(
    "/auto-offload",
    response_model=views.AutoOffloadStatus,
    openapi_extra=takes(requests.SetAutoOffload),
    tags=["moves"],
)
async def set_auto_offload(call: Authenticated) -> JsonResponse:
    """Switch automatic offloading on or off whatever the config says, or let the config decide again. Only the admin
    may."""
    op = requests.convert(await call.fields(), requests.SetAutoOffload)
    return JsonResponse(await call.services.auto_offload.set(op, call.caller))


# ------------------------------------------------------------------ events


@router.get(
    "/events",
    status_code=200,
    response_class=StreamResponse,
    responses={200: {"model": views.EventRecord, "description": "One event a line.", "content": {NDJSON: {}, SSE: {}}}},
    tags=["events"],
)
async def events(
    call: Authenticated,
    after: Annotated[int | None, Query(ge=0, le=2**62, description="Only those after this `seq`.")] = None,
    follow: Annotated[bool, Query(description="Go on with what still comes.")] = False,
    subject: Annotated[str | None, Query(max_length=128, description="About this job, lease or node.")] = None,
    types: Annotated[list[str] | None, Query(max_length=50, alias="type")] = None,
    limit: Annotated[int, Query(ge=1, le=1_000_000)] = 100,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    last_event_id: Annotated[str, Header(include_in_schema=False)] = "",
) -> StreamResponse:
    """What happened, oldest first: the newest `limit`, or those after a number."""
    if last_event_id.isdigit() and len(last_event_id) < 19:
        after = int(last_event_id)
    op = requests.ListEvents(after, follow, subject, tuple(types or ()), limit)
    check_event_types(op.types)
    as_sse = SSE in accept
    return StreamResponse(lambda write: _write_events(call, op, as_sse, write), SSE if as_sse else NDJSON)


async def _write_events(call: AuthenticatedRequest, op: requests.ListEvents, as_sse: bool, write: Write) -> None:
    async with contextlib.aclosing(call.services.reports.events(op, call.caller)) as found:
        async for event in found:
            text = json_line(event)
            await write(b"id: %d\nevent: %s\ndata: %s\n" % (event.seq, event.type.encode(), text) if as_sse else text)


# ------------------------------------------------------------------ metrics


@router.get("/metrics/snapshots", response_model=dict[str, Any], tags=["metrics"])
async def snapshots(call: Authenticated) -> JsonResponse:
    """What each node does now."""
    return await _metrics(call, kind="snapshots")


@router.get("/metrics/summary", response_model=dict[str, Any], tags=["metrics"])
async def summary(call: Authenticated) -> JsonResponse:
    """The cluster in a few numbers."""
    return await _metrics(call, kind="summary")


@router.get("/metrics/rebalancing", response_model=dict[str, Any], tags=["metrics"])
async def rebalancing(call: Authenticated) -> JsonResponse:
    """How often the grid was rebalanced of late."""
    return await _metrics(call, kind="rebalancing")


@router.get("/metrics/scheduling", response_model=dict[str, Any], tags=["metrics"])
async def scheduling(call: Authenticated) -> JsonResponse:
    """How well requests were served over the last day."""
    return await _metrics(call, kind="scheduling")


@router.get("/metrics/trend/{name}/{resource_type}", response_model=dict[str, Any], tags=["metrics"])
async def trend(
    call: Authenticated, name: NodeName, resource_type: Literal["cpu", "memory", "gpu"], window: Minutes = None
) -> JsonResponse:
    """Where a node's use of one resource is going."""
    return await _metrics(call, kind="trend", node=name, resource_type=resource_type, window=window)


@router.get("/metrics/history/{name}", response_model=dict[str, Any], tags=["metrics"])
async def history(call: Authenticated, name: NodeName, window: Minutes = None) -> JsonResponse:
    """What a node did, minute by minute."""
    return await _metrics(call, kind="history", node=name, window=window)


@prometheus_router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "The text format of Prometheus."}},
)
async def prometheus(call: Authenticated) -> Response:
    """For Prometheus; scrape it with a bearer token."""
    text = (await call.services.reports.metrics(requests.GetMetrics("prometheus"), call.caller)).text
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


async def _metrics(call: AuthenticatedRequest, **fields: Any) -> JsonResponse:
    return JsonResponse(await call.services.reports.metrics(requests.convert(fields, requests.GetMetrics), call.caller))
