"""Relief of a node: the job that leaves it, by which way and where to; as advice, or as a move by itself.

The run time that is left, and the loss beside others on a machine that is short of something, are unknown. So both are
stated assumptions, and the numbers are shown with every decision:

- Left: the expected run time (by earlier runs, or as its user said) less the time passed; where that is not known, or
  has passed already, as long again as it has run.
- Lost here: for each second of work a quarter of one at the threshold, two at a full machine, in between linear. For
  evening out: the difference between the pressures of the two nodes.
- A move costs the work since the last mark, or since the start; the shipping of its files; and a new start.
- It must gain one and a half times its cost.

Advice names a job to move and a target, and moves nothing. It stands until its cause is clearly over, or its job or
target is gone. A job is only sent where it may run, fits, and finds a surplus. Evening out never reverses the order of
two nodes, so that nothing comes back.

In the mode `share_and_offload` a node borrows first: jobs move where borrowing was refused, or has not been enough for
some rounds. Where nothing can go elsewhere, a node short of memory is degraded until its memory is below the low mark.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease, NodeKind
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MAX_CONSIDERED, Considered, DegradedNode, OffloadWatch, Way
from distributed_grid.domain.rebalancing import (
    GRID_USER,
    SPREAD,
    WATCHED_RESOURCES,
    Advice,
    SharingMode,
    belongs_to,
    claimed_amount,
)
from distributed_grid.domain.resources import Priority, ResourceType
from distributed_grid.domain.states import JobState, LeaseState
from distributed_grid.number_text import plain_number
from distributed_grid.scheduling.offloading.processes import Obstacle, ObstacleKind
from distributed_grid.scheduling.placement.placement import find_placement
from distributed_grid.scheduling.pressure.loans import UNITS, carve_placement, describe, surplus, surpluses, total_of
from distributed_grid.scheduling.pressure.scan import PressureScan, machine_of, percent

MAX_WAITING = 100
"""Waiting requests that are looked through for work of a node."""
LOSS_AT_MARK_MILLI, LOSS_AT_FULL_MILLI = 250, 2000
"""Milliseconds lost for each second of work, at the threshold and on a full machine."""
SHIP_BYTES_PER_MS = 50_000
RESTART_MS = 5_000
PROFIT_MILLI = 1500
"""Gain that is required for each thousand of cost."""
ARRIVAL_MARGIN_MILLI = 50
"""A node that takes a job stays below its own thresholds by this much."""
SHARE_ROUNDS = 3
"""Rounds in which borrowing comes first where the mode says so."""
MAX_TRIED_JOBS, MAX_TRIED_TARGETS = 20, 8
MAX_ADVISED_LENDERS = 32
"""Lenders that are compared for advice, least loaded first."""
CRITICAL_MILLI = 950
"""From here on a node is degraded though a job could move at a loss."""
HOUR_MS = 3_600_000
"""A job is moved at most once within this time."""
_RUNS = (JobState.RUNNING, JobState.PAUSED)


# ------------------------------------------------------------------ ways of jobs


class JobWay(Struct, frozen=True):
    """The way by which a job could leave its node and the run time it would lose, or its obstacle."""

    way: Way | None = None
    lost_ms: int = 0
    reason: str = ""
    obstacle: Obstacle | None = None


def jobs_of_node(ledger: Ledger, node: str) -> Iterator[tuple[Job, Lease]]:
    """The jobs with a lease on a node, then its waiting ones."""
    for lease in ledger.leases_of(node):
        job = ledger.jobs.get(lease.job)
        if job is not None and job.lease_id == lease.id:
            yield job, lease
    for _, _, lease_id in ledger.waiting[:MAX_WAITING]:
        lease = ledger.leases[lease_id]
        job = ledger.jobs.get(lease.job)
        if job is not None and node in belongs_to(job.request):
            yield job, lease


def job_way(ledger: Ledger, job: Job, lease: Lease, now: int) -> JobWay:
    """The way of a job, whatever the targets."""
    if (obstacle := _obstacle(ledger, job, lease)) is not None:
        return JobWay(obstacle=obstacle)
    attempt = job.attempt
    if job.state is JobState.QUEUED or attempt is None or not attempt.started_at_ms:
        return JobWay(Way.QUEUE_ELSEWHERE, 0, "it has not started, so nothing is lost")
    way, lost_ms = way_of(job), lost_work_ms(job, now)
    lost = f"{lost_ms / 1000:.0f} s"
    if way is Way.CHECKPOINT_RESTART:
        return JobWay(way, lost_ms, f"it marked a checkpoint {lost} ago, and goes on from there")
    if way is Way.RESTART:
        return JobWay(way, lost_ms, f"declared restartable: {lost} are run again, with whatever they did outside")
    text = "it has marked no checkpoint ($GRID_CHECKPOINT) and was not submitted with --restartable"
    return JobWay(obstacle=Obstacle(ObstacleKind.NOT_DECLARED, text))


def _obstacle(ledger: Ledger, job: Job, lease: Lease) -> Obstacle | None:
    if job.uid in ledger.moves_by_job:
        return Obstacle(ObstacleKind.MOVING, f"it is being moved: {ledger.moves_by_job[job.uid]}")
    if job.state is JobState.STOPPING:
        return Obstacle(ObstacleKind.NOT_RUNNING, "it is being stopped")
    if lease.gang or job.request.gang > 1:
        return Obstacle(ObstacleKind.GANG, "it runs on several nodes together")
    if job.request.use_lease:
        return Obstacle(ObstacleKind.BOUND, f"it uses what {job.request.use_lease} holds, which stays here")
    if job.request.runs_on is NodeKind.PULL:
        return Obstacle(ObstacleKind.BOUND, "it is a task of pull workers")
    if lease.state is LeaseState.RELEASING:
        return Obstacle(ObstacleKind.NOT_RUNNING, f"its lease is {lease.state}")
    if lease.node and job.request.require == (lease.node,):
        return Obstacle(ObstacleKind.BOUND, f"it was submitted for {lease.node} alone")
    return None


def way_of(job: Job) -> Way | None:
    """The way of a running job: from a marked checkpoint or, declared restartable, from the beginning; None where
    nobody has said that it may be started again."""
    if job.attempt is not None and job.attempt.marked_at_ms:
        return Way.CHECKPOINT_RESTART
    return Way.RESTART if job.restartable else None


def lost_work_ms(job: Job, now: int) -> int:
    """The run time since the last mark, or since the start."""
    attempt = job.attempt
    if attempt is None or not attempt.started_at_ms:
        return 0
    return max(now - max(attempt.marked_at_ms, attempt.started_at_ms), 0)


class MoveProfit(Struct, frozen=True):
    """Gain and cost of a move, in milliseconds."""

    left_ms: int
    gain_ms: int
    lost_ms: int
    ship_ms: int
    known: bool  # False: `left_ms` is assumed

    @property
    def cost_ms(self) -> int:
        return self.lost_ms + self.ship_ms + RESTART_MS

    @property
    def pays(self) -> bool:
        return 1000 * self.gain_ms > PROFIT_MILLI * self.cost_ms

    def __str__(self) -> str:
        left = f"about {_duration(self.left_ms)} left{'' if self.known else ' (as long as it has run)'}"
        cost = f"{_duration(self.lost_ms)} done again, {_duration(self.ship_ms)} of shipping, {_duration(RESTART_MS)}"
        return f"{left}, of which {_duration(self.gain_ms)} would be saved; a move costs {cost} to start"


def _duration(ms: int) -> str:
    seconds = ms / 1000
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def left_ms(job: Job, now: int) -> tuple[int, bool]:
    """The run time that is left, and whether that is known."""
    attempt = job.attempt
    ran_ms = max(now - attempt.started_at_ms, 0) if attempt is not None and attempt.started_at_ms else 0
    expected = (job.estimate.run_ms if job.estimate is not None else 0) or job.request.expects_ms
    return (expected - ran_ms, True) if expected > ran_ms else (ran_ms, False)


def loss_milli(level: int, mark: int) -> int:
    """Milliseconds lost for each second of work on a node at this level above its threshold."""
    if level <= mark:
        return 0
    return LOSS_AT_MARK_MILLI + (LOSS_AT_FULL_MILLI - LOSS_AT_MARK_MILLI) * (level - mark) // max(1000 - mark, 1)


def profit_of(job: Job, loss: int, now: int, *, speed_here: int = 1000, speed_there: int = 1000) -> MoveProfit:
    """Gain and cost of a move off a node with this loss. A faster node adds to the gain, a slower one takes of it."""
    left, known = left_ms(job, now)
    gain = left * loss // 1000 + left - left * max(speed_here, 1) // max(speed_there, 1)
    attempt = job.attempt
    shipped = job.estimate.input_bytes if job.estimate is not None else 0
    if (
        attempt is not None and attempt.marked_at_ms
    ):  # a checkpoint is about as large as the memory that the job may hold
        shipped += attempt.memory_limit_bytes or job.sized_request.ask.memory_bytes
    return MoveProfit(left, max(gain, 0), lost_work_ms(job, now), shipped // SHIP_BYTES_PER_MS, known)


# ------------------------------------------------------------------ jobs and nodes


def _resources_of(cause: str) -> tuple[ResourceType, ...]:
    return WATCHED_RESOURCES if cause == SPREAD else (ResourceType(cause),)


def _held_text(lease: Lease, cause: str) -> str:
    amounts = ((kind, claimed_amount(lease, kind)) for kind in _resources_of(cause))
    return ", ".join(describe(kind, amount) for kind, amount in amounts if amount)


def _has_surplus(scan: PressureScan, lease: Lease, to: str) -> bool:
    """Whether a node has a surplus of all that a lease holds."""
    amounts = ((kind, claimed_amount(lease, kind)) for kind in WATCHED_RESOURCES)
    return all(amount <= surplus(scan, to, kind) for kind, amount in amounts if amount)


def _share_milli(scan: PressureScan, lease: Lease, node: str) -> int:
    """The largest part of a node that a lease is of any resource, in thousandths."""
    capacity = scan.ledger.nodes[node].capacity
    parts = ((claimed_amount(lease, kind), total_of(capacity, kind)) for kind in WATCHED_RESOURCES)
    return max((1000 * amount // total if total else 1000 for amount, total in parts if amount), default=0)


def _evens_out(scan: PressureScan, lease: Lease, to: str) -> bool:
    """Whether two nodes differ much, and the one that gives still works at least as hard after the move."""
    gives, takes = scan.reading(lease.node).score or 0, scan.reading(to).score or 0
    if gives - takes <= scan.rules.policy.spread_milli:
        return False
    return takes + _share_milli(scan, lease, to) <= gives - _share_milli(scan, lease, lease.node)


def _spread_text(scan: PressureScan, node: str, to: str) -> str:
    here, there = (percent(scan.reading(name).score or 0) for name in (node, to))
    most = percent(scan.rules.policy.spread_milli)
    return f"{node} works at {here}, {to or 'others'} at {there}, may differ by {most}"


# ------------------------------------------------------------------ advice


def advice_for(scan: PressureScan, node: str, cause: str) -> Advice | None:
    """The best recommendation for a node, or None where nothing can be moved anywhere."""

    def reason(to: str) -> str:
        if cause == SPREAD:
            return _spread_text(scan, node, to)
        resource = ResourceType(cause)
        here, high = scan.reading(node), scan.rules.watermarks(resource).high
        level, ahead, there = here.level(resource) or 0, here.ahead(resource), scan.reading(to).level(resource) or 0
        expected = f", expected at {percent(ahead.level)}" if level <= high and ahead is not None else ""
        marks = f"{resource} at {percent(level)}{expected}, above the mark of {percent(high)}"
        return f"{marks}; {to} is at {percent(there)}"

    jobs: list[tuple[int, int, str, Job, Lease]] = []
    for lease in scan.ledger.leases_of(node):
        job = scan.ledger.jobs.get(lease.job)
        if job is None or job.state is not JobState.RUNNING or lease.state is not LeaseState.ACTIVE or lease.gang:
            continue
        size = _share_milli(scan, lease, node) if cause == SPREAD else claimed_amount(lease, ResourceType(cause))
        if size:
            jobs.append((int(lease.request.priority), -size, job.uid, job, lease))
    places = list(scan.lenders(node))
    for *_, job, lease in sorted(jobs, key=lambda entry: entry[:3])[:MAX_TRIED_JOBS]:  # the least important, largest
        for to in places:
            is_pinned = bool(job.request.require) and to not in job.request.require
            if is_pinned or (cause == SPREAD and not _evens_out(scan, lease, to)) or not _has_surplus(scan, lease, to):
                continue
            if find_placement(scan.ledger, replace(job.request, require=(to,), prefer=())) is not None:
                text = f"{reason(to)}; job {job.id} holds {_held_text(lease, cause)}"
                return Advice(str(cause), job.uid, to, text, scan.now)
    if cause == SPREAD or not scan.borrows_for_machine(node):
        return None
    resource = ResourceType(cause)
    lenders = islice(surpluses(scan, node, resource, UNITS[resource]), MAX_ADVISED_LENDERS)
    room, to = max(lenders, default=(0, ""))
    if not room:
        return None
    return Advice(str(cause), "", to, f"{reason(to)}, {describe(resource, room)} to spare", scan.now)


def still_applies(scan: PressureScan, node: str, advice: Advice) -> bool:
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


# ------------------------------------------------------------------ moves by themselves


class ReliefOutcome(enum.StrEnum):
    """Result of the evaluation of a node above a threshold."""

    MOVE = "move"
    WAIT = "wait"
    NOT_WORTH_IT = "not_worth_it"
    NO_ROOM = "no_room"
    NOTHING_MOVABLE = "nothing_movable"


class Relief(Struct, frozen=True, kw_only=True):
    """The action for one node: with `move` this job goes to that target by that way."""

    outcome: ReliefOutcome
    reason: str
    cause: str = ""
    job: str = ""
    target: str = ""
    way: Way = Way.RESTART
    considered: tuple[Considered, ...] = ()


def find_relief(scan: PressureScan, node: str) -> Relief:
    """The move for the first cause that has one, memory first; or the reason for which there is none."""
    watch = scan.watch(node)
    first: Relief | None = None
    for cause in (*WATCHED_RESOURCES, SPREAD):
        since_ms = watch.since_ms(cause)
        if since_ms is None:
            continue
        wait = _wait_reason(scan, node, cause, since_ms)
        if wait:
            text = f"{describe_pressure(scan, node, cause)}: {wait}"
            relief = Relief(outcome=ReliefOutcome.WAIT, reason=text, cause=cause)
        else:
            relief = _choose_job(scan, node, watch, cause)
        if relief.outcome is ReliefOutcome.MOVE:
            return relief
        first = first or relief
    return first or Relief(outcome=ReliefOutcome.WAIT, reason="below its thresholds")


def _wait_reason(scan: PressureScan, node: str, cause: str, since_ms: int) -> str:
    """Why nothing is moved off a node yet; empty where it may be."""
    ledger, rules, passed_ms = scan.ledger, scan.rules, scan.now - since_ms
    if not scan.has_dwelt(since_ms):
        return f"for {_seconds(passed_ms)}, acts after {_seconds(scan.dwell_ms)}"
    under_way = next((name for name in ledger.moves_at.get(node, ()) if ledger.moves[name].source == node), None)
    if under_way is not None:
        return f"{under_way} is under way"
    if scan.rests(node):
        return f"rests for {_seconds(scan.offload.cooldown_ms)} after the last move"
    if rules.mode is not SharingMode.SHARE_AND_OFFLOAD or not rules.shares or cause == SPREAD:
        return ""
    patience_ms = SHARE_ROUNDS * rules.interval_ms + scan.dwell_ms
    if scan.state(node).watch(cause).refused or passed_ms >= patience_ms - scan.offload.interval_ms // 2:
        return ""
    return f"it borrows first; work moves when that is not enough for {_seconds(patience_ms)}"


def _choose_job(scan: PressureScan, node: str, watch: OffloadWatch, cause: str) -> Relief:
    """The job that leaves: of those that may, the one with the least work to do again whose move pays."""
    ledger, considered = scan.ledger, list[Considered]()
    candidates: list[tuple[tuple[int, int, int, str], Job, Lease, Way]] = []
    tried, refused = {uid for uid, _ in watch.tried}, 0
    for lease in ledger.leases_of(node):
        job = ledger.jobs.get(lease.job)
        size = sum(claimed_amount(lease, kind) for kind in _resources_of(cause))
        if job is None or not size:
            continue
        way, obstacle = way_of(job), _move_obstacle(scan, job, lease, tried)
        if way is None or obstacle:
            refused += 1
            if len(considered) < MAX_CONSIDERED // 2:
                considered.append(Considered(job.uid, obstacle))
            continue
        candidates.append(((lost_work_ms(job, scan.now), int(lease.request.priority), -size, job.uid), job, lease, way))
    outcome, why = ReliefOutcome.NOTHING_MOVABLE, "no job of the grid is there that holds any of it"
    if refused:
        why = f"none of its {refused} jobs can be moved: {considered[0].reason if considered else ''}"
    level = describe_pressure(scan, node, cause)
    for _, job, lease, way in sorted(candidates, key=lambda entry: entry[0])[:MAX_TRIED_JOBS]:
        target, reason, failed = _target_for(scan, node, job, lease, cause)
        considered.append(Considered(job.uid, reason))
        if target:
            return Relief(
                outcome=ReliefOutcome.MOVE,
                reason=f"{level}; job {job.id} holds {_held_text(lease, cause)}; {reason}",
                cause=cause,
                job=job.uid,
                target=target,
                way=way,
                considered=tuple(considered),
            )
        if outcome is not ReliefOutcome.NOT_WORTH_IT:
            outcome, why = failed, f"job {job.id}: {reason}"
    shown = tuple(considered[:MAX_CONSIDERED])
    return Relief(outcome=outcome, reason=f"{level}: {why}", cause=cause, considered=shown)


def _move_obstacle(scan: PressureScan, job: Job, lease: Lease, tried: set[str]) -> str:
    """Why a job is not moved now, whatever it may gain; empty where it may be."""
    if lease.gang or job.request.use_lease:
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


def _target_for(scan: PressureScan, node: str, job: Job, lease: Lease, cause: str) -> tuple[str, str, ReliefOutcome]:
    """The target of a job and the profit of its move; or the reason for which it stays, and the outcome."""
    ledger, refusal = scan.ledger, ""
    for to in _targets(scan, node, job, lease, cause):
        if cause == SPREAD:
            loss = max((scan.reading(node).score or 0) - (scan.reading(to).score or 0), 0)
        else:
            resource = ResourceType(cause)
            loss = loss_milli(scan.reading(node).level(resource) or 0, scan.threshold(resource))
        speeds = {"speed_here": ledger.nodes[node].speed_milli, "speed_there": ledger.nodes[to].speed_milli}
        profit = profit_of(job, loss, scan.now, **speeds)
        if profit.pays:
            return to, str(profit), ReliefOutcome.MOVE
        refusal = refusal or f"a move to {to} does not pay: {profit}"
    if refusal:
        return "", refusal, ReliefOutcome.NOT_WORTH_IT
    required = job.request.require
    own = machine_of(ledger.nodes[node])
    if required and not any(name != node for name in required):
        reason = f"it insists on {', '.join(required)}"
    elif all(machine_of(other) == own for other in ledger.nodes.values()):
        reason = "there is no other node"
    elif not scan.schedule.with_headroom:
        reason = "no other node is below its thresholds and at rest"
    else:
        held = _held_text(lease, SPREAD) or "what it holds"
        reason = f"no other node has {held} to spare and stays below its thresholds"
    return "", reason, ReliefOutcome.NO_ROOM


def _targets(scan: PressureScan, node: str, job: Job, lease: Lease, cause: str) -> Iterator[str]:
    """The nodes that can take a job now: those that lend to this node before all others."""
    ledger, required = scan.ledger, job.request.require
    lending = {loan.node for loan in scan.leases if loan.request.target == node}
    tried = 0
    for to in sorted(scan.lenders(node), key=lambda name: name not in lending):
        if tried >= MAX_TRIED_TARGETS:
            return
        if (required and to not in required) or not _stays_below_thresholds(scan, lease, to):
            continue
        if cause == SPREAD and not _evens_out(scan, lease, to):
            continue
        # the ask of the job there, as work of the node that it leaves
        request = replace(job.sized_request, user=GRID_USER, team="", require=(to,), prefer=(), strategy=None)
        request = replace(request, wait_ms=0, deadline_ms=0, target=node, origin="")
        if to in lending and carve_placement(ledger, request) is not None:
            tried += 1
            yield to
        elif _has_surplus(scan, lease, to):
            tried += 1
            if find_placement(ledger, request) is not None:
                yield to


def _stays_below_thresholds(scan: PressureScan, lease: Lease, to: str) -> bool:
    """Whether a node with all that a lease holds on top would still be clearly below its thresholds."""
    capacity, reading = scan.ledger.nodes[to].capacity, scan.reading(to)
    for kind in WATCHED_RESOURCES:
        size, total = claimed_amount(lease, kind), total_of(capacity, kind)
        if not size:
            continue
        most = scan.threshold(kind) - ARRIVAL_MARGIN_MILLI
        if not total or (reading.level(kind) or 0) + 1000 * size // total > most:
            return False
    return True


def describe_pressure(scan: PressureScan, node: str, cause: str) -> str:
    """The shortage of a node, with its numbers."""
    if cause == SPREAD:
        return _spread_text(scan, node, next(scan.lenders(node), ""))
    resource = ResourceType(cause)
    level, high = scan.reading(node).level(resource) or 0, scan.threshold(resource)
    return f"{resource} at {percent(level)}, above the threshold of {percent(high)}"


def _seconds(ms: int) -> str:
    return f"{plain_number(ms / 1000)} s"


# ------------------------------------------------------------------ degraded nodes


def why_degraded(scan: PressureScan, node: str, relief: Relief) -> str:
    """Why a node becomes degraded; empty where it does not, or is already."""
    memory = scan.reading(node).memory
    if memory is None or node in scan.ledger.degraded or relief.cause != ResourceType.MEMORY:
        return ""
    is_stuck = relief.outcome in (ReliefOutcome.NO_ROOM, ReliefOutcome.NOTHING_MOVABLE)
    is_critical = relief.outcome is ReliefOutcome.NOT_WORTH_IT and memory >= CRITICAL_MILLI
    return relief.reason if is_stuck or is_critical else ""


def why_restored(scan: PressureScan, row: DegradedNode, low_since_ms: int | None) -> str:
    """Why a degraded node is restored, its memory having been low since then; empty while it is not."""
    if row.node not in scan.ledger.nodes:
        return "it is no node of the grid any more"
    memory = scan.reading(row.node).memory
    if memory is None or low_since_ms is None or scan.now - low_since_ms < scan.offload.interval_ms // 2:
        return ""
    return f"memory at {percent(memory)}, below the low mark of {percent(scan.low_mark(ResourceType.MEMORY))}"


def jobs_to_pause(ledger: Ledger, node: str) -> frozenset[str]:
    """The `low` jobs of a degraded node, which are paused; without the oldest where all of its jobs are `low`."""
    if node not in ledger.degraded:
        return frozenset()
    here = [job for job in ledger.jobs_of(node) if job.state in _RUNS]
    low = [job for job in here if job.request.priority <= Priority.LOW]
    if len(low) == len(here) and low:
        oldest = min(low, key=lambda job: (job.attempt.started_at_ms if job.attempt is not None else 0, job.uid))
        low.remove(oldest)
    return frozenset(job.uid for job in low)
