"""Packed values: values that are compressed (LZ4) at rest, so that their blocks hold fewer bytes.

A value never changes, so it is compressed before its block is allocated, and the block is only as large as what is
left. The block has the compressed chunks (256 KiB of the value each), one after the other, and then the length of each
as four bytes. A chunk that does not shrink is kept plain: its length says so. The meta of the block has the length of
the value.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import lz4.block

from distributed_grid.errors import BadInput, Corrupt
from distributed_grid.memory.client.transfer_queue import ReadBuffer
from distributed_grid.memory.protocol.frames import CHUNK_BYTES

MAX_PART: Final = 15 / 16
"""A value that would keep a larger part of its size is stored plain."""
BATCH_BYTES: Final = 8 << 20


class PackedLayout:
    """The lengths of the compressed chunks of a value, and the block that they need."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._lengths = [len(chunk) for chunk in _chunks(data)]
        self.block_bytes = sum(self._lengths) + 4 * len(self._lengths)

    @property
    def pays(self) -> bool:
        return self.block_bytes <= MAX_PART * len(self._data)

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """What to write into the block, and where. It is compressed once more, so that no compressed value has to be in
        memory as a whole; BadInput where the data are other ones by now."""
        batch, start = bytearray(), 0
        for chunk, length in zip(_chunks(self._data), self._lengths, strict=True):
            if len(chunk) != length:
                raise BadInput("the data changed while they were stored; nothing was stored")
            batch += chunk
            if len(batch) >= BATCH_BYTES:
                yield start, bytes(batch)
                start += len(batch)
                batch.clear()
        yield start, bytes(batch) + struct.pack(f"<{len(self._lengths)}I", *self._lengths)


def _chunks(data: memoryview) -> Iterator[bytes | memoryview]:
    for begin in range(0, len(data), CHUNK_BYTES):
        plain = data[begin : begin + CHUNK_BYTES]
        packed = lz4.block.compress(plain, store_size=False)
        yield packed if len(packed) < len(plain) else plain


class BlockReader(Protocol):
    """Reads blocks; `BlockClient` is one."""

    def read(self, block_id: str, size: int, offset: int = 0) -> bytes: ...


class PackedValue:
    """Reads a packed value, whole or in parts: only chunks that are asked for are transferred. Its index is kept."""

    def __init__(self, blocks: BlockReader, block_id: str, block_bytes: int, length: int) -> None:
        self.length = length
        self._blocks = blocks
        self._block_id = block_id
        self._block_bytes = block_bytes
        self._starts: Sequence[int] = ()

    def read(self, size: int, offset: int) -> bytes:
        """`size` bytes of the value, from an offset on."""
        self._check_range(size, offset)
        self._load_index()
        buffer = ReadBuffer(size)
        self.read_into(buffer.view, offset)
        return buffer.to_bytes()

    def _check_range(self, size: int, offset: int) -> None:
        if offset < 0 or offset + size > self.length:
            end = offset + size
            raise BadInput(f"cannot read bytes {offset} to {end} of block {self._block_id}: it has {self.length}")

    def read_into(self, view: memoryview, offset: int = 0) -> None:
        """Fill the view from an offset of the value on."""
        self._check_range(len(view), offset)
        end = offset + len(view)
        if not len(view):
            return
        starts = self._load_index()
        number, last = offset // CHUNK_BYTES, (end - 1) // CHUNK_BYTES
        while number <= last:
            after = number + 1
            while after <= last and starts[after + 1] - starts[number] <= BATCH_BYTES:
                after += 1
            packed = memoryview(self._blocks.read(self._block_id, starts[after] - starts[number], starts[number]))
            for each in range(number, after):
                chunk = self._unpacked(each, packed[starts[each] - starts[number] : starts[each + 1] - starts[number]])
                begin = each * CHUNK_BYTES
                low, high = max(offset, begin), min(end, begin + len(chunk))
                view[low - offset : high - offset] = chunk[low - begin : high - begin]
            number = after

    def _load_index(self) -> Sequence[int]:
        """Where each chunk begins in the block, and where the last one ends."""
        if self._starts:
            return self._starts
        count = -(-self.length // CHUNK_BYTES)
        end = self._block_bytes - 4 * count
        if end <= 0:
            raise self._corrupt()
        lengths = struct.unpack(f"<{count}I", self._blocks.read(self._block_id, 4 * count, end))
        starts = [0, *itertools.accumulate(lengths)]
        if starts[-1] != end or max(lengths) > CHUNK_BYTES:
            raise self._corrupt()
        self._starts = starts
        return starts

    def _unpacked(self, number: int, packed: memoryview) -> bytes | memoryview:
        size = min(CHUNK_BYTES, self.length - number * CHUNK_BYTES)
        if len(packed) == size:
            return packed
        try:
            plain: bytes = lz4.block.decompress(packed, uncompressed_size=size)
        except (lz4.block.LZ4BlockError, ValueError):
            raise self._corrupt() from None
        if len(plain) != size:
            raise self._corrupt()
        return plain

    def _corrupt(self) -> Corrupt:
        return Corrupt(f"block {self._block_id} does not hold the compressed value that its record describes")
