"""Preemption candidates, the work they would lose, and the lightest exact set of victims on one node.

Candidates have a strictly lower priority, run on nodes that are alive, have run for the minimum time, and were not
preempted too often. Work lost is the dominant share of the grid times the time since the start or the last checkpoint.
Whether a request fits is what `NodeClaims.claim_for` says: whole GPUs have to be cleared of everybody, part of a GPU
has to be free on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from distributed_grid.domain.indexes.columns import Column
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Capacity, Claim, GpuDevice, is_model
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
