"""One copy of a block as a file: a memfd, or a file on disk.

Rule 1. The file alone says everything: data from 0 on, then on a page of its own the digest table, and a trailer at
        the end. Whoever gets the descriptor can take the copy over.
Rule 2. A chunk with digest 0 was never written, and reads as zeros. In a file taken over, where a writer may have
        died, those chunks are emptied first; so afterwards they really are zeros.
Rule 3. Nothing of a file is mapped by the server: `pwrite` of pages that are not there yet costs half of what a page
        fault does, and a full disk is an error instead of a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from array import array
from pathlib import Path
from struct import Struct
from typing import Final

from distributed_grid.domain.blocks import MAX_BLOCK_BYTES
from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.frames import CHUNK_BYTES, digest_of
from distributed_grid.memory.protocol.ticket import is_copy_id
from distributed_grid.posix.boot_clock import boot_id

PAGE: Final = 4096
TRAILER: Final = Struct("<8sQQQBBBx16s200s")  # magic, size, generation, ends, frozen, complete, id length, boot, id
TRAILER_BYTES: Final = 512
MAGIC: Final = b"gridmem1"
ENDING: Final = ".block"
_PUNCH_HOLE: Final = 0x01 | 0x02  # with KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@functools.cache
def boot_id_bytes() -> bytes:
    """Names the time since this machine was started."""
    return bytes.fromhex(boot_id().replace("-", ""))


class CopyFile:
    """The file of one copy. Its digests are in memory too; what changes is written through at once."""

    __slots__ = (
        "complete",
        "copy",
        "digests",
        "ends_boot_ms",
        "fd",
        "frozen",
        "generation",
        "path",
        "size",
    )

    def __init__(self, fd: int, copy: str, size: int, path: Path | None) -> None:
        self.fd = fd
        self.copy = copy
        self.size = size
        self.path = path
        self.generation = 0
        self.ends_boot_ms = 0
        self.frozen = False
        self.complete = True
        self.digests = array("Q", bytes(8 * chunks_in(size)))

    @property
    def on_disk(self) -> bool:
        return self.path is not None

    # ------------------------------------------------------------------ making, taking over, letting go

    @classmethod
    def make(cls, copy: str, size: int, folder: Path | None) -> CopyFile:
        """An empty copy in memory, or as a file in this folder; OSError where there is no room, and nothing is left."""
        path = None if folder is None else folder / f"{copy}{ENDING}"
        if path is None:
            fd = os.memfd_create(f"grid-{copy}"[:200], os.MFD_CLOEXEC)
        else:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        made = cls(fd, copy, size, path)
        try:
            if path is None:
                os.ftruncate(fd, file_bytes(size))
            else:
                os.posix_fallocate(fd, 0, file_bytes(size))
        except OSError:
            made.remove()
            raise
        return made

    @classmethod
    def take_over(cls, fd: int, path: Path | None = None) -> CopyFile:
        """The copy in this file, which is ours from now on; ProtocolError where it is none (it is closed then)."""
        try:
            return cls._read(fd, path)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def _read(cls, fd: int, path: Path | None) -> CopyFile:
        length = os.fstat(fd).st_size
        packed = os.pread(fd, TRAILER.size, length - TRAILER_BYTES) if length >= TRAILER_BYTES else b""
        if len(packed) < TRAILER.size or not packed.startswith(MAGIC):
            raise ProtocolError("a file that holds no copy")
        _, size, generation, ends, frozen, complete, letters, boot, name = TRAILER.unpack(packed)
        copy = name[:letters].decode("ascii", "replace")
        if not 1 <= size <= MAX_BLOCK_BYTES or file_bytes(size) != length or not is_copy_id(copy):
            raise ProtocolError("a copy whose trailer makes no sense")
        found = cls(fd, copy, size, path)
        found.generation, found.frozen, found.complete = generation, bool(frozen), bool(complete)
        found.ends_boot_ms = ends if boot == boot_id_bytes() else 0
        table = os.pread(fd, 8 * chunks_in(size), padded(size))
        found.digests = array("Q", table)
        found._empty_unwritten()
        return found

    def _empty_unwritten(self) -> None:
        first = None
        for index, digest in enumerate((*self.digests, 1)):
            if digest == 0 and first is None:
                first = index
            elif digest != 0 and first is not None:
                self.empty(first * CHUNK_BYTES, min(index * CHUNK_BYTES, self.size) - first * CHUNK_BYTES)
                first = None

    def empty(self, offset: int, length: int) -> None:
        """Have this range be zeros that take no room, where the file system can do that."""
        if _libc.fallocate(self.fd, _PUNCH_HOLE, offset, length) == 0:
            return
        number = ctypes.get_errno()
        if number != errno.EOPNOTSUPP:
            raise OSError(number, os.strerror(number))
        zeros = memoryview(bytes(CHUNK_BYTES))
        for start in range(offset, offset + length, CHUNK_BYTES):
            self.put(zeros[: min(CHUNK_BYTES, offset + length - start)], start)

    def reset(self) -> None:
        """Forget all data, as before the first write."""
        self.digests = array("Q", bytes(8 * len(self.digests)))
        os.pwrite(self.fd, self.digests, padded(self.size))
        self.empty(0, self.size)

    def close(self) -> None:
        """Let go of the descriptor; the second time nothing happens."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def remove(self) -> None:
        """Let go of it all."""
        self.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ the trailer

    def save(self) -> None:
        """Write the trailer."""
        name = self.copy.encode()
        packed = TRAILER.pack(
            MAGIC,
            self.size,
            self.generation,
            self.ends_boot_ms,
            self.frozen,
            self.complete,
            len(name),
            boot_id_bytes(),
            name,
        )
        os.pwrite(self.fd, packed, file_bytes(self.size) - TRAILER_BYTES)

    def sync(self) -> None:
        """Have all of it on the disk, where it is on one."""
        if self.path is not None:
            os.fsync(self.fd)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    # ------------------------------------------------------------------ data

    def chunk_length(self, index: int) -> int:
        """How long this chunk is: the last may be shorter."""
        return min(CHUNK_BYTES, self.size - index * CHUNK_BYTES)

    def set_digest(self, index: int, digest: int) -> None:
        """Record what a chunk holds."""
        self.digests[index] = digest
        os.pwrite(self.fd, digest.to_bytes(8, "little"), padded(self.size) + 8 * index)

    def put(self, data: memoryview, offset: int) -> None:
        """Write data where they belong; OSError when there is no room."""
        done = 0
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], offset + done)

    def get_into(self, buffer: memoryview, offset: int) -> None:
        """Read data as they are in the file."""
        done = 0
        while done < len(buffer):
            got = os.preadv(self.fd, [buffer[done:]], offset + done)
            if got == 0:
                raise OSError("the file of a copy is shorter than it was")
            done += got

    def seal(self, index: int, scratch: memoryview) -> None:
        """Record the digest of a chunk from what it holds now."""
        view = scratch[: self.chunk_length(index)]
        self.get_into(view, index * CHUNK_BYTES)
        self.set_digest(index, digest_of(view))

    @property
    def resident_bytes(self) -> int:
        """What it really takes."""
        return os.fstat(self.fd).st_blocks * 512


def chunks_in(size: int) -> int:
    """How many chunks a block of this size has."""
    return -(-size // CHUNK_BYTES)


def padded(size: int) -> int:
    """Up to the next page."""
    return -(-size // PAGE) * PAGE


def file_bytes(size: int) -> int:
    """How long the file of a copy of this size is."""
    return padded(size) + padded(8 * chunks_in(size) + TRAILER_BYTES)


def found_on_disk(folder: Path) -> list[CopyFile]:
    """The complete copies in this folder; what was never completed is deleted, what is none of ours left alone."""
    found = []
    for path in sorted(folder.glob(f"*{ENDING}")):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                backing = CopyFile.take_over(fd, path)
            except ProtocolError:
                path.unlink()
                continue
            if backing.complete and path.name == f"{backing.copy}{ENDING}":
                found.append(backing)
            else:
                backing.remove()
    return found
