"""Owners who come and go: when each machine is wanted back, drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from msgspec import Struct

DAY_MS = 86_400_000


class Presence(Struct, frozen=True):
    """The owner of a node uses it between two moments; borrowed work has to go."""

    node: str
    from_ms: int
    to_ms: int


def comings(seed: int, node: str, *, per_day: float, lasts_ms: int, begin_ms: int) -> Iterator[Presence]:
    """When an owner comes, without end: so often a day that it is away, at random, for a while around `lasts_ms`."""
    random = Random(f"{seed}/owner/{node}")
    at = begin_ms
    while per_day > 0:
        at += max(1, round(random.expovariate(per_day / DAY_MS)))
        stays = max(1_000, round(lasts_ms * random.uniform(0.1, 1.9)))
        yield Presence(node, at, at + stays)
        at += stays
