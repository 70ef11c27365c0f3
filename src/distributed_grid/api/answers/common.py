"""Base of the answers, the reader for whom they are built, and amounts in people's units."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.resources import GB, Amounts, Claim

MAX_CORRECTION_MS = 60_000
"""A time keeps the way it is displayed where a clock was corrected by less."""
HIDDEN = "(of another user)"
"""Stands for a text that the reader may not see."""


class Answer(Struct, frozen=True):
    """An answer, or a part of one."""


class Viewer(Struct, frozen=True):
    """Reader of an answer: the texts that may be shown, and times by the wall clock."""

    offset_ms: int
    """How far the wall clock is ahead of the grid's own time."""
    max_offers_per_node: int = 5
    earlier: Sequence[tuple[int, int]] = ()
    """Pairs of a grid time and the offset until then, oldest first: grid time steps forward at a reboot, and under a
    wrong clock by anything."""
    reader: str | None = None
    """None is an admin."""

    def for_reader(self, reader: str | None) -> Viewer:
        return replace(self, reader=reader)

    def shows(self, owner: str) -> bool:
        """Whether the reader may see the texts of this user's work."""
        return self.reader is None or self.reader == owner

    def time(self, at_ms: int) -> str | None:
        """A moment of grid time in ISO 8601; None for "never"."""
        if not at_ms:
            return None
        then_ms = next((offset_ms for until_ms, offset_ms in self.earlier if at_ms <= until_ms), self.offset_ms)
        return utc(at_ms + (then_ms if abs(then_ms - self.offset_ms) > MAX_CORRECTION_MS else self.offset_ms))


def utc(wall_ms: int) -> str:
    """A moment of the wall clock in ISO 8601, in UTC."""
    moment = datetime.fromtimestamp(wall_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def gigabytes(size: int) -> float:
    return round(size / GB, 3)


def headline(ask: Amounts) -> tuple[str, float]:
    """The one resource that an ask is mainly about, and its amount."""
    if ask.gpu_milli:
        return "gpu", ask.gpu_milli / 1000
    if ask.custom:
        return ask.custom[0][0], ask.custom[0][1]
    if ask.cpu_milli:
        return "cpu", ask.cpu_milli / 1000
    return "memory", gigabytes(ask.memory_bytes)


class PageAnswer(Answer, frozen=True, kw_only=True):
    """A page of a list, apart from its rows."""

    omitted: int
    """Rows of the page that are left out for length: the next page begins with them."""
    more: bool
    """There is a next page."""
    next: str | None
    """Cursor of the next page; None at the end of the list."""


class ErrorBody(Answer, frozen=True):
    """Class of an error, its text, and its reasons, node by node."""

    type: str
    message: str
    reasons: list[str]


class ErrorAnswer(Answer, frozen=True):
    """Why a request failed."""

    error: ErrorBody


class AskedResources(Answer, frozen=True):
    """The amounts of a request."""

    cpu_cores: float
    memory_gb: float
    gpus: float
    custom: dict[str, int]

    @classmethod
    def of(cls, ask: Amounts) -> AskedResources:
        return cls(ask.cpu_milli / 1000, gigabytes(ask.memory_bytes), ask.gpu_milli / 1000, dict(ask.custom))


class HeldGpu(Answer, frozen=True):
    """A device of which something is held, or the GPUs of a lease that holds none (`index` None)."""

    index: int | None
    amount: float
    memory_gb: float


class HeldResources(Answer, frozen=True):
    """The amounts that a lease holds; before its grant and after its end those that it asked for."""

    cpu_cores: float
    memory_gb: float
    gpus: list[HeldGpu]
    custom: dict[str, int]

    @classmethod
    def of(cls, claim: Claim | None, ask: Amounts) -> HeldResources:
        if claim is None:
            gpu = HeldGpu(None, ask.gpu_milli / 1000, gigabytes(ask.gpu_memory_bytes))
            gpus = [gpu] if ask.gpu_milli else []
            return cls(ask.cpu_milli / 1000, gigabytes(ask.memory_bytes), gpus, dict(ask.custom))
        gpus = [HeldGpu(share.index, share.milli / 1000, gigabytes(share.memory_bytes)) for share in claim.gpus]
        return cls(claim.cpu_milli / 1000, gigabytes(claim.memory_bytes), gpus, dict(claim.custom))
