"""Which real cores each CPU lease is pinned to: pure, and the same answer for the same question.

A claim of 2,500 millicores is two whole cores and half of a third; its cores are listed whole ones first.

Rule 1. A claim has as many distinct cores as it asks for, or all there are.
Rule 2. While everything fits, a whole core is nobody else's, and fractions share a core up to one core.
Rule 3. When it no longer fits, the least loaded cores are shared.
Rule 4. Nothing moves without need: arranging what is already arranged changes nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

CORE = 1000


class CoreClaim(NamedTuple):
    """What one attempt has leased, and the cores it has now (none when it is new)."""

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
    bins = _packed([claim.rest for claim in claims.values() if claim.rest])
    if sum(claim.whole for claim in claims.values()) + len(bins) > len(real_cores):
        return _shared(claims, real_cores)
    wholes = _wholes(claims, real_cores)
    taken = {core for cores in wholes.values() for core in cores}
    rests = _rests(claims, [core for core in real_cores if core not in taken])
    return {name: wholes[name] + ((rests[name],) if name in rests else ()) for name in claims}


def _wholes(claims: Mapping[str, CoreClaim], real_cores: Sequence[int]) -> dict[str, tuple[int, ...]]:
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


def _rests(claims: Mapping[str, CoreClaim], cores: Sequence[int]) -> dict[str, int]:
    """A core for each fraction: where it is if that works, else the fullest with room, else all anew."""
    load = dict.fromkeys(cores, 0)
    found: dict[str, int] = {}
    moving: list[tuple[str, CoreClaim]] = []
    for name, claim in claims.items():
        core = claim.rest_core
        if core in load and load[core] + claim.rest <= CORE:
            load[core] += claim.rest
            found[name] = core
        elif claim.rest:
            moving.append((name, claim))
    for name, claim in sorted(moving, key=lambda item: -item[1].rest):
        room = [core for core in cores if load[core] + claim.rest <= CORE]
        if not room:
            return _rests_anew(claims, cores)
        core = max(room, key=lambda core: load[core])
        load[core] += claim.rest
        found[name] = core
    return found


def _rests_anew(claims: Mapping[str, CoreClaim], cores: Sequence[int]) -> dict[str, int]:
    names = [name for name, claim in claims.items() if claim.rest]
    bins = _packed([claims[name].rest for name in names])
    return {names[index]: cores[number] for number, members in enumerate(bins) for index in members}


def _packed(rests: Sequence[int]) -> list[list[int]]:
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


def _shared(claims: Mapping[str, CoreClaim], real_cores: Sequence[int]) -> dict[str, tuple[int, ...]]:
    load = dict.fromkeys(real_cores, 0)
    found = {}
    for name, claim in claims.items():
        parts = [CORE] * claim.whole + ([claim.rest] if claim.rest else [])
        chosen: list[int] = []
        for index, part in enumerate(parts[: len(real_cores)]):
            present = claim.cores[index] if index < len(claim.cores) else None
            core = _least(load, chosen, present)
            load[core] += part
            chosen.append(core)
        found[name] = tuple(chosen)
    return found


def _least(load: Mapping[int, int], chosen: Iterable[int], present: int | None) -> int:
    open_cores = {core: amount for core, amount in load.items() if core not in chosen}
    least = min(open_cores.values())
    if present in open_cores and open_cores[present] == least:
        return present
    return next(core for core, amount in open_cores.items() if amount == least)


def within(cores: Sequence[int], allowed: Sequence[int] | None) -> tuple[int, ...]:
    """Those of one's cores that may be used now; all that may be used when none of one's own is among them."""
    if allowed is None:
        return tuple(cores)
    return tuple(core for core in cores if core in allowed) or tuple(allowed)


def weight_for(milli: int, cores: int) -> int:
    """The group weight that gives a fraction its share of its core; 0 where nothing is shared."""
    return round(milli % CORE * 1.024) * max(1, cores) if milli % CORE else 0


def nice_for(milli: int) -> int:
    """The niceness that does roughly the same: each step is a quarter of the time."""
    rest = milli % CORE
    return min(19, round(math.log(CORE / rest) / math.log(1.25))) if rest else 0
