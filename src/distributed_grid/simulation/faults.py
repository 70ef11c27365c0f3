"""Seeded faults: what breaks, when, and for how long.

Rule 1: faults are drawn before anything happens; each has a beginning and an end.
Rule 2: after the last end everything works again, so that whatever is still wrong then is the grid's own doing.
"""

from __future__ import annotations

import enum
from random import Random

from msgspec import Struct


class FaultKind(enum.StrEnum):
    """What can go wrong."""

    AGENT_DIES = "the agent dies"
    MACHINE_DIES = "the machine loses its power"
    CONTROL_DIES = "the control plane dies"
    CONTROL_MACHINE_DIES = "the control plane's machine loses its power"
    CUT = "the network is cut"
    CUT_UP = "nothing from the node arrives"
    CUT_DOWN = "nothing arrives at the node"
    SLOW_LINK = "the network is slow"
    SLOW_NODE = "the machine is slow"
    CLOCK_SKEWED = "the machine's clock runs fast or slow"
    LOSSY = "messages are lost"
    REPEATING = "messages are repeated"
    SCRAMBLED = "messages overtake each other"
    DISK_FULL = "the control plane's disk is full"
    DISK_SLOW = "the control plane's disk is slow"
    OWNER = "the owner comes"
    DRAINED = "the node is drained"


LOCAL = frozenset({FaultKind.OWNER, FaultKind.DRAINED, FaultKind.SLOW_NODE})
"""What can happen to the node of the control plane's own machine; its agent and its links live and die with it."""
EVERYWHERE = frozenset(
    {FaultKind.CONTROL_DIES, FaultKind.CONTROL_MACHINE_DIES, FaultKind.DISK_FULL, FaultKind.DISK_SLOW}
)
_LASTS_MS = {
    FaultKind.AGENT_DIES: (500, 15_000),
    FaultKind.MACHINE_DIES: (5_000, 90_000),
    FaultKind.CONTROL_DIES: (100, 30_000),
    FaultKind.CONTROL_MACHINE_DIES: (5_000, 60_000),
    FaultKind.CUT: (1_000, 150_000),
    FaultKind.CUT_UP: (1_000, 120_000),
    FaultKind.CUT_DOWN: (1_000, 120_000),
    FaultKind.DISK_FULL: (500, 10_000),
    FaultKind.OWNER: (3_000, 120_000),
    FaultKind.DRAINED: (5_000, 60_000),
}
_USUALLY_MS = (5_000, 60_000)
_OFTEN = (FaultKind.CUT, FaultKind.CUT, FaultKind.CUT_UP, FaultKind.CUT_DOWN)


class Fault(Struct, frozen=True):
    """Something goes wrong at a moment, and right again later; an empty node is all of them."""

    at_ms: int
    kind: FaultKind
    node: str
    lasts_ms: int
    strength: float
    """Between 0 and 1; what it means depends on the kind."""


def draw(random: Random, nodes: tuple[str, ...], local: str, *, count: int, until_ms: int) -> list[Fault]:
    """So many faults, of a few kinds that this seed is about, before that moment."""
    kinds = [*random.sample([*FaultKind], random.randint(2, 6)), *_OFTEN] if random.random() < 0.7 else [*FaultKind]
    found = []
    for _ in range(count):
        kind = random.choice(kinds)
        node = "" if kind in EVERYWHERE else random.choice(nodes)
        if node and node == local and kind not in LOCAL:
            continue
        shortest, longest = _LASTS_MS.get(kind, _USUALLY_MS)
        found.append(Fault(random.randrange(until_ms), kind, node, random.randint(shortest, longest), random.random()))
    return found
