"""Degradation of nodes that are short of memory while nothing there can go elsewhere.

A degraded node gets no new work, its `low` jobs stand still, and blocks of the memory pool go to disk, until its memory
has been below the low mark at two looks. One job at least goes on: memory that only standing jobs hold never comes
free.
"""

from __future__ import annotations

from distributed_grid.domain.jobs import Job
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.offload_watch import DegradedNode
from distributed_grid.domain.resources import Priority, ResourceType
from distributed_grid.domain.states import JobState
from distributed_grid.scheduling.offloading.offload_scan import OffloadScan, low_mark
from distributed_grid.scheduling.offloading.relief import Relief, ReliefOutcome
from distributed_grid.scheduling.rebalancing.pressure import percent

CRITICAL_MILLI = 950
"""From here on a node is degraded though a job could move that is not worth it."""
_STUCK = frozenset({ReliefOutcome.NO_ROOM, ReliefOutcome.NOTHING_MOVABLE})


def why_degraded(scan: OffloadScan, node: str, relief: Relief) -> str:
    """Why a node is degraded from now on; empty where it is not, or is already."""
    memory = scan.pressure.reading(node).memory
    if memory is None or node in scan.ledger.degraded or relief.cause != ResourceType.MEMORY:
        return ""
    is_stuck = relief.outcome in _STUCK
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
    here = [job for job in ledger.jobs_of(node) if job.state in _STANDING]
    low = [job for job in here if job.request.priority <= Priority.LOW]
    if len(low) == len(here) and low:
        low.remove(min(low, key=_age))
    return frozenset(job.uid for job in low)


_STANDING = frozenset({JobState.RUNNING, JobState.PAUSED})


def _age(job: Job) -> tuple[int, str]:
    attempt = job.attempt
    return (attempt.started_at_ms if attempt is not None else 0, job.uid)
