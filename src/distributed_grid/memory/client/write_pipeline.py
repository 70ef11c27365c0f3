"""Writing pieces of blocks over one connection.

Rule 1. Requests are pipelined, in a window: the answers come in their order.
Rule 2. When something goes wrong, what is not done is still in the list of what is to be done.
"""

from __future__ import annotations

from collections import deque

import lz4.block

from distributed_grid.memory.client.buffered_socket import BufferedSocket, StatusError
from distributed_grid.memory.client.chunks import WINDOW, ChunkRange, InFlight
from distributed_grid.memory.protocol.frames import CHUNK, COMPRESSED, MAGIC, REQUEST, FrameStatus, Op, digest_of


def write_pieces(line: BufferedSocket, todo: deque[ChunkRange], *, compress: bool = False) -> None:
    """Write every piece of the list, which is empty afterwards; after an error it has what is still to do."""
    with InFlight(todo) as sent:
        while sent.may_send or sent.pending:
            while sent.may_send and len(sent.pending) < sent.window:
                line.send(_together(line, todo, sent, compress))
            status, _, _, _ = line.answer(0)
            sent.answered(status)


def _together(
    line: BufferedSocket, todo: deque[ChunkRange], sent: InFlight, compress: bool
) -> list[bytes | memoryview]:
    """The requests for one large piece, or for several small ones."""
    piece = sent.send_off()
    parts = _write_request(line, piece, digest_of(piece.view), compress)
    room = CHUNK - len(piece.view)
    while todo and room > len(todo[0].view) and len(parts) < 64:
        piece = sent.send_off()
        parts += _write_request(line, piece, digest_of(piece.view), compress)
        room -= len(piece.view)
    return parts


def _write_request(line: BufferedSocket, piece: ChunkRange, digest: int, compress: bool) -> list[bytes | memoryview]:
    payload: bytes | memoryview = piece.view
    flags, length = 0, len(payload)
    if compress:
        packed = lz4.block.compress(payload, store_size=False)
        if len(packed) < length:
            payload, flags = packed, COMPRESSED
    line.seq = (line.seq + 1) & 0xFFFFFFFF
    wire = len(payload)
    line.wire_sent += wire
    head = REQUEST.pack(MAGIC, Op.WRITE, flags, piece.handle, line.seq, length, wire, piece.offset, digest)
    return [head, payload]


class Filling:
    """Chunks on their way to a new copy."""

    def __init__(self, line: BufferedSocket, handle: int) -> None:
        self._line = line
        self._handle = handle
        self._under_way = 0

    def put(self, offset: int, view: memoryview, digest: int) -> None:
        """Send a chunk with the digest it has had since it was written; the buffer may be used again afterwards."""
        piece = ChunkRange(self._handle, offset, view)
        self._line.send(_write_request(self._line, piece, digest, compress=False))
        self._under_way += 1
        self.settle(WINDOW)

    def settle(self, left: int) -> None:
        """Wait until no more than so many are unanswered."""
        while self._under_way > left:
            status, _, _, _ = self._line.answer(0)
            self._under_way -= 1
            if status:
                raise StatusError(FrameStatus(status))
