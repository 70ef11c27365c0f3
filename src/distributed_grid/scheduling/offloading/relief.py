"""Relief of nodes above the thresholds of `auto_offload`: which job goes where, or why none does; and degraded nodes.

A job is moved only if its user has said that it may be started again (it marks checkpoints, or was declared
restartable), if another node can spare what it holds and stays below its own thresholds, if that pays
(`job_ways.py`), and at most once an hour. What would have to be done again is least with the first one that is tried.
Why nothing was moved is an answer, too: each look at a node ends with a reason.

A node that is short of memory while nothing there can go elsewhere is degraded: it gets no new work, its `low` jobs
stand still, and blocks of the memory pool go to disk, until its memory has been below the low mark at two looks. One
job at least goes on: memory that only standing jobs hold never comes free.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MAX_CONSIDERED, Considered, DegradedNode, OffloadWatch, Way
from distributed_grid.domain.rebalancing import (
    GRID_USER,
    SPREAD,
    WATCHED_RESOURCES,
    SharingMode,
    claimed_amount,
)
from distributed_grid.domain.resources import Priority, ResourceType
from distributed_grid.domain.states import JobState, LeaseState
from distributed_grid.number_text import plain_number
from distributed_grid.scheduling.offloading.job_ways import loss_milli, lost_work_ms, profit_of, way_of
from distributed_grid.scheduling.offloading.offload_scan import (
    HOUR_MS,
    OffloadScan,
    describe_pressure,
    high_mark,
    low_mark,
)
from distributed_grid.scheduling.placement.placement import find_placement
from distributed_grid.scheduling.rebalancing.lease_parts import carve_placement
from distributed_grid.scheduling.rebalancing.loans import describe, surplus, total_of
from distributed_grid.scheduling.rebalancing.pressure import (
    PressureScan,
    machine_of,
    percent,
)

ARRIVAL_MARGIN_MILLI = 50
"""A node that takes a job stays so far below its own thresholds."""
SHARE_ROUNDS = 3
"""For so many rounds borrowing comes first where the mode says so."""
MAX_TRIED_JOBS = 20
MAX_TRIED_TARGETS = 8
CRITICAL_MILLI = 950
"""From here on a node is degraded though a job could move that is not worth it."""
_RUNS = (JobState.RUNNING, JobState.PAUSED)


class ReliefOutcome(enum.StrEnum):
    """What a look at a node above a threshold came to."""

    MOVE = "move"
    WAIT = "wait"
    NOT_WORTH_IT = "not_worth_it"
    NO_ROOM = "no_room"
    NOTHING_MOVABLE = "nothing_movable"


class Relief(Struct, frozen=True):
    """What to do about one node: with `move` this job goes to that node by that way."""

    outcome: ReliefOutcome
    reason: str
    cause: str = ""
    job: str = ""
    target: str = ""
    way: Way = Way.RESTART
    considered: tuple[Considered, ...] = ()


def find_relief(scan: OffloadScan, node: str) -> Relief:
    """What to do about a node: the first cause that something can be done about, memory first; or why nothing is."""
    watch = scan.watch(node)
    causes = [cause for cause in (*WATCHED_RESOURCES, SPREAD) if watch.since_ms(cause) is not None]
    found: Relief | None = None
    for cause in causes:
        one = _relief_for(scan, node, watch, cause)
        if one.outcome is ReliefOutcome.MOVE:
            return one
        found = found or one
    return found or Relief(ReliefOutcome.WAIT, "below its thresholds")


def _relief_for(scan: OffloadScan, node: str, watch: OffloadWatch, cause: str) -> Relief:
    why = _wait_reason(scan, node, watch, cause)
    if why:
        return Relief(ReliefOutcome.WAIT, f"{describe_pressure(scan, node, cause)}: {why}", cause)
    return _choose_job(scan, node, watch, cause)


def _wait_reason(scan: OffloadScan, node: str, watch: OffloadWatch, cause: str) -> str:
    """Why nothing is moved off a node yet; empty where it may be."""
    since, ledger = watch.since_ms(cause), scan.ledger
    assert since is not None
    if not scan.has_lasted(since):
        return f"for {_seconds(scan.now - since)}, acts after {_seconds(scan.dwell_ms)}"
    under_way = next((name for name in ledger.moves_at.get(node, ()) if ledger.moves[name].source == node), None)
    if under_way is not None:
        return f"{under_way} is under way"
    if scan.rests(node):
        return f"rests for {_seconds(scan.offload.cooldown_ms)} after the last move"
    return _borrow_first(scan, node, cause, since)


def _borrow_first(scan: OffloadScan, node: str, cause: str, since: int) -> str:
    """In the mode `share_and_offload` work moves when borrowing was refused, or has not been enough for some rounds."""
    rules = scan.pressure.rules
    if rules.mode is not SharingMode.SHARE_AND_OFFLOAD or not rules.shares or cause == SPREAD:
        return ""
    if scan.pressure.state(node).watch(cause).refused:
        return ""
    patience_ms = SHARE_ROUNDS * rules.interval_ms + scan.dwell_ms
    passed_ms = scan.now - since
    if passed_ms >= patience_ms - scan.offload.interval_ms // 2:
        return ""
    return f"it borrows first; work moves when that is not enough for {_seconds(patience_ms)}"


class _Candidate(Struct, frozen=True):
    """A job that may be moved, and what it holds."""

    job: Job
    lease: Lease
    way: Way


def _choose_job(scan: OffloadScan, node: str, watch: OffloadWatch, cause: str) -> Relief:
    level, considered = describe_pressure(scan, node, cause), list[Considered]()
    candidates, others = _candidates(scan, node, watch, cause, considered)
    outcome, why = ReliefOutcome.NOTHING_MOVABLE, others
    for one in candidates[:MAX_TRIED_JOBS]:
        target, reason, failed = _target_for(scan, node, one, cause)
        considered.append(Considered(one.job.uid, reason))
        if target:
            why = f"{level}; job {one.job.id} holds {_held(one.lease, cause)}; {reason}"
            return Relief(ReliefOutcome.MOVE, why, cause, one.job.uid, target, one.way, tuple(considered))
        if outcome is not ReliefOutcome.NOT_WORTH_IT:
            outcome, why = failed, f"job {one.job.id}: {reason}"
    return Relief(outcome, f"{level}: {why}", cause, considered=tuple(considered[:MAX_CONSIDERED]))


def _candidates(
    scan: OffloadScan, node: str, watch: OffloadWatch, cause: str, considered: list[Considered]
) -> tuple[list[_Candidate], str]:
    """The jobs of a node that may be moved, those first that have least to do again; and why the others may not."""
    found: list[tuple[int, int, int, str, _Candidate]] = []
    tried, refused = {uid for uid, _ in watch.tried}, 0
    for lease in scan.ledger.leases_of(node):
        job = scan.ledger.jobs.get(lease.job)
        size = _size(lease, cause)
        if job is None or not size:
            continue
        way, why = way_of(job), _why_not(scan, job, lease, tried)
        if way is None or why:
            refused += 1
            if len(considered) < MAX_CONSIDERED // 2:
                considered.append(Considered(job.uid, why))
            continue
        key = (lost_work_ms(job, scan.now), int(lease.request.priority), -size, job.uid)
        found.append((*key, _Candidate(job, lease, way)))
    found.sort(key=lambda entry: entry[:4])
    words = "no job of the grid is there that holds any of it"
    if refused:
        words = f"none of its {refused} jobs can be moved: {considered[0].reason if considered else ''}"
    return [entry[4] for entry in found], words


def _why_not(scan: OffloadScan, job: Job, lease: Lease, tried: set[str]) -> str:
    """Why a job is not moved now, whatever it may gain; empty where it may be."""
    if lease.gang or job.request.within:
        return "it runs within a lease that is held besides it"
    if job.state not in _RUNS or lease.state is not LeaseState.ACTIVE:
        return f"it is {job.state}"
    if job.uid in scan.ledger.moves_by_job:
        return f"{scan.ledger.moves_by_job[job.uid]} moves it"
    if way_of(job) is None:
        return "it has marked no checkpoint and is not declared restartable"
    if job.uid in tried or (job.moved_at_ms and scan.now - job.moved_at_ms < HOUR_MS):
        return "it was moved, or tried to, within the last hour"
    return ""


def _size(lease: Lease, cause: str) -> int:
    """How much of what a node is short of a lease holds; for evening out, of anything."""
    kinds = WATCHED_RESOURCES if cause == SPREAD else (ResourceType(cause),)
    return sum(claimed_amount(lease, kind) for kind in kinds)


def _target_for(scan: OffloadScan, node: str, one: _Candidate, cause: str) -> tuple[str, str, ReliefOutcome]:
    """Where a job goes and why that pays; or why it stays, and what that comes from."""
    places = list(_places(scan, node, one, cause))
    if not places:
        return "", _why_no_place(scan, node, one), ReliefOutcome.NO_ROOM
    ledger, best = scan.ledger, ""
    for to in places:
        loss = _loss(scan, node, to, cause)
        speeds = {"speed_here": ledger.nodes[node].speed_milli, "speed_there": ledger.nodes[to].speed_milli}
        profit = profit_of(one.job, loss, scan.now, **speeds)
        if profit.pays:
            return to, str(profit), ReliefOutcome.MOVE
        best = best or f"a move to {to} does not pay: {profit}"
    return "", best, ReliefOutcome.NOT_WORTH_IT


def _loss(scan: OffloadScan, node: str, to: str, cause: str) -> int:
    here, there = scan.pressure.reading(node), scan.pressure.reading(to)
    if cause == SPREAD:
        return max((here.score or 0) - (there.score or 0), 0)
    resource = ResourceType(cause)
    return loss_milli(here.level(resource) or 0, high_mark(scan.offload, resource))


def _places(scan: OffloadScan, node: str, one: _Candidate, cause: str) -> Iterator[str]:
    """The nodes that can take a job now: where this node has borrowed something before all others."""
    pressure, ledger = scan.pressure, scan.ledger
    boosted = {lease.node for lease in pressure.leases if lease.request.target == node}
    able = sorted(pressure.lenders(node), key=lambda name: name not in boosted)
    tried = 0
    for to in able:
        if tried >= MAX_TRIED_TARGETS:
            return
        if (one.job.request.require and to not in one.job.request.require) or not _stays_below(scan, one.lease, to):
            continue
        if cause == SPREAD and not _evens_out(scan, one.lease, to):
            continue
        there = _wanted_there(one.job, node, to)
        if to in boosted and carve_placement(ledger, there) is not None:
            tried += 1
            yield to
        elif _can_spare(pressure, one.lease, to):
            tried += 1
            if find_placement(ledger, there) is not None:
                yield to


def _wanted_there(job: Job, source: str, target: str) -> Request:
    """What a job would ask of another node, as work of the node that it leaves."""
    wanted = replace(job.sized_request, user=GRID_USER, team="", require=(target,), prefer=(), strategy=None)
    return replace(wanted, wait_ms=0, deadline_ms=0, target=source, origin="")


def _can_spare(pressure: PressureScan, lease: Lease, to: str) -> bool:
    kinds = (kind for kind in WATCHED_RESOURCES if claimed_amount(lease, kind))
    return all(claimed_amount(lease, kind) <= surplus(pressure, to, kind) for kind in kinds)


def _stays_below(scan: OffloadScan, lease: Lease, to: str) -> bool:
    """Whether a node with all that a lease holds on top would still be clearly below its thresholds."""
    capacity, reading = scan.ledger.nodes[to].capacity, scan.pressure.reading(to)
    for kind in WATCHED_RESOURCES:
        size, total = claimed_amount(lease, kind), total_of(capacity, kind)
        if not size:
            continue
        if not total or (reading.level(kind) or 0) + 1000 * size // total > (
            high_mark(scan.offload, kind) - ARRIVAL_MARGIN_MILLI
        ):
            return False
    return True


def _evens_out(scan: OffloadScan, lease: Lease, to: str) -> bool:
    """Whether two nodes differ much, and the one that gives still works at least as hard after the move."""
    gives, takes = scan.pressure.reading(lease.node).score or 0, scan.pressure.reading(to).score or 0
    if gives - takes <= scan.pressure.rules.policy.spread_milli:
        return False
    return takes + _shift(scan, lease, to) <= gives - _shift(scan, lease, lease.node)


def _shift(scan: OffloadScan, lease: Lease, node: str) -> int:
    """How much of a node a lease is at most, in thousandths."""
    capacity = scan.ledger.nodes[node].capacity
    parts = ((claimed_amount(lease, kind), total_of(capacity, kind)) for kind in WATCHED_RESOURCES)
    return max((1000 * size // total if total else 1000 for size, total in parts if size), default=0)


def _why_no_place(scan: OffloadScan, node: str, one: _Candidate) -> str:
    required = one.job.request.require
    if required and not any(name != node for name in required):
        return f"it insists on {', '.join(required)}"
    own = machine_of(scan.ledger.nodes[node])
    others = [name for name in scan.ledger.nodes if machine_of(scan.ledger.nodes[name]) != own]
    if not others:
        return "there is no other node"
    if not scan.targets:
        return "no other node is below its thresholds and at rest"
    kinds = [kind for kind in WATCHED_RESOURCES if claimed_amount(one.lease, kind)]
    holds = ", ".join(describe(kind, claimed_amount(one.lease, kind)) for kind in kinds) or "what it holds"
    return f"no other node has {holds} to spare and stays below its thresholds"


def _held(lease: Lease, cause: str) -> str:
    kinds = WATCHED_RESOURCES if cause == SPREAD else (ResourceType(cause),)
    return ", ".join(describe(kind, claimed_amount(lease, kind)) for kind in kinds if claimed_amount(lease, kind))


def _seconds(ms: int) -> str:
    return f"{plain_number(ms / 1000)} s"


def why_degraded(scan: OffloadScan, node: str, relief: Relief) -> str:
    """Why a node is degraded from now on; empty where it is not, or is already."""
    memory = scan.pressure.reading(node).memory
    if memory is None or node in scan.ledger.degraded or relief.cause != ResourceType.MEMORY:
        return ""
    is_stuck = relief.outcome in (ReliefOutcome.NO_ROOM, ReliefOutcome.NOTHING_MOVABLE)
    is_critical = relief.outcome is ReliefOutcome.NOT_WORTH_IT and memory >= CRITICAL_MILLI
    return relief.reason if is_stuck or is_critical else ""


def why_restored(scan: OffloadScan, row: DegradedNode, since: int | None) -> str:
    """Why a degraded node is as others are again, its memory having been low since then; empty while it is not."""
    node, low = row.node, low_mark(scan.offload, ResourceType.MEMORY)
    if node not in scan.ledger.nodes:
        return "it is no node of the grid any more"
    memory = scan.pressure.reading(node).memory
    if memory is None or since is None or scan.now - since < scan.offload.interval_ms // 2:
        return ""
    return f"memory at {percent(memory)}, below the low mark of {percent(low)}"


def jobs_to_pause(ledger: Ledger, node: str) -> frozenset[str]:
    """The jobs of a degraded node that stand still: its `low` ones, but one where there is no other that goes on."""
    if node not in ledger.degraded:
        return frozenset()
    here = [job for job in ledger.jobs_of(node) if job.state in _RUNS]
    low = [job for job in here if job.request.priority <= Priority.LOW]
    if len(low) == len(here) and low:
        oldest = min(low, key=lambda job: (job.attempt.started_at_ms if job.attempt is not None else 0, job.uid))
        low.remove(oldest)
    return frozenset(job.uid for job in low)
