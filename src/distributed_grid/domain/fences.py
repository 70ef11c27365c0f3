"""Fences: numbers that order the grants of a lease, so that an agent refuses an order older than one it has seen.

A fence is the epoch of the control plane that gave it, and a number that grows with every grant. Epochs grow by one
with each start, so every fence is far below 2**61. What an agent, a boost file or an engine says of fences and epochs
never raises the counters of the grid: it raises the epoch of the node it is about (`Node.epoch`), and only where it is
plausible.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.nodes import Node

NUMBER_BITS = 32
MAX_EPOCH = 2**29 - 1
MAX_FENCE = (MAX_EPOCH + 1 << NUMBER_BITS) - 1
MAX_EPOCH_LEAD = 1_000_000
"""So many starts of a control plane can have been forgotten at most: by a restored backup, or a deleted database."""


def first_fence(epoch: int) -> int:
    """The fence below all those of an epoch."""
    return epoch << NUMBER_BITS


def epoch_of(fence: int) -> int:
    """The epoch in which a fence was given."""
    return fence >> NUMBER_BITS


def is_plausible(epoch: int, own: int) -> bool:
    """Whether a control plane of this grid, which has come to its `own` epoch, can ever have had this one."""
    return 0 <= epoch <= min(own + MAX_EPOCH_LEAD, MAX_EPOCH - 1)


def fence_on(node: Node, number: int) -> int:
    """The next of the grid's fences as it is given on a node: above all that were ever given there."""
    return max(number, first_fence(node.epoch) | number & (1 << NUMBER_BITS) - 1)


def above(node: Node, fence: int, number: int) -> Node:
    """The node, with an epoch of its own where a fence that was found there is not below the grid's next one."""
    return node if fence_on(node, number) > fence else replace(node, epoch=epoch_of(fence) + 1)
