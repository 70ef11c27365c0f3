"""What can be asked of the grid, whoever asks and through whichever door: the socket and REST both end here.

Rule 1: a deed takes a message of `requests` and who asks, and returns what is shown or raises the refusal.
Rule 2: only the owner of a job or a lease, or an admin, ends or extends it; everybody sees everything.

A job's output as it comes: from the files of its attempts, in order, at the reader's pace.

Bringing back what a job has left in its directory, file by file, at the reader's pace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from msgspec import Struct

from distributed_grid.adapters.workdir.manifest import EXECUTABLE, ManifestEntry
from distributed_grid.api import requests
from distributed_grid.api.framing import STDERR, STDOUT
from distributed_grid.control.attempt_files import AttemptFiles, in_work
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View
from distributed_grid.domain.events import (
    JobCancelled,
    JobSubmitted,
    LeaseAsked,
    LeaseExtended,
    LeaseReleased,
    RequestRefused,
)
from distributed_grid.domain.jobs import Attempt, Command, Ending, Job
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import LeaseEnd, LeaseState
from distributed_grid.errors import GridError, NotFound, Refused, TimedOut, Unreachable
from distributed_grid.reactor import JobAnswer, LeaseAnswer
from distributed_grid.server.access.tokens import Forbidden
from distributed_grid.server.context import DaemonContext
from distributed_grid.server.services.audit import decision_on, stream_events
from distributed_grid.server.services.conversion import request_of
from distributed_grid.server.services.explanation import explain
from distributed_grid.server.services.lending_report import lending_report
from distributed_grid.server.services.lookup import ended_job, find_job, find_lease

OUTPUT_CHUNK_BYTES = 256 * 1024
LOCAL_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 0.2
REMOTE_POLL_SECONDS = 0.05
UNREACHABLE_OUTPUT_SECONDS = 10.0
"""How long the rest of an ended job's output is waited for while its node cannot be reached."""
OutputSink = Callable[[bytes, bytes], Awaitable[None]]
_NAMES = ((STDOUT, b"stdout"), (STDERR, b"stderr"))


class OutputStream:
    """Reads the output of one job's attempts and remembers how far it got.

    `seen` is how many bytes of each kind a reader who comes back has had already.
    """

    def __init__(self, files: AttemptFiles, send: OutputSink, seen: dict[bytes, int]) -> None:
        self._files = files
        self._send = send
        self._seen = seen
        self._read: dict[tuple[str, bytes], int] = {}
        self._tail: int | None = None
        self._over: set[str] = set()

    def skip_to_tail(self, tail_bytes: int) -> None:
        """Begin so many bytes before the end of each attempt's output."""
        self._tail = tail_bytes

    async def pass_on(self, attempts: tuple[Attempt, ...]) -> bool:
        """Send what is new; whether there was anything. Unreachable while an attempt's node is."""
        anything = False
        for attempt in attempts:
            if attempt.lease_id in self._over:
                continue
            for kind, name in _NAMES:
                while chunk := await self._next(attempt, name):
                    anything = True
                    known = min(self._seen[kind], len(chunk))
                    self._seen[kind] -= known
                    if known < len(chunk):
                        await self._send(kind, chunk[known:])
            if attempt.outcome is not None:
                self._over.add(attempt.lease_id)
        return anything

    def is_near(self, attempt: Attempt | None) -> bool:
        """Whether looking costs next to nothing."""
        return attempt is None or self._files.is_here(attempt)

    async def _next(self, attempt: Attempt, name: bytes) -> bytes:
        key = (attempt.lease_id, name)
        from_end = self._tail is not None and key not in self._read
        offset = self._tail or 0 if from_end else self._read.get(key, 0)
        try:
            start, chunk = await self._files.read(attempt, name, offset, OUTPUT_CHUNK_BYTES, from_end=from_end)
        except NotFound:
            return b""
        self._read[key] = start + len(chunk)
        return chunk


async def follow(output: OutputStream, current: Callable[[], Awaitable[Job]], changed: asyncio.Event) -> Job:
    """Pass output on until the job is over and all of it was passed on; the job as it ended.

    While a node cannot be reached its output waits there. Of a job that is over, the rest is waited for a while.
    """
    pause = LOCAL_POLL_SECONDS
    patience = UNREACHABLE_OUTPUT_SECONDS
    while True:
        changed.clear()
        job = await current()
        try:
            anything = await output.pass_on(job.attempts)
        except Unreachable:
            if job.is_over and (patience <= 0 or _is_lost(job)):
                return job
            patience -= MAX_POLL_SECONDS if job.is_over else 0
            await asyncio.sleep(MAX_POLL_SECONDS)
            continue
        if job.is_over:
            return job
        quick = LOCAL_POLL_SECONDS if output.is_near(job.attempt) else REMOTE_POLL_SECONDS
        pause = quick if anything else min(pause * 1.5, MAX_POLL_SECONDS)
        try:
            await asyncio.wait_for(changed.wait(), pause if job.attempt is not None else None)
        except TimeoutError:
            continue


def _is_lost(job: Job) -> bool:
    return job.outcome is not None and job.outcome.ending is Ending.LOST


FILE_CHUNK_BYTES = 4 * 1024 * 1024


class FileSink:
    """What a reader gets: a header for each file, its bytes, and at last the sum."""

    def __init__(
        self, header: Callable[[dict[str, Any]], Awaitable[None]], data: Callable[[bytes], Awaitable[None]]
    ) -> None:
        self.header = header
        self.data = data


async def send_files(files: AttemptFiles, job: Job, patterns: tuple[str, ...], parcel: FileSink) -> dict[str, Any]:
    """Send the files of a job's last attempt that fit; the sum of it. A job that ran in its caller's own directory
    has left them there already."""
    attempt = job.attempts[-1] if job.attempts else None
    if attempt is None or not (attempt.started_at_ms or attempt.outcome is not None):
        raise Refused(f"{job.id} has not run yet")
    if files.is_here(attempt) and job.command.cwd:
        return {"files": 0, "bytes": 0, "in_place": True, "skipped": []}
    found = await files.find(attempt, patterns)
    total = 0
    for entry in found.entries:
        total += await _send_file(files, attempt, entry, parcel)
    return {"files": len(found.entries), "bytes": total, "in_place": False, "skipped": list(found.skipped)}


async def _send_file(files: AttemptFiles, attempt: Attempt, entry: ManifestEntry, parcel: FileSink) -> int:
    """One file as it was listed; of one that has grown meanwhile no more than that."""
    executable = entry.mode == EXECUTABLE
    await parcel.header({"file": entry.path.encode("utf-8", "surrogateescape").hex(), "size": entry.size,
                         "executable": executable})  # fmt: skip
    sent = 0
    while sent < entry.size:
        _, data = await files.read(attempt, in_work(entry), sent, min(FILE_CHUNK_BYTES, entry.size - sent))
        if not data:
            raise NotFound(f"{entry.path!r} became shorter while it was fetched")
        await parcel.data(data)
        sent += len(data)
    return sent


class Caller(Struct, frozen=True):
    """Who asks. An admin may do to everybody's things what their owners may."""

    user: str
    admin: bool = False
    team: str = ""

    def must_own(self, owner: str, what: str) -> None:
        """Refuse who is neither the owner nor an admin."""
        if not self.admin and owner != self.user:
            raise Forbidden(f"{what} belongs to {owner}, not to {self.user}")


def _is_to_come(lease: Lease) -> bool:
    """Whether a plain lease waits for its turn, for others to make room, or for an engine to reserve it."""
    return lease.state in (LeaseState.ASKED, LeaseState.RESERVING)


class JobService:
    """Does what is asked; holds nothing but the house it serves in."""

    def __init__(self, house: DaemonContext) -> None:
        self._house = house

    @property
    def _grid(self) -> Grid:
        return self._house.grid

    async def status(self) -> View:
        return await self._grid.read(self._house.viewer.status)

    async def node(self, name: str) -> View:
        def look(ledger: Ledger, now: int) -> View:
            if name not in ledger.nodes:
                raise NotFound(f"no node is called {name!r}")
            return self._house.viewer.node(ledger, ledger.nodes[name], now)

        return {"node": await self._grid.read(look)}

    async def ask(self, op: requests.RequestLease, caller: Caller) -> View:
        """The lease as it was decided: granted, or still waiting for its turn."""
        answer = await self._ask(op, caller)
        return await self._lease_view(answer.lease, answer)

    async def ask_and_wait(self, op: requests.RequestLease, caller: Caller) -> View:
        """The lease once it is granted; one that nobody waits for any more is given back."""
        answer = await self._ask(op, caller)
        lease = answer.lease
        if not op.dry_run and _is_to_come(lease):
            lease = await self._until_granted(lease.id, caller)
        return await self._lease_view(lease, answer)

    async def _ask(self, op: requests.RequestLease, caller: Caller) -> LeaseAnswer:
        event = LeaseAsked(await self._request(op, caller), op.again)
        answer = await (self._grid.dry_run(event) if op.dry_run else self._grid.handle(event))
        assert isinstance(answer, LeaseAnswer)
        return answer

    async def _lease_view(self, lease: Lease, answer: LeaseAnswer) -> View:
        why, viewer = list(answer.reasons), self._house.viewer
        decision = await decision_on(self._grid, viewer, lease, answer.choice, why, lease.id)
        return {"allocation": viewer.lease(lease), "reasons": why, "decision": decision}

    async def _until_granted(self, lease_id: str, caller: Caller) -> Lease:
        changed = self._grid.watch(lease_id)
        try:
            while True:
                changed.clear()
                lease = await find_lease(self._grid, lease_id)
                if lease.end is LeaseEnd.FAILED:
                    raise Refused(lease.detail)
                if lease.is_over:
                    raise TimedOut(lease.detail)
                if not _is_to_come(lease):
                    return lease
                await changed.wait()
        except asyncio.CancelledError:
            if not self._house.is_leaving:  # the client hung up: nobody would ever give this back
                await asyncio.shield(self._grid.handle(LeaseReleased(lease_id, caller.user, "its client went away")))
            raise
        finally:
            self._grid.unwatch(lease_id, changed)

    async def _request(self, op: requests.RequestLease | requests.SubmitJob, caller: Caller) -> Request:
        """The request in the ledger's units; what is wrong with it is in the audit trail, too, if it was meant."""
        try:
            if not self._house.sharing_enabled:
                raise Refused("Resource sharing not enabled: set resource_sharing.enabled to true in the config")
            return request_of(op, caller.user, caller.team, self._house.custom_resources)
        except GridError as refusal:
            if not op.dry_run:
                await self._grid.handle(RequestRefused(op.request_id, caller.user, str(refusal)))
            raise

    async def lease(self, name: str) -> View:
        """One lease, alive or ended."""
        return {"allocation": self._house.viewer.lease(await find_lease(self._grid, name))}

    async def release(self, op: requests.ReleaseLease, caller: Caller) -> View:
        """Releasing what is over already is harmless."""
        lease = await find_lease(self._grid, op.allocation_id, exact=op.exact)
        caller.must_own(lease.request.user, f"the lease {lease.id}")
        if not lease.is_over:
            try:
                answer = await self._grid.handle(LeaseReleased(lease.id, caller.user))
                assert isinstance(answer, LeaseAnswer)
                lease = answer.lease
            except NotFound:  # it ended by itself a moment ago
                lease = await find_lease(self._grid, lease.id)
        return {"allocation": self._house.viewer.lease(lease)}

    async def extend(self, op: requests.ExtendLease, caller: Caller) -> View:
        lease = await find_lease(self._grid, op.allocation_id)
        caller.must_own(lease.request.user, f"the lease {lease.id}")
        answer = await self._grid.handle(LeaseExtended(lease.id, caller.user, round(1000 * op.seconds)))
        assert isinstance(answer, LeaseAnswer)
        return {"allocation": self._house.viewer.lease(answer.lease)}

    async def submit(self, op: requests.SubmitJob, caller: Caller) -> View:
        command = Command(
            op.argv,
            tuple(sorted(op.env.items())),
            op.cwd,
            round(1000 * op.timeout_seconds),
            round(1000 * op.grace_seconds),
            op.workdir,
            op.given,
        )
        job_id = op.job_id or f"job-{op.request_id[:12]}"
        event = JobSubmitted(job_id, command, await self._request(op, caller), op.retries)
        answer = await (self._grid.dry_run(event) if op.dry_run else self._grid.handle(event))
        assert isinstance(answer, JobAnswer)
        why, viewer = list(answer.reasons), self._house.viewer
        decision = await decision_on(self._grid, viewer, answer.lease, answer.choice, why, answer.job.uid)
        return {"job": viewer.job(answer.job), "reasons": why, "decision": decision}

    async def jobs(self, op: requests.ListJobs) -> View:
        """What goes on, after what ended of late; `all` leaves the ended ones their whole limit."""

        def going_on(ledger: Ledger, now: int) -> list[Job]:
            return [job for job in ledger.jobs.values() if op.user in (None, job.request.user)]

        living = await self._grid.read(going_on)
        room = op.limit if op.all else max(op.limit - len(living), 0)
        ended = [ended_job(row) for row in self._grid.store.ended("job", user=op.user, limit=room)] if room else []
        shown = {job.uid: job for job in (*reversed(ended), *living) if op.state in (None, str(job.state))}
        return {"jobs": [self._house.viewer.job(job) for job in shown.values()]}

    async def job(self, name: str) -> View:
        return {"job": self._house.viewer.job(await find_job(self._grid, name))}

    async def explain(self, op: requests.Explain) -> View:
        """Why it waits, why it is there, why it was stopped, when it will start."""
        return await explain(self._grid, self._house.viewer, op.id, kind=op.kind)

    async def ledger(self, op: requests.GetLendingReport) -> View:
        """Who lent whom how much."""
        since_ms = max(self._grid.now_ms() - round(1000 * op.since_seconds), 1)
        return await lending_report(self._grid, self._house.viewer, since_ms=since_ms, by=op.by)

    async def cancel(self, op: requests.CancelJob, caller: Caller) -> View:
        """Cancelling what is over already is harmless."""
        job = await find_job(self._grid, op.job_id)
        caller.must_own(job.request.user, f"the job {job.id}")
        if not job.is_over:
            try:
                await self._grid.handle(JobCancelled(job.uid, caller.user))
            except NotFound:  # it ended by itself a moment ago
                pass
            job = await find_job(self._grid, job.uid)
        return {"job": self._house.viewer.job(job)}

    async def wait(self, op: requests.WaitForJob) -> View:
        job = await find_job(self._grid, op.job_id)
        try:
            async with asyncio.timeout(op.timeout_seconds):
                job = await self._until_over(job)
        except TimeoutError:
            raise TimedOut(f"{job.id} is still {job.state} after {op.timeout_seconds:g} s") from None
        return {"job": self._house.viewer.job(job)}

    async def _until_over(self, job: Job) -> Job:
        changed = self._grid.watch(job.uid)
        try:
            while not job.is_over:
                changed.clear()
                job = await find_job(self._grid, job.uid)
                if not job.is_over:
                    await changed.wait()
            return job
        finally:
            self._grid.unwatch(job.uid, changed)

    async def logs(self, op: requests.ReadLogs, send: Callable[[bytes, bytes], Awaitable[None]]) -> View:
        """Pass a job's output on, as `(kind, bytes)`; the job as it is, or with `follow` as it ended."""
        job = await find_job(self._grid, op.job_id)

        async def current() -> Job:
            return await find_job(self._grid, job.uid)

        output = OutputStream(self._house.files, send, {STDOUT: op.stdout_seen, STDERR: op.stderr_seen})
        if op.tail_bytes is not None:
            output.skip_to_tail(op.tail_bytes)
        if op.follow:
            changed = self._grid.watch(job.uid)
            try:
                job = await follow(output, current, changed)
            finally:
                self._grid.unwatch(job.uid, changed)
        else:
            await output.pass_on(job.attempts)
        return {"job": self._house.viewer.job(job)}

    async def fetch(self, op: requests.FetchFiles, parcel: FileSink) -> View:
        """Bring back what a job has left; the sum of it."""
        job = await find_job(self._grid, op.job_id)
        return await send_files(self._house.files, job, op.patterns, parcel)

    async def reach(self) -> View:
        """The names of all nodes, and of those on other machines: whoever submits has to know what to ship."""

        def names(ledger: Ledger, now: int) -> View:
            far = [node.name for node in ledger.nodes.values() if node.host != "local"]
            return {"nodes": list(ledger.nodes), "far_nodes": far}

        return await self._grid.read(names)

    def events(self, op: requests.ListEvents) -> AsyncGenerator[View, None]:
        """The audit trail, one event after the other, and with `follow` without an end."""
        return stream_events(self._grid, self._house.viewer, op)
