"""The grid for Python programs: `import distributed_grid as grid`, then `grid.run("make", cpus=2)`.

Plain calls that block, safe in any thread and inside a running event loop; `distributed_grid.aio` has the same names
as coroutines. They use the grid that a command typed in the same place would use: of `GRID_STATE_DIR` and
`GRID_CONFIG`, else the running one, else the one of a config at the usual places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self, Unpack

from distributed_grid.client import jobs, leases
from distributed_grid.client.jobs import AsyncJob, JobUsage, Result
from distributed_grid.client.leases import AsyncLease
from distributed_grid.client.pages import whole_status_async
from distributed_grid.client.transports import complete, iterate, named_config, usual_transport

if TYPE_CHECKING:
    from types import TracebackType

    from distributed_grid.api.answers.jobs import JobRow
    from distributed_grid.api.answers.reports import GridStatus
    from distributed_grid.client.job_requests import Command, CommandOptions, JobOptions, LeaseOptions
    from distributed_grid.client.memory.pool import MemoryPool
    from distributed_grid.quantities import Span

__all__ = ["JobHandle", "JobUsage", "LeaseHandle", "Result", "borrow", "pool", "run", "status", "submit"]


def run(command: Command, **options: Unpack[JobOptions]) -> Result:
    """Borrow resources, run a command with them, give them back; the result of the command with its output.

    The command is a list of words, or one string that is split into words as a shell would (`shell=True`: a string for
    `sh -c`). Ctrl-C cancels it. A command that fails raises nothing, unless `check=True`: then JobFailed, which has the
    `result`. Refused where no node may ever run it, TimedOut where the wait for resources was in vain.

    resources    cpus (1), mem ("4G", "512M", or GB), gpus, also={"tpu": 1}, gpu_models, gpu_memory_gb
    place        node (preferred; with strategy="node_specific" required), strategy, labels, required_nodes, group,
                 affinity, anti_affinity, target_node (the node whose work it is)
    time         wait (300 s for resources), timeout ("1h30m" or seconds), grace (5 s), expects, deadline, priority
    command      shell, check, env, workdir, isolated, ship, fetch, overwrite, retries, restartable, job_id
    """
    return complete(jobs.run(usual_transport(), command, options))


def submit(command: Command, **options: Unpack[JobOptions]) -> JobHandle:
    """Submit a command as a job and return at once; the options are those of `run`. It waits for resources without
    limit, unless `wait` is given."""
    return JobHandle(complete(jobs.submit(usual_transport(), command, options)))


def borrow(**options: Unpack[LeaseOptions]) -> LeaseHandle:
    """Lease resources, once they are granted; `with grid.borrow(cpus=2) as lease:` releases them at its end.

    The options are those of `run` for resources, place and time, and `duration` (an hour): when the lease ends by
    itself.
    """
    return LeaseHandle(complete(leases.borrow(usual_transport(), options)))


def status() -> GridStatus:
    """Nodes, offers, leases and recommendations, all of them; 200 jobs at most, and the number in each state."""
    return complete(whole_status_async(usual_transport()))


def pool(*, compression: str = "auto") -> MemoryPool:
    """The memory pool of the grid, connected; `with grid.pool() as pool` closes it."""
    from distributed_grid.client.memory.directory import BlockDirectoryClient, agent_directory
    from distributed_grid.client.memory.pool import MemoryPool  # with its data plane, which few programs need

    transport = usual_transport()
    local = agent_directory(transport.state_dir, has_config=named_config().explicit)
    return MemoryPool(local or BlockDirectoryClient(transport.client), compression=compression).connected()


class JobHandle:
    """A job that was submitted. Its properties ask the grid each time."""

    def __init__(self, job: AsyncJob) -> None:
        self._job = job

    def __repr__(self) -> str:
        return f"<JobHandle {self.id}>"

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def uid(self) -> str:
        """The id that no other job will ever have."""
        return self._job.uid

    @property
    def state(self) -> str:
        """queued, assigned, running, paused, stopping or ended."""
        return self._refreshed().state

    @property
    def node(self) -> str | None:
        """The node of its last attempt; None before the first."""
        return self._refreshed().node

    def _refreshed(self) -> AsyncJob:
        if self._job.state != "ended":
            complete(self._job.status())
        return self._job

    def status(self) -> JobRow:
        """Everything known about the job now."""
        return complete(self._job.status())

    def wait(self, timeout: Span | None = None) -> Result:
        """The result of the job once it has ended; TimedOut where that takes longer, and the job continues."""
        return complete(self._job.wait(timeout))

    def logs(self, *, follow: bool = False, stdout: bool = True, stderr: bool = True) -> Iterator[str]:
        """Lines of its output without their ends, as they come; with `follow` until the job has ended."""
        return iterate(self._job.logs(follow=follow, stdout=stdout, stderr=stderr))

    def cancel(self) -> None:
        """Stop the job for good; a second time is harmless."""
        complete(self._job.cancel())


class LeaseHandle:
    """Resources of one node, held until they are released or their time is over."""

    def __init__(self, lease: AsyncLease) -> None:
        self._lease = lease

    def __repr__(self) -> str:
        return f"<LeaseHandle {self.id} on {self.node}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        complete(self._lease.leave(error))

    @property
    def id(self) -> str:
        return self._lease.id

    @property
    def node(self) -> str:
        """The node that lends."""
        return self._lease.node

    @property
    def expires_at(self) -> str | None:
        """The end of the lease in ISO 8601, UTC."""
        return self._lease.expires_at

    def run(self, command: Command, **options: Unpack[CommandOptions]) -> Result:
        """Run a command with what is leased, on its node; one at a time."""
        return complete(self._lease.run(command, **options))

    def submit(self, command: Command, **options: Unpack[CommandOptions]) -> JobHandle:
        """The same without waiting; the job is cancelled when the lease ends."""
        return JobHandle(complete(self._lease.submit(command, **options)))

    def extend(self, seconds: Span) -> None:
        """Give the lease more time, counted from its end."""
        complete(self._lease.extend(seconds))

    def release(self) -> None:
        """Release the lease, which cancels a job that runs with it; a second time is harmless."""
        complete(self._lease.release())
