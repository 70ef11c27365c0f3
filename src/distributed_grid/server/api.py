"""How each message of the socket is answered: one short method each, named by `requests`."""

from __future__ import annotations

import asyncio
import getpass
import os
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from distributed_grid import __version__
from distributed_grid.domain.events import (
    JobCancelled,
    JobSubmitted,
    LeaseAsked,
    LeaseExtended,
    LeaseReleased,
    RequestRefused,
)
from distributed_grid.domain.jobs import Command
from distributed_grid.domain.jobs import Job as JobRow
from distributed_grid.domain.leases import Request
from distributed_grid.domain.resources import Priority
from distributed_grid.errors import GridError, NotFound, ProtocolError, Refused, TimedOut
from distributed_grid.orchestration.asking import amounts_of
from distributed_grid.orchestration.protocol import PROTOCOL, STDERR, STDOUT
from distributed_grid.orchestration.runtime import Grid
from distributed_grid.orchestration.views import Viewer
from distributed_grid.reactor import JobAnswer, LeaseAnswer
from distributed_grid.server import requests
from distributed_grid.server.audit import send_events
from distributed_grid.server.connection import Connection
from distributed_grid.server.finding import ended_job, find_job, find_lease
from distributed_grid.server.follow import Output, follow


class House(Protocol):
    """What the API needs to know of the daemon around it."""

    @property
    def grid(self) -> Grid: ...
    @property
    def viewer(self) -> Viewer: ...
    def info(self) -> dict[str, Any]: ...
    def config_view(self) -> dict[str, Any]: ...
    @property
    def sharing_enabled(self) -> bool: ...
    @property
    def custom_resources(self) -> frozenset[str]: ...
    @property
    def jobs_dir(self) -> Any: ...
    async def greet(self, hello: requests.Hello) -> bool:
        """Whether this daemon hands over to another; raises where the client cannot be served."""

    def stay(self, wanted: bool) -> None:
        """Go away when idle, or not; a successor after a crash or a hand-over does the same."""

    @property
    def is_leaving(self) -> bool:
        """Whether connections end because the daemon does, so that clients will come back."""

    def end(self) -> None:
        """Begin to stop."""


class Api:
    """Answers messages; holds nothing but the house it serves in."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._user = _login()
        self._handlers: dict[type, Callable[[Connection, Any], Awaitable[None]]] = {
            requests.Hello: self._hello,
            requests.Status: self._status,
            requests.Info: self._info,
            requests.Config: self._config,
            requests.Ask: self._ask,
            requests.Release: self._release,
            requests.Extend: self._extend,
            requests.Submit: self._submit,
            requests.Jobs: self._jobs,
            requests.Job: self._job,
            requests.Cancel: self._cancel,
            requests.Wait: self._wait,
            requests.Logs: self._logs,
            requests.Events: self._events,
            requests.Stay: self._stay,
            requests.Stop: self._stop,
        }

    async def serve(self, client: Connection, body: bytes) -> None:
        """Answer one message; what is wrong with it is raised."""
        op = requests.parse(body)
        await self._handlers[type(op)](client, op)

    @property
    def _grid(self) -> Grid:
        return self._house.grid

    async def _hello(self, client: Connection, op: requests.Hello) -> None:
        handing_over = await self._house.greet(op)
        if op.protocol != PROTOCOL and not handing_over:
            raise ProtocolError(
                f"this control plane speaks protocol {PROTOCOL}, not {op.protocol}: upgrade the older side"
            )
        client.send({"protocol": PROTOCOL, "version": __version__, "pid": os.getpid(), "handing_over": handing_over})

    async def _status(self, client: Connection, op: requests.Status) -> None:
        client.send(await self._grid.read(self._house.viewer.status))

    async def _info(self, client: Connection, op: requests.Info) -> None:
        client.send(self._house.info())

    async def _config(self, client: Connection, op: requests.Config) -> None:
        client.send(self._house.config_view())

    async def _ask(self, client: Connection, op: requests.Ask) -> None:
        event = LeaseAsked(await self._request(op, op.duration_seconds, op.target))
        answer = await (self._grid.dry_run(event) if op.dry_run else self._grid.handle(event))
        assert isinstance(answer, LeaseAnswer)
        lease = answer.lease
        if not op.dry_run and lease.request.wait_ms and not lease.holds and not lease.is_over:
            lease = await self._until_granted(lease.id)
        client.send({"allocation": self._house.viewer.lease(lease), "reasons": list(answer.reasons)})

    async def _until_granted(self, lease_id: str) -> Any:
        changed = self._grid.watch(lease_id)
        try:
            while True:
                changed.clear()
                lease = await find_lease(self._grid, lease_id)
                if lease.is_over:
                    raise TimedOut(lease.detail)
                if lease.holds and not lease.awaits:
                    return lease
                await changed.wait()
        except asyncio.CancelledError:
            if not self._house.is_leaving:  # the client hung up: nobody would ever give this back
                await asyncio.shield(self._grid.handle(LeaseReleased(lease_id, self._user, "its client went away")))
            raise
        finally:
            self._grid.unwatch(lease_id, changed)

    async def _request(
        self, op: requests.Ask | requests.Submit, duration_seconds: float = 0.0, target: str = ""
    ) -> Request:
        """The request in the ledger's units; what is wrong with it is in the audit trail, too."""
        try:
            return self._translated(op, duration_seconds, target)
        except GridError as refusal:
            await self._grid.handle(RequestRefused(op.request_id, self._user, str(refusal)))
            raise

    def _translated(self, op: requests.Ask | requests.Submit, duration_seconds: float, target: str) -> Request:
        if not self._house.sharing_enabled:
            raise Refused("Resource sharing not enabled: set resource_sharing.enabled to true in the config")
        ask = amounts_of(op.resource_type, op.amount, self._house.custom_resources)
        return Request(
            op.request_id,
            self._user,
            ask,
            Priority.parse(op.priority),
            op.prefer,
            op.require,
            round(1000 * op.wait_seconds),
            round(1000 * duration_seconds),
            target,
        )

    async def _release(self, client: Connection, op: requests.Release) -> None:
        try:
            answer = await self._grid.handle(LeaseReleased(op.allocation_id, self._user))
        except NotFound:  # a prefix, or one that is over already: releasing twice is harmless
            lease = await find_lease(self._grid, op.allocation_id)
            if not lease.is_over:
                answer = await self._grid.handle(LeaseReleased(lease.id, self._user))
            else:
                answer = LeaseAnswer(lease)
        assert isinstance(answer, LeaseAnswer)
        client.send({"allocation": self._house.viewer.lease(answer.lease)})

    async def _extend(self, client: Connection, op: requests.Extend) -> None:
        lease = await find_lease(self._grid, op.allocation_id)
        answer = await self._grid.handle(LeaseExtended(lease.id, self._user, round(1000 * op.seconds)))
        assert isinstance(answer, LeaseAnswer)
        client.send({"allocation": self._house.viewer.lease(answer.lease)})

    async def _submit(self, client: Connection, op: requests.Submit) -> None:
        command = Command(
            op.argv,
            tuple(sorted(op.env.items())),
            op.cwd,
            round(1000 * op.timeout_seconds),
            round(1000 * op.grace_seconds),
        )
        job_id = op.job_id or f"job-{op.request_id[:12]}"
        event = JobSubmitted(job_id, command, await self._request(op), op.retries)
        answer = await (self._grid.dry_run(event) if op.dry_run else self._grid.handle(event))
        assert isinstance(answer, JobAnswer)
        client.send({"job": self._house.viewer.job(answer.job), "reasons": list(answer.reasons)})

    async def _jobs(self, client: Connection, op: requests.Jobs) -> None:
        living = await self._grid.read(lambda ledger, now: list(ledger.jobs.values()))
        room = op.limit if op.all else max(op.limit - len(living), 0)
        ended = [ended_job(row) for row in self._grid.store.ended("job", limit=room)] if room else []
        shown = {job.uid: job for job in (*reversed(ended), *living)}
        client.send({"jobs": [self._house.viewer.job(job) for job in shown.values()]})

    async def _job(self, client: Connection, op: requests.Job) -> None:
        client.send({"job": self._house.viewer.job(await find_job(self._grid, op.job_id))})

    async def _cancel(self, client: Connection, op: requests.Cancel) -> None:
        job = await find_job(self._grid, op.job_id)
        if not job.is_over:
            try:
                await self._grid.handle(JobCancelled(job.uid, self._user))
            except NotFound:  # it ended by itself a moment ago
                pass
            job = await find_job(self._grid, job.uid)
        client.send({"job": self._house.viewer.job(job)})

    async def _wait(self, client: Connection, op: requests.Wait) -> None:
        job = await find_job(self._grid, op.job_id)
        try:
            async with asyncio.timeout(op.timeout_seconds):
                job = await self._until_over(job)
        except TimeoutError:
            raise TimedOut(f"{job.id} is still {job.state} after {op.timeout_seconds:g} s") from None
        client.send({"job": self._house.viewer.job(job)})

    async def _until_over(self, job: JobRow) -> JobRow:
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

    async def _logs(self, client: Connection, op: requests.Logs) -> None:
        job = await find_job(self._grid, op.job_id)

        async def send(kind: bytes, chunk: bytes) -> None:
            client.send_frame(kind, chunk)
            await client.drain()

        async def current() -> JobRow:
            return await find_job(self._grid, job.uid)

        output = Output(self._house.jobs_dir, send, {STDOUT: op.stdout_seen, STDERR: op.stderr_seen})
        if op.tail_bytes is not None:
            output.skip_to_tail(job.attempts, op.tail_bytes)
        if op.follow:
            changed = self._grid.watch(job.uid)
            try:
                job = await follow(output, current, changed)
            finally:
                self._grid.unwatch(job.uid, changed)
        else:
            await output.pass_on(job.attempts)
        client.send({"job": self._house.viewer.job(job), "done": True})

    async def _events(self, client: Connection, op: requests.Events) -> None:
        await send_events(self._grid, self._house.viewer, client, op)

    async def _stay(self, client: Connection, op: requests.Stay) -> None:
        self._house.stay(True)
        client.send(self._house.info())

    async def _stop(self, client: Connection, op: requests.Stop) -> None:
        self._house.stay(False)
        client.send({"stopping": True})
        self._house.end()


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())
