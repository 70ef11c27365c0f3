"""How idle a node has been for a while: what is lent or kept at present, and what speaks against that.

How an owner's use of a node has moved of late: statistics, so in fractions, of thousandths of what the node has.
"""

from __future__ import annotations

from msgspec import Struct


class IdleTendency(Struct, frozen=True):
    """One resource: whether it is lent, and since when its level speaks against that (None: it does not).

    `level` is what the owner uses, smoothed: thousandths of the CPU or of a GPU, bytes of memory. `turned` says
    that it was lent or kept the other way before.
    """

    lent: bool
    level: int
    against_since_ms: int | None = None
    turned: bool = False


class Idleness(Struct, frozen=True):
    """Every resource of a node that thresholds look at; GPUs by their index."""

    cpu: IdleTendency
    memory: IdleTendency
    gpus: tuple[tuple[int, IdleTendency], ...] = ()

    def gpu(self, index: int) -> IdleTendency | None:
        """One device; None where it was not there."""
        return next((leaning for at, leaning in self.gpus if at == index), None)


class UsageTrace(Struct, frozen=True):
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


class UsageVolatility(Struct, frozen=True):
    """Every resource of a node that an owner may want back; the GPU is the one in most use, None where none is lent."""

    cpu: UsageTrace
    memory: UsageTrace
    gpu: UsageTrace | None = None
