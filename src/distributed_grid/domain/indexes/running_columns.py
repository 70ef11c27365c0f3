"""What runs on the nodes and could make room, one contiguous int64 column per fact.

An index derived in `Ledger.apply`, as the columns of the nodes are: nothing here is known only here. Whom an urgent
request displaces is a question to every running lease of the grid, and this makes it a handful of vector operations.

Rule 1: a lease has a slot from when it is active until it begins to leave; copies of blocks have none, for only their
        owner or the lender's drives them away.
Rule 2: who is on the way out is listed by node, so that it can be waited for instead of asking somebody else to go.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distributed_grid.domain.jobs import Ending, Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.states import LeaseState

Column = NDArray[np.int64]
_NAMES = ("node", "priority", "began", "since", "spent", "cpu", "memory", "gpu", "devices", "share")
_BEGAN, _SINCE, _SPENT = _NAMES.index("began"), _NAMES.index("since"), _NAMES.index("spent")


class RunningColumns:
    """Parallel arrays over the leases that are active.

    `node` is the node's row in the columns; `began` when it started, `since` when it started or last marked a
    checkpoint; `spent` how often its job was displaced before. Of GPUs it holds `gpu` thousandths in all, on so many
    `devices`, the largest `share` on one of them.
    """

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.ids: list[str] = []
        self.leaving: dict[str, dict[str, None]] = {}
        self._table: NDArray[np.int64] = np.zeros((len(_NAMES), 16), dtype=np.int64)

    def column(self, name: str) -> Column:
        """One fact of every slot in use; do not write to it."""
        found: Column = self._table[_NAMES.index(name), : len(self.ids)]
        return found

    def put(self, lease: Lease, job: Job | None, row: int) -> None:
        """Take a lease in as it now is: `job` is what runs under it, `row` its node's."""
        if lease.state is LeaseState.RELEASING:
            self.leaving.setdefault(lease.node, {})[lease.id] = None
        if lease.state is not LeaseState.ACTIVE or lease.claim is None or lease.request.block:
            self._drop(lease.id)
            return
        claim = lease.claim
        began, since, spent = _history(lease, job)
        slot = self._slot(lease.id)
        self._table[:, slot] = (
            row,
            lease.request.priority,
            began,
            since,
            spent,
            claim.cpu_milli,
            claim.memory_bytes,
            sum(share.milli for share in claim.gpus) if claim.gpus else 0,
            len(claim.gpus),
            max(share.milli for share in claim.gpus) if claim.gpus else 0,
        )

    def told(self, lease: Lease, job: Job) -> None:
        """Take in what is new of the job under a lease."""
        slot = self.slots.get(lease.id)
        if slot is not None:
            table = self._table
            table[_BEGAN, slot], table[_SINCE, slot], table[_SPENT, slot] = _history(lease, job)

    def over(self, lease: Lease) -> None:
        """Forget a lease."""
        self._drop(lease.id)
        there = self.leaving.get(lease.node)
        if there is not None and lease.id in there:
            del there[lease.id]
            if not there:
                del self.leaving[lease.node]

    def _slot(self, lease_id: str) -> int:
        slot = self.slots.get(lease_id)
        if slot is None:
            slot = len(self.ids)
            if slot == self._table.shape[1]:
                self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
            self.slots[lease_id] = slot
            self.ids.append(lease_id)
        return slot

    def _drop(self, lease_id: str) -> None:
        """Give the slot up; the last one moves into it."""
        slot = self.slots.pop(lease_id, None)
        if slot is None:
            return
        last = self.ids.pop()
        if last != lease_id:
            self._table[:, slot] = self._table[:, len(self.ids)]
            self.ids[slot] = last
            self.slots[last] = slot

    def facts(self, nodes: Sequence[str]) -> dict[str, tuple[str | int, ...]]:
        """All that is known, by lease and with the node's name: equal where two ledgers say the same."""
        found: dict[str, tuple[str | int, ...]] = {}
        for lease_id, slot in self.slots.items():
            row, *facts = self._table[:, slot].tolist()
            found[lease_id] = (nodes[row], *facts)
        return found


def _history(lease: Lease, job: Job | None) -> tuple[int, int, int]:
    """When it started, when it started or marked a checkpoint, and how often its job was displaced before."""
    if job is None:
        return lease.granted_at_ms, lease.granted_at_ms, 0
    spent = sum(one.outcome is not None and one.outcome.ending is Ending.PREEMPTED for one in job.attempts)
    attempt = job.attempt
    if attempt is None or attempt.lease_id != lease.id:
        return lease.granted_at_ms, lease.granted_at_ms, spent
    began = max(lease.granted_at_ms, attempt.started_at_ms)
    return began, max(began, attempt.marked_at_ms), spent
