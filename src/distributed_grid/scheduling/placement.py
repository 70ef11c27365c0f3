"""Where a request fits best right now.

Rule 1: only open nodes (alive, with a fresh offer) are considered, never a guess.
Rule 2: required nodes are a must, preferred ones a wish that comes before any score.
Rule 3: the same ledger and request always give the same place.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Claim


class Placement(Struct, frozen=True):
    """A node and the exact claim there."""

    node: str
    claim: Claim


def place(ledger: Ledger, request: Request, *, avoid: frozenset[str] = frozenset()) -> Placement | None:
    """The best place for a request, or None where it does not fit anywhere now; never on a node to avoid."""
    named = request.require or request.prefer
    if named:
        found = _best_of(ledger, request.ask, _rows(ledger, named, avoid))
        if found is not None or request.require:
            return found
    mask = fitting(ledger, request.ask)
    for row in _rows(ledger, tuple(avoid), frozenset()):
        mask[row] = False
    # A row that passes the filter can still fail in detail (GPU memory, custom resources): then the next best.
    while True:
        scores = np.where(mask, ledger.columns.slack, -1)
        row = int(scores.argmax()) if len(scores) else -1
        if row < 0 or scores[row] < 0:
            return None
        node = ledger.columns.names[row]
        claim = ledger.book(node).claim_for(request.ask, ledger.lends(node))
        if claim is not None:
            return Placement(node, claim)
        mask[row] = False


def fitting(ledger: Ledger, ask: Amounts) -> NDArray[np.bool_]:
    """Which rows have room, by their columns."""
    columns = ledger.columns
    mask = columns.open.copy()
    if ask.cpu_milli:
        mask &= columns.cpu >= ask.cpu_milli
    if ask.memory_bytes:
        mask &= columns.memory >= ask.memory_bytes
    if ask.gpu_milli >= WHOLE_GPU:
        mask &= columns.gpu_whole >= ask.gpu_milli // WHOLE_GPU
    elif ask.gpu_milli:
        mask &= columns.gpu_part >= ask.gpu_milli
    return mask


def _rows(ledger: Ledger, names: tuple[str, ...], avoid: frozenset[str]) -> list[int]:
    rows = ledger.columns.rows
    return [rows[name] for name in names if name in rows and name not in avoid]


def _best_of(ledger: Ledger, ask: Amounts, rows: list[int]) -> Placement | None:
    columns = ledger.columns
    for row in sorted(rows, key=lambda row: -int(columns.slack[row])):
        if not columns.open[row]:
            continue
        node = columns.names[row]
        claim = ledger.book(node).claim_for(ask, ledger.lends(node))
        if claim is not None:
            return Placement(node, claim)
    return None
