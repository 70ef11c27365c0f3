"""Preemption candidates, the work they would lose, and the lightest exact set of victims on one node.

Candidates have a strictly lower priority, run on nodes that are alive, have run for the minimum time, and were not
preempted too often. Work lost is the dominant share of the grid times the time since the start or the last checkpoint.
Whether a request fits is decided by `NodeClaims.claim_for`: whole GPUs have to be cleared of everybody, part of a GPU
has to be free on one device.

The lightest set is a minimum-weight cover: branch and bound from the highest rank down, lightest items first; an item
of a higher rank outweighs any number of lower ones. A branch ends where even the lightest remaining items, in the least
number that is needed, would be too heavy. That number is counted per need and for all needs together: an item that
meets a third of one need and none of another meets a sixth of the two. The result is optimal unless the search exceeds
`MAX_STEPS` or `MAX_DEPTH` (dozens of items of dozens of sizes); then it is the lightest set found. Either way it
contains nothing superfluous.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import add, ge, sub
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from distributed_grid.domain.indexes.columns import Column
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Capacity, Claim, GpuDevice, is_model

MAX_STEPS = 5_000
MAX_DEPTH = 200
WHOLE = 1 << 30
"""A need as a whole, where all needs are counted together."""

AmountVector = tuple[int, ...]


class CoverItem(NamedTuple):
    """Something that can be given up: what that costs, its rank, and how much of each need it meets."""

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
    """An item as the search knows it: by its number, and with what it meets of the needs there are."""

    weight: int
    number: int
    amounts: AmountVector


class _RankLayer:
    """The items of one rank, lightest first, with what the search asks of them again and again."""

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
        """What each of so many has to meet at the least, if no more of this rank go."""
        parts = zip(needs, self.lower, self.most, strict=True)
        return tuple([need - lower - most[count - 1] for need, lower, most in parts])

    def without(self, needs: AmountVector, count: int) -> AmountVector:
        """What is left to be met when so many of this rank meet as much as any could."""
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
        """The numbers of the lightest items that are enough, if they are lighter than what was asked for."""
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
        """Keep what is chosen, if it is enough and the lightest so far; whether it is enough."""
        if max(left) > 0:
            return False
        if weight < self._below:
            self._below, self._best = weight, self._chosen[:]
        return True

    def _branch(self, at: int, start: int, left: AmountVector, weight: int) -> None:
        """Look through everything that begins with what is chosen so far and goes on in this layer."""
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


class VictimGroup(NamedTuple):
    """Leases that go together, the one on this node first: what that costs, its rank, what it gives back here, and
    what it really uses of the memory of the machine that simulated nodes share."""

    leases: tuple[str, ...]
    weight: int
    rank: int
    claim: Claim
    machine_bytes: int = 0


class PreemptionSite(Struct, frozen=True):
    """A node to make room on: what it lends, what is taken there for good or for now, and who of them could go.

    Where the machine of simulated nodes lacks `machine_bytes`, those on its other nodes could go, too.
    """

    lends: Capacity
    claims: NodeClaims
    groups: Sequence[VictimGroup]
    machine_bytes: int = 0


def lightest_victims(site: PreemptionSite, ask: Amounts, below: int) -> list[VictimGroup] | None:
    """The lightest victims for the ask to fit, or None where none lighter than `below` are enough."""
    search = _VictimSearch(site, ask, below)
    if not ask.gpu_milli:
        search.consider({})
        return search.best
    devices = [d for d in site.lends.gpus if not ask.gpu_models or is_model(d.name, ask.gpu_models)]
    if ask.gpu_milli < WHOLE_GPU:
        for device in devices:
            if not device.exclusive:
                search.consider({}, device)
        return search.best
    large = [_OccupiedGpu(device, site) for device in devices if device.memory_bytes >= ask.gpu_memory_bytes]
    missing = ask.gpu_milli // WHOLE_GPU - sum(one.is_free for one in large)
    taken = sorted((one for one in large if one.can_be_cleared), key=lambda one: one.share)
    if missing <= len(taken):
        search.clear(taken, max(missing, 0), {}, 0)
    return search.best


class _OccupiedGpu:
    """A GPU and those who are on it, by their numbers."""

    def __init__(self, device: GpuDevice, site: PreemptionSite) -> None:
        on_it = {
            number: (group, share.milli)
            for number, group in enumerate(site.groups)
            for share in group.claim.gpus
            if share.index == device.index
        }
        self.groups = {number: group for number, (group, _) in on_it.items()}
        milli = site.claims.gpu_milli.get(device.index, 0)
        self.is_free = not milli
        self.can_be_cleared = bool(on_it) and milli == sum(milli for _, milli in on_it.values())
        self.share = sum(group.weight // len(group.claim.gpus) for group in self.groups.values())
        """Its part in what its users weigh, rounded down: over any GPUs these add up to no more than all on them."""


class _VictimSearch:
    """The lightest victims so far, and what others have to be lighter than."""

    def __init__(self, site: PreemptionSite, ask: Amounts, below: int) -> None:
        self._site = site
        self._ask = ask
        self._below = below
        self.best: list[VictimGroup] | None = None

    def clear(self, taken: Sequence[_OccupiedGpu], missing: int, gone: Mapping[int, VictimGroup], share: int) -> None:
        """Consider every choice of so many of these GPUs that can still be the lightest; they are sorted by share."""
        if _weight(gone.values()) >= self._below:
            return
        if not missing:
            self.consider(gone)
            return
        for at in range(len(taken) - missing + 1):
            if share + sum(one.share for one in taken[at : at + missing]) >= self._below:
                return
            one = taken[at]
            self.clear(taken[at + 1 :], missing - 1, {**gone, **one.groups}, share + one.share)

    def consider(self, forced: Mapping[int, VictimGroup], device: GpuDevice | None = None) -> None:
        """Those who go anyway, and the lightest others who are enough together with them."""
        site, ask = self._site, self._ask
        needs = _shortfalls(site, ask, device)
        for group in forced.values():
            needs = [
                need - amount for need, amount in zip(needs, _released_amounts(group, site, ask, device), strict=True)
            ]
        others = [group for number, group in enumerate(site.groups) if number not in forced]
        items = [CoverItem(group.weight, group.rank, _released_amounts(group, site, ask, device)) for group in others]
        chosen = lightest_cover(items, tuple(needs), self._below - _weight(forced.values()))
        if chosen is not None:
            self.best = [*forced.values(), *(others[at] for at in chosen)]
            self._below = _weight(self.best)


def _weight(groups: Iterable[VictimGroup]) -> int:
    return sum(group.weight for group in groups)


def _shortfalls(site: PreemptionSite, ask: Amounts, device: GpuDevice | None) -> list[int]:
    """How much is missing of each resource; what is not missing is not positive."""
    lends, claims = site.lends, site.claims
    needs = [
        ask.cpu_milli - lends.cpu_milli + claims.cpu_milli,
        ask.memory_bytes - lends.memory_bytes + claims.memory_bytes,
    ]
    has = dict(lends.custom) if ask.custom else {}
    needs += [count - has.get(name, 0) + claims.custom.get(name, 0) for name, count in ask.custom]
    if device is not None:
        memory = ask.gpu_memory_bytes or device.memory_bytes * ask.gpu_milli // WHOLE_GPU
        needs += [ask.gpu_milli - claims.free_milli(device), memory - claims.free_memory(device)]
    return [*needs, site.machine_bytes] if site.machine_bytes else needs


def _released_amounts(
    group: VictimGroup, site: PreemptionSite, ask: Amounts, device: GpuDevice | None
) -> tuple[int, ...]:
    """How much of each resource a group gives back, in the order of `_shortfalls`."""
    claim = group.claim
    if not ask.custom and device is None and not site.machine_bytes:
        return (claim.cpu_milli, claim.memory_bytes)
    has = dict(claim.custom)
    amounts = [claim.cpu_milli, claim.memory_bytes, *(has.get(name, 0) for name, _ in ask.custom)]
    if device is not None:
        mine = [share for share in claim.gpus if share.index == device.index]
        amounts += [sum(share.milli for share in mine), sum(share.memory_bytes for share in mine)]
    return (*amounts, group.machine_bytes) if site.machine_bytes else tuple(amounts)


Slots = NDArray[np.intp]
Cost = Callable[[Ledger, Slots, int], Column]
"""Cost of preempting each of these running leases now; never negative, below 2**52."""

_MAX_AGO_MS = 2**40
_MAX_SIZE = 2**22


class PreemptionCandidates:
    """The running leases that may be preempted, by slot; `able` says so for every slot, `costs` holds theirs."""

    def __init__(self, ledger: Ledger, request: Request, now: int, cost: Cost) -> None:
        running, policy = ledger.running, ledger.policy
        able = running.column("priority") < int(request.priority)
        able &= now - running.column("started") >= policy.minimum_run_ms
        able &= running.column("preemptions") < policy.preemptions_max
        able &= ledger.columns.open[running.column("node")]
        self.able: NDArray[np.bool_] = able
        self.slots: Slots = np.flatnonzero(able)
        self.costs: Column = np.zeros(len(able), dtype=np.int64)
        self.costs[self.slots] = cost(ledger, self.slots, now)


def work_lost(ledger: Ledger, slots: Slots, now: int) -> Column:
    """About so many core-milliseconds of work would have to be done again; a GPU or memory counts as the cores that
    are as large a part of the grid."""
    running, columns = ledger.running, ledger.columns
    cores = min(int(columns.lends_cpu.sum()), 2**32)
    size = np.maximum(running.column("cpu")[slots], 1)
    for name, total in (
        ("memory", int(columns.lends_memory.sum()) >> 20),
        ("gpu", 1000 * int(columns.lends_gpus.sum())),
    ):
        if total and cores:
            amount = running.column(name)[slots]
            size = np.maximum(size, np.minimum(amount >> 20 if name == "memory" else amount, 2**30) * cores // total)
    ago: Column = np.clip(now - running.column("since")[slots], 0, _MAX_AGO_MS)
    lost: Column = (np.minimum(size, _MAX_SIZE) * ago) >> 10
    return lost
