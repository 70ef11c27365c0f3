"""What is typically asked for: the shapes of the requests that came, how often, and how much each matters."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from distributed_grid.domain.resources import WHOLE_GPU

FIFTH = 5


class RequestShape(Struct, frozen=True, order=True):
    """What matters of a request for where it fits; `gpu_milli` below 1000 is part of one device, else whole ones."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_milli: int = 0
    models: tuple[str, ...] = ()

    @property
    def is_part(self) -> bool:
        """Whether part of one device is asked for."""
        return 0 < self.gpu_milli < WHOLE_GPU

    @property
    def rounded(self) -> RequestShape:
        """The shape it is counted as; it fits wherever this one does."""
        gpu = self.gpu_milli // 10 * 10 or self.gpu_milli
        return RequestShape(_down(self.cpu_milli), _down(self.memory_bytes), gpu, tuple(sorted(self.models)))


class RequestShapes(Struct, frozen=True):
    """How often each shape came, `counted` in all, and the weights last taken, when `taken` were counted."""

    kind: ClassVar[str] = "typical"

    counts: tuple[tuple[RequestShape, int], ...] = ()
    counted: int = 0
    weights: tuple[tuple[RequestShape, int], ...] = ()
    taken: int = 0

    @property
    def key(self) -> str:
        return self.kind

    @property
    def is_over(self) -> bool:
        return False

    @property
    def is_due(self) -> bool:
        """Whether weights are to be taken anew."""
        return self.counted >= self.taken + max(self.taken // FIFTH, 1)


def _down(amount: int) -> int:
    """The next lower number with three bits after its first."""
    step = 1 << max(amount.bit_length() - 4, 0)
    return amount // step * step
