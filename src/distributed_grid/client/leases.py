"""Leases of Python programs: borrow resources, run commands with them, extend, release; for blocking and asyncio
programs."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Unpack

from distributed_grid.client.job_requests import Command, CommandOptions, command_request, lease_fields
from distributed_grid.client.jobs import AsyncJob, Result, run_request, submit_request
from distributed_grid.client.placement_arguments import check_names, positive_seconds
from distributed_grid.client.transports import log_note
from distributed_grid.errors import GridError, NotFound

if TYPE_CHECKING:
    from types import TracebackType

    from distributed_grid.api.answers.leases import AllocationRow
    from distributed_grid.client.job_requests import JobRequest, LeaseOptions
    from distributed_grid.client.transports import Transport
    from distributed_grid.quantities import Span


class AsyncLease:
    """Resources of one node, held until they are released or their time is over."""

    def __init__(self, transport: Transport, row: AllocationRow) -> None:
        self._transport = transport
        self._row = row

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} on {self.node}>"

    @property
    def id(self) -> str:
        return self._row.allocation_id

    @property
    def node(self) -> str:
        """The node that lends."""
        return self._row.node_id or ""

    @property
    def expires_at(self) -> str | None:
        """The end of the lease in ISO 8601, UTC."""
        return self._row.expires_at

    async def run(self, command: Command, **options: Unpack[CommandOptions]) -> Result:
        """Run a command with what is leased, on its node; one at a time."""
        return await run_request(self._transport, self._request(command, options))

    async def submit(self, command: Command, **options: Unpack[CommandOptions]) -> AsyncJob:
        """The same without waiting; the job is cancelled when the lease ends."""
        return await submit_request(self._transport, self._request(command, options))

    def _request(self, command: Command, options: CommandOptions) -> JobRequest:
        check_names(options, CommandOptions, "option")
        return command_request(command, options, {"allocation_id": self.id}, self.node)

    async def extend(self, seconds: Span) -> None:
        """Give the lease more time, counted from its end."""
        extension = positive_seconds(seconds, "an extension")
        answer = await self._transport.extend_lease(
            request_id=os.urandom(16).hex(), allocation_id=self.id, seconds=extension
        )
        self._row = answer.allocation

    async def release(self) -> None:
        """Release the lease, which cancels a job that runs with it; a second time is harmless."""
        self._row = (await self._transport.release_lease(allocation_id=self.id, exact=True)).allocation

    async def leave(self, error: BaseException | None) -> None:
        """Release the lease at the end of a `with` block; an error of the block is not replaced by another one."""
        try:
            await self.release()
        except NotFound:  # it has ended by itself, long ago
            pass
        except GridError as failure:
            if error is None:
                raise
            log_note(f"lease {self.id} was not released: {failure}")


async def borrow(transport: Transport, options: LeaseOptions) -> AsyncLease:
    """Lease resources, once they are granted; an interrupt meanwhile, or a cancelled task, withdraws the request."""
    fields = lease_fields(options)
    try:
        return AsyncLease(transport, (await transport.request_lease(**fields)).allocation)
    except (Exception, GeneratorExit):
        raise
    except BaseException:  # KeyboardInterrupt, SystemExit, CancelledError
        await transport.withdraw(lease=fields["request_id"])
        raise


class PendingLease:
    """A lease to be requested: awaited, or entered as a context that releases it at its end."""

    def __init__(self, transport: Transport, options: LeaseOptions) -> None:
        self._transport = transport
        self._options = options
        self._lease: AsyncLease | None = None

    def __await__(self) -> Generator[Any, None, AsyncLease]:
        return borrow(self._transport, self._options).__await__()

    async def __aenter__(self) -> AsyncLease:
        self._lease = await self
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._lease is not None
        await self._lease.leave(error)
