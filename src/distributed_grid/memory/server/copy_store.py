"""Store of the copies one server holds: made by the first valid ticket, changed chunk by chunk, freed for good.

A copy that was freed is not made again by an old ticket: its tombstone is in the journal (`write_journal.py`). A higher
generation in a ticket counts; a lower one is out of date. A write that does not match its digest, or meets a frozen
copy, changes nothing. A part of a chunk is read or written only where the whole chunk was verified, now or within the
last seconds: hashing 256 KiB for each 4 KiB costs more than sending them.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import Final

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.control_messages import MakeReplica
from distributed_grid.memory.protocol.frames import (
    CHUNK_BYTES,
    FILL,
    READ,
    WRITE,
    FrameStatus,
    TicketClaims,
    digest_of,
    is_copy_id,
    read_claims,
)
from distributed_grid.memory.server.copy_file import CopyFile, load_copies
from distributed_grid.memory.server.write_journal import Slot, SlotPool, Tombstones, WriteJournal

MAX_COPIES: Final = 50_000
KEY_BYTES: Final = 32
VERIFIED_MS: Final = 10_000
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE)


class Counters:
    """Counters since the server was started."""

    __slots__ = ("bytes_in", "bytes_out", "reads", "wire_in", "wire_out", "writes")

    def __init__(self) -> None:
        self.reads = self.writes = self.bytes_in = self.bytes_out = self.wire_in = self.wire_out = 0


class CopyStore:
    """All copies of one incarnation of the memory, and those on disk."""

    def __init__(self, spill: Path, incarnation: str, key: bytes, journal: WriteJournal) -> None:
        self.spill = spill
        self.incarnation = incarnation
        self.key = key
        self.held: dict[str, CopyFile] = {}
        self.counters = Counters()
        self.staging = SlotPool(journal)
        self._journal = journal
        self._disk_journal: WriteJournal | None = None
        self.tombstones = Tombstones(journal.fd, journal.length)
        self._last_expiry: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._touched: set[str] = set()
        self._scratch = memoryview(bytearray(CHUNK_BYTES))
        self._verified: set[tuple[CopyFile, int]] = set()
        self._verified_until = 0

    # ------------------------------------------------------------------ taking over

    def take_over(self, copies: list[CopyFile]) -> int:
        """Hold these copies and those on disk, finish interrupted frees and writes; returns the number of writes."""
        for backing in (*copies, *load_copies(self.spill)):
            if backing.copy in self.tombstones:
                backing.remove()
                continue
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
        """Open a copy by authenticated claims: status, the copy, and whether it is a new one."""
        if claims.incarnation != self.incarnation:
            return FrameStatus.WRONG_INCARNATION, None, False
        if claims.expires_boot_ms <= now:
            return FrameStatus.EXPIRED, None, False
        backing = self.held.get(claims.copy)
        if backing is None:
            if self.tombstones.refuses(claims.copy, claims.expires_boot_ms):
                return FrameStatus.MOVED, None, False
            return self._create(claims)
        status = self._reopen(backing, claims)
        return status, (backing if status is FrameStatus.OK else None), False

    def _create(self, claims: TicketClaims) -> tuple[FrameStatus, CopyFile | None, bool]:
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

    def create_untouched(self, order: MakeReplica, now: int) -> CopyFile | None:
        """Source of a replica before any ticket opened it: zeros. None if it cannot be made."""
        try:
            size = read_claims(order.ticket.claims).size
        except ProtocolError:
            return None
        if not is_copy_id(order.source) or order.source in self.tombstones:
            return None
        claims = TicketClaims(
            copy=order.source,
            generation=max(order.generation - 1, 0),
            size=size,
            rights=READ,
            expires_boot_ms=now + 1,
            ends_boot_ms=0,
            incarnation=self.incarnation,
        )
        return self._create(claims)[1]

    def _reopen(self, backing: CopyFile, claims: TicketClaims) -> FrameStatus:
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
        """Write all verified data from a slot, or none."""
        index = offset // CHUNK_BYTES
        whole = length == backing.chunk_length(index)
        self._touched.add(backing.copy)
        try:
            if whole and backing.digests[index] == 0:
                data = slot.view[:length]
                try:
                    backing.write(data, offset)
                except OSError:
                    backing.punch_hole(offset, len(data))
                    raise
                backing.set_digest(index, digest)
            else:
                if not whole:
                    chunk = self._load_chunk(backing, index)
                    if chunk is None:
                        return FrameStatus.CORRUPT
                    chunk[offset - index * CHUNK_BYTES : offset - index * CHUNK_BYTES + length] = slot.view[:length]
                    digest = digest_of(chunk)
                journal = self._on_disk_journal() if backing.on_disk else self._journal
                if slot.index < 0 or backing.on_disk:
                    journal.slots[0].view[:length] = slot.view[:length]
                    slot = journal.slots[0]
                before = backing.digests[index]
                journal.record_intent(slot, backing.copy, offset, length)
                try:
                    backing.write(slot.view[:length], offset)
                except (
                    OSError
                ):  # only pages that did not exist can have failed: those of a chunk with nothing or holes in it
                    if before == 0:
                        backing.punch_hole(index * CHUNK_BYTES, backing.chunk_length(index))
                    else:
                        backing.refresh_digest(index, self._scratch)
                    raise
                else:
                    backing.set_digest(index, digest)
                finally:
                    journal.clear_intent(slot)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return FrameStatus.FULL
        self.counters.writes += 1
        self.counters.bytes_in += length
        return FrameStatus.OK

    def read(self, backing: CopyFile, offset: int, view: memoryview) -> int:
        """Fill the view from within one chunk; its digest, or 0: these are zeros, and the view is as it was.

        A part of a chunk is read only if the whole chunk matches its digest; -1 if it does not.
        """
        index = offset // CHUNK_BYTES
        stored = backing.digests[index]
        self.counters.reads += 1
        self.counters.bytes_out += len(view)
        if stored == 0:
            return 0
        if len(view) == backing.chunk_length(index):
            backing.read_into(view, offset)
            return stored
        if (backing, index) in self._verified:
            backing.read_into(view, offset)
        elif self._load_chunk(backing, index) is None:
            return -1
        else:
            start = offset - index * CHUNK_BYTES
            view[:] = self._scratch[start : start + len(view)]
        return digest_of(view)

    def start_send(self, backing: CopyFile, index: int) -> int:
        """The digest of a whole chunk that is about to be sent from its file; 0: these are zeros."""
        digest = backing.digests[index]
        if digest:
            self.counters.reads += 1
            self.counters.bytes_out += backing.chunk_length(index)
        return digest

    def read_small(self, backing: CopyFile, offset: int, length: int) -> bytes | None:
        """A few bytes of a chunk that was verified within the last seconds; else None."""
        if (backing, offset // CHUNK_BYTES) not in self._verified:
            return None
        self.counters.reads += 1
        self.counters.bytes_out += length
        data = os.pread(backing.fd, length, offset)
        return data if len(data) == length else None

    def _load_chunk(self, backing: CopyFile, index: int) -> memoryview | None:
        """A whole chunk, verified; None if it does not match its digest."""
        chunk = self._scratch[: backing.chunk_length(index)]
        stored = backing.digests[index]
        if stored == 0:
            chunk[:] = bytes(len(chunk))
            return chunk
        backing.read_into(chunk, index * CHUNK_BYTES)
        if digest_of(chunk) != stored:
            return None
        self._verified.add((backing, index))
        return chunk

    def end_fill(self, backing: CopyFile) -> FrameStatus:
        """The copy is complete; on disk it is durable before this returns."""
        try:
            backing.sync()
            backing.complete = True
            backing.save()
            backing.sync()
        except OSError:
            return FrameStatus.FULL
        return FrameStatus.OK

    def freeze(self, backing: CopyFile) -> None:
        backing.frozen = True
        backing.save()

    # ------------------------------------------------------------------ freeing

    def free(self, copy: str, now: int) -> None:
        """Free a copy; if it is not there, an old ticket will not make it either.

        The tombstone comes first: a server that dies before it leaves the copy to the repeated order, one that dies
        after it leaves the rest to `take_over`.
        """
        self.tombstones.record(copy, now)
        backing = self.held.pop(copy, None)
        self._last_expiry.pop(copy, None)
        self._sizes.pop(copy, None)
        self._touched.discard(copy)
        if backing is not None:
            backing.remove()

    def discard(self, backing: CopyFile) -> None:
        """Undo an `open` that has just made this copy."""
        self.held.pop(backing.copy, None)
        self._last_expiry.pop(backing.copy, None)
        self._touched.discard(backing.copy)
        backing.remove()

    def expire(self, now: int) -> None:
        """Drop tombstones without a valid ticket, and forget chunks that were verified seconds ago."""
        if now >= self._verified_until:
            self._verified_until = now + VERIFIED_MS
            self._verified.clear()
        self.tombstones.expire(now)

    def start_incarnation(self, now: int) -> None:
        """Free everything in memory; earlier tickets are void."""
        for copy in [copy for copy, backing in self.held.items() if not backing.on_disk]:
            self.free(copy, now)
        self.tombstones.clear()
        self.incarnation, self.key = secrets.token_hex(8), secrets.token_bytes(KEY_BYTES)

    # ------------------------------------------------------------------ usage

    @property
    def in_memory(self) -> list[CopyFile]:
        return [backing for backing in self.held.values() if not backing.on_disk]

    def resident_bytes(self) -> int:
        """Memory that the copies really use; only copies touched since are measured again."""
        for copy in self._touched:
            backing = self.held.get(copy)
            if backing is not None and not backing.on_disk:
                self._sizes[copy] = backing.resident_bytes
        self._touched.clear()
        return sum(self._sizes.values())


def permits(rights: int, right: int) -> bool:
    """True if a ticket with these rights includes this one; FILL includes READ and WRITE."""
    return bool(rights & right) or (right in (READ, WRITE) and bool(rights & FILL))
