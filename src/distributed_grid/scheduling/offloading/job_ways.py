"""Ways of jobs: by which one a job of the grid could leave its node, or why it cannot; and whether that pays.

Nobody knows how long a job still takes, nor how much it loses beside others on a machine that is short of something.
So both are stated assumptions, and the numbers are shown with every decision:

- Left: the expected run time (by earlier runs, or as its user said) less what has passed; where that is not known, or
  has passed already, as long again as it has run.
- Lost here: for each second of work a quarter of one at the threshold, two at a full machine, in between linear. For
  evening out: what the pressures of the two nodes differ by.
- A move costs what was done since the last mark, or since the start; the shipping of what it needs; and a new start.
- It must gain one and a half times what it costs.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease, WorkerKind
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import Way
from distributed_grid.domain.rebalancing import belongs_to
from distributed_grid.domain.states import JobState, LeaseState
from distributed_grid.scheduling.offloading.obstacles import Obstacle, ObstacleKind

MAX_WAITING = 100
"""Waiting requests that are looked through for work of a node."""
LOSS_AT_MARK_MILLI, LOSS_AT_FULL_MILLI = 250, 2000
"""Milliseconds lost for each second of work, at the threshold and on a full machine."""
SHIP_BYTES_PER_MS = 50_000
RESTART_MS = 5_000
PROFIT_MILLI = 1500
"""What must be gained for each thousand of cost."""


class JobWay(Struct, frozen=True):
    """How a job could leave its node: which work would be lost, in milliseconds of run time, or why it cannot."""

    way: Way | None = None
    lost_ms: int = 0
    reason: str = ""
    obstacle: Obstacle | None = None


def jobs_of_node(ledger: Ledger, node: str) -> Iterator[tuple[Job, Lease]]:
    """The jobs that hold something on a node, then those of it that wait."""
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
    """The way of a job, by what is known of it, whoever could take it."""
    if (obstacle := _obstacle(ledger, job, lease)) is not None:
        return JobWay(obstacle=obstacle)
    attempt = job.attempt
    if job.state is JobState.QUEUED or attempt is None or not attempt.started_at_ms:
        return JobWay(Way.QUEUE_ELSEWHERE, 0, "it has not started, so nothing is lost")
    way, lost_ms = way_of(job), lost_work_ms(job, now)
    if way is Way.CHECKPOINT_RESTART:
        return JobWay(way, lost_ms, f"it marked a checkpoint {_seconds(lost_ms)} ago, and goes on from there")
    if way is Way.RESTART:
        said = f"declared restartable: {_seconds(lost_ms)} are run again, with whatever they did outside"
        return JobWay(way, lost_ms, said)
    return JobWay(
        obstacle=Obstacle(
            ObstacleKind.NOT_DECLARED,
            "it has marked no checkpoint ($GRID_CHECKPOINT) and was not submitted with --restartable",
        )
    )


def _obstacle(ledger: Ledger, job: Job, lease: Lease) -> Obstacle | None:
    if job.uid in ledger.moves_by_job:
        return Obstacle(ObstacleKind.MOVING, f"it is being moved: {ledger.moves_by_job[job.uid]}")
    if job.state is JobState.STOPPING:
        return Obstacle(ObstacleKind.NOT_RUNNING, "it is being stopped")
    if lease.gang or job.request.gang > 1:
        return Obstacle(ObstacleKind.GANG, "it runs on several nodes together")
    if job.request.within:
        return Obstacle(ObstacleKind.BOUND, f"it uses what {job.request.within} holds, which stays here")
    if job.request.runs_on is WorkerKind.PULL:
        return Obstacle(ObstacleKind.BOUND, "it is a task of pull workers")
    if lease.state is LeaseState.RELEASING:
        return Obstacle(ObstacleKind.NOT_RUNNING, f"its lease is {lease.state}")
    if lease.node and job.request.require == (lease.node,):
        return Obstacle(ObstacleKind.BOUND, f"it was submitted for {lease.node} alone")
    return None


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.0f} s"


class MoveProfit(Struct, frozen=True):
    """What a move would gain and cost, in milliseconds."""

    left_ms: int
    gain_ms: int
    lost_ms: int
    ship_ms: int
    known: bool

    @property
    def cost_ms(self) -> int:
        return self.lost_ms + self.ship_ms + RESTART_MS

    @property
    def pays(self) -> bool:
        """Whether it gains clearly more than it costs."""
        return 1000 * self.gain_ms > PROFIT_MILLI * self.cost_ms

    def __str__(self) -> str:
        left = f"about {_duration(self.left_ms)} left{'' if self.known else ' (as long as it has run)'}"
        cost = f"{_duration(self.lost_ms)} done again, {_duration(self.ship_ms)} of shipping, {_duration(RESTART_MS)}"
        return f"{left}, of which {_duration(self.gain_ms)} would be saved; a move costs {cost} to start"


def way_of(job: Job) -> Way | None:
    """How a job that runs gets to another node: from a checkpoint that it has marked, or, declared restartable, from
    the beginning; None where nobody has said that it may be started again."""
    if job.attempt is not None and job.attempt.marked_at_ms:
        return Way.CHECKPOINT_RESTART
    return Way.RESTART if job.restartable else None


def lost_work_ms(job: Job, now: int) -> int:
    """What a job would have to do again: all since its last mark, or since its start."""
    attempt = job.attempt
    if attempt is None or not attempt.started_at_ms:
        return 0
    return max(now - max(attempt.marked_at_ms, attempt.started_at_ms), 0)


def left_ms(job: Job, now: int) -> tuple[int, bool]:
    """How long a job still takes, and whether that was known."""
    attempt = job.attempt
    ran_ms = max(now - attempt.started_at_ms, 0) if attempt is not None and attempt.started_at_ms else 0
    expected = (job.estimate.run_ms if job.estimate is not None else 0) or job.request.expects_ms
    return (expected - ran_ms, True) if expected > ran_ms else (ran_ms, False)


def loss_milli(level: int, mark: int) -> int:
    """What is lost for each second of work on a node at this level above its threshold."""
    if level <= mark:
        return 0
    return LOSS_AT_MARK_MILLI + (LOSS_AT_FULL_MILLI - LOSS_AT_MARK_MILLI) * (level - mark) // max(1000 - mark, 1)


def profit_of(job: Job, loss: int, now: int, *, speed_here: int = 1000, speed_there: int = 1000) -> MoveProfit:
    """What a job gains by leaving a node where it loses so much, and what that costs. What a faster node saves is
    gained, too; on a slower one it takes longer."""
    left, known = left_ms(job, now)
    gain = left * loss // 1000 + left - left * max(speed_here, 1) // max(speed_there, 1)
    attempt = job.attempt
    bytes_ = job.estimate.input_bytes if job.estimate is not None else 0
    if attempt is not None and attempt.marked_at_ms:  # a checkpoint is about as large as what the job may hold
        bytes_ += attempt.memory_limit_bytes or job.sized_request.ask.memory_bytes
    return MoveProfit(left, max(gain, 0), lost_work_ms(job, now), bytes_ // SHIP_BYTES_PER_MS, known)


def _duration(ms: int) -> str:
    seconds = ms / 1000
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
