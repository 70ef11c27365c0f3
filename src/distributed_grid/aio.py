"""The names of `distributed_grid` as coroutines: `result = await aio.run("make", cpus=2)`.

`async with aio.borrow(cpus=2) as lease` and `async with aio.pool() as pool` release and close at their end. Cancelling
a task that awaits `run` cancels its job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from distributed_grid.client import jobs
from distributed_grid.client.async_client import AsyncClient, AsyncioTransport
from distributed_grid.client.jobs import AsyncJob, JobUsage, Result
from distributed_grid.client.leases import AsyncLease, PendingLease
from distributed_grid.client.pages import whole_status_async
from distributed_grid.client.transports import named_config, usual_transport

if TYPE_CHECKING:
    from distributed_grid.api.answers.reports import GridStatus
    from distributed_grid.client.job_requests import Command, JobOptions, LeaseOptions
    from distributed_grid.orchestration.distributed_memory_pool import DistributedMemoryPool

__all__ = ["AsyncJob", "AsyncLease", "JobUsage", "Result", "borrow", "pool", "run", "status", "submit"]


def _transport() -> AsyncioTransport:
    usual = usual_transport()
    return AsyncioTransport(AsyncClient(usual.state_dir, named_config(), usual.client), usual.state_dir)


async def run(command: Command, **options: Unpack[JobOptions]) -> Result:
    """As `distributed_grid.run`."""
    return await jobs.run(_transport(), command, options)


async def submit(command: Command, **options: Unpack[JobOptions]) -> AsyncJob:
    """As `distributed_grid.submit`."""
    return await jobs.submit(_transport(), command, options)


def borrow(**options: Unpack[LeaseOptions]) -> PendingLease:
    """As `distributed_grid.borrow`: `async with aio.borrow(cpus=2) as lease`, or `lease = await aio.borrow(cpus=2)`."""
    return PendingLease(_transport(), options)


async def status() -> GridStatus:
    """As `distributed_grid.status`."""
    return await whole_status_async(_transport())


def pool(*, compression: str = "auto") -> DistributedMemoryPool:
    """The memory pool of the grid: `async with aio.pool() as pool`."""
    from distributed_grid.orchestration.distributed_memory_pool import DistributedMemoryPool

    return DistributedMemoryPool(compression=compression)
