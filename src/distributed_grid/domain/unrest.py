"""How an owner's use of a node has moved of late: statistics, so in fractions, of thousandths of what the node has."""

from __future__ import annotations

from msgspec import Struct


class Trail(Struct, frozen=True):
    """One resource.

    `level` is the use, smoothed over half a minute. `rises` counts how often it has climbed above each tenth of the
    node, as of `counted_at_ms`, the longer ago the less; it climbs from `trough`, and has been at `crest` since.
    `drift` is how it wanders, as the variance after an hour, without the jumps; it is measured from `anchor` on, where
    the level was at `anchored_at_ms`. All since `since_ms`.
    """

    level: float
    trough: float
    crest: float
    anchor: float
    anchored_at_ms: int
    since_ms: int
    counted_at_ms: int
    drift: float = 0.0
    rises: tuple[float, ...] = ()


class Unrest(Struct, frozen=True):
    """Every resource of a node that an owner may want back; the GPU is the one in most use, None where none is lent."""

    cpu: Trail
    memory: Trail
    gpu: Trail | None = None
