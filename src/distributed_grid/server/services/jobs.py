"""Jobs: submit, list, wait, cancel, and stream their output and files. Used by the socket and by REST.

Only the owner of a job, or an admin, cancels it, reads its output and fetches its files; others see it without its
texts (`Viewer.for_reader`). Shipped working directories are trimmed in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from msgspec.structs import replace

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.jobs import (
    DeliveryDetail,
    DeliveryRow,
    FetchedFile,
    FetchedFiles,
    FetchedTree,
    FetchRecorded,
    JobDetail,
    JobList,
    JobNotice,
    JobRow,
    LiveJobs,
)
from distributed_grid.api.framing import STDERR, STDOUT
from distributed_grid.control.agent_files import AttemptFiles, in_work
from distributed_grid.control.grid import Grid
from distributed_grid.domain.deliveries import DeliveredFiles, FetchOrder
from distributed_grid.domain.events import FilesFetched, JobCancelled, JobDetached, JobSubmitted
from distributed_grid.domain.jobs import Attempt, Command, Ending, Job
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import JobState
from distributed_grid.errors import GridError, NotFound, Refused, TimedOut, Unreachable
from distributed_grid.reactor import JobAnswer
from distributed_grid.scheduling.queue.reasons import why_not_there
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.answers import AnswerRenderer, EncodedAnswer
from distributed_grid.server.endpoints import READ, USER, endpoint, get, post
from distributed_grid.server.pages import HistoryList, select_page
from distributed_grid.server.prediction.job_runs import JobSizer
from distributed_grid.server.services.job_notices import JobNotices, attempt_line
from distributed_grid.server.services.leases import RequestConverter
from distributed_grid.server.services.records import decision_on, find_delivery, find_job
from distributed_grid.server.workers.output_collector import dropped_message
from distributed_grid.trees.content_store import GRACE_SECONDS, ContentMissing, ContentStore
from distributed_grid.trees.file_selection import FilePatterns
from distributed_grid.trees.manifest import EXECUTABLE, ManifestEntry, decode
from distributed_grid.trees.paths import to_bytes
from distributed_grid.trees.secret_files import is_unremarkable

MAX_PREFERRED_NAMED = 3
MAX_CONTENT_BYTES = 10 * 1024**3
TRIM_SECONDS = 3600.0
log = logging.getLogger(__name__)
OUTPUT_CHUNK_BYTES = 256 * 1024
FILE_CHUNK_BYTES = 4 * 1024 * 1024
LOCAL_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 0.2
REMOTE_POLL_SECONDS = 0.05
UNREACHABLE_OUTPUT_SECONDS = 10.0
"""How long the rest of an ended job's output is waited for while its node cannot be reached."""
LOCAL_FIELDS = ("fetch_to", "overwrite", "umask")
"""Fields of a submission that are about a directory of the control plane's own user."""
_NAMES = ((STDOUT, b"stdout"), (STDERR, b"stderr"))


class OutputSink(Protocol):
    """Receives the output of a job."""

    async def send(self, kind: bytes, chunk: bytes) -> None:
        """The next bytes of stdout or stderr."""

    async def skip(self, kind: bytes, dropped: int, message: str) -> None:
        """The next `dropped` bytes were dropped by their node; a reader counts them as seen."""

    async def notify(self, notice: JobNotice) -> None:
        """A change of the job, or the beginning of an attempt's output (with the number 0)."""


class OutputStream:
    """Reads the output of one job's attempts and remembers how far it got.

    `seen` is how many bytes of each kind a returning reader already has. With `divides` a line stands between the
    output of two attempts; `notices` come as they happen.
    """

    def __init__(
        self,
        files: AttemptFiles,
        sink: OutputSink,
        seen: dict[bytes, int],
        notices: JobNotices | None = None,
        *,
        divides: bool = False,
    ) -> None:
        self._files = files
        self._sink = sink
        self._notices = notices
        self._divides = divides
        self._announced = 1
        self._seen = seen
        self._read: dict[tuple[str, bytes], int] = {}
        self._tail: int | None = None
        self._finished: set[str] = set()

    def skip_to_tail(self, tail_bytes: int) -> None:
        """Begin this many bytes before the end of each attempt's output."""
        self._tail = tail_bytes

    async def send_new(self, job: Job) -> bool:
        """Send new output; True if there was any. Raises Unreachable while an attempt's node is."""
        anything = await self._send_attempts(job, job.attempts[:-1])
        for notice in await self._notices.read_new(job) if self._notices is not None else ():
            self._announced = max(self._announced, notice.attempt)
            await self._sink.notify(notice)
        return await self._send_attempts(job, job.attempts[-1:]) or anything

    async def _announce(self, job: Job, attempt: Attempt) -> None:
        """Divide the output of an attempt from that of the one before."""
        if attempt.number > self._announced and self._divides:
            self._announced = attempt.number
            line = attempt_line(job.id, attempt.number, attempt.node)
            await self._sink.notify(
                JobNotice(
                    seq=0, notice="started", node_id=attempt.node, reason="", attempt=attempt.number, message=line
                )
            )

    async def _send_attempts(self, job: Job, attempts: tuple[Attempt, ...]) -> bool:
        anything = False
        for attempt in attempts:
            if attempt.lease_id in self._finished:
                continue
            for kind, name in _NAMES:
                while part := await self._next(attempt, name):
                    anything = True
                    dropped, chunk = part
                    dropped -= self._count_seen(kind, dropped)
                    if dropped:
                        await self._sink.skip(kind, dropped, dropped_message(name.decode(), dropped))
                    known = self._count_seen(kind, len(chunk))
                    if known < len(chunk):
                        await self._announce(job, attempt)
                        await self._sink.send(kind, chunk[known:])
            if attempt.outcome is not None:
                self._finished.add(attempt.lease_id)
        return anything

    def is_local(self, attempt: Attempt | None) -> bool:
        """Whether its files are on this machine, where reading costs next to nothing."""
        return attempt is None or self._files.is_here(attempt)

    def _count_seen(self, kind: bytes, size: int) -> int:
        """How many of the next bytes the reader has already."""
        known = min(self._seen[kind], size)
        self._seen[kind] -= known
        return known

    async def _next(self, attempt: Attempt, name: bytes) -> tuple[int, bytes] | None:
        """The next bytes, and how many before them were dropped; None where there is nothing new."""
        key = (attempt.lease_id, name)
        from_end = self._tail is not None and key not in self._read
        offset = self._tail or 0 if from_end else self._read.get(key, 0)
        try:
            start, chunk = await self._files.read(attempt, name, offset, OUTPUT_CHUNK_BYTES, from_end=from_end)
        except NotFound:
            return None
        self._read[key] = start + len(chunk) if chunk or from_end else offset
        if not chunk:
            return None
        return 0 if from_end else max(start - offset, 0), chunk


async def follow_output(output: OutputStream, current: Callable[[], Awaitable[Job]], changed: asyncio.Event) -> Job:
    """Send output until the job is over and all of it was sent; returns the ended job.

    While a node cannot be reached its output waits there. Of a job that is over, the rest is waited for a while.
    """
    pause = LOCAL_POLL_SECONDS
    remaining = UNREACHABLE_OUTPUT_SECONDS
    while True:
        changed.clear()
        job = await current()
        try:
            anything = await output.send_new(job)
        except Unreachable:
            is_lost = job.outcome is not None and job.outcome.ending is Ending.LOST
            if job.is_over and (remaining <= 0 or is_lost):
                return job
            remaining -= MAX_POLL_SECONDS if job.is_over else 0
            await asyncio.sleep(MAX_POLL_SECONDS)
            continue
        if job.is_over:
            return job
        quick = LOCAL_POLL_SECONDS if output.is_local(job.attempt) else REMOTE_POLL_SECONDS
        pause = quick if anything else min(pause * 1.5, MAX_POLL_SECONDS)
        try:
            async with asyncio.timeout(pause if job.attempt is not None else None):
                await changed.wait()
        except TimeoutError:
            continue


class FileSink:
    """Receives the files of a job: a header for each, then its bytes."""

    def __init__(
        self, header: Callable[[FetchedTree | FetchedFile], Awaitable[None]], data: Callable[[bytes], Awaitable[None]]
    ) -> None:
        self.header = header
        self.data = data


async def send_files(files: AttemptFiles, job: Job, patterns: tuple[str, ...], sink: FileSink) -> FetchedFiles:
    """Send the files of a job's last attempt that fit and that it has made or changed, after a header about the job;
    the totals. A job that ran in its caller's own directory has left them there already."""
    attempt = job.attempts[-1] if job.attempts else None
    if attempt is None or not (attempt.started_at_ms or attempt.outcome is not None):
        raise Refused(f"{job.id} has not run yet")
    if files.is_here(attempt) and job.command.cwd and not files.was_brought_home(attempt):
        return FetchedFiles(files=0, bytes=0, in_place=True, skipped=[], unchanged=0)
    found = await files.find(attempt, patterns, job.command.workdir)
    await sink.header(FetchedTree(job.id, job.command.workdir))
    entries = [entry for entry in found.entries if not is_unremarkable(tuple(to_bytes(entry.path).split(b"/")))]
    total = 0
    for entry in entries:
        total += await _send_file(files, attempt, entry, sink)
    return FetchedFiles(
        files=len(entries), bytes=total, in_place=False, skipped=list(found.skipped), unchanged=found.unchanged
    )


async def _send_file(files: AttemptFiles, attempt: Attempt, entry: ManifestEntry, sink: FileSink) -> int:
    """One file as it was listed; of one that has grown meanwhile no more than that."""
    name = entry.path.encode("utf-8", "surrogateescape").hex()
    await sink.header(FetchedFile(name, entry.size, executable=entry.mode == EXECUTABLE))
    sent = 0
    while sent < entry.size:
        _, data = await files.read(attempt, in_work(entry), sent, min(FILE_CHUNK_BYTES, entry.size - sent))
        if not data:
            raise NotFound(f"{entry.path!r} became shorter while it was fetched")
        await sink.data(data)
        sent += len(data)
    return sent


def _complete_environment(fields: dict[str, Any]) -> None:
    """Add the clean environment of the control plane to that of a submission by REST; an `env` that is no mapping is
    left for the parser to refuse."""
    from distributed_grid.client.job_payload import caller_environment

    env = fields.get("env")
    if isinstance(env, dict | None):
        fields["env"] = {**caller_environment({}), **(env or {})}


class JobService:
    """Answers the requests about jobs; without a sizer nothing is known of them beforehand."""

    def __init__(
        self,
        grid: Grid,
        viewer: Callable[[], Viewer],
        converter: RequestConverter,
        files: AttemptFiles,
        renderer: AnswerRenderer,
        sizer: JobSizer | None = None,
    ) -> None:
        self._grid = grid
        self._viewer = viewer
        self._renderer = renderer
        self._converter = converter
        self._files = files
        self._sizer = sizer
        self._jobs = HistoryList(
            grid, Job, lambda ledger: ledger.jobs.values(), lambda job: job.submitted_at_ms, newest_first=True
        )

    @endpoint(USER, post("/jobs", "jobs", hidden=LOCAL_FIELDS, adapt=_complete_environment))
    async def submit(self, op: requests.SubmitJob, caller: Caller) -> JobDetail:
        request = replace(await self._converter.convert(op, caller), limits_memory=True)
        event = JobSubmitted(
            id=op.job_id or f"job-{op.request_id[:12]}",
            command=command_of(op, op.env),
            request=request,
            retries=op.retries,
            estimate=await self._sizer.estimate(op, caller.user) if self._sizer is not None else None,
            restartable=op.restartable,
            fetch=fetch_order(op),
        )
        answer = await (self._grid.dry_run(event) if op.dry_run else self._grid.handle(event))
        assert isinstance(answer, JobAnswer)
        viewer = self._viewer().for_reader(caller.reader)
        decision = await decision_on(self._grid, viewer, answer.lease, answer.choice, answer.reasons, answer.job.uid)
        return JobDetail(
            job=JobRow.of(viewer, answer.job),
            reasons=list(answer.reasons),
            decision=decision,
            note=await self._preference_note(request, answer.lease.node if answer.lease is not None else ""),
        )

    async def _preference_note(self, request: Request, node: str) -> str | None:
        """One line where a request is placed on another node than the preferred ones; None where there is nothing to
        say."""
        if not node or not request.prefer or node in request.prefer:
            return None

        def write_note(ledger: Ledger, now: int) -> str:
            names = request.prefer[:MAX_PREFERRED_NAMED]
            preferred = [ledger.nodes[name] for name in names if name in ledger.nodes]
            reasons = [f"{one.name}: {why_not_there(ledger, request, one, now)}" for one in preferred]
            why = f" ({'; '.join(reasons)})" if reasons else ""
            return f"placed on {node} instead of {' or '.join(names)}{why}"

        return await self._grid.read(write_note)

    @endpoint(READ, get("/jobs", "jobs", fixed={"all": True}))
    async def list(self, op: requests.ListJobs, caller: Caller) -> EncodedAnswer[JobList]:
        """A page of the jobs: the living ones, then those that have ended, the newest in the first page and last in
        each page."""

        async def render() -> EncodedAnswer[JobList]:
            states: Counter[str] = Counter()

            def fits(job: Job) -> bool:
                if op.user not in (None, job.request.user):
                    return False
                states[job.state] += 1
                return op.state in (None, job.state)

            wants_ended = op.state in (None, JobState.ENDED)
            async with self._renderer.answer(max_rows=op.limit) as writer:
                page = await self._jobs.page(
                    op.cursor,
                    op.limit,
                    choose=lambda living: self._grid.slices.select(living, fits),
                    fits=(lambda row: True) if wants_ended else None,
                    user=op.user,
                )
                if kept := await self._grid.query(lambda store: store.count_ended("job", user=op.user)):
                    states[JobState.ENDED] = kept
                writer.field("total", states.total())
                writer.field("by_state", dict(states))
                viewer = self._viewer().for_reader(caller.reader)
                return await writer.page(
                    "jobs", page, lambda row: JobRow.listed(viewer, self._jobs.decode(row)), last_first=True
                )

        return await self._renderer.shared(("jobs", op, caller.reader), render)

    @endpoint(READ)
    async def list_live(self, op: requests.ListLiveJobs, caller: Caller) -> LiveJobs:
        """The uids of the caller's jobs that have not ended, the oldest first."""
        own = await self._grid.scan(lambda ledger: ledger.jobs.values(), lambda job: job.request.user == caller.user)
        page = await select_page(
            self._grid.slices,
            own,
            lambda job: (job.submitted_at_ms, job.uid),
            name="live jobs",
            cursor=op.cursor,
            limit=op.limit,
        )
        return LiveJobs([job.uid for job in page.rows], page.next())

    @endpoint(READ, get("/jobs/{name}", "jobs", name="job_id"))
    async def get(self, op: requests.GetJob, caller: Caller) -> JobDetail:
        job = await find_job(self._grid, op.job_id)
        delivery, viewer = await find_delivery(self._grid, job), self._viewer().for_reader(caller.reader)
        return JobDetail(job=JobRow.of(viewer, job), delivery=DeliveryRow.of(viewer, job, delivery))

    async def find_own(self, name: str, caller: Caller) -> Job:
        """A job whose output and files the caller may read; Forbidden where it is somebody else's."""
        job = await find_job(self._grid, name)
        caller.must_own(job.request.user, f"the job {job.id}")
        return job

    @endpoint(USER)
    async def record_fetch(self, op: requests.RecordFetch, caller: Caller) -> FetchRecorded:
        """Record that the files of a job were fetched by hand."""
        job = await self.find_own(op.job_id, caller)
        fetched = FilesFetched(
            job=job.uid,
            job_id=job.id,
            user=caller.user,
            node=job.attempts[-1].node if job.attempts else "",
            patterns=op.patterns,
            delivered=DeliveredFiles(directory=op.directory, files=op.files, bytes=op.bytes),
        )
        await self._grid.handle(fetched)
        return FetchRecorded(job.id)

    @endpoint(READ)
    async def wait_for_delivery(self, op: requests.WaitForDelivery, caller: Caller) -> DeliveryDetail:
        """The delivery of an ended job when it is over, or as it is after the time that was given."""
        job = await self.find_own(op.job_id, caller)
        changed = self._grid.watch(job.uid)
        try:
            async with asyncio.timeout(op.timeout_seconds):
                while not job.is_over or job.uid in self._grid.ledger.deliveries:
                    await changed.wait()
                    changed.clear()
                    job = await find_job(self._grid, job.uid)
        except TimeoutError:
            pass
        finally:
            self._grid.unwatch(job.uid, changed)
        return DeliveryDetail(DeliveryRow.of(self._viewer(), job, await find_delivery(self._grid, job)))

    @endpoint(USER, post("/jobs/{name}/cancel", "jobs", name="job_id"), keeps_config=True)
    async def cancel(self, op: requests.CancelJob, caller: Caller) -> JobDetail:
        """Cancelling a job that has ended is harmless."""
        job = await find_job(self._grid, op.job_id)
        caller.must_own(job.request.user, f"the job {job.id}")
        if not job.is_over:
            try:
                await self._grid.handle(JobCancelled(job.uid, caller.user))
            except NotFound:  # it ended by itself a moment ago
                pass
            job = await find_job(self._grid, job.uid)
        return JobDetail(job=JobRow.of(self._viewer(), job))

    @endpoint(USER)
    async def detach(self, op: requests.DetachJob, caller: Caller) -> JobDetail:
        """Detaching a job that has ended changes nothing."""
        job = await find_job(self._grid, op.job_id)
        caller.must_own(job.request.user, f"the job {job.id}")
        if not job.is_over:
            with contextlib.suppress(NotFound):  # it ended a moment ago
                await self._grid.handle(JobDetached(job.uid, caller.user, op.reason))
            job = await find_job(self._grid, job.uid)
        return JobDetail(job=JobRow.of(self._viewer(), job))

    @endpoint(READ)
    async def wait(self, op: requests.WaitForJob, caller: Caller) -> JobDetail:
        job = await find_job(self._grid, op.job_id)
        changed = self._grid.watch(job.uid)
        try:
            async with asyncio.timeout(op.timeout_seconds):
                while not job.is_over:
                    if self._grid.ledger.jobs.get(job.uid) is job:  # else it has changed since it was read
                        await changed.wait()
                    changed.clear()
                    job = self._grid.recently_ended(job.uid) or await find_job(self._grid, job.uid)
        except TimeoutError:
            raise TimedOut(f"{job.id} is still {job.state} after {op.timeout_seconds:g} s") from None
        finally:
            self._grid.unwatch(job.uid, changed)
        return JobDetail(job=JobRow.of(self._viewer().for_reader(caller.reader), job))

    @endpoint(READ, streams=True)
    async def read_logs(self, op: requests.ReadLogs, caller: Caller, sink: OutputSink) -> JobDetail:
        """Send a job's output; the job as it is, or with `follow` as it ended."""
        job = await self.find_own(op.job_id, caller)

        async def current() -> Job:
            return await find_job(self._grid, job.uid)

        wanted = op.notices_seen is not None
        notices = JobNotices(self._grid, op.notices_seen or 0) if wanted and op.follow else None
        seen = {STDOUT: op.stdout_seen, STDERR: op.stderr_seen}
        output = OutputStream(self._files, sink, seen, notices, divides=wanted)
        if op.tail_bytes is not None:
            output.skip_to_tail(op.tail_bytes)
        if op.follow:
            changed = self._grid.watch(job.uid)
            try:
                job = await follow_output(output, current, changed)
            finally:
                self._grid.unwatch(job.uid, changed)
        else:
            await output.send_new(job)
        return JobDetail(job=JobRow.of(self._viewer(), job))

    @endpoint(READ, streams=True)
    async def fetch_files(self, op: requests.FetchFiles, caller: Caller, sink: FileSink) -> FetchedFiles:
        """Send the files that a job left in its directory; the totals."""
        return await send_files(self._files, await self.find_own(op.job_id, caller), op.patterns, sink)


def command_of(op: requests.SubmitJob | requests.CommandInLease, env: Mapping[str, str]) -> Command:
    return Command(
        argv=op.argv,
        env=tuple(sorted(env.items())),
        cwd=op.cwd,
        timeout_ms=round(1000 * op.timeout_seconds),
        grace_ms=round(1000 * op.grace_seconds),
        workdir=op.workdir,
        given=op.given,
        merge=op.merge,
    )


def fetch_order(op: requests.SubmitJob | requests.CommandInLease) -> FetchOrder | None:
    """The files that a submission wants back; BadInput for a pattern that is none."""
    if not op.fetch:
        return None
    FilePatterns(op.fetch)
    return FetchOrder(op.fetch, op.fetch_to, op.overwrite, op.umask)


async def trim_content_forever(grid: Grid, content: ContentStore, may_delete: Callable[[], bool]) -> None:
    """Trim at once and every hour, until cancelled; not while the wall clock, which the times of files are of, may be
    wrong."""
    while True:
        try:
            if may_delete():
                await trim_content(grid, content)
        except (GridError, OSError) as failure:
            log.warning("could not trim shipped working directories: %s", failure)
        await asyncio.sleep(TRIM_SECONDS)


async def trim_content(
    grid: Grid, content: ContentStore, *, max_bytes: int = MAX_CONTENT_BYTES, grace_seconds: float = GRACE_SECONDS
) -> int:
    """Remove the oldest content beyond `max_bytes`, but nothing that a living job needs; the bytes removed."""

    def manifests_in_use(ledger: Ledger, now: int) -> set[str]:
        used = {job.command.workdir for job in ledger.jobs.values()}
        for move in ledger.moves.values():
            used |= {move.shipped, move.final, move.results}
        used |= {delivery.shipped for delivery in ledger.deliveries.values()}
        return used - {""}

    manifests = await grid.read(manifests_in_use)

    def trim() -> int:
        keep = set(manifests)
        for digest in manifests:
            with contextlib.suppress(ContentMissing), content.open(digest) as file:
                keep.update(decode(file.read()).contents())
        return content.trim(max_bytes, keep=keep, grace_seconds=grace_seconds)

    return await asyncio.to_thread(trim)
