"""Statistics that decisions learn from: usage of users, shapes of requests, idleness and volatility of nodes."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from distributed_grid.domain.resources import WHOLE_GPU
from distributed_grid.domain.rows import Row


class Account(Row, frozen=True, kw_only=True):
    """Decayed usage of one user up to `at_ms` (`scheduling/queue/fairness.py`).

    In millicore-seconds, MiB-seconds and milli-GPU-seconds, so that 64 bits are enough.
    """

    kind: ClassVar[str] = "account"

    user: str
    at_ms: int
    cpu: int = 0
    memory: int = 0
    gpu: int = 0
    runs: tuple[int, ...] = ()  # last two run times of its jobs in milliseconds, the newest last
    overran_at_ms: int = 0  # last time that one of its leases outlasted its stated length; 0: never
    promoted_at_ms: int = 0  # last start of its oldest waiting request after that was owed its place; 0: never

    @property
    def key(self) -> str:
        return self.user


class QueueProgress(Row, frozen=True):
    """Work that has left the queue, and the most that waited at once (`scheduling/queue/order.py`).

    Work is what a request would take if it had the whole grid, in microseconds.
    """

    kind: ClassVar[str] = "queue_progress"

    started: int = 0  # work that has started, in all
    peak: int = 0  # the most work that waited at once; it decays from `peak_at_ms` on
    peak_at_ms: int = 0


REWEIGH_DIVISOR = 5


class RequestShape(Struct, frozen=True, order=True):
    """Resources of a request that decide where it fits; `gpu_milli` below 1000 is part of one device."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_milli: int = 0
    models: tuple[str, ...] = ()

    @property
    def is_part(self) -> bool:
        return 0 < self.gpu_milli < WHOLE_GPU

    @property
    def rounded(self) -> RequestShape:
        """The shape it is counted as; it fits wherever this one does."""
        gpu = self.gpu_milli // 10 * 10 or self.gpu_milli
        return RequestShape(
            _round_down(self.cpu_milli), _round_down(self.memory_bytes), gpu, tuple(sorted(self.models))
        )


class RequestShapes(Row, frozen=True):
    """Number of requests of each shape, and their weights."""

    kind: ClassVar[str] = "request_shapes"

    counts: tuple[tuple[RequestShape, int], ...] = ()
    counted: int = 0  # in all
    weights: tuple[tuple[RequestShape, int], ...] = ()  # as of `taken` counted requests
    taken: int = 0

    @property
    def is_due(self) -> bool:
        """Whether weights are to be taken anew."""
        return self.counted >= self.taken + max(self.taken // REWEIGH_DIVISOR, 1)


def _round_down(amount: int) -> int:
    """The next lower number with three bits after its first."""
    step = 1 << max(amount.bit_length() - 4, 0)
    return amount // step * step


class IdleTendency(Struct, frozen=True):
    """Idleness of one resource."""

    lent: bool
    level: int  # the owner's use, smoothed: thousandths of the CPU or of a GPU, bytes of memory
    against_since_ms: int | None = None  # the level contradicts `lent` since then; None: it does not
    turned: bool = False  # `lent` has changed before


class Idleness(Struct, frozen=True):
    """Idleness of every resource with a threshold; GPUs by index."""

    cpu: IdleTendency
    memory: IdleTendency
    gpus: tuple[tuple[int, IdleTendency], ...] = ()

    def gpu(self, index: int) -> IdleTendency | None:
        return next((tendency for number, tendency in self.gpus if number == index), None)


class MarkHistory(Struct, frozen=True):
    """Recent use of one resource relative to its mark, and the pause that follows from it."""

    level: float  # use in thousandths, smoothed over five minutes
    above_share: float = 0.0  # part of about the last hour above the mark, weighted by recency
    is_paused: bool = False
    below_since_ms: int | None = None  # None while the level is above the mark


class RecentUsage(Struct, frozen=True):
    """The owner's recent use (`scheduling/offers/pause.py`): CPU, memory and each GPU, in thousandths."""

    integrals: tuple[tuple[int, ...], ...]  # moments of the last minute, each with the integrals of all resources
    last: tuple[int, ...]  # last measurement
    minute: tuple[int, ...] = ()  # mean of the minute before it
    marks: tuple[MarkHistory, ...] = ()


class UsageTrace(Struct, frozen=True, kw_only=True):
    """Volatility of one resource since `since_ms`."""

    level: float  # use, smoothed over half a minute
    trough: float  # start of the present climb
    crest: float  # highest level since the trough
    anchor: float  # level at `anchored_at_ms`, from which the drift is measured
    anchored_at_ms: int
    since_ms: int
    counted_at_ms: int
    drift: float = 0.0  # variance after an hour, without the jumps
    rises: tuple[float, ...] = ()  # climbs above each tenth of the node as of `counted_at_ms`, weighted by recency


class UsageVolatility(Struct, frozen=True):
    """Volatility of every resource of a node that an owner may want back."""

    cpu: UsageTrace
    memory: UsageTrace
    gpu: UsageTrace | None = None  # the one in most use; None: none is lent
