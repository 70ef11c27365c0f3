"""Journals of a memory server: intents to write with the pool of their slots, and tombstones of freed copies.

An intent is valid only while its slot holds all data; then the data are written, then their digest, then the intent is
cleared. A server that dies in between leaves enough for the next to finish, and finishing twice is the same as once.
The journal for copies in memory is a memfd, held by supervisor and server like the copies, and ends with the tombstones
(`Tombstones`); that for copies on disk is a file beside them.

A freed copy is not made again by an old ticket, even after the server was killed: its tombstone is recorded before the
copy is removed, and the next server reads it. A tombstone lasts for two lifetimes of a ticket. The ring has a fixed
capacity: when it overwrites a tombstone that is still needed, tickets as old as that one create nothing any more (the
floor). Their holders get a new ticket from the directory, which issues none for a freed copy.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping
from itertools import islice
from struct import Struct
from typing import Final

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.frames import CHUNK_BYTES, TICKET_LIFE_MS
from distributed_grid.memory.server.copy_file import CopyFile, page_aligned

MAX_TOMBSTONES: Final = 500_000
_HEADER: Final = Struct("<QQ")  # records written so far, floor
_HEADER_BYTES: Final = 4096
_TOMBSTONE: Final = Struct("<Q24s")  # needed until, digest of the copy's id; a page holds a whole number of records
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
        while len(packed) < count * _TOMBSTONE.size:
            part = os.pread(self._fd, count * _TOMBSTONE.size - len(packed), self._start + _HEADER_BYTES + len(packed))
            if not part:
                raise ProtocolError("the tombstones in the journal are cut short")
            packed += part
        oldest = self._written % self._capacity if self._written > self._capacity else 0
        records = list(_TOMBSTONE.iter_unpack(packed))
        for until, digest in (*records[oldest:], *records[:oldest]):
            self._until.pop(digest, None)
            self._until[digest] = until

    @staticmethod
    def end_of(start: int, capacity: int = MAX_TOMBSTONES) -> int:
        return start + _HEADER_BYTES + capacity * _TOMBSTONE.size

    def __contains__(self, copy: str) -> bool:
        """True if this copy was freed, as long as a ticket for it may still be valid."""
        return _digest(copy) in self._until

    def refuses(self, copy: str, expires_boot_ms: int) -> bool:
        """True if a ticket for this copy with this end must not create it."""
        return copy in self or expires_boot_ms <= self._floor_boot_ms

    def record(self, copy: str, now: int) -> None:
        """Record a copy as freed; after this returns the next server knows it, too. A second time is harmless."""
        digest = _digest(copy)
        if self._until.get(digest, 0) > now + TICKET_LIFE_MS:  # covers every ticket that was issued so far
            return
        offset = self._start + _HEADER_BYTES + self._written % self._capacity * _TOMBSTONE.size
        try:
            if self._written >= self._capacity:  # the record at this offset may still be needed: raise the floor
                until, oldest = _TOMBSTONE.unpack(os.pread(self._fd, _TOMBSTONE.size, offset))
                if until > now and self._until.get(oldest, 0) == until:
                    self.raise_floor(until - TICKET_LIFE_MS)
                    del self._until[oldest]
            os.pwrite(self._fd, _TOMBSTONE.pack(now + 2 * TICKET_LIFE_MS, digest), offset)
        except OSError:  # no memory for another page of the journal: no ticket from before now creates anything
            self.raise_floor(now + TICKET_LIFE_MS)
        else:
            self._write_header(self._written + 1, self._floor_boot_ms)
        self._until.pop(digest, None)
        self._until[digest] = now + 2 * TICKET_LIFE_MS

    def raise_floor(self, floor_boot_ms: int) -> None:
        if floor_boot_ms > self._floor_boot_ms:
            self._write_header(self._written, floor_boot_ms)

    def expire(self, now: int) -> None:
        """Drop tombstones without a valid ticket, some at a time; an empty ring gives its memory back."""
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


assert 4096 % _TOMBSTONE.size == 0


SLOTS: Final = 32
_ENTRY: Final = Struct("<IIQB200s")  # valid, length, offset, id length, id
_ENTRY_BYTES: Final = 256
_VALID: Final = 0x74636E69


class Slot:
    """A buffer of one chunk; `index` is its position in the journal, -1 where it is in plain memory."""

    __slots__ = ("index", "view")

    def __init__(self, view: memoryview, index: int) -> None:
        self.view = view
        self.index = index


class WriteJournal:
    """Slots of one file, and the intended write of the data in each."""

    def __init__(self, fd: int, slots: int = SLOTS) -> None:
        self.fd = fd
        length = page_aligned(slots * _ENTRY_BYTES) + slots * CHUNK_BYTES
        size = os.fstat(fd).st_size
        if size and not length <= size <= Tombstones.end_of(length):
            raise ProtocolError(f"the journal has {size} bytes instead of {length}")
        if size == 0:
            os.posix_fallocate(fd, 0, length) if slots == 1 else os.ftruncate(fd, length)
        self.length = length  # without the tombstones
        self._map = mmap.mmap(fd, length)
        whole = memoryview(self._map)
        start = page_aligned(slots * _ENTRY_BYTES)
        self.slots = [Slot(whole[start + i * CHUNK_BYTES : start + (i + 1) * CHUNK_BYTES], i) for i in range(slots)]

    @classmethod
    def make(cls) -> WriteJournal:
        return cls(os.memfd_create("grid-journal", os.MFD_CLOEXEC))

    def record_intent(self, slot: Slot, copy: str, offset: int, length: int) -> None:
        name, entry = copy.encode(), slot.index * _ENTRY_BYTES
        _ENTRY.pack_into(self._map, entry, 0, length, offset, len(name), name)
        self._map[entry : entry + 4] = _VALID.to_bytes(4, "little")

    def clear_intent(self, slot: Slot) -> None:
        offset = slot.index * _ENTRY_BYTES
        self._map[offset : offset + 4] = b"\0\0\0\0"

    def replay(self, held: Mapping[str, CopyFile]) -> int:
        """Finish the intended writes to these copies; returns their number."""
        done = 0
        scratch = memoryview(bytearray(CHUNK_BYTES))
        for slot in self.slots:
            valid, length, offset, name_length, name = _ENTRY.unpack_from(self._map, slot.index * _ENTRY_BYTES)
            backing = held.get(name[:name_length].decode("ascii", "replace"))
            fits = 1 <= length <= CHUNK_BYTES and offset // CHUNK_BYTES == (offset + length - 1) // CHUNK_BYTES
            if valid == _VALID and backing is not None and fits and offset + length <= backing.size:
                backing.write(slot.view[:length], offset)
                backing.refresh_digest(offset // CHUNK_BYTES, scratch)
                done += 1
            self.clear_intent(slot)
        return done

    def close(self) -> None:
        """Close the descriptor; the mapping ends with its last user."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SlotPool:
    """Slots for chunks in transit: of the journal as long as there are any, warm ones first, else of plain memory.

    Slot 0 of the journal is reserved for writes whose data came in plain memory.
    """

    def __init__(self, journal: WriteJournal) -> None:
        self._free = journal.slots[:0:-1]
        self._plain: list[Slot] = []

    def acquire(self) -> Slot:
        """A slot, the caller's until it is released; it has to be filled before it is read."""
        if self._free:
            return self._free.pop()
        if self._plain:
            return self._plain.pop()
        return Slot(memoryview(bytearray(CHUNK_BYTES)), -1)

    def release(self, slot: Slot) -> None:
        if slot.index >= 0:
            self._free.append(slot)
        elif len(self._plain) < SLOTS:
            self._plain.append(slot)


assert _ENTRY.size <= _ENTRY_BYTES
