"""Whom an owner who is back takes away what its node's engine holds for others.

Rule 1: the owner is back where its own use is above the marks that lending goes by, and the margin.
Rule 2: only what the owner is short of is taken back, of the least important and then of the youngest first. What an
        engine's workers use of a loan is the borrower's use, so that no loan drives itself away.
"""

from __future__ import annotations

from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.states import LeaseState


def overdrawn(ledger: Ledger, node: Node, usage: Usage) -> tuple[Lease, ...]:
    """The leases of a node that its engine holds and that its owner wants back now."""
    limits = node.thresholds
    if limits is None or not ledger.bindings:
        return ()
    backed = [
        lease for lease in ledger.leases_of(node.name) if lease.engine and not lease.job and lease.claim is not None
    ]
    if not backed:
        return ()
    has, margin = node.capacity, limits.margin_milli
    memory_used = 1000 * usage.memory_outside_bytes // max(has.memory_bytes, 1)
    cpu_short = memory_short = 0
    if usage.cpu_outside_milli > limits.cpu_busy_max_milli + margin:
        free = has.cpu_milli * max(1000 - usage.cpu_outside_milli, 0) // 1000
        cpu_short = sum(lease.claim.cpu_milli for lease in backed if lease.claim is not None) - free
    if memory_used > limits.memory_used_max_milli + margin:
        free = max(has.memory_bytes - usage.memory_outside_bytes, 0)
        memory_short = sum(lease.claim.memory_bytes for lease in backed if lease.claim is not None) - free
    wanted = {gpu.index for gpu in usage.gpus if gpu.busy_milli > limits.gpu_busy_max_milli + margin}
    leaving: list[Lease] = []
    for lease in sorted(backed, key=lambda one: (one.request.priority, -one.granted_at_ms, one.id)):
        claim = lease.claim
        assert claim is not None
        helps = (
            (cpu_short > 0 and claim.cpu_milli)
            or (memory_short > 0 and claim.memory_bytes)
            or any(share.index in wanted for share in claim.gpus)
        )
        if helps and lease.state is not LeaseState.RELEASING:
            leaving.append(lease)
            cpu_short -= claim.cpu_milli
            memory_short -= claim.memory_bytes
    return tuple(leaving)
