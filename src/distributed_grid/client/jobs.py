"""Jobs of Python programs: run, submit, follow, wait, cancel; written once for blocking and asyncio programs.

A job outlives the program that submitted it, unless `run` is interrupted: that cancels it. No msgspec and no asyncio
here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from distributed_grid.api.framing import STDERR, STDOUT
from distributed_grid.client.conversation import present
from distributed_grid.client.job_requests import WAIT_SECONDS, Command, JobRequest, job_request
from distributed_grid.client.transports import log_note
from distributed_grid.errors import GridError, JobFailed, NotFound, TimedOut, Unreachable
from distributed_grid.quantities import parse_seconds

if TYPE_CHECKING:
    from distributed_grid.api.answers.jobs import JobRow
    from distributed_grid.client.conversation import Part
    from distributed_grid.client.job_requests import JobOptions
    from distributed_grid.client.operations import ReadLogsFields
    from distributed_grid.client.transports import Transport
    from distributed_grid.quantities import Span

DELAY_SECONDS = 10.0
"""Wait for the delivery of files that has a problem, before it is left to the control plane."""
POLL_SECONDS = 30.0
"""Longest single wait for the end of a job: a restart of the control plane begins at most one anew."""
MAX_LINE_BYTES = 1 << 20
"""A longer line of output comes in pieces."""
MAX_REASON_CHARS = 200
MAX_SHOWN_BYTES = 80


class JobUsage(NamedTuple):
    """Measured use of the last attempt of a job."""

    cpu_seconds: float
    wall_seconds: float
    max_memory_gb: float


class Result(NamedTuple):
    """The end of a job, with its complete output."""

    job_id: str
    exit_code: int  # as a shell would see it: 128+N after signal N, 124 timed out, 130 cancelled
    outcome: str  # exited, signalled, cancelled, over_limit, timed_out, …
    detail: str | None  # one line with the reason, if there is one
    node: str | None  # of the last attempt
    usage: JobUsage
    stdout_bytes: bytes
    stderr_bytes: bytes
    beside: Mapping[str, str]  # fetched files whose local version was edited and stays: the name of the job's version

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode(errors="replace")

    @property
    def succeeded(self) -> bool:
        return self.outcome == "exited" and self.exit_code == 0

    def check(self) -> Result:
        """The result itself; raises JobFailed unless the command exited with 0."""
        if self.succeeded:
            return self
        end = f"exited with {self.exit_code}" if self.outcome == "exited" else self.outcome.replace("_", " ")
        where = f" on {self.node}" if self.node else ""
        reason = self.detail or self.stderr.rstrip().rpartition("\n")[2][:MAX_REASON_CHARS]
        raise JobFailed(f"{self.job_id} {end}{where}" + (f": {reason}" if reason else ""), self)

    def __repr__(self) -> str:
        shown = {"job_id": self.job_id, "exit_code": self.exit_code, "node": self.node}
        if self.outcome != "exited":
            shown |= {"outcome": self.outcome, "detail": self.detail}
        fields = [f"{name}={value!r}" for name, value in shown.items()]
        for name, output in (("stdout", self.stdout_bytes), ("stderr", self.stderr_bytes)):
            beginning = output[:MAX_SHOWN_BYTES].decode(errors="replace")
            fields.append(f"{name}={beginning!r}{'…' if len(output) > MAX_SHOWN_BYTES else ''}")
        return f"Result({', '.join(fields)})"


class AsyncJob:
    """A job that was submitted; `state` and `node` are as last seen."""

    def __init__(self, transport: Transport, row: JobRow, *, check: bool = False, fetches: bool = False) -> None:
        self._transport = transport
        self._row = row
        self._check = check
        self._fetches = fetches

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.state}>"

    @property
    def id(self) -> str:
        return self._row.job_id

    @property
    def uid(self) -> str:
        """The id that no other job will ever have."""
        return self._row.uid

    @property
    def state(self) -> str:
        return self._row.state

    @property
    def node(self) -> str | None:
        """The node of its last attempt."""
        return self._row.node_id

    async def status(self) -> JobRow:
        """Everything known about the job now."""
        self._row = (await self._transport.get_job(job_id=self.uid)).job
        return self._row

    async def cancel(self) -> None:
        """Stop the job for good; a second time is harmless."""
        self._row = (await self._transport.cancel_job(job_id=self.uid)).job

    async def wait(self, timeout: Span | None = None) -> Result:
        """The result of the job once it has ended; TimedOut where that takes longer, and the job continues."""
        seconds = None if timeout is None else parse_seconds(timeout, "a timeout")
        deadline = None if seconds is None else time.monotonic() + seconds
        while self.state != "ended":
            left = POLL_SECONDS if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                answer = await self._transport.wait_for_job(job_id=self.uid, timeout_seconds=min(left, POLL_SECONDS))
                self._row = answer.job
            except TimedOut:
                if left <= POLL_SECONDS and deadline is not None:
                    raise TimedOut(f"{self.id} has not ended after {seconds:g} s") from None
        return await self.collect()

    async def collect(self) -> Result:
        """Follow the job to its end and collect its output; its files are there by then."""
        output = OutputPosition(self.uid, follow=True)
        streams = {STDOUT: bytearray(), STDERR: bytearray()}
        async for kind, part in self._transport.follow_logs(output.fields):
            stream, chunk = output.receive(kind, part)
            streams[stream] += chunk
        assert output.job is not None, "a stream ends with its last message"
        self._row = output.job
        beside = await self._delivered() if self._fetches else {}
        result = _result_of(self._row, bytes(streams[STDOUT]), bytes(streams[STDERR]), beside)
        return result.check() if self._check else result

    async def _delivered(self) -> Mapping[str, str]:
        """Wait until the files that were wanted are there; Unreachable where they come later."""
        delayed_since = 0.0
        while True:
            answer = await self._transport.wait_for_delivery(job_id=self.uid, timeout_seconds=DELAY_SECONDS)
            delivery = answer.delivery
            assert delivery is not None, "the files of this job were wanted"
            if delivery.state == "delivered":
                return delivery.beside
            if delivery.state == "failed":
                raise NotFound(f"the files of {self.id} were not fetched: {delivery.problem}")
            now = time.monotonic()
            delayed_since = (delayed_since or now) if delivery.problem else 0.0
            if delayed_since and now - delayed_since >= DELAY_SECONDS:
                raise Unreachable(f"the files of {self.id} come when they can be had: {delivery.problem}")

    def logs(self, *, follow: bool = False, stdout: bool = True, stderr: bool = True) -> LogLines:
        """Lines of its output without their ends, as they come; with `follow` until the job has ended."""
        output = OutputPosition(self.uid, follow=follow)
        return LogLines(self._transport.follow_logs(output.fields), output, stdout=stdout, stderr=stderr)


class OutputPosition:
    """Position in the output of a job, across connections; `job` is the job of the last message."""

    def __init__(self, uid: str, *, follow: bool) -> None:
        self._uid = uid
        self._follow = follow
        self._seen = {STDOUT: 0, STDERR: 0}
        self.job: JobRow | None = None

    def fields(self) -> ReadLogsFields:
        stdout_seen, stderr_seen = self._seen[STDOUT], self._seen[STDERR]
        return {"job_id": self._uid, "follow": self._follow, "stdout_seen": stdout_seen, "stderr_seen": stderr_seen}

    def receive(self, kind: bytes, part: Part) -> tuple[bytes, bytes]:
        """Stream and bytes of one part; a line stands for bytes that its node has dropped."""
        if isinstance(part, bytes):
            self._seen[kind] += len(part)
            return kind, part
        if "dropped" in part:
            stream = STDOUT if part.stream == "stdout" else STDERR
            self._seen[stream] += part.dropped
            return stream, f"[grid: {part.message}]\n".encode()
        self.job = part.job
        return STDOUT, b""


class LogLines:
    """Lines of a job's output, each stream by itself."""

    def __init__(
        self, parts: AsyncIterator[tuple[bytes, Part]], output: OutputPosition, *, stdout: bool, stderr: bool
    ) -> None:
        self._parts = parts
        self._output = output
        self._wanted = {STDOUT: stdout, STDERR: stderr}
        self._rest = {STDOUT: b"", STDERR: b""}
        self._lines: deque[str] = deque()
        self._is_over = False

    def __aiter__(self) -> LogLines:
        return self

    async def __anext__(self) -> str:
        while not self._lines:
            if self._is_over:
                raise StopAsyncIteration
            try:
                kind, part = await self._parts.__anext__()
            except StopAsyncIteration:
                self._is_over = True
                self._lines += [line.decode(errors="replace") for line in self._rest.values() if line]
            else:
                self._take(*self._output.receive(kind, part))
        return self._lines.popleft()

    def _take(self, stream: bytes, chunk: bytes) -> None:
        if not self._wanted[stream]:
            return
        *lines, rest = (self._rest[stream] + chunk).split(b"\n")
        while len(rest) > MAX_LINE_BYTES:
            lines.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest[stream] = rest
        self._lines += [line.decode(errors="replace") for line in lines]


async def run(transport: Transport, command: Command, options: JobOptions) -> Result:
    return await run_request(transport, job_request(command, options, wait_seconds=WAIT_SECONDS))


async def submit(transport: Transport, command: Command, options: JobOptions) -> AsyncJob:
    return await submit_request(transport, job_request(command, options, wait_seconds=None))


async def run_request(transport: Transport, request: JobRequest) -> Result:
    """The result of a job; an interrupt meanwhile, or a cancelled task, cancels it."""
    try:
        return await (await submit_request(transport, request)).collect()
    except (Exception, GeneratorExit):
        raise
    except BaseException:  # KeyboardInterrupt, SystemExit, CancelledError
        await transport.withdraw(job=request.uid)
        raise


async def submit_request(transport: Transport, request: JobRequest) -> AsyncJob:
    """Upload the working directory and submit the job; the log says what the user should know."""
    welcome = await transport.greet()
    fields, notes = await transport.run_in_thread(partial(request.upload, transport.state_dir, welcome))
    _log_notes(notes)
    accepted = await (transport.run_in_lease(**fields) if request.lease_node else transport.submit_job(**fields))
    _log_notes([present(accepted.note)])
    return AsyncJob(transport, accepted.job, check=request.check, fetches="fetch" in fields)


def _log_notes(notes: Sequence[str | None]) -> None:
    for note in notes:
        if note:
            log_note(note)


def _result_of(job: JobRow, stdout: bytes, stderr: bytes, beside: Mapping[str, str]) -> Result:
    if job.outcome == "waited_too_long":
        raise TimedOut(f"No resource offers available: {job.detail}")
    if job.outcome == "lost":
        raise GridError(f"{job.job_id} is lost: {job.detail}")
    return Result(
        job_id=job.job_id,
        exit_code=present(job.shell_code) or 0,
        outcome=job.outcome or "",
        detail=job.detail,
        node=job.node_id,
        usage=JobUsage(
            present(job.cpu_seconds) or 0.0, present(job.wall_seconds) or 0.0, present(job.max_memory_gb) or 0.0
        ),
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        beside=beside,
    )
