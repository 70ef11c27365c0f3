"""Reading pieces of blocks over one connection.

Rule 1. Requests are pipelined, in a window: the answers come in their order.
Rule 2. What arrives is hashed right after it was received, while it is still in the cache.
Rule 3. When something goes wrong, what is not done is still in the list of what is to be done.
"""

from __future__ import annotations

from collections import deque

import lz4.block

from distributed_grid.memory.client.buffered_socket import BufferedSocket, StatusError
from distributed_grid.memory.client.chunks import ChunkRange, InFlight
from distributed_grid.memory.protocol.frames import (
    CHUNK,
    COMPRESSED,
    MAGIC,
    REQUEST,
    STEADY,
    ZEROS,
    FrameStatus,
    Op,
    digest_of,
)


def read_pieces(line: BufferedSocket, todo: deque[ChunkRange], *, compress: bool = False) -> None:
    """Fill every piece of the list, which is empty afterwards; after an error it has what is still to do.

    A piece that does not fit its digest, as when somebody writes to it meanwhile, is asked for once more and then
    as it is at one moment; `StatusError(CORRUPT)` when that is no better.
    """
    first = line.seq + 1
    with InFlight(todo) as sent:
        while sent.may_send or sent.pending:
            if sent.may_send and len(sent.pending) <= sent.window // 2:
                line.send([_read_request(line, sent.send_off(), compress) for _ in range(min(sent.window, len(todo)))])
            status = _read_answer(line, sent.pending[0], first)
            first += 1
            sent.answered(status)


def _read_request(line: BufferedSocket, piece: ChunkRange, compress: bool) -> bytes:
    line.seq = (line.seq + 1) & 0xFFFFFFFF
    flags = COMPRESSED if compress else STEADY if piece.again else 0
    return REQUEST.pack(MAGIC, Op.READ, flags, piece.handle, line.seq, len(piece.view), 0, piece.offset, 0)


def _read_answer(line: BufferedSocket, piece: ChunkRange, seq: int) -> int:
    view = piece.view
    wanted = len(view)
    status, flags, length, digest = line.answer(wanted, seq)
    if status:
        return status
    if flags & ZEROS:
        view[:] = bytes(wanted)
        return 0
    if flags & COMPRESSED:
        if length >= wanted:
            raise line.broken(ValueError("an answer is too long"))
        return _unpacked(line, view, length, digest)
    if length != wanted:
        raise line.broken(ValueError("an answer has the wrong length"))
    line.take(view)
    line.wire_received += length
    return 0 if digest_of(view) == digest else FrameStatus.CORRUPT


def _unpacked(line: BufferedSocket, view: memoryview, length: int, digest: int) -> int:
    if len(line.packed) < length:
        line.packed = memoryview(bytearray(CHUNK))
    line.take(line.packed[:length])
    line.wire_received += length
    try:
        plain = lz4.block.decompress(line.packed[:length], uncompressed_size=len(view))
    except (lz4.block.LZ4BlockError, ValueError):
        return FrameStatus.CORRUPT
    if len(plain) != len(view) or digest_of(plain) != digest:
        return FrameStatus.CORRUPT
    view[:] = plain
    return 0


def read_small_piece(line: BufferedSocket, handle: int, offset: int, size: int) -> bytes | None:
    """A few bytes within one chunk, by the shortest way; None where they did not fit their digest."""
    line.seq = seq = (line.seq + 1) & 0xFFFFFFFF
    try:
        line.sock.sendall(REQUEST.pack(MAGIC, Op.READ, 0, handle, seq, size, 0, offset, 0))
    except (OSError, ValueError) as error:
        raise line.broken(error) from None
    status, flags, length, digest = line.answer(size, seq)
    if status:
        raise StatusError(FrameStatus(status))
    if flags & ZEROS:
        return bytes(size)
    if length != size:
        raise line.broken(ValueError("an answer has the wrong length"))
    while line.end - line.start < size:
        line.end += line.receive_into(line.buffer[line.end :])
    data = bytes(line.buffer[line.start : line.start + size])
    line.start += size
    line.wire_received += size
    return data if digest_of(data) == digest else None
