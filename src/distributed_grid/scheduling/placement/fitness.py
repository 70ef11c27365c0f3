"""Fitness of a node for a task: 0 where it does not fit, from a half for an exact fit up towards 1 for plenty of room.

The fitness is `1 - m / 2`, where m is the mean of `asked / free` over the resources that the task asks for. It depends
on what is free and on nothing else, so a node with more of everything free is never less fit for the same task.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distributed_grid.domain.indexes.columns import WHOLE
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Amounts, Capacity


def fitness_of(ask: Amounts, lends: Capacity, claims: NodeClaims) -> float:
    """How fit a node is that lends so much in all, of which so much is taken."""
    if claims.claim_for(ask, lends) is None:
        return 0.0
    taken = [asked / free for asked, free in _asked_and_free(ask, lends, claims)]
    return 1 - sum(taken) / max(len(taken), 1) / 2


def _asked_and_free(ask: Amounts, lends: Capacity, claims: NodeClaims) -> list[tuple[int, int]]:
    pairs = [
        (ask.cpu_milli, lends.cpu_milli - claims.cpu_milli),
        (ask.memory_bytes, lends.memory_bytes - claims.memory_bytes),
        (ask.gpu_milli, sum(claims.free_milli(device) for device in lends.gpus) if ask.gpu_milli else 0),
    ]
    return [(asked, free) for asked, free in pairs if asked]


def fitness_rows(ledger: Ledger, ask: Amounts) -> NDArray[np.int64]:
    """The same of every row that has room, in millionths, by the columns; other rows have some number."""
    columns = ledger.columns
    asked = ((ask.cpu_milli, columns.cpu), (ask.memory_bytes, columns.memory), (ask.gpu_milli, columns.gpu_left))
    parts = [amount / np.maximum(free, 1) for amount, free in asked if amount]
    taken = sum(parts) / len(parts) if parts else np.zeros(len(columns.open))
    return WHOLE - (np.minimum(taken, 1.0) * (WHOLE // 2)).astype(np.int64)
