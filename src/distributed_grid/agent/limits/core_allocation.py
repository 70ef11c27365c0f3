"""Core allocation: which real cores each CPU claim is pinned to. Pure and deterministic.

A claim of 2,500 millicores is two whole cores and half of a third; its cores are listed whole ones first. It has as
many distinct cores as it asks for, or all there are. While everything fits, whole cores are exclusive and fractions
share a core up to 1,000; otherwise the least loaded cores are shared. No claim moves without need: a second allocation
of the same claims changes nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CORE = 1000


class CoreClaim(NamedTuple):
    """Leased share of one attempt, and its cores now (none when it is new)."""

    milli: int
    cores: tuple[int, ...] = ()

    @property
    def whole(self) -> int:
        return self.milli // CORE

    @property
    def rest(self) -> int:
        return self.milli % CORE

    @property
    def whole_cores(self) -> tuple[int, ...]:
        return self.cores[: self.whole]

    @property
    def rest_core(self) -> int | None:
        return self.cores[self.whole] if self.rest and len(self.cores) > self.whole else None


def allocate_cores(claims: Mapping[str, CoreClaim], real_cores: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Cores for every claim, older claims first."""
    bins = _pack([claim.rest for claim in claims.values() if claim.rest])
    if sum(claim.whole for claim in claims.values()) + len(bins) > len(real_cores):
        return _share_cores(claims, real_cores)
    wholes = _assign_wholes(claims, real_cores)
    taken = {core for cores in wholes.values() for core in cores}
    rests = _assign_rests(claims, [core for core in real_cores if core not in taken])
    return {name: wholes[name] + ((rests[name],) if name in rests else ()) for name in claims}


def _assign_wholes(claims: Mapping[str, CoreClaim], real_cores: Sequence[int]) -> dict[str, tuple[int, ...]]:
    taken: set[int] = set()
    kept: dict[str, list[int]] = {}
    for name, claim in claims.items():
        kept[name] = [core for core in claim.whole_cores if core in real_cores and core not in taken]
        taken.update(kept[name])
    fractions = dict.fromkeys(real_cores, 0)
    for claim in claims.values():
        if claim.rest_core in fractions:
            fractions[claim.rest_core] += claim.rest
    free = sorted((core for core in real_cores if core not in taken), key=lambda core: fractions[core])
    return {
        name: tuple(kept[name] + [free.pop(0) for _ in range(claim.whole - len(kept[name]))])
        for name, claim in claims.items()
    }


def _assign_rests(claims: Mapping[str, CoreClaim], cores: Sequence[int]) -> dict[str, int]:
    """A core for each fraction: where it is if that works, else the fullest with room, else all are packed anew."""
    load = dict.fromkeys(cores, 0)
    core_of: dict[str, int] = {}
    moving: list[tuple[str, CoreClaim]] = []
    for name, claim in claims.items():
        core = claim.rest_core
        if core in load and load[core] + claim.rest <= CORE:
            load[core] += claim.rest
            core_of[name] = core
        elif claim.rest:
            moving.append((name, claim))
    for name, claim in sorted(moving, key=lambda item: -item[1].rest):
        room = [core for core in cores if load[core] + claim.rest <= CORE]
        if not room:
            names = [name for name, claim in claims.items() if claim.rest]
            bins = _pack([claims[name].rest for name in names])
            return {names[index]: cores[number] for number, members in enumerate(bins) for index in members}
        core = max(room, key=lambda core: load[core])
        load[core] += claim.rest
        core_of[name] = core
    return core_of


def _pack(rests: Sequence[int]) -> list[list[int]]:
    """Indexes of `rests` in as few full cores as first-fit decreasing finds."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(rests)), key=lambda index: -rests[index]):
        for number, load in enumerate(loads):
            if load + rests[index] <= CORE:
                bins[number].append(index)
                loads[number] += rests[index]
                break
        else:
            bins.append([index])
            loads.append(rests[index])
    return bins


def _share_cores(claims: Mapping[str, CoreClaim], real_cores: Sequence[int]) -> dict[str, tuple[int, ...]]:
    load = dict.fromkeys(real_cores, 0)
    shares = {}
    for name, claim in claims.items():
        whole = min(claim.whole, len(real_cores))
        parts = [CORE] * whole + ([claim.rest] if claim.rest else [])
        chosen: list[int] = []
        for index, part in enumerate(parts[: len(real_cores)]):
            present = claim.cores[index] if index < len(claim.cores) else None
            open_cores = {core: amount for core, amount in load.items() if core not in chosen}
            least = min(open_cores.values())
            if present in open_cores and open_cores[present] == least:
                core = present
            else:
                core = next(core for core, amount in open_cores.items() if amount == least)
            load[core] += part
            chosen.append(core)
        shares[name] = tuple(chosen)
    return shares


def allowed_cores(cores: Sequence[int], allowed: Sequence[int] | None) -> tuple[int, ...]:
    """Those of the cores that are allowed now; all allowed ones if none of them is."""
    if allowed is None:
        return tuple(cores)
    return tuple(core for core in cores if core in allowed) or tuple(allowed)


def cgroup_weight(milli: int, cores: int) -> int:
    """Group weight that gives a fraction its share of its core; 0 without sharing."""
    return round(milli % CORE * 1.024) * max(1, cores) if milli % CORE else 0


def niceness(milli: int) -> int:
    """Niceness of roughly the same effect: each step is a quarter of the time."""
    rest = milli % CORE
    return min(19, round(math.log(CORE / rest) / math.log(1.25))) if rest else 0
