"""Preemption candidates, the work they would lose, and the lightest exact set of victims on one node.

Candidates have a strictly lower priority, run on nodes that are alive, have run for the minimum time, and were not
preempted too often. Work lost is the dominant share of the grid times the time since the start or the last checkpoint.
Whether a request fits is what `NodeClaims.claim_for` says: whole GPUs have to be cleared of everybody, part of a GPU
has to be free on one device.

Lower bounds of the cost of every node, lightest first, order and prune the exact search. A bound is never above the
result of `lightest_victims`. Priority comes first, so nodes come in groups with the same least number of victims per
rank; the work lost is only bounded for a group that is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from distributed_grid.domain.indexes.columns import Column
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Capacity, Claim, GpuDevice, is_model
from distributed_grid.scheduling.placement.placement import Mask, allowed_rows
from distributed_grid.scheduling.preemption.weighted_cover import CoverItem, lightest_cover


class VictimGroup(NamedTuple):
    """Leases that are preempted together, the one on this node first: weight, rank, freed claim, and used memory of the
    machine that simulated nodes share."""

    leases: tuple[str, ...]
    weight: int
    rank: int
    claim: Claim
    machine_bytes: int = 0


class PreemptionSite(Struct, frozen=True):
    """A node to make room on: its capacity, its claims, and the groups that may be preempted.

    If the machine of simulated nodes lacks `machine_bytes`, groups on its other nodes are included.
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
    """A GPU and its groups of leases, by their numbers."""

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
    """The lightest victims so far, and the weight that others have to stay below."""

    def __init__(self, site: PreemptionSite, ask: Amounts, below: int) -> None:
        self._site = site
        self._ask = ask
        self._below = below
        self.best: list[VictimGroup] | None = None

    def clear(self, taken: Sequence[_OccupiedGpu], missing: int, gone: Mapping[int, VictimGroup], share: int) -> None:
        """Try every choice of `missing` GPUs that can still be the lightest; they are sorted by share."""
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
    """Missing amount of each resource; not positive if nothing is missing."""
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
    """Lost work in core-milliseconds, roughly; GPUs and memory count as the cores that are as large a part of the
    grid."""
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
            leaving = np.zeros(len(self._ledger.columns.open), dtype=np.int64)  # that leases being released will free
            for name, ids in self._ledger.running.leaving.items():
                claims = [claim for lease_id in ids if (claim := self._ledger.leases[lease_id].claim) is not None]
                leaving[self._ledger.columns.rows[name]] = sum(gives(claim) for claim in claims)
            short = short[self._rows] - leaving[self._rows]
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
