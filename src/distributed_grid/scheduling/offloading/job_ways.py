"""Ways of jobs: by which one a job of the grid could leave its node, and why it cannot."""

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
    ran_ms = max(now - attempt.started_at_ms, 0)
    if attempt.marked_at_ms:
        lost_ms = max(now - attempt.marked_at_ms, 0)
        return JobWay(
            Way.CHECKPOINT_RESTART, lost_ms, f"it marked a checkpoint {_seconds(lost_ms)} ago, and goes on from there"
        )
    if job.restartable:
        said = f"declared restartable: {_seconds(ran_ms)} are run again, with whatever they did outside"
        return JobWay(Way.RESTART, ran_ms, said)
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
