"""Compressed values: every part of them can be read, and what is damaged is never returned."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.client.memory.directory import EMPTY_META, length_of, packed_length, packed_meta
from distributed_grid.client.memory.packed_values import PackedLayout, PackedValue
from distributed_grid.errors import BadInput, Corrupt
from distributed_grid.memory.protocol.frames import CHUNK_BYTES
from tests.support.records import records

SOFT = b"the same words again and again, "


class OneBlock:
    """A block in this process."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.bytes_read = 0

    def read(self, block_id: str, size: int, offset: int = 0) -> bytes:
        assert 0 <= offset <= offset + size <= len(self.data)
        self.bytes_read += size
        return self.data[offset : offset + size]


def packed(data: bytes) -> OneBlock:
    layout = PackedLayout(memoryview(data))
    content = bytearray(layout.block_bytes)
    for offset, piece in layout.pieces():
        content[offset : offset + len(piece)] = piece
    return OneBlock(bytes(content))


def value_in(block: OneBlock, length: int) -> PackedValue:
    return PackedValue(block, "b1", len(block.data), length)


def mixed(size: int) -> bytes:
    """Chunks that shrink and chunks that do not, in turns."""
    source, parts = random.Random(size), bytearray()
    while len(parts) < size:
        parts += source.randbytes(CHUNK_BYTES) if len(parts) % (2 * CHUNK_BYTES) else SOFT * (CHUNK_BYTES // 32)
    return bytes(parts[:size])


@given(st.integers(1, 5 * CHUNK_BYTES), st.data())
def test_any_part_of_a_value_is_what_was_stored(size: int, data: st.DataObject) -> None:
    plain = mixed(size)
    offset = data.draw(st.integers(0, size))
    length = data.draw(st.integers(0, size - offset))
    value = value_in(packed(plain), size)
    assert value.read(length, offset) == plain[offset : offset + length]
    assert value.read(size, 0) == plain


def test_a_part_transfers_only_its_chunks_and_the_index() -> None:
    plain = os.urandom(CHUNK_BYTES) + SOFT * (63 * CHUNK_BYTES // 32)
    block = packed(plain)
    value = value_in(block, len(plain))
    assert len(block.data) < CHUNK_BYTES + len(plain) // 50
    value.read(10, 20 * CHUNK_BYTES - 5)
    assert block.bytes_read < CHUNK_BYTES // 10
    buffer = bytearray(100)
    value.read_into(memoryview(buffer), 7)
    assert buffer == plain[7:107]


def test_what_does_not_shrink_is_not_worth_it() -> None:
    assert not PackedLayout(memoryview(os.urandom(CHUNK_BYTES + 1))).pays
    assert not PackedLayout(memoryview(b"x")).pays
    assert PackedLayout(memoryview(SOFT * 1000)).pays


def test_data_that_change_while_they_are_stored_are_not_stored() -> None:
    data = bytearray(SOFT * (2 * CHUNK_BYTES // 32))
    layout = PackedLayout(memoryview(data))
    data[:CHUNK_BYTES] = os.urandom(CHUNK_BYTES)
    with pytest.raises(BadInput, match="the data changed while they were stored"):
        list(layout.pieces())


@pytest.mark.parametrize(("size", "offset"), [(1, -1), (10, 3 * CHUNK_BYTES), (3 * CHUNK_BYTES + 1, 0)])
def test_a_read_outside_of_the_value_is_refused(size: int, offset: int) -> None:
    value = value_in(packed(mixed(3 * CHUNK_BYTES)), 3 * CHUNK_BYTES)
    with pytest.raises(BadInput, match=f"of block b1: it has {3 * CHUNK_BYTES}"):
        value.read(size, offset)


@given(st.integers(0, 2**20), st.binary(min_size=1, max_size=8))
def test_a_damaged_block_is_corrupt_or_has_other_bytes_and_nothing_worse(place: int, noise: bytes) -> None:
    plain = mixed(3 * CHUNK_BYTES + 5)
    block = packed(plain)
    place %= len(block.data)
    block.data = (block.data[:place] + noise + block.data[place + len(noise) :])[: len(block.data)]
    try:
        assert len(value_in(block, len(plain)).read(len(plain), 0)) == len(plain)
    except Corrupt:
        pass


def test_a_forged_length_reads_nothing() -> None:
    block = packed(SOFT * 10_000)
    for length in (10**19, 10**12, 1):
        with pytest.raises(Corrupt):
            value_in(block, length).read(1, 0)


def test_the_meta_of_a_block_has_the_length_of_its_value() -> None:
    assert packed_length(packed_meta(12345)) == 12345
    assert length_of(records({"meta": packed_meta(12345), "size": 7})) == 12345
    assert length_of(records({"meta": EMPTY_META, "size": 1})) == 0
    for meta in ("", "{}", EMPTY_META, packed_meta(5) + " ", '{"array": {}}'):
        assert packed_length(meta) == 0
