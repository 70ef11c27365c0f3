"""Statistics that decisions learn from: usage of users, shapes of requests, idleness and volatility of nodes."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from distributed_grid.domain.resources import WHOLE_GPU


class Account(Struct, frozen=True):
    """Decayed usage of one user up to `at_ms` (`scheduling/queue/fairness.py`).

    In millicore-seconds, MiB-seconds and milli-GPU-seconds, so that 64 bits are enough. `runs` are the last two run
    times of its jobs in milliseconds, the newest last; `overran_at_ms` is when one of its leases last ended later than
    had been said, `promoted_at_ms` when the oldest of its waiting last started after being owed its place (0: never).
    """

    kind: ClassVar[str] = "account"

    user: str
    at_ms: int
    cpu: int = 0
    memory: int = 0
    gpu: int = 0
    runs: tuple[int, ...] = ()
    overran_at_ms: int = 0
    promoted_at_ms: int = 0

    @property
    def key(self) -> str:
        return self.user

    @property
    def is_over(self) -> bool:
        return False


class QueueProgress(Struct, frozen=True):
    """Work that has left the queue, and the most that waited at once (`scheduling/queue/order.py`).

    Work is what a request would take if it had the whole grid, in microseconds.
    """

    kind: ClassVar[str] = "queue_progress"

    started: int = 0
    """Work that has started, in all."""
    peak: int = 0
    """The most work that waited at once; it decays from `peak_at_ms` on."""
    peak_at_ms: int = 0

    @property
    def key(self) -> str:
        return self.kind

    @property
    def is_over(self) -> bool:
        return False


REWEIGH_DIVISOR = 5


class RequestShape(Struct, frozen=True, order=True):
    """The resources of a request that decide where it fits; `gpu_milli` below 1000 is part of one device."""

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
        return RequestShape(
            _round_down(self.cpu_milli), _round_down(self.memory_bytes), gpu, tuple(sorted(self.models))
        )


class RequestShapes(Struct, frozen=True):
    """How often each shape came, `counted` in all, and the weights last taken, when `taken` were counted."""

    kind: ClassVar[str] = "request_shapes"

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
        return self.counted >= self.taken + max(self.taken // REWEIGH_DIVISOR, 1)


def _round_down(amount: int) -> int:
    """The next lower number with three bits after its first."""
    step = 1 << max(amount.bit_length() - 4, 0)
    return amount // step * step


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
    """Idleness of every resource with a threshold; GPUs by index."""

    cpu: IdleTendency
    memory: IdleTendency
    gpus: tuple[tuple[int, IdleTendency], ...] = ()

    def gpu(self, index: int) -> IdleTendency | None:
        """One device; None where it was not there."""
        return next((tendency for at, tendency in self.gpus if at == index), None)


class MarkHistory(Struct, frozen=True):
    """How the use of one resource was above its mark lately, and the pause that follows from it."""

    level: float
    """The use in thousandths, smoothed over five minutes."""
    above_share: float = 0.0
    """Of about the last hour, with the level above the mark; the longer ago, the less it counts."""
    is_paused: bool = False
    below_since_ms: int | None = None
    """Since when the level is at or below the mark; None while it is above."""


class RecentUsage(Struct, frozen=True):
    """The owner's use lately (`scheduling/offers/pause.py`): CPU, memory and each GPU, in thousandths.

    `integrals` are moments of the last minute, each with the integrals of all of them up to there, the last
    measurement's at the end; `last` is what was measured then, and `minute` the mean of the minute before it.
    """

    integrals: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]
    minute: tuple[int, ...] = ()
    marks: tuple[MarkHistory, ...] = ()


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
