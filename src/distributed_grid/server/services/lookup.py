"""Finding what a user means: a job or a lease by its id or any unique prefix, alive or ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from distributed_grid.control.grid import Grid
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import decode_row
from distributed_grid.errors import Ambiguous, NotFound
from distributed_grid.ports import EndedRow

T = TypeVar("T", Job, Lease)


async def find_job(grid: Grid, name: str) -> Job:
    """The job of this id or uid, alive or ended; else of this unique prefix, living ones before ended ones."""

    def exact(ledger: Ledger, now: int) -> Job | None:
        return ledger.jobs.get(ledger.job_uids.get(name, name))

    def beginning(ledger: Ledger, now: int) -> list[Job]:
        return [job for job in ledger.jobs.values() if job.id.startswith(name) or job.uid.startswith(name)]

    job = await grid.read(exact)
    if job is not None:
        return job
    store = grid.store
    rows = store.ended("job", key=name, limit=1) or store.ended("job", request_id=name, limit=1)
    found = [ended_job(row) for row in rows] or await grid.read(beginning)
    if not found and name:
        found = [ended_job(row) for row in store.ended("job", key_prefix=name, limit=5)]
    return _only({job.uid: job for job in found}, name, "job", lambda job: job.id)


async def find_lease(grid: Grid, name: str, *, exact: bool = False) -> Lease:
    """The lease of this id, alive or ended; else of this unique prefix, living ones before ended ones."""

    def beginning(ledger: Ledger, now: int) -> list[Lease]:
        return [lease for key, lease in ledger.leases.items() if key.startswith(name) and not exact]

    lease = await grid.read(lambda ledger, now: ledger.leases.get(name))
    if lease is not None:
        return lease
    store = grid.store
    found = [_lease(row) for row in store.ended("lease", key=name, limit=1)] or await grid.read(beginning)
    if not found and name and not exact:
        found = [_lease(row) for row in store.ended("lease", key_prefix=name, limit=5)]
    return _only({lease.id: lease for lease in found}, name, "lease", lambda lease: lease.id)


def ended_job(row: EndedRow) -> Job:
    """The job as it ended."""
    job = decode_row("job", row.blob)
    assert isinstance(job, Job)
    return job


def _lease(row: EndedRow) -> Lease:
    lease = decode_row("lease", row.blob)
    assert isinstance(lease, Lease)
    return lease


def _only(found: dict[str, T], name: str, what: str, shown: Callable[[T], str]) -> T:
    if not found:
        raise NotFound(f"no {what} is called {name!r}")
    if len(found) > 1:
        candidates = sorted(shown(one) for one in found.values())
        raise Ambiguous(f"{name!r} fits several: {', '.join(candidates[:5])}", candidates)
    return next(iter(found.values()))
