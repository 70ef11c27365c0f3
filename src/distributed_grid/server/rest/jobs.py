"""Jobs: submitted, looked at, followed, cancelled."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query

from distributed_grid.api import requests
from distributed_grid.api.framing import STDERR, STDOUT
from distributed_grid.client.job_payload import caller_environment
from distributed_grid.server.rest.auth import AuthenticatedRequest, Visit, takes
from distributed_grid.server.rest.leases import Key
from distributed_grid.server.rest.models import Explanation, Jobs, OneJob
from distributed_grid.server.rest.responses import Answer, Stream, Write

router = APIRouter(tags=["jobs"])
JobName = Annotated[str, Path(min_length=1, max_length=128, description="A job's id or uid, or any unique prefix.")]
State = Literal["queued", "assigned", "running", "paused", "stopping", "ended"]
Bytes = Annotated[int, Query(ge=0, le=2**62)]


@router.get("/jobs", response_model=Jobs)
async def jobs(
    visitor: Visit,
    state: Annotated[State | None, Query(description="Only those.")] = None,
    user: Annotated[str | None, Query(max_length=128, description="Only this user's.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Of those that ended, so many newest.")] = 20,
) -> Answer:
    """The jobs that are going on, and those that ended of late."""
    return Answer(await visitor.deeds.jobs(requests.ListJobs(all=True, limit=limit, user=user, state=state)))


@router.get("/jobs/{name}", response_model=OneJob)
async def job(visitor: Visit, name: JobName) -> Answer:
    """One job, alive or ended."""
    return Answer(await visitor.deeds.job(name))


@router.get("/jobs/{name}/explain", response_model=Explanation)
async def explain(visitor: Visit, name: JobName) -> Answer:
    """Why a job waits, why it is there, why it was stopped, when it will start."""
    return Answer(await visitor.deeds.explain(requests.Explain(name, "job")))


@router.post("/jobs", response_model=OneJob, openapi_extra=takes(requests.SubmitJob))
async def submit(visitor: Visit, _key: Key = None) -> Answer:
    """Submit a command. It gets the control plane's clean environment and what `env` adds."""
    fields = await visitor.fields_with_id()
    op = requests.convert({**fields, "env": _environment(fields.get("env"))}, requests.SubmitJob)
    return Answer(await visitor.deeds.submit(op, visitor.caller))


@router.post("/jobs/{name}/cancel", response_model=OneJob)
async def cancel(visitor: Visit, name: JobName) -> Answer:
    """Stop a job for good; a second time is harmless. Only its owner or the admin may."""
    return Answer(await visitor.deeds.cancel(requests.CancelJob(name), visitor.caller))


@router.get(
    "/jobs/{name}/logs",
    status_code=200,
    response_class=Stream,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The bytes as the job wrote them."}},
)
async def logs(
    visitor: Visit,
    name: JobName,
    follow: Annotated[bool, Query(description="Go on until the job is over.")] = False,
    stream: Annotated[Literal["stdout", "stderr"], Query()] = "stdout",
    seen: Bytes = 0,
    tail_bytes: Annotated[int | None, Query(ge=0, le=2**62)] = None,
) -> Stream:
    """The output of a job, as it comes. `seen` is how many bytes a reader who comes back has had already."""
    await visitor.deeds.job(name)  # a job that is not there is told before anything is streamed
    wanted = STDOUT if stream == "stdout" else STDERR
    place = {"stdout_seen" if wanted == STDOUT else "stderr_seen": seen}
    op = requests.ReadLogs(name, follow, tail_bytes, **place)
    return Stream(lambda write: _pass_on(visitor, op, wanted, write), "application/octet-stream")


async def _pass_on(visitor: AuthenticatedRequest, op: requests.ReadLogs, wanted: bytes, write: Write) -> None:
    async def send(kind: bytes, chunk: bytes) -> None:
        if kind == wanted:
            await write(chunk)

    await visitor.deeds.logs(op, send)


def _environment(given: object) -> object:
    """A clean base and what was given; something that is no mapping is left to be refused."""
    if not isinstance(given, dict | None):
        return given
    return {**caller_environment({}), **(given or {})}
