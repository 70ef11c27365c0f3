"""Frames of the data protocol between clients and memory servers.

Little-endian headers of fixed size, and payloads whose length the header gives: a reader knows from the header alone
how many bytes follow, and refuses more than it is ready for. Answers come in the order of the requests; a client may
send many before it reads the first answer. A READ or WRITE stays within one chunk, so that each has one digest and is
done whole or not at all.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

import xxhash

from distributed_grid.errors import GridError

CHUNK_BYTES: Final = 256 * 1024
MAGIC: Final = 0x6D47
ANSWER_MAGIC: Final = 0x6D61
VERSION: Final = 1
NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
MAX_HANDLES: Final = 4096

# magic, op, flags, handle, seq, length, wire length, offset, digest. `length` is that of the data, `wire` the bytes
# that follow the header.
REQUEST: Final = Struct("<HBBIIIIQQ")
# magic, status, flags, seq, wire length, digest
ANSWER: Final = Struct("<HBBIIQ")
OPENED: Final = Struct("<IQQB")  # handle, generation, size, whether the copy is complete
STAT: Final = Struct("<QQQB")  # size, generation, chunks written, whether it is frozen

COMPRESSED: Final = 1  # of a WRITE: the payload is an lz4 block; of a READ: the answer may be one
STEADY: Final = 4  # of a READ: a consistent snapshot, even where somebody writes meanwhile
ZEROS: Final = 2  # of an answer: the data are zeros, and none follow

MAX_OPEN_BYTES: Final = 2 + 1024 + PROOF_BYTES


class Op(IntEnum):
    """Operation of a request."""

    HELLO = 1
    OPEN = 2
    READ = 3
    WRITE = 4
    FILL_END = 5
    MAP = 6
    STAT = 7
    CLOSE = 8
    SEVER = 9  # end another connection of mine, so that nothing sent on it is done after this


class FrameStatus(IntEnum):
    """Outcome of a request."""

    OK = 0
    DENIED = 1  # not permitted; deliberately without a reason
    EXPIRED = 2  # the ticket has run out
    WRONG_INCARNATION = 3  # the ticket is for another incarnation of this server
    STALE = 4  # the copies of the block have changed since the ticket was issued
    MOVED = 5  # the copy is not here any more
    FROZEN = 6  # not now: the copy is being moved, or is not filled yet
    CORRUPT = 7  # the digest does not match
    BAD = 8  # the request is invalid
    FULL = 9  # no room


class StatusError(GridError):
    """The server refused a request."""

    def __init__(self, status: FrameStatus) -> None:
        super().__init__(f"the memory server answered: {status.name.lower()}")
        self.status = status


def digest_of(data: bytes | bytearray | memoryview) -> int:
    """The XXH3 of a chunk or a part of one; never 0, which stands for "never written"."""
    return xxhash.xxh3_64_intdigest(data) or 1
