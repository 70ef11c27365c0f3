"""Placement scores: one integer per node and strategy, higher is better.

The owner's lending rank decides before how full a node is, but after what a strategy is named for: being local, being
spread, speed, cost. Equal scores go to the first row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distributed_grid.domain.indexes.columns import FreeColumns
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.scheduling.placement.fragmentation import fragmentation_index, shape_of

Scores = NDArray[np.int64]

RANK_UNIT = 10_000
"""Above any slack or fullness: the room those have below a rank."""
CLASS_UNIT = 10**10
"""Above any rank: the room everything has below what a strategy is named for."""
LOSS_UNIT = 2 * CLASS_UNIT
"""Above any loss of what is useful on one node, which is below 2**33 (`fragmentation.TOTAL_WEIGHT`)."""
MAX_CACHED_ASKS = 64
"""Requests whose part of each node is cached."""
MAX_RANK = CLASS_UNIT // RANK_UNIT - 1


def score_rows(ledger: Ledger, request: Request, strategy: Strategy) -> Scores:
    """How well each row serves the request, by the strategy."""
    return _SCORERS[strategy](ledger, request)


def _balanced(ledger: Ledger, request: Request) -> Scores:
    """The most room that is left afterwards, in parts of what the node lends: large nodes take more than small ones.
    GPUs count for those who ask for one: nobody else is drawn to them. What is lent to another node comes from one
    that does not work hard itself."""
    columns = ledger.columns
    room = columns.slack + _score_terms(ledger).without(request.ask)
    if request.ask.gpu_milli:
        room += columns.gpu_whole * 1000 // np.maximum(columns.lends_gpus, 1)
    return room - columns.pressure if request.target else room


def _local(ledger: Ledger, request: Request) -> Scores:
    """The node it is for, or this machine; then as balanced."""
    near = ledger.columns.mask_of((request.target,)) if request.target else ledger.columns.local
    return near * np.int64(CLASS_UNIT) + _balanced(ledger, request)


def _best_fit(ledger: Ledger, request: Request) -> Scores:
    """The least that is left afterwards, CPU and GPU alike, as parts of the largest node that is there."""
    columns, ask, terms = ledger.columns, request.ask, _score_terms(ledger)
    left = (columns.cpu - ask.cpu_milli) * 4000 // terms.most_cpu
    left += (columns.gpu_left - ask.gpu_milli) * 4000 // terms.most_gpu
    return terms.rank + (RANK_UNIT - 1) - left


def _spread(ledger: Ledger, request: Request) -> Scores:
    """The fewest leases of the same group, or of anybody where it is in none; then as balanced."""
    columns = ledger.columns
    count = columns.leases
    if request.group:
        count = np.zeros(len(columns.open), dtype=np.int64)
        for lease_id in ledger.groups.get(request.group, ()):
            count[columns.rows[ledger.leases[lease_id].node]] += 1
    return -count * CLASS_UNIT + _balanced(ledger, request)


def _fastest(ledger: Ledger, request: Request) -> Scores:
    """The most unused speed; then as balanced."""
    columns = ledger.columns
    idle = np.maximum(1000 - columns.busy, 0)
    return (columns.speed * idle // 1000) * CLASS_UNIT + _balanced(ledger, request)


def _cheapest(ledger: Ledger, request: Request) -> Scores:
    """The lowest cost; then as best fit, so that costly nodes run empty and can be given up."""
    return -ledger.columns.cost * CLASS_UNIT + _best_fit(ledger, request)


def _least_fragmentation(ledger: Ledger, request: Request) -> Scores:
    """The least fragmentation for typical requests; before any GPU request, the fewest GPUs left."""
    rank = _score_terms(ledger).rank
    if ledger.request_shapes.weights:
        losses = fragmentation_index(ledger).losses(shape_of(request.ask))
        return rank * (LOSS_UNIT // RANK_UNIT) - np.minimum(losses, LOSS_UNIT - 1).astype(np.int64)
    return rank - np.minimum(ledger.columns.gpu_left // 10, RANK_UNIT - 1)


@dataclass(frozen=True, slots=True)
class _ScoreTerms:
    """Score terms that depend on the nodes' own rows: ranks, maxima, and the part of each node that a request takes.

    No lease and no offer changes that, so it is worked out once and remembered (`Ledger.cached`).
    """

    columns: FreeColumns
    version: tuple[int, int]
    rank: Scores
    most_cpu: int
    most_gpu: int
    known: dict[Amounts, Scores]

    def without(self, ask: Amounts) -> Scores:
        """Ranks, less the parts of what each node lends that an ask takes of it. Do not write to it."""
        found = self.known.get(ask)
        if found is None:
            if len(self.known) == MAX_CACHED_ASKS:
                self.known.clear()
            found = self.known[ask] = self.rank + RANK_UNIT // 2 - self._taken(ask)
        return found

    def _taken(self, ask: Amounts) -> Scores:
        """In thousandths, at most 1000 of each resource."""
        columns = self.columns
        cpu = np.minimum(1000 * ask.cpu_milli // np.maximum(columns.lends_cpu, 1), 1000)
        memory = np.minimum(ask.memory_bytes // np.maximum(columns.lends_memory // 1000, 1), 1000)
        gpu = np.minimum(ask.gpu_milli // np.maximum(columns.lends_gpus, 1), 1000)
        taken: Scores = cpu + memory + gpu
        return taken


def _score_terms(ledger: Ledger) -> _ScoreTerms:
    columns, known = ledger.columns, ledger.cached(_ScoreTerms)
    version = (columns.layout, columns.terms)
    if known is None or known.version != version:
        rank = np.minimum(columns.rank, MAX_RANK) * RANK_UNIT
        most_cpu = max(int(columns.lends_cpu.max(initial=1)), 1)
        most_gpu = 1000 * max(int(columns.lends_gpus.max(initial=1)), 1)
        known = ledger.cache(_ScoreTerms(columns, version, rank, most_cpu, most_gpu, {}))
    return known


_SCORERS: dict[Strategy, Callable[[Ledger, Request], Scores]] = {
    Strategy.LOAD_BALANCED: _balanced,
    Strategy.LOCAL_FIRST: _local,
    Strategy.BEST_FIT: _best_fit,
    Strategy.SPREAD: _spread,
    Strategy.PERFORMANCE_OPTIMIZED: _fastest,
    Strategy.COST_OPTIMIZED: _cheapest,
    Strategy.NODE_SPECIFIC: _balanced,
    Strategy.FRAGMENTATION_AWARE: _least_fragmentation,
}
