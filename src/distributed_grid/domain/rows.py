"""Rows of the ledger: their base class, their encoding, and counters.

A change is a whole row in its new state. Rows of leases and jobs are stored without the fields that have their
defaults, so a default that is changed changes the meaning of older rows: give such a field a new name. The garbage
collector does not track them (`gc=False`): they are many, and hold nothing that could refer back to them.

A new kind of row takes two edits: its class, and its table in `Ledger.__init__`.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import Struct

_STORED: dict[str, type[Row]] = {}
_encoder = msgspec.msgpack.Encoder()


class HistoryEntry(Struct, frozen=True, kw_only=True):
    """Columns of an ended row, by which the history finds it and adds it up."""

    key: str  # name that users know it by
    request_id: str
    user: str
    node: str
    ended_at_ms: int
    reason: str
    started_at_ms: int = 0  # 0: it never started and used nothing
    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_milli: int = 0
    target: str = ""  # node that it was for


class Row(Struct, frozen=True):
    """Base of all rows."""

    kind: ClassVar[str]
    is_volatile: ClassVar[bool] = False
    """Applied, never stored."""

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        if not cls.is_volatile:
            _STORED[cls.kind] = cls

    @property
    def key(self) -> str:
        """Name among the rows of its kind; a kind with a single row needs none."""
        return self.kind

    @property
    def is_over(self) -> bool:
        """Whether it leaves the ledger with this change."""
        return False

    def ended(self) -> HistoryEntry | None:
        """Entry in the history, for a row that is over; None for a kind without a history."""
        return None


R = TypeVar("R", bound=Row)


class Counter(Row, frozen=True):
    """A number that only grows: the epoch of the control plane, the last fence."""

    kind: ClassVar[str] = "counter"

    name: str
    value: int

    @property
    def key(self) -> str:
        return self.name


def encode_row(row: Row) -> bytes:
    return _encoder.encode(row)


def decode_row(kind: str, blob: bytes) -> Row:
    """The row that was stored; unknown fields of a newer build are ignored, missing ones get their defaults."""
    return decode_as(_STORED[kind], blob)


def decode_as(row_type: type[R], blob: bytes) -> R:
    """`decode_row`, where the type is known."""
    row: R = _decoder_of(row_type).decode(blob)
    return row


@functools.cache
def _decoder_of(row_type: type[Row]) -> msgspec.msgpack.Decoder[Any]:
    """Made when the first row of its type is read."""
    return msgspec.msgpack.Decoder(row_type)
