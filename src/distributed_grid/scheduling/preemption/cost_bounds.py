"""Lower bounds of the preemption cost of every node, lightest first, to order and prune the exact search.

A bound is never above what `lightest_victims` finds. Priority comes first, so nodes come in groups with the same least
number of victims per rank; the work lost is only bounded for a group that is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distributed_grid.domain.indexes.columns import Column
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Claim
from distributed_grid.scheduling.placement.placement import Mask, allowed_rows
from distributed_grid.scheduling.preemption.victims import PreemptionCandidates

COUNT_BITS = 20
NOT_PREFERRED = 1 << 78
EXACT_VICTIMS = 8  # victims whose least size is bounded one by one; the others are bounded together
WHOLE = 1 << 20  # a need as a whole, where all needs are counted together
Gives = Callable[[Claim], int]
_INFEASIBLE = np.int64(2**60)
_NOTHING = np.zeros(1, dtype=np.int64)


def victim_weight(rank: int, cost: int) -> int:
    """Weight of one victim: a higher rank outweighs any number of lower ones, one victim any work lost."""
    return (1 << (80 + COUNT_BITS * rank)) + cost


class CostBound(NamedTuple):
    """Lower bound of a preemption on this node; `slots` are the candidates there."""

    weight: int
    node: str
    slots: NDArray[np.intp]


def cost_bounds(ledger: Ledger, request: Request, candidates: PreemptionCandidates) -> Iterator[CostBound]:
    """Nodes where a preemption could make room, the lightest bound first."""
    rows = _rows(ledger, request)
    if len(rows):
        yield from _BoundSearch(ledger, request, candidates, rows).in_order()


def _rows(ledger: Ledger, request: Request) -> NDArray[np.intp]:
    mask: Mask = ledger.columns.open.copy()
    musts = allowed_rows(ledger, request)
    if musts is not None:
        mask &= musts
    return np.flatnonzero(mask)


class _Need:
    """One resource: its shortfall on each node, and the sums of the largest claims there."""

    def __init__(self, short: Column, amounts: Column, segments: Column, starts: Column) -> None:
        self.short = short
        self.amounts = amounts
        largest = np.int64(1 << 40)
        order = np.argsort(segments * largest + (largest - 1 - np.minimum(amounts, largest - 1)))
        self.starts = starts
        self.summed = np.concatenate((_NOTHING, np.cumsum(amounts[order])))

    def given_by(self, segments: Column, count: Column) -> Column:
        """Sum of the `count` largest amounts of each segment."""
        start = self.starts[segments]
        given: Column = self.summed[start + count] - self.summed[start]
        return given

    def least(self, segments: Column, wanted: Column) -> Column:
        """Least number of claims of each segment that sum up to `wanted`; above their number if all are too few."""
        start = self.starts[segments]
        found: Column = np.searchsorted(self.summed, self.summed[start] + np.maximum(wanted, 0)) - start
        return np.maximum(found, 0)


class _BoundSearch:
    """The nodes that may serve, the running leases that may go there, and the minimum counts and costs."""

    def __init__(
        self, ledger: Ledger, request: Request, candidates: PreemptionCandidates, rows: NDArray[np.intp]
    ) -> None:
        self._ledger = ledger
        self._rows = rows
        self._ranks = int(request.priority)
        columns, running = ledger.columns, ledger.running
        place = np.full(len(columns.open), -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        where = place[running.column("node")[candidates.slots]]
        there = where >= 0
        slots, where = candidates.slots[there], where[there]
        segments = where * self._ranks + running.column("priority")[slots]
        order = np.argsort(segments, kind="stable")
        self._slots, self._where, self._segments = slots[order], where[order], segments[order]
        self._costs = candidates.costs[self._slots]
        self._sizes = np.bincount(self._segments, minlength=len(rows) * self._ranks).astype(np.int64)
        self._starts: Column = np.concatenate((_NOTHING, np.cumsum(self._sizes)))
        self._needs = self._missing(request)
        self._wanted: list[list[Column]] = [[] for _ in range(self._ranks)]
        self._preferred = ledger.columns.mask_of(request.prefer)[rows]

    def _missing(self, request: Request) -> list[_Need]:
        """Resources with a shortfall on some node. Memory counts in MiB, rounded in favour of the node; leaving leases
        count as gone."""
        columns, running, ask = self._ledger.columns, self._ledger.running, request.ask
        kinds: list[tuple[Column, Column, Gives]] = [
            (ask.cpu_milli - columns.cpu, running.column("cpu"), lambda claim: claim.cpu_milli),
            (
                (ask.memory_bytes - columns.memory) >> 20,
                -(-running.column("memory") >> 20),
                lambda claim: -(-claim.memory_bytes >> 20),
            ),
        ]
        if ask.gpu_milli >= WHOLE_GPU:
            wanted = ask.gpu_milli // WHOLE_GPU - columns.gpu_whole
            kinds.append((wanted, running.column("devices"), lambda claim: len(claim.gpus)))
        elif ask.gpu_milli:
            kinds.append(
                (
                    ask.gpu_milli - columns.gpu_part,
                    running.column("share"),
                    lambda claim: max((share.milli for share in claim.gpus), default=0),
                )
            )
        needs = []
        for short, amounts, gives in kinds:
            short = short[self._rows] - self._leaving(gives)
            if short.max(initial=0) > 0:
                needs.append(_Need(short, amounts[self._slots], self._segments, self._starts))
        if len(needs) > 1:
            needs.append(self._together(needs))
        return needs

    def _together(self, needs: list[_Need]) -> _Need:
        """All needs as one, each in parts of its shortfall: meeting only one of them does not meet all."""
        short = np.zeros(len(self._rows), dtype=np.int64)
        amounts = np.zeros(len(self._slots), dtype=np.int64)
        for need in needs:
            short += np.where(need.short > 0, WHOLE, 0)
            missing = np.maximum(need.short, 0)[self._where]
            amounts += -(-np.minimum(need.amounts, missing) * WHOLE // np.maximum(missing, 1))
        return _Need(short, amounts, self._segments, self._starts)

    def _leaving(self, gives: Gives) -> Column:
        """Amounts that the leases being released will free."""
        ledger = self._ledger
        given = np.zeros(len(ledger.columns.open), dtype=np.int64)
        for name, ids in ledger.running.leaving.items():
            claims = [claim for lease_id in ids if (claim := ledger.leases[lease_id].claim) is not None]
            given[ledger.columns.rows[name]] = sum(gives(claim) for claim in claims)
        return given[self._rows]

    def in_order(self) -> Iterator[CostBound]:
        counts, feasible = self._counts()
        code = np.zeros(len(self._rows), dtype=np.int64)
        for rank, count in enumerate(counts):
            code += count << (COUNT_BITS * rank)
        for group in np.unique(code[feasible]).tolist():
            members = np.flatnonzero(feasible & (code == group))
            victims = [int(count[members[0]]) for count in counts]
            lost = self._min_work_lost(members, victims) if len(members) > 1 else _NOTHING
            base = sum(count * victim_weight(rank, 0) for rank, count in enumerate(victims))
            not_preferred = ~self._preferred[members]
            for at in np.lexsort((lost, not_preferred)).tolist():
                member = int(members[at])
                slots = self._slots[self._starts[member * self._ranks] : self._starts[(member + 1) * self._ranks]]
                weight = base + (NOT_PREFERRED if not_preferred[at] else 0) + int(lost[at])
                yield CostBound(weight, self._ledger.columns.names[int(self._rows[member])], slots)

    def _counts(self) -> tuple[list[Column], Mask]:
        """Least number of victims of each rank on each node, and the nodes where they are enough."""
        all_rows = np.arange(len(self._rows), dtype=np.int64)
        feasible = np.ones(len(self._rows), dtype=np.bool_)
        counts: list[Column] = [np.zeros(len(self._rows), dtype=np.int64) for _ in range(self._ranks)]
        left = [need.short for need in self._needs]
        for rank in reversed(range(self._ranks)):
            segments = all_rows * self._ranks + rank
            sizes = self._sizes[segments]
            for need, short in zip(self._needs, left, strict=True):
                lower = sum(
                    (need.given_by(segments - below, self._sizes[segments - below]) for below in range(1, rank + 1)),
                    start=np.zeros(len(all_rows), dtype=np.int64),
                )
                self._wanted[rank].append(short - lower)
                counts[rank] = np.maximum(counts[rank], need.least(segments, short - lower))
            feasible &= counts[rank] <= sizes
            counts[rank] = np.minimum(counts[rank], sizes)
            left = [
                short - need.given_by(segments, counts[rank]) for need, short in zip(self._needs, left, strict=True)
            ]
        return counts, feasible

    def _min_work_lost(self, members: NDArray[np.intp], counts: list[int]) -> Column:
        """Least work lost on each of these nodes with exactly `counts` victims of each rank."""
        lost = np.zeros(len(members), dtype=np.int64)
        chosen = np.full(len(self._rows), -1, dtype=np.int64)
        chosen[members] = np.arange(len(members))
        for rank, count in enumerate(counts):
            if not count:
                continue
            mine = np.flatnonzero((chosen[self._where] >= 0) & (self._segments % self._ranks == rank))
            at, costs = chosen[self._where[mine]], self._costs[mine]
            order = np.lexsort((costs, at))
            mine, at, costs = mine[order], at[order], costs[order]
            segments = members * self._ranks + rank
            least = np.zeros(len(members), dtype=np.int64)
            for need, wanted in zip(self._needs, self._wanted[rank], strict=True):
                enough = _Thresholds(need, segments, wanted[members], count)
                least = np.maximum(least, _lightest(at, costs, need.amounts[mine], enough, len(members)))
            lost += least
        return np.minimum(lost, _INFEASIBLE)


class _Thresholds:
    """Least amount of the n-th largest of `count` claims that sum up to `wanted`, while none exceeds the largest claims
    there: the first gives at least its part of the whole, the first two theirs of the rest, and so on."""

    def __init__(self, need: _Need, segments: Column, wanted: Column, count: int) -> None:
        self.count = count
        self._need = need
        self._segments = segments
        self._wanted = wanted

    def __getitem__(self, number: int) -> Column:
        """Least amount of claim `number`, node by node."""
        before = np.full(len(self._segments), number, dtype=np.int64)
        left = self._wanted - self._need.given_by(self._segments, before)
        return -(-left // (self.count - number))


def _lightest(at: Column, costs: Column, amounts: Column, enough: _Thresholds, size: int) -> Column:
    """Least cost of `enough.count` claims on each node, each large enough; costs are sorted, node by node."""
    lost = np.zeros(size, dtype=np.int64)
    free = np.ones(len(at), dtype=np.bool_)
    for number in range(min(enough.count, EXACT_VICTIMS)):
        rest = number == EXACT_VICTIMS - 1
        wanted = enough.count - number if rest else 1
        able = np.flatnonzero(free & (amounts >= enough[enough.count - 1 if rest else number][at]))
        sizes = np.bincount(at[able], minlength=size)
        firsts = np.cumsum(sizes) - sizes
        summed = np.concatenate((_NOTHING, np.cumsum(costs[able])))
        given = summed[firsts + np.minimum(sizes, wanted)] - summed[firsts]
        lost = np.minimum(lost + np.where(sizes >= wanted, given, _INFEASIBLE), _INFEASIBLE)
        free[able[firsts[sizes > 0]]] = False
    return lost
