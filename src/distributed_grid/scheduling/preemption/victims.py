"""Who has to go on one node so that an ask fits there: the lightest choice, exactly.

Rule 1: whether it fits is what `NodeClaims.claim_for` says, resource by resource and GPU by GPU.
Rule 2: whole GPUs have to be cleared of everybody: first which, then who else has to go for the rest of the ask.
Rule 3: a part of a GPU has to be on one device: each is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Capacity, Claim, GpuDevice, is_model
from distributed_grid.scheduling.preemption.weighted_cover import CoverItem, lightest_cover


class Unit(NamedTuple):
    """Leases that go together, the one on this node first: what that costs, its rank, and what it gives back here."""

    leases: tuple[str, ...]
    weight: int
    rank: int
    claim: Claim


class Site(Struct, frozen=True):
    """A node to make room on: what it lends, what is taken there for good or for now, and who of them could go."""

    lends: Capacity
    book: NodeClaims
    units: Sequence[Unit]


def lightest_victims(site: Site, ask: Amounts, below: int) -> list[Unit] | None:
    """Who has to go for the ask to fit, or None where nobody lighter than `below` is enough."""
    search = _Search(site, ask, below)
    if not ask.gpu_milli:
        search.consider({})
        return search.best
    devices = [d for d in site.lends.gpus if not ask.gpu_models or is_model(d.name, ask.gpu_models)]
    if ask.gpu_milli < WHOLE_GPU:
        for device in devices:
            if not device.exclusive:
                search.consider({}, device)
        return search.best
    large = [_Occupied(device, site) for device in devices if device.memory_bytes >= ask.gpu_memory_bytes]
    missing = ask.gpu_milli // WHOLE_GPU - sum(one.is_free for one in large)
    taken = sorted((one for one in large if one.can_be_cleared), key=lambda one: one.share)
    if missing <= len(taken):
        search.clear(taken, max(missing, 0), {}, 0)
    return search.best


class _Occupied:
    """A GPU and those who are on it, by their numbers."""

    def __init__(self, device: GpuDevice, site: Site) -> None:
        on_it = {
            number: (unit, share.milli)
            for number, unit in enumerate(site.units)
            for share in unit.claim.gpus
            if share.index == device.index
        }
        self.units = {number: unit for number, (unit, _) in on_it.items()}
        milli = site.book.gpu_milli.get(device.index, 0)
        self.is_free = not milli
        self.can_be_cleared = bool(on_it) and milli == sum(milli for _, milli in on_it.values())
        self.share = sum(unit.weight // len(unit.claim.gpus) for unit in self.units.values())
        """Its part in what its users weigh, rounded down: over any GPUs these add up to no more than all on them."""


class _Search:
    """The lightest victims so far, and what others have to be lighter than."""

    def __init__(self, site: Site, ask: Amounts, below: int) -> None:
        self._site = site
        self._ask = ask
        self._below = below
        self.best: list[Unit] | None = None

    def clear(self, taken: Sequence[_Occupied], missing: int, gone: Mapping[int, Unit], share: int) -> None:
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
            self.clear(taken[at + 1 :], missing - 1, {**gone, **one.units}, share + one.share)

    def consider(self, forced: Mapping[int, Unit], device: GpuDevice | None = None) -> None:
        """Those who go anyway, and the lightest others who are enough together with them."""
        site, ask = self._site, self._ask
        needs = _short(site, ask, device)
        for unit in forced.values():
            needs = [need - amount for need, amount in zip(needs, _gives(unit.claim, ask, device), strict=True)]
        others = [unit for number, unit in enumerate(site.units) if number not in forced]
        items = [CoverItem(unit.weight, unit.rank, _gives(unit.claim, ask, device)) for unit in others]
        chosen = lightest_cover(items, tuple(needs), self._below - _weight(forced.values()))
        if chosen is not None:
            self.best = [*forced.values(), *(others[at] for at in chosen)]
            self._below = _weight(self.best)


def _weight(units: Iterable[Unit]) -> int:
    return sum(unit.weight for unit in units)


def _short(site: Site, ask: Amounts, device: GpuDevice | None) -> list[int]:
    """How much is missing of each resource; what is not missing is not positive."""
    lends, book = site.lends, site.book
    needs = [
        ask.cpu_milli - lends.cpu_milli + book.cpu_milli,
        ask.memory_bytes - lends.memory_bytes + book.memory_bytes,
    ]
    has = dict(lends.custom) if ask.custom else {}
    needs += [count - has.get(name, 0) + book.custom.get(name, 0) for name, count in ask.custom]
    if device is not None:
        memory = ask.gpu_memory_bytes or device.memory_bytes * ask.gpu_milli // WHOLE_GPU
        needs += [ask.gpu_milli - book.free_milli(device), memory - book.free_memory(device)]
    return needs


def _gives(claim: Claim, ask: Amounts, device: GpuDevice | None) -> tuple[int, ...]:
    """How much of each resource a claim gives back, in the order of `_short`."""
    if not ask.custom and device is None:
        return (claim.cpu_milli, claim.memory_bytes)
    has = dict(claim.custom)
    amounts = [claim.cpu_milli, claim.memory_bytes, *(has.get(name, 0) for name, _ in ask.custom)]
    if device is not None:
        mine = [share for share in claim.gpus if share.index == device.index]
        amounts += [sum(share.milli for share in mine), sum(share.memory_bytes for share in mine)]
    return tuple(amounts)
