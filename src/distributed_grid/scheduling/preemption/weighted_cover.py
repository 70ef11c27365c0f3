"""Minimum-weight cover: the lightest set of items that together meet every need.

Branch and bound from the highest rank down, lightest items first; an item of a higher rank outweighs any number of
lower ones. A branch ends where even the lightest remaining items, as many as are needed at least, would be too heavy.
That number is counted per need and for all needs together: an item that meets a third of one need and none of another
meets a sixth of the two. The result is optimal unless the search exceeds `MAX_STEPS` or `MAX_DEPTH` (dozens of items
of dozens of sizes); then it is the lightest that was found. Either way it contains nothing that could be left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import add, ge, sub
from typing import NamedTuple

MAX_STEPS = 5_000
MAX_DEPTH = 200
WHOLE = 1 << 30  # a need as a whole, where all needs are counted together

AmountVector = tuple[int, ...]


class CoverItem(NamedTuple):
    """A candidate: its weight, its rank, and the part of each need that it meets."""

    weight: int
    rank: int
    amounts: AmountVector


def lightest_cover(
    items: Sequence[CoverItem], needs: AmountVector, below: int, steps: int = MAX_STEPS
) -> list[int] | None:
    """Which items meet all needs at the least weight, or None where nothing lighter than `below` does."""
    dims = [(at, need) for at, need in enumerate(needs) if need > 0]
    if not dims:
        return [] if below > 0 else None
    ranks: dict[int, list[_CoverEntry]] = {}
    for number, item in enumerate(items):
        if item.weight < below:
            amounts = [item.amounts[at] for at, _ in dims]
            if len(dims) > 1:
                amounts.append(sum([-(-min(item.amounts[at], need) * WHOLE // need) for at, need in dims]))
            if amounts[-1]:
                ranks.setdefault(item.rank, []).append(_CoverEntry(item.weight, number, tuple(amounts)))
    layers: list[_RankLayer] = []
    for rank in sorted(ranks):
        layers.insert(0, _RankLayer(ranks[rank], layers[0] if layers else None))
    together = [len(dims) * WHOLE] if len(dims) > 1 else []
    return _CoverSearch(layers, tuple([need for _, need in dims] + together), below).run(steps)


class _CoverEntry(NamedTuple):
    """A candidate in the search: its number, and the amounts of the open needs only."""

    weight: int
    number: int
    amounts: AmountVector


class _RankLayer:
    """The items of one rank, lightest first, with cached sums for the search."""

    def __init__(self, entries: list[_CoverEntry], below: _RankLayer | None) -> None:
        self.entries = sorted(entries)
        self.summed = [0, *accumulate([entry.weight for entry in self.entries])]
        columns = list(zip(*[entry.amounts for entry in entries], strict=True))
        self.most = [[0, *accumulate(sorted(column, reverse=True))] for column in columns]
        """How much the so-many largest meet, need by need."""
        self.lower: AmountVector = below.all_met if below is not None else (0,) * len(columns)
        """How much all items of lower ranks meet together."""
        self.from_here = [self.lower]
        for entry in reversed(self.entries):
            self.from_here.insert(0, tuple(map(add, self.from_here[0], entry.amounts)))
        """How much they and the items from each one on meet together."""
        self.all_met: AmountVector = self.from_here[0]
        self._dominated_by: dict[int, int] = {}

    def dominated_by(self, at: int) -> int:
        """The last of the lighter items that meets every need at least as well; -1 where none does."""
        if at not in self._dominated_by:
            mine, lighter = self.entries[at].amounts, range(at - 1, -1, -1)
            better = (other for other in lighter if _covers(self.entries[other].amounts, mine))
            self._dominated_by[at] = next(better, -1)
        return self._dominated_by[at]

    def least(self, needs: AmountVector) -> int:
        """How many of this rank it takes at the least, when everybody of lower ranks helps."""
        count = 0
        for need, lower, most in zip(needs, self.lower, self.most, strict=True):
            if need > lower:
                count = max(count, bisect_left(most, need - lower, count))
        return count

    def each_meets(self, needs: AmountVector, count: int) -> AmountVector:
        """Least amount of each of `count` items, if no more of this rank are chosen."""
        parts = zip(needs, self.lower, self.most, strict=True)
        return tuple([need - lower - most[count - 1] for need, lower, most in parts])

    def without(self, needs: AmountVector, count: int) -> AmountVector:
        """Needs left over by the `count` largest items of this rank."""
        return tuple([need - most[count] for need, most in zip(needs, self.most, strict=True)])


class _CoverSearch:
    """Branch and bound: the lightest cover so far, and the current branch."""

    def __init__(self, layers: list[_RankLayer], needs: AmountVector, below: int) -> None:
        self._layers = layers
        self._needs = needs
        self._below = below
        self._best: list[_CoverEntry] | None = None
        self._chosen: list[_CoverEntry] = []
        self._steps = 0

    def run(self, steps: int) -> list[int] | None:
        """Numbers of the lightest items that are enough; None if they are not lighter than the bound."""
        bound = self._lower_bound(0, self._needs)
        if bound is None or bound >= self._below:
            return None
        self._greedy_cover()
        self._steps = steps
        if self._best is None or len(self._best) < MAX_DEPTH:
            self._branch(0, 0, self._needs, 0)
        return (
            None
            if self._best is None
            else sorted(entry.number for entry in _without_superfluous(self._best, self._needs))
        )

    def _lower_bound(self, at: int, left: AmountVector) -> int | None:
        """No answer from this layer down is lighter than this; None where there is none."""
        weight = 0
        for layer in self._layers[at:]:
            count = layer.least(left)
            if count > len(layer.entries):
                return None
            weight += layer.summed[count]
            left = layer.without(left, count)
        return weight if max(left) <= 0 else None

    def _greedy_cover(self) -> None:
        """A first answer to measure others by: the largest items first, of the ranks it takes."""
        left = self._needs
        for layer in self._layers:
            for entry in sorted(layer.entries, key=lambda entry: (-entry.amounts[-1], entry)):
                if not layer.least(left):
                    break
                self._chosen.append(entry)
                left = _subtract(left, entry.amounts)
        if max(left) <= 0:
            self._chosen = _without_superfluous(self._chosen, self._needs)
            self._record(sum([entry.weight for entry in self._chosen]), left)
        self._chosen = []

    def _record(self, weight: int, left: AmountVector) -> bool:
        """Keep the chosen items if they are enough and the lightest so far; True if they are enough."""
        if max(left) > 0:
            return False
        if weight < self._below:
            self._below, self._best = weight, self._chosen[:]
        return True

    def _branch(self, at: int, start: int, left: AmountVector, weight: int) -> None:
        """Search every continuation of the chosen items in this layer."""
        self._steps -= 1
        if self._record(weight, left) or at == len(self._layers) or self._steps < 0:
            return
        layer = self._layers[at]
        count, size, summed = layer.least(left), len(layer.entries), layer.summed
        if not count:
            self._branch(at + 1, 0, left, weight)
            return
        if start + count > size:
            return
        is_last = at + 1 == len(self._layers)
        bound = weight + ((not is_last and self._lower_bound(at + 1, layer.without(left, count))) or 0)
        exactly = start + count == size or bound + summed[start + count + 1] - summed[start] >= self._below
        each = layer.each_meets(left, count) if exactly else left
        for first in range(start, size - count + 1):
            if bound + summed[first + count] - summed[first] >= self._below or not _covers(
                layer.from_here[first], left
            ):
                break
            entry = layer.entries[first]
            if (exactly and not _covers(entry.amounts, each)) or layer.dominated_by(first) >= start:
                continue
            self._chosen.append(entry)
            self._branch(at, first + 1, _subtract(left, entry.amounts), weight + entry.weight)
            self._chosen.pop()


def _without_superfluous(chosen: list[_CoverEntry], needs: AmountVector) -> list[_CoverEntry]:
    """The chosen entries without superfluous ones, the heaviest dropped first."""
    kept = list(chosen)
    left = needs
    for entry in kept:
        left = _subtract(left, entry.amounts)
    for entry in sorted(chosen, reverse=True):
        without = tuple(map(add, left, entry.amounts))
        if max(without) <= 0:
            kept.remove(entry)
            left = without
    return kept


def _covers(amounts: AmountVector, needs: AmountVector) -> bool:
    return all(map(ge, amounts, needs))


def _subtract(needs: AmountVector, amounts: AmountVector) -> AmountVector:
    return tuple(map(sub, needs, amounts))
