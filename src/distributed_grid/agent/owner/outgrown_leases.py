"""Attempts that hold more memory than their leases, which may grow: reports of them, and the end of one in need.

The size of such a lease was learned from earlier runs and is no limit. The control plane grows it. Where it cannot, or
has not yet, the attempt runs on until the memory of the machine is short: then the one that holds most beyond its lease
ends, as over its limit. The agent decides that alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from distributed_grid.agent.execution.attempt import AttemptUsage
from distributed_grid.agent.execution.cpu_control import RunningTree
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.limits.tree_memory import over_limit_message
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.domain.resources import gigabytes
from distributed_grid.wire import HeldMemory

WATCH_MS = 500
RESERVE_DIVISOR = 40
MAX_RESERVE_BYTES = 512 << 20
"""Memory is short when less than a fortieth of the machine is available, or than 512 MB: half of what offers keep."""
GRACE_MS = 2_000
log = logging.getLogger(__name__)


class OutgrownLeases:
    """The attempts of a host that hold more than they have leased."""

    def __init__(self, host: AttemptHost, meter: UsageMeter) -> None:
        self._host = host
        self._meter = meter

    def reports(self, usage: Mapping[str, AttemptUsage]) -> list[HeldMemory]:
        """What the control plane has to know of them."""
        return [
            HeldMemory(tree.attempt_id, tree.fence, usage[tree.attempt_id].memory_bytes)
            for tree in self._outgrown(usage)
            if not tree.stopping
        ]

    async def relieve_memory(self) -> None:
        """End one where the memory of the machine is short; the next one when that is gone and it is not enough."""
        if not any(tree.spec.most_memory_bytes for tree in self._host.running_trees()):
            return
        usage = self._host.usage()
        there_is, used, _ = self._meter.memory(usage)
        available = there_is - used
        if available >= min(there_is // RESERVE_DIVISOR, MAX_RESERVE_BYTES):
            return
        outgrown = self._outgrown(usage)
        if not outgrown or any(tree.stopping for tree in outgrown):
            return
        largest = max(outgrown, key=lambda tree: usage[tree.attempt_id].memory_bytes - tree.spec.memory_bytes)
        held = usage[largest.attempt_id].memory_bytes
        detail = f"{beyond_lease(held, largest.spec.memory_bytes)}; its machine has {gigabytes(available)} left"
        log.warning("%s is ended: %s", largest.attempt_id, detail)
        await self._host.stop_attempt(
            largest.attempt_id, kind="over_limit", detail=detail, grace_ms=min(largest.spec.grace_ms, GRACE_MS)
        )

    def _outgrown(self, usage: Mapping[str, AttemptUsage]) -> list[RunningTree]:
        trees = (tree for tree in self._host.running_trees() if tree.attempt_id in usage)
        return [tree for tree in trees if tree.spec.is_outgrown_by(usage[tree.attempt_id].memory_bytes)]


def beyond_lease(held_bytes: int, leased_bytes: int) -> str:
    """How much more an attempt holds than it has leased, for people."""
    return f"{over_limit_message(held_bytes, leased_bytes)} leased"
