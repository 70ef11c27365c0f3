"""Who may be displaced for a request, and how much work would be lost with each.

Rule 1: only strictly lower priorities yield, on nodes that are alive and heard.
Rule 2: what has run for less than the minimum run time, or was displaced as often as the policy allows, stays.
Rule 3: work lost is a share of the grid (the dominant one) times the time since the start or the last checkpoint mark.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from distributed_grid.domain.indexes.running_columns import Column
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger

Slots = NDArray[np.intp]
Cost = Callable[[Ledger, Slots, int], Column]
"""What it costs to displace each of these tenants now; never negative, below 2**52."""

_LONGEST_MS = 2**40
_LARGEST = 2**22


class PreemptionCandidates:
    """The tenants that may be displaced, by their slots; `able` says so of every slot, `costs` is theirs alone."""

    def __init__(self, ledger: Ledger, request: Request, now: int, cost: Cost) -> None:
        tenants, policy = ledger.tenants, ledger.policy
        able = tenants.column("priority") < int(request.priority)
        able &= now - tenants.column("began") >= policy.minimum_run_ms
        able &= tenants.column("spent") < policy.preemptions_max
        able &= ledger.columns.open[tenants.column("node")]
        self.able: NDArray[np.bool_] = able
        self.slots: Slots = np.flatnonzero(able)
        self.costs: Column = np.zeros(len(able), dtype=np.int64)
        self.costs[self.slots] = cost(ledger, self.slots, now)


def work_lost(ledger: Ledger, slots: Slots, now: int) -> Column:
    """About so many core-milliseconds of work would have to be done again; a GPU or memory counts as the cores that
    are as large a part of the grid."""
    tenants, columns = ledger.tenants, ledger.columns
    cores = min(int(columns.lends_cpu.sum()), 2**32)
    size = np.maximum(tenants.column("cpu")[slots], 1)
    for name, total in (
        ("memory", int(columns.lends_memory.sum()) >> 20),
        ("gpu", 1000 * int(columns.lends_gpus.sum())),
    ):
        if total and cores:
            amount = tenants.column(name)[slots]
            size = np.maximum(size, np.minimum(amount >> 20 if name == "memory" else amount, 2**30) * cores // total)
    ago: Column = np.clip(now - tenants.column("since")[slots], 0, _LONGEST_MS)
    lost: Column = (np.minimum(size, _LARGEST) * ago) >> 10
    return lost
