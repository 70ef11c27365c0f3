"""Advice to move work off a node: which job, and where to. Nothing is moved here.

A job is only sent where it may run, fits and can be spared room. Evening out never reverses the order of two nodes, so
that nobody advises the way back. Advice stands until its cause is clearly over, or its job or target is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from msgspec.structs import replace

from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.rebalancing import SPREAD, WATCHED_RESOURCES, Advice, claimed_amount
from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.states import JobState, LeaseState
from distributed_grid.scheduling.placement.placement import find_placement
from distributed_grid.scheduling.rebalancing.loans import UNITS, describe, surplus, surpluses, total_of
from distributed_grid.scheduling.rebalancing.pressure import PressureScan, percent

MAX_JOBS = 20
"""Jobs of a node that are tried."""
MAX_TARGETS = 32
"""Nodes with room that are compared, least loaded first."""


def advice_for(scan: PressureScan, node: str, cause: str) -> Advice | None:
    """The best recommendation for a node, or None where nothing can be moved anywhere."""
    places = list(scan.lenders(node))
    for job, lease in _movable(scan, node, cause):
        for to in places:
            if (cause != SPREAD or _evens_out(scan, lease, to)) and _can_go(scan, job, lease, to):
                reason = f"{_why(scan, node, to, cause)}; job {job.id} holds {_held(lease, cause)}"
                return Advice(str(cause), job.uid, to, reason, scan.now)
    if cause == SPREAD or not scan.borrows_for_machine(node):
        return None
    resource = ResourceType(cause)
    room, to = max(islice(surpluses(scan, node, resource, UNITS[resource]), MAX_TARGETS), default=(0, ""))
    if not room:
        return None
    return Advice(str(cause), "", to, f"{_why(scan, node, to, cause)}, {describe(resource, room)} to spare", scan.now)


def still_applies(scan: PressureScan, node: str, advice: Advice) -> bool:
    """Whether advice is still valid."""
    reading = scan.reading(node)
    if not scan.has_headroom(advice.to) or reading.score is None:
        return False
    if advice.job:
        job = scan.ledger.jobs.get(advice.job)
        if job is None or job.attempt is None or job.attempt.node != node:
            return False
    if advice.cause == SPREAD:
        distance = reading.score - (scan.reading(advice.to).score or 0)
        return scan.rules.evens_out and distance > scan.rules.policy.spread_milli // 2
    resource = ResourceType(advice.cause)
    level = reading.level(resource)
    if level is None:
        return False
    return level > scan.rules.watermarks(resource).middle or scan.will_be_above(node, resource)


def _movable(scan: PressureScan, node: str, cause: str) -> Iterator[tuple[Job, Lease]]:
    """The jobs that run on a node and would relieve it: the least important first, then the largest."""
    found = []
    for lease in scan.ledger.leases_of(node):
        job = scan.ledger.jobs.get(lease.job)
        if job is None or job.state is not JobState.RUNNING or lease.state is not LeaseState.ACTIVE or lease.gang:
            continue
        size = _shift(scan, lease, node) if cause == SPREAD else claimed_amount(lease, ResourceType(cause))
        if size:
            found.append((int(lease.request.priority), -size, job.uid, job, lease))
    for *_, job, lease in sorted(found, key=lambda entry: entry[:3])[:MAX_JOBS]:
        yield job, lease


def _can_go(scan: PressureScan, job: Job, lease: Lease, to: str) -> bool:
    """Whether a job may run on a node that has room for it and can spare that."""
    request = job.request
    if request.require and to not in request.require:
        return False
    if any(
        claimed_amount(lease, resource) > surplus(scan, to, resource)
        for resource in WATCHED_RESOURCES
        if claimed_amount(lease, resource)
    ):
        return False
    return find_placement(scan.ledger, replace(request, require=(to,), prefer=())) is not None


def _evens_out(scan: PressureScan, lease: Lease, to: str) -> bool:
    """Whether two nodes differ much, and the one that gives still works at least as hard after the move."""
    gives, takes = scan.reading(lease.node).score or 0, scan.reading(to).score or 0
    if gives - takes <= scan.rules.policy.spread_milli:
        return False
    return takes + _shift(scan, lease, to) <= gives - _shift(scan, lease, lease.node)


def _shift(scan: PressureScan, lease: Lease, node: str) -> int:
    """How much of a node a lease is at most, in thousandths."""
    capacity = scan.ledger.nodes[node].capacity
    parts = ((claimed_amount(lease, resource), total_of(capacity, resource)) for resource in WATCHED_RESOURCES)
    return max((1000 * size // total if total else 1000 for size, total in parts if size), default=0)


def _held(lease: Lease, cause: str) -> str:
    kinds = WATCHED_RESOURCES if cause == SPREAD else (ResourceType(cause),)
    return ", ".join(describe(kind, claimed_amount(lease, kind)) for kind in kinds if claimed_amount(lease, kind))


def _why(scan: PressureScan, node: str, to: str, cause: str) -> str:
    here, there = scan.reading(node), scan.reading(to)
    if cause == SPREAD:
        most = percent(scan.rules.policy.spread_milli)
        return f"{node} works at {percent(here.score or 0)}, {to} at {percent(there.score or 0)}, may differ by {most}"
    resource = ResourceType(cause)
    high = scan.rules.watermarks(resource).high
    level, other = here.level(resource) or 0, there.level(resource)
    if level <= high and (ahead := here.ahead(resource)) is not None:
        words = f"{resource} at {percent(level)}, expected at {percent(ahead.level)}"
    else:
        words = f"{resource} at {percent(level)}"
    return f"{words}, above the mark of {percent(high)}; {to} is at {percent(other or 0)}"
