"""How idle a node has been for a while: what is lent or kept at present, and what speaks against that."""

from __future__ import annotations

from msgspec import Struct


class Leaning(Struct, frozen=True):
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

    cpu: Leaning
    memory: Leaning
    gpus: tuple[tuple[int, Leaning], ...] = ()

    def gpu(self, index: int) -> Leaning | None:
        """One device; None where it was not there."""
        return next((leaning for at, leaning in self.gpus if at == index), None)
