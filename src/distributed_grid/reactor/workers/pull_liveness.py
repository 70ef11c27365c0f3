"""Liveness of pull workers: when they are doubted, ask no more, have not taken a task, or are forgotten.

Besides, how what is reserved on any node for a task is renewed while the node is heard.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import LeaseReclaimed
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, NodeObservation
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import JobState, LeaseState, NodeState
from distributed_grid.reactor.decision import MAX_LEASES_PER_STEP, Decision

MIN_SUSPECT_MS = 1_000
ASKING_MS = 15_000
"""How long a pull worker counts as asking for a task after it has asked."""
UNTAKEN_MS = 30_000
"""How long a task waits for the pull worker that it was assigned to."""
DESERTED_MS = 3_600_000
"""How long a pull worker that is lost stays listed."""


def pull_suspect_after_ms(node: Node) -> int:
    """After how long a silence a pull worker is doubted: it is heard as often as its hold needs."""
    return max(node.hold_ms // 3, MIN_SUSPECT_MS)


def check_pull_worker(ledger: Ledger, node: Node, seen: NodeObservation | None, decision: Decision, now: int) -> None:
    """A pull worker that has not asked for a while asks no more, and what it does not take goes to another."""
    if seen is not None and seen.asking_since_ms and now - seen.asking_since_ms > ASKING_MS:
        decision.changes.append(replace(seen, asking_since_ms=0))
    for job in ledger.jobs_of(node.name):
        attempt = job.attempt
        if attempt is None or job.state is not JobState.ASSIGNED or now - attempt.assigned_at_ms <= UNTAKEN_MS:
            continue
        if len(decision.follow) < MAX_LEASES_PER_STEP and not ledger.leases[attempt.lease_id].awaits:
            why = f"{node.name} did not take it within {UNTAKEN_MS // 1000} s"
            decision.follow.append(LeaseReclaimed(attempt.lease_id, why))


def is_deserted(node: Node, seen: NodeObservation | None, now: int) -> bool:
    """Whether a pull worker was lost so long ago that nobody expects it back."""
    if not node.is_pull or node.state is not NodeState.LOST or seen is None:
        return False
    return now - max(seen.at_ms, seen.held_until_ms) > DESERTED_MS


def renewed_reservations(ledger: Ledger, node: str, now: int) -> list[Row]:
    """The reservations for tasks on a node that was heard, with their whole term again once half of it is over."""
    held = (ledger.leases[lease_id] for lease_id in ledger.reservations_on.get(node, ()))
    return [
        replace(lease, ends_at_ms=now + lease.request.duration_ms)
        for lease in held
        if lease.state is LeaseState.ACTIVE and 2 * (lease.ends_at_ms - now) < lease.request.duration_ms
    ]
