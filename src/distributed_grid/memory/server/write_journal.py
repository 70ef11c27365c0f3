"""Write-ahead journal of a memory server, and the pool of its slots.

An intent is valid only while its slot holds all data; then the data are written, then their digest, then the intent is
cleared. Whoever dies in between leaves enough for the next server to finish, and finishing twice is the same as once.
The journal for copies in memory is a memfd, held by supervisor and server like the copies, and ends with the tombstones
(`tombstones.py`); that for copies on disk is a file beside them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from struct import Struct
from typing import Final

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.frames import CHUNK_BYTES
from distributed_grid.memory.server.copy_file import CopyFile, page_aligned
from distributed_grid.memory.server.tombstones import Tombstones

SLOTS: Final = 32
_RECORD: Final = Struct("<IIQB200s")  # valid, length, offset, id length, id
_RECORD_BYTES: Final = 256
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
        length = page_aligned(slots * _RECORD_BYTES) + slots * CHUNK_BYTES
        found = os.fstat(fd).st_size
        if found and not length <= found <= Tombstones.end_of(length):
            raise ProtocolError(f"the journal has {found} bytes instead of {length}")
        if found == 0:
            os.posix_fallocate(fd, 0, length) if slots == 1 else os.ftruncate(fd, length)
        self.length = length  # without the tombstones
        self._map = mmap.mmap(fd, length)
        whole = memoryview(self._map)
        start = page_aligned(slots * _RECORD_BYTES)
        self.slots = [Slot(whole[start + i * CHUNK_BYTES : start + (i + 1) * CHUNK_BYTES], i) for i in range(slots)]

    @classmethod
    def make(cls) -> WriteJournal:
        """An empty one in memory."""
        return cls(os.memfd_create("grid-journal", os.MFD_CLOEXEC))

    def record_intent(self, slot: Slot, copy: str, offset: int, length: int) -> None:
        """Record that the first `length` bytes of this slot are about to be written there."""
        name, at = copy.encode(), slot.index * _RECORD_BYTES
        _RECORD.pack_into(self._map, at, 0, length, offset, len(name), name)
        self._map[at : at + 4] = _VALID.to_bytes(4, "little")

    def clear_intent(self, slot: Slot) -> None:
        """The write is done."""
        at = slot.index * _RECORD_BYTES
        self._map[at : at + 4] = b"\0\0\0\0"

    def replay(self, held: Mapping[str, CopyFile]) -> int:
        """Finish the intended writes to these copies; how many they were."""
        done = 0
        scratch = memoryview(bytearray(CHUNK_BYTES))
        for slot in self.slots:
            valid, length, offset, name_length, name = _RECORD.unpack_from(self._map, slot.index * _RECORD_BYTES)
            backing = held.get(name[:name_length].decode("ascii", "replace"))
            fits = 1 <= length <= CHUNK_BYTES and offset // CHUNK_BYTES == (offset + length - 1) // CHUNK_BYTES
            if valid == _VALID and backing is not None and fits and offset + length <= backing.size:
                backing.write(slot.view[:length], offset)
                backing.refresh_digest(offset // CHUNK_BYTES, scratch)
                done += 1
            self.clear_intent(slot)
        return done

    def close(self) -> None:
        """Close the descriptor; the mapping goes with its last user."""
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


assert _RECORD.size <= _RECORD_BYTES
