"""Buffers of a transfer, filled in place, and its work list: the chunk ranges that are still to be moved.

Python's own ways to get `bytes` from a socket copy once more: for a block of a gigabyte that is a second gigabyte and a
third of the time. The C API allows to write an object with one owner until it is shared. `ReadBuffer` asks
for huge pages, because otherwise every 4 KiB of a new buffer cost a fault; a thread populates them ahead of the data,
because on a virtual machine a page may have to come from the host first. All of this relies on CPython's reference
counts: elsewhere, free-threaded builds included, data are received into a `bytearray` and copied.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Final, NamedTuple, Self

from distributed_grid.memory.protocol.frames import CHUNK_BYTES, FrameStatus, StatusError

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
FILLS_IN_PLACE: Final = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
_AHEAD_BYTES: Final = 4 * HUGE_PAGE_BYTES
_OWN_REFERENCES: Final = 2  # of the populating thread: its own, and that of the call that counts them
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
if FILLS_IN_PLACE:
    _make = ctypes.pythonapi.PyBytes_FromStringAndSize
    _make.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
    _make.restype = ctypes.py_object
    _address = ctypes.pythonapi.PyBytes_AsString
    _address.argtypes = [ctypes.py_object]
    _address.restype = ctypes.c_void_p


class ReadBuffer:
    """Room for the data of a read, which then become `bytes`."""

    __slots__ = ("_data", "view")

    def __init__(self, size: int) -> None:
        self._data: bytes | bytearray
        if not FILLS_IN_PLACE or size < 2:  # shorter `bytes` are shared objects
            self._data = bytearray(size)
            self.view = memoryview(self._data)
            return
        self._data = _make(None, size)
        address = _address(self._data)
        start, end = _huge_pages(address, size)
        if end > start:
            _madvise(start, end - start, _MADV_HUGEPAGE)
            populate_pages(self._data, address, size)
        self.view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")

    def to_bytes(self) -> bytes:
        """Data of the buffer; the view must not be written to any more."""
        return bytes(self._data)  # of `bytes` no copy


def populate_pages(owner: object, address: int, size: int) -> None:
    """Populate the pages of new memory in a thread, as long as anybody else holds its owner. Their content stays."""
    start, end = _huge_pages(address, size)
    if end > start and FILLS_IN_PLACE:
        threading.Thread(target=_populate, args=(_OwnerReference(owner), start, end), daemon=True).start()


class _OwnerReference:
    """The only reference to an owner that the populating thread has."""

    def __init__(self, owner: object) -> None:
        self.owner = owner


def _populate(reference: _OwnerReference, start: int, end: int) -> None:
    for address in range(start, end, _AHEAD_BYTES):
        if sys.getrefcount(reference.owner) <= _OWN_REFERENCES:
            return  # the reader has given up
        if _madvise(address, min(_AHEAD_BYTES, end - address), _MADV_POPULATE_WRITE) != 0:
            return  # a kernel without this call: each page is populated when it is written


def _huge_pages(address: int, size: int) -> tuple[int, int]:
    """Range of huge pages within this one; empty if they are not worth it."""
    if size < 2 * HUGE_PAGE_BYTES:
        return 0, 0
    return -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, (address + size) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


SMALL_BYTES: Final = 32 * 1024
WINDOW: Final = 16  # chunks in flight
SMALL_WINDOW: Final = 128


class ChunkRange(NamedTuple):
    """A range of a copy (by its handle on the connection) within one chunk, and the buffer it is moved to or from."""

    handle: int
    offset: int
    view: memoryview
    is_retry: bool = False


class TransferQueue:
    """Ranges still to be moved, in order; a range is queued, in flight, or done and gone.

    A connection moves ranges inside `with queue:`, by `take` (queued to in flight) and `acknowledge` (the oldest one in
    flight is answered). Leaving the block, in any way, puts all unfinished ranges back at the front, in order, and
    raises `StatusError` where the server refused a range. So an empty queue means that everything was moved, and a
    transfer that failed continues with the same queue on another connection or to another copy.
    """

    def __init__(self, ranges: Iterable[ChunkRange] = ()) -> None:
        self._queued = deque(ranges)
        self._in_flight: deque[ChunkRange] = deque()
        self._refused: list[ChunkRange] = []
        self._refusal: FrameStatus | None = None
        self.window = WINDOW

    @classmethod
    def of_range(cls, view: memoryview, offset: int, handle: int = 0) -> Self:
        """A contiguous range of a block, cut at the edges of its chunks."""
        ranges: list[ChunkRange] = []
        done, size = 0, len(view)
        while done < size:
            length = min(CHUNK_BYTES - (offset + done) % CHUNK_BYTES, size - done)
            ranges.append(ChunkRange(handle, offset + done, view[done : done + length]))
            done += length
        return cls(ranges)

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def total_bytes(self) -> int:
        return sum(len(item.view) for item in self._queued)

    @property
    def has_small_ranges(self) -> bool:
        """True if the ranges are too small for compression and large windows; the first one decides."""
        return not self._queued or len(self._queued[0].view) <= SMALL_BYTES

    def copy(self) -> TransferQueue:
        return TransferQueue(self._queued)

    def samples(self, count: int) -> list[memoryview]:
        """Buffers of at most `count` queued ranges, evenly spread."""
        total = len(self._queued)
        return [self._queued[total * number // count].view for number in range(min(count, total))]

    # ------------------------------------------------------------------ before a pass

    def bind_handle(self, handle: int) -> None:
        self._queued = deque([item._replace(handle=handle) for item in self._queued])

    def clear_retries(self) -> None:
        self._queued = deque([item._replace(is_retry=False) for item in self._queued])

    def take_batch(self, count: int) -> TransferQueue:
        """Remove at most `count` ranges from the front; the caller gives back the rest."""
        if count >= len(self._queued):
            batch = TransferQueue()
            batch._queued, self._queued = self._queued, batch._queued
            return batch
        return TransferQueue([self._queued.popleft() for _ in range(count)])

    def give_back(self, batch: TransferQueue) -> None:
        """Put the rest of a batch back at the front."""
        self._queued.extendleft(reversed(batch._queued))
        batch._queued.clear()

    def extend(self, other: TransferQueue) -> None:
        self._queued.extend(other._queued)

    # ------------------------------------------------------------------ one pass over a connection

    def __enter__(self) -> Self:
        self.window = SMALL_WINDOW if self.has_small_ranges else WINDOW
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queued.extendleft(reversed(self._in_flight))
        self._queued.extendleft(reversed(self._refused))
        self._in_flight.clear()
        self._refused.clear()
        refusal, self._refusal = self._refusal, None
        if error is None and refusal is not None:
            raise StatusError(refusal)

    @property
    def may_send(self) -> bool:
        """True if a range is queued and the server has refused none in this pass."""
        return bool(self._queued) and self._refusal is None

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def oldest(self) -> ChunkRange:
        return self._in_flight[0]

    def next_fits(self, room: int) -> bool:
        return bool(self._queued) and len(self._queued[0].view) < room

    def take(self) -> ChunkRange:
        item = self._queued.popleft()
        self._in_flight.append(item)
        return item

    def acknowledge(self, status: int) -> None:
        """The oldest range in flight was answered: done, queued for its one retry (CORRUPT), or refused."""
        item = self._in_flight.popleft()
        if status == FrameStatus.CORRUPT and not item.is_retry:
            self._queued.append(item._replace(is_retry=True))
        elif status:
            self._refusal = self._refusal or FrameStatus(status)
            self._refused.append(item)
