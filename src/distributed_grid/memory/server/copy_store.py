"""The copies one server holds: made by the first valid ticket, changed chunk by chunk, let go of for good.

Rule 1. A copy that was let go of is not made again by an old ticket: it is remembered for two lives of a ticket.
Rule 2. A higher generation in a ticket is news; a lower one is out of date.
Rule 3. A write that fits no digest, or meets a frozen copy, changes nothing.
Rule 4. A part of a chunk is read or written only where the whole chunk was found to be as it was written, now or within
        the last seconds: hashing 256 KiB for each 4 KiB costs more than sending them.
"""

from __future__ import annotations

import errno
import os
import secrets
from itertools import islice
from pathlib import Path
from typing import Final

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.control_messages import MakeReplica
from distributed_grid.memory.protocol.frames import CHUNK_BYTES, FrameStatus, digest_of
from distributed_grid.memory.protocol.ticket import (
    FILL,
    READ,
    TICKET_LIFE_MS,
    WRITE,
    TicketClaims,
    is_copy_id,
    read_claims,
)
from distributed_grid.memory.server.copy_file import CopyFile, found_on_disk
from distributed_grid.memory.server.write_journal import Slot, StagedWrite, WriteJournal

MAX_COPIES: Final = 50_000
MOST_REMEMBERED: Final = 500_000
KEY_BYTES: Final = 32
VERIFIED_MS: Final = 10_000
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE)


class Counters:
    """What a server has done so far."""

    __slots__ = ("bytes_in", "bytes_out", "reads", "wire_in", "wire_out", "writes")

    def __init__(self) -> None:
        self.reads = self.writes = self.bytes_in = self.bytes_out = self.wire_in = self.wire_out = 0


class CopyStore:
    """All copies of one life of the memory, and those on disk."""

    def __init__(self, spill: Path, incarnation: str, key: bytes, journal: WriteJournal) -> None:
        self.spill = spill
        self.incarnation = incarnation
        self.key = key
        self.held: dict[str, CopyFile] = {}
        self.counters = Counters()
        self.staging = StagedWrite(journal)
        self._journal = journal
        self._disk_journal: WriteJournal | None = None
        self._tombs: dict[str, int] = {}
        self._last_expiry: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._touched: set[str] = set()
        self._scratch = memoryview(bytearray(CHUNK_BYTES))
        self._verified: set[tuple[CopyFile, int]] = set()
        self._verified_until = 0

    # ------------------------------------------------------------------ taking over

    def take_over(self, copies: list[CopyFile]) -> int:
        """Hold these copies and those on disk, and finish what was begun; says how many chunks that were."""
        for backing in (*copies, *found_on_disk(self.spill)):
            self.held[backing.copy] = backing
            self._touched.add(backing.copy)
        done = self._journal.replay(self.held)
        if any(backing.on_disk for backing in self.held.values()):
            done += self._on_disk_journal().replay(self.held)
        return done

    def _on_disk_journal(self) -> WriteJournal:
        if self._disk_journal is None:
            fd = os.open(self.spill / "journal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._disk_journal = WriteJournal(fd, slots=1)
        return self._disk_journal

    # ------------------------------------------------------------------ tickets

    def open(self, claims: TicketClaims, now: int) -> tuple[FrameStatus, CopyFile | None, bool]:
        """What becomes of somebody with these (proven) claims: status, the copy, and whether it is a new one."""
        if claims.incarnation != self.incarnation:
            return FrameStatus.WRONG_INCARNATION, None, False
        if claims.expires_boot_ms <= now:
            return FrameStatus.EXPIRED, None, False
        backing = self.held.get(claims.copy)
        if backing is None:
            return self._first(claims, now)
        status = self._again(backing, claims)
        return status, (backing if status is FrameStatus.OK else None), False

    def _first(self, claims: TicketClaims, now: int) -> tuple[FrameStatus, CopyFile | None, bool]:
        if self._tombs.get(claims.copy, 0) > now:
            return FrameStatus.MOVED, None, False
        if len(self.held) >= MAX_COPIES:
            return FrameStatus.FULL, None, False
        try:
            backing = CopyFile.make(claims.copy, claims.size, self.spill if claims.on_disk else None)
        except OSError:
            return FrameStatus.FULL, None, False
        backing.generation = claims.generation
        backing.ends_boot_ms = claims.ends_boot_ms
        backing.complete = not claims.rights & FILL
        try:
            backing.save()
            if backing.complete:
                backing.sync()
        except OSError:
            backing.remove()
            return FrameStatus.FULL, None, False
        self.held[claims.copy] = backing
        self._last_expiry[claims.copy] = claims.expires_boot_ms
        self._touched.add(claims.copy)
        return FrameStatus.OK, backing, True

    def make_untouched(self, order: MakeReplica, now: int) -> CopyFile | None:
        """The source of a copy that nobody has opened yet: zeros. None where it cannot be that, or there is no room."""
        try:
            size = read_claims(order.ticket.claims).size
        except ProtocolError:
            return None
        if not is_copy_id(order.source):
            return None
        claims = TicketClaims(order.source, max(order.generation - 1, 0), size, READ, now + 1, 0, self.incarnation)
        return self._first(claims, now)[1]

    def _again(self, backing: CopyFile, claims: TicketClaims) -> FrameStatus:
        if claims.generation < backing.generation:
            return FrameStatus.STALE
        if claims.size != backing.size or claims.on_disk != backing.on_disk:
            return FrameStatus.BAD
        if claims.rights & FILL:
            if claims.generation > backing.generation or not backing.complete:
                backing.reset()
                backing.complete = False
                self._touched.add(backing.copy)
        elif not backing.complete:
            return FrameStatus.FROZEN
        newer = claims.generation > backing.generation
        later = claims.expires_boot_ms >= self._last_expiry.get(backing.copy, 0)
        if newer:
            backing.generation = claims.generation
            backing.frozen = False
        if later:
            self._last_expiry[backing.copy] = claims.expires_boot_ms
        if newer or not backing.complete or (later and backing.ends_boot_ms != claims.ends_boot_ms):
            backing.ends_boot_ms = claims.ends_boot_ms if later else backing.ends_boot_ms
            backing.save()
        return FrameStatus.OK

    # ------------------------------------------------------------------ data

    def write(self, backing: CopyFile, offset: int, slot: Slot, length: int, digest: int) -> FrameStatus:
        """Put checked data from a slot where they belong: all of them, or none."""
        index = offset // CHUNK_BYTES
        whole = length == backing.chunk_length(index)
        self._touched.add(backing.copy)
        try:
            if whole and backing.digests[index] == 0:
                self._first_write(backing, offset, slot.view[:length])
                backing.set_digest(index, digest)
            else:
                if not whole:
                    chunk = self._load(backing, index)
                    if chunk is None:
                        return FrameStatus.CORRUPT
                    chunk[offset - index * CHUNK_BYTES : offset - index * CHUNK_BYTES + length] = slot.view[:length]
                    digest = digest_of(chunk)
                self._journalled(backing, offset, slot, length, digest)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return FrameStatus.FULL
        self.counters.writes += 1
        self.counters.bytes_in += length
        return FrameStatus.OK

    def _first_write(self, backing: CopyFile, offset: int, data: memoryview) -> None:
        try:
            backing.put(data, offset)
        except OSError:
            backing.empty(offset, len(data))
            raise

    def _journalled(self, backing: CopyFile, offset: int, slot: Slot, length: int, digest: int) -> None:
        journal = self._on_disk_journal() if backing.on_disk else self._journal
        if slot.index < 0 or backing.on_disk:
            journal.slots[0].view[:length] = slot.view[:length]
            slot = journal.slots[0]
        index = offset // CHUNK_BYTES
        before = backing.digests[index]
        journal.intend(slot, backing.copy, offset, length)
        try:
            backing.put(slot.view[:length], offset)
        except OSError:  # only pages that did not exist can have failed: those of a chunk with nothing or holes in it
            if before == 0:
                backing.empty(index * CHUNK_BYTES, backing.chunk_length(index))
            else:
                backing.seal(index, self._scratch)
            raise
        else:
            backing.set_digest(index, digest)
        finally:
            journal.settle(slot)

    def read(self, backing: CopyFile, offset: int, view: memoryview) -> int:
        """Fill the view from within one chunk, and give its digest; 0: these are zeros, and the view is as it was.

        A part of a chunk is given only when the whole chunk is as it was written; -1 where it is not.
        """
        index = offset // CHUNK_BYTES
        stored = backing.digests[index]
        self.counters.reads += 1
        self.counters.bytes_out += len(view)
        if stored == 0:
            return 0
        if len(view) == backing.chunk_length(index):
            backing.get_into(view, offset)
            return stored
        if (backing, index) in self._verified:
            backing.get_into(view, offset)
        elif self._load(backing, index) is None:
            return -1
        else:
            start = offset - index * CHUNK_BYTES
            view[:] = self._scratch[start : start + len(view)]
        return digest_of(view)

    def look(self, backing: CopyFile, index: int) -> int:
        """The digest of a whole chunk that is about to be sent from its file; 0: these are zeros."""
        digest = backing.digests[index]
        if digest:
            self.counters.reads += 1
            self.counters.bytes_out += backing.chunk_length(index)
        return digest

    def read_small(self, backing: CopyFile, offset: int, length: int) -> bytes | None:
        """A few bytes of a chunk that was verified within the last seconds; None where it was not."""
        if (backing, offset // CHUNK_BYTES) not in self._verified:
            return None
        self.counters.reads += 1
        self.counters.bytes_out += length
        data = os.pread(backing.fd, length, offset)
        return data if len(data) == length else None

    def _load(self, backing: CopyFile, index: int) -> memoryview | None:
        """A whole chunk, verified; None where it is not as it was written."""
        chunk = self._scratch[: backing.chunk_length(index)]
        stored = backing.digests[index]
        if stored == 0:
            chunk[:] = bytes(len(chunk))
            return chunk
        backing.get_into(chunk, index * CHUNK_BYTES)
        if digest_of(chunk) != stored:
            return None
        self._verified.add((backing, index))
        return chunk

    def fill_ended(self, backing: CopyFile) -> FrameStatus:
        """The copy is whole; on disk it is durable before this returns."""
        try:
            backing.sync()
            backing.complete = True
            backing.save()
            backing.sync()
        except OSError:
            return FrameStatus.FULL
        return FrameStatus.OK

    def freeze(self, backing: CopyFile) -> None:
        """Nobody may write to it until a ticket of a higher generation comes."""
        backing.frozen = True
        backing.save()

    # ------------------------------------------------------------------ letting go

    def free(self, copy: str, now: int) -> None:
        """Let go of a copy; where it is not there, it will not be made by an old ticket either."""
        self._tombs.pop(copy, None)
        self._tombs[copy] = now + 2 * TICKET_LIFE_MS
        backing = self.held.pop(copy, None)
        self._last_expiry.pop(copy, None)
        self._sizes.pop(copy, None)
        self._touched.discard(copy)
        if backing is not None:
            backing.remove()

    def discard(self, backing: CopyFile) -> None:
        """Take back what `open` has just made, as if it had never been asked for."""
        self.held.pop(backing.copy, None)
        self._last_expiry.pop(backing.copy, None)
        self._touched.discard(backing.copy)
        backing.remove()

    def forget_old(self, now: int) -> None:
        """Forget what was let go of so long ago that no ticket for it is left, and what was verified seconds ago."""
        if now >= self._verified_until:
            self._verified_until = now + VERIFIED_MS
            self._verified.clear()
        for copy, until in list(islice(self._tombs.items(), 10_000)):
            if until > now and len(self._tombs) <= MOST_REMEMBERED:
                break
            del self._tombs[copy]

    def begin_new_life(self, now: int) -> None:
        """Let go of everything in memory; tickets of before are worth nothing any more."""
        for copy in [copy for copy, backing in self.held.items() if not backing.on_disk]:
            self.free(copy, now)
        self._tombs.clear()
        self.incarnation, self.key = secrets.token_hex(8), secrets.token_bytes(KEY_BYTES)

    # ------------------------------------------------------------------ numbers

    @property
    def in_memory(self) -> list[CopyFile]:
        return [backing for backing in self.held.values() if not backing.on_disk]

    def resident_bytes(self) -> int:
        """What the copies in memory really use; only what was touched since is looked at again."""
        for copy in self._touched:
            backing = self.held.get(copy)
            if backing is not None and not backing.on_disk:
                self._sizes[copy] = backing.resident_bytes
        self._touched.clear()
        return sum(self._sizes.values())


def may(rights: int, wanted: int) -> bool:
    """Whether a ticket with these rights lets somebody do this; who fills may write."""
    return (
        bool(rights & wanted) or (wanted == WRITE and bool(rights & FILL)) or (wanted == READ and bool(rights & FILL))
    )
