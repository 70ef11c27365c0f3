"""Tombstones of freed copies, in the journal that server and supervisor share.

A freed copy is not made again by an old ticket, also after the server was killed: the tombstone is recorded before the
copy is removed, and the next server reads it. It lasts for two lifetimes of a ticket. The ring has a fixed capacity:
when it overwrites a tombstone that is still needed, tickets as old as that one create nothing any more (the floor).
Their holders get a new ticket from the directory, which issues none for a freed copy.
"""

from __future__ import annotations

import hashlib
import os
from itertools import islice
from struct import Struct
from typing import Final

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.authentication import TICKET_LIFE_MS

MAX_TOMBSTONES: Final = 500_000
_HEADER: Final = Struct("<QQ")  # records written so far, floor
_HEADER_BYTES: Final = 4096
_RECORD: Final = Struct("<Q24s")  # needed until, digest of the copy's id; a page holds a whole number of records
_EXPIRE_BATCH: Final = 10_000


class Tombstones:
    """The freed copies of a journal, from `start` on in its file."""

    def __init__(self, fd: int, start: int, capacity: int = MAX_TOMBSTONES) -> None:
        self._fd = fd
        self._start = start
        self._capacity = capacity
        self._until: dict[bytes, int] = {}  # by digest, oldest first
        self._written = 0
        self._floor_boot_ms = 0
        length = self.end_of(start, capacity)
        if os.fstat(fd).st_size < length:  # new, or of a server that had no tombstones in its journal
            os.ftruncate(fd, length)
        self._written, self._floor_boot_ms = _HEADER.unpack(os.pread(self._fd, _HEADER.size, self._start))
        count = min(self._written, self._capacity)
        packed = b""
        while len(packed) < count * _RECORD.size:
            part = os.pread(self._fd, count * _RECORD.size - len(packed), self._start + _HEADER_BYTES + len(packed))
            if not part:
                raise ProtocolError("the tombstones in the journal are cut short")
            packed += part
        oldest = self._written % self._capacity if self._written > self._capacity else 0
        records = list(_RECORD.iter_unpack(packed))
        for until, digest in (*records[oldest:], *records[:oldest]):
            self._until.pop(digest, None)
            self._until[digest] = until

    @staticmethod
    def end_of(start: int, capacity: int = MAX_TOMBSTONES) -> int:
        """The length of a journal whose tombstones begin at `start`."""
        return start + _HEADER_BYTES + capacity * _RECORD.size

    def __contains__(self, copy: str) -> bool:
        """Whether this copy was freed, as far as a ticket for it may still be valid."""
        return _digest(copy) in self._until

    def refuses(self, copy: str, expires_boot_ms: int) -> bool:
        """Whether a ticket for this copy that expires then must not create it."""
        return copy in self or expires_boot_ms <= self._floor_boot_ms

    def record(self, copy: str, now: int) -> None:
        """Record a copy as freed; after this returns the next server knows it, too. A second time is harmless."""
        digest = _digest(copy)
        if self._until.get(digest, 0) > now + TICKET_LIFE_MS:  # covers every ticket that was issued so far
            return
        offset = self._start + _HEADER_BYTES + self._written % self._capacity * _RECORD.size
        try:
            self._make_room(offset, now)
            os.pwrite(self._fd, _RECORD.pack(now + 2 * TICKET_LIFE_MS, digest), offset)
        except OSError:  # no memory for another page of the journal: no ticket from before now creates anything
            self.raise_floor(now + TICKET_LIFE_MS)
        else:
            self._write_header(self._written + 1, self._floor_boot_ms)
        self._until.pop(digest, None)
        self._until[digest] = now + 2 * TICKET_LIFE_MS

    def _make_room(self, offset: int, now: int) -> None:
        """Raise the floor where the record at this offset is still needed."""
        if self._written < self._capacity:
            return
        until, digest = _RECORD.unpack(os.pread(self._fd, _RECORD.size, offset))
        if until > now and self._until.get(digest, 0) == until:
            self.raise_floor(until - TICKET_LIFE_MS)
            del self._until[digest]

    def raise_floor(self, floor_boot_ms: int) -> None:
        """From now on tickets that expire at or before this time create no copy."""
        if floor_boot_ms > self._floor_boot_ms:
            self._write_header(self._written, floor_boot_ms)

    def expire(self, now: int) -> None:
        """Drop those for which no valid ticket can be left, some at a time; an empty ring gives its memory back."""
        for digest, until in list(islice(self._until.items(), _EXPIRE_BATCH)):
            if until > now:
                break
            del self._until[digest]
        if not self._until and self._written:
            self._empty_ring(self._floor_boot_ms)

    def clear(self) -> None:
        """Forget everything: all earlier tickets are void for another reason."""
        self._until.clear()
        self._empty_ring(0)

    def _empty_ring(self, floor_boot_ms: int) -> None:
        self._write_header(0, floor_boot_ms)
        os.ftruncate(self._fd, self._start + _HEADER_BYTES)
        os.ftruncate(self._fd, self.end_of(self._start, self._capacity))

    def _write_header(self, written: int, floor_boot_ms: int) -> None:
        os.pwrite(self._fd, _HEADER.pack(written, floor_boot_ms), self._start)
        self._written, self._floor_boot_ms = written, floor_boot_ms


def _digest(copy: str) -> bytes:
    return hashlib.blake2b(copy.encode(), digest_size=24).digest()


assert 4096 % _RECORD.size == 0
