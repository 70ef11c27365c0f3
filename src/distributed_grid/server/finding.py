"""Finding what a user means: a job or a lease by its id or any unique prefix, alive or ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from distributed_grid.domain.changes import decode_row
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.errors import Ambiguous, NotFound
from distributed_grid.orchestration.runtime import Grid
from distributed_grid.ports import EndedRow

T = TypeVar("T", Job, Lease)


async def find_job(grid: Grid, name: str) -> Job:
    """The job of this id, uid, or unique prefix of either; living ones before ended ones."""

    def living(ledger: Ledger, now: int) -> dict[str, Job]:
        exact = ledger.jobs.get(ledger.job_uids.get(name, name))
        if exact is not None:
            return {exact.uid: exact}
        return {job.uid: job for job in ledger.jobs.values() if job.id.startswith(name) or job.uid.startswith(name)}

    found = await grid.read(living)
    if not found:
        store = grid.store
        rows = store.ended("job", key=name, limit=1) or store.ended("job", request_id=name, limit=1)
        rows = rows or (store.ended("job", key_prefix=name, limit=5) if name else [])
        found = {job.uid: job for job in map(ended_job, rows)}
    return _only(found, name, "job", lambda job: job.id)


async def find_lease(grid: Grid, name: str) -> Lease:
    """The lease of this id or unique prefix; living ones before ended ones."""

    def living(ledger: Ledger, now: int) -> dict[str, Lease]:
        if name in ledger.leases:
            return {name: ledger.leases[name]}
        return {key: lease for key, lease in ledger.leases.items() if key.startswith(name)}

    found = await grid.read(living)
    if not found:
        rows = grid.store.ended("lease", key=name, limit=1)
        rows = rows or (grid.store.ended("lease", key_prefix=name, limit=5) if name else [])
        found = {lease.id: lease for lease in map(_lease, rows)}
    return _only(found, name, "lease", lambda lease: lease.id)


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
