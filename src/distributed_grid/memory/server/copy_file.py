"""File of one copy of a block: a memfd, or a file on disk.

The file is complete: data from 0 on, then on a page of its own the digest table, and a trailer at the end. The holder
of the descriptor can take the copy over. A chunk with digest 0 was never written, and reads as zeros; in a file taken
over, where a writer may have died, those chunks are punched out first. Nothing is mapped by the server: `pwrite` of
pages that are not there yet costs half of a page fault, and a full disk is an error instead of a signal.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from array import array
from pathlib import Path
from struct import Struct
from typing import Final

from distributed_grid.domain.blocks import MAX_BLOCK_BYTES
from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.frames import CHUNK_BYTES, digest_of, is_copy_id
from distributed_grid.posix.boot_clock import boot_id
from distributed_grid.posix.file_blocks import punch_hole
from distributed_grid.posix.private_files import sync_directory

PAGE_BYTES: Final = 4096
TRAILER: Final = Struct("<8sQQQBBBx16s200s")  # magic, size, generation, ends, frozen, complete, id length, boot, id
TRAILER_BYTES: Final = 512
MAGIC: Final = b"gridmem1"
COPY_SUFFIX: Final = ".block"


@functools.cache
def boot_id_bytes() -> bytes:
    return bytes.fromhex(boot_id().replace("-", ""))


class CopyFile:
    """The file of one copy. Its digests are in memory too; what changes is written through at once."""

    __slots__ = ("complete", "copy", "digests", "ends_boot_ms", "fd", "frozen", "generation", "path", "size")

    def __init__(self, fd: int, copy: str, size: int, path: Path | None) -> None:
        self.fd = fd
        self.copy = copy
        self.size = size
        self.path = path
        self.generation = 0
        self.ends_boot_ms = 0
        self.frozen = False
        self.complete = True
        self.digests = array("Q", bytes(8 * chunk_count(size)))

    @property
    def on_disk(self) -> bool:
        return self.path is not None

    # ------------------------------------------------------------------ creating, taking over, removing

    @classmethod
    def make(cls, copy: str, size: int, folder: Path | None) -> CopyFile:
        """An empty copy in memory, or as a file in this folder; OSError where there is no room, and nothing remains."""
        path = None if folder is None else folder / f"{copy}{COPY_SUFFIX}"
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
        """The copy in this file, which it owns from now on; ProtocolError where it is none (it is closed then)."""
        try:
            length = os.fstat(fd).st_size
            packed = os.pread(fd, TRAILER.size, length - TRAILER_BYTES) if length >= TRAILER_BYTES else b""
            if len(packed) < TRAILER.size or not packed.startswith(MAGIC):
                raise ProtocolError("the file holds no copy")
            _, size, generation, ends, frozen, complete, name_length, boot, name = TRAILER.unpack(packed)
            copy = name[:name_length].decode("ascii", "replace")
            if not 1 <= size <= MAX_BLOCK_BYTES or file_bytes(size) != length or not is_copy_id(copy):
                raise ProtocolError("the trailer of the copy is invalid")
            backing = cls(fd, copy, size, path)
            backing.generation, backing.frozen, backing.complete = generation, bool(frozen), bool(complete)
            backing.ends_boot_ms = ends if boot == boot_id_bytes() else 0
            table = os.pread(fd, 8 * chunk_count(size), page_aligned(size))
            backing.digests = array("Q", table)
            first = None
            for index, digest in enumerate((*backing.digests, 1)):
                if digest == 0 and first is None:
                    first = index
                elif digest != 0 and first is not None:
                    backing.punch_hole(
                        first * CHUNK_BYTES, min(index * CHUNK_BYTES, backing.size) - first * CHUNK_BYTES
                    )
                    first = None
            return backing
        except BaseException:
            os.close(fd)
            raise

    def punch_hole(self, offset: int, length: int) -> None:
        """Make this range zeros that take no room, where the file system can do that."""
        try:
            punch_hole(self.fd, offset, length)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            zeros = memoryview(bytes(CHUNK_BYTES))
            for start in range(offset, offset + length, CHUNK_BYTES):
                self.write(zeros[: min(CHUNK_BYTES, offset + length - start)], start)

    def reset(self) -> None:
        self.digests = array("Q", bytes(8 * len(self.digests)))
        os.pwrite(self.fd, self.digests, page_aligned(self.size))
        self.punch_hole(0, self.size)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def remove(self) -> None:
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
        if self.path is not None:
            os.fsync(self.fd)
            sync_directory(self.path.parent)

    # ------------------------------------------------------------------ data

    def chunk_length(self, index: int) -> int:
        return min(CHUNK_BYTES, self.size - index * CHUNK_BYTES)

    def set_digest(self, index: int, digest: int) -> None:
        self.digests[index] = digest
        os.pwrite(self.fd, digest.to_bytes(8, "little"), page_aligned(self.size) + 8 * index)

    def write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], offset + done)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from an offset on."""
        done = 0
        while done < len(buffer):
            got = os.preadv(self.fd, [buffer[done:]], offset + done)
            if got == 0:
                raise OSError("the file of a copy is shorter than it was")
            done += got

    def refresh_digest(self, index: int, scratch: memoryview) -> None:
        """Digest of a chunk's current data, recorded."""
        view = scratch[: self.chunk_length(index)]
        self.read_into(view, index * CHUNK_BYTES)
        self.set_digest(index, digest_of(view))

    @property
    def resident_bytes(self) -> int:
        return os.fstat(self.fd).st_blocks * 512


def chunk_count(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def page_aligned(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def file_bytes(size: int) -> int:
    return page_aligned(size) + page_aligned(8 * chunk_count(size) + TRAILER_BYTES)


def load_copies(folder: Path) -> list[CopyFile]:
    """The complete copies in this folder; incomplete ones are deleted, other files left alone."""
    backings = []
    for path in sorted(folder.glob(f"*{COPY_SUFFIX}")):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                backing = CopyFile.take_over(fd, path)
            except ProtocolError:
                path.unlink()
                continue
            if backing.complete and path.name == f"{backing.copy}{COPY_SUFFIX}":
                backings.append(backing)
            else:
                backing.remove()
    return backings
