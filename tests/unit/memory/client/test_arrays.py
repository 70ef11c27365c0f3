"""An index of a remote array moves the bytes it asks for, in few requests, and means what it means to NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from distributed_grid.errors import BadInput
from distributed_grid.memory.client.arrays import (
    MAX_BATCH_BYTES,
    MAX_GAP_BYTES,
    Axis,
    Layout,
    RemoteArray,
    array_meta,
    bytes_of,
    parse_array_meta,
    parse_index,
)

TYPES = ("u1", "<i2", ">i4", "<f8", "<c16", "<M8[ns]", "<U3", "S5", "?")
FIELDS = np.dtype([("name", "<U4"), ("at", "<f8", (2, 3)), ("inner", [("a", "u1"), ("b", "<i4")])])


class OneBlock:
    """The bytes of one block in this process, and what was asked of them."""

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.calls = 0

    def read_into(self, block_id: str, buffer: Any, offset: int = 0) -> None:
        view = memoryview(buffer).cast("B")
        view[:] = self.read_many([(block_id, len(view), offset)])[0]

    def write(self, block_id: str, data: Any, offset: int = 0) -> None:
        self.write_many([(block_id, data, offset)])

    def read_many(self, asks: Sequence[tuple[str, int, int]]) -> list[bytes]:
        self.calls += 1
        assert all(0 <= offset <= len(self.content) - size for _, size, offset in asks)
        self.reads += [size for _, size, _ in asks]
        return [bytes(self.content[offset : offset + size]) for _, size, offset in asks]

    def write_many(self, asks: Sequence[tuple[str, Any, int]]) -> None:
        self.calls += 1
        for _, data, offset in asks:
            view = memoryview(data).cast("B")
            assert 0 <= offset <= len(self.content) - len(view)
            self.writes.append(len(view))
            self.content[offset : offset + len(view)] = view


def stored(array: np.ndarray[Any, Any]) -> tuple[RemoteArray, OneBlock]:
    block = OneBlock(array.tobytes())
    return RemoteArray(block, "b", array.shape, array.dtype), block


def as_array(block: OneBlock, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes(block.content), like.dtype).reshape(like.shape)


some_arrays = st.sampled_from(TYPES).flatmap(
    lambda kind: arrays_of.arrays(kind, arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7))
)


@given(st.data(), some_arrays)
@settings(max_examples=60, deadline=None)
def test_reading_an_index_gives_what_numpy_gives(data: st.DataObject, array: np.ndarray[Any, Any]) -> None:
    index = data.draw(arrays_of.basic_indices(array.shape, allow_newaxis=False))
    remote, _ = stored(array)
    found, wanted = remote[index], array[index]
    assert type(found) is type(wanted)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert np.asarray(found, array.dtype).tobytes() == np.asarray(wanted, array.dtype).tobytes()


@given(st.data(), some_arrays)
@settings(max_examples=60, deadline=None)
def test_writing_an_index_changes_what_numpy_changes_and_nothing_else(
    data: st.DataObject, array: np.ndarray[Any, Any]
) -> None:
    drawn = data.draw(arrays_of.basic_indices(array.shape, allow_newaxis=False))
    index = drawn if isinstance(drawn, tuple) else (drawn,)
    target = array[index].shape
    shape = data.draw(st.sampled_from([target, (), target[1:], (1, *target)] if target else [()]))
    value = data.draw(arrays_of.arrays(array.dtype, shape))
    remote, block = stored(array)
    expected = array.copy()
    expected[index] = value
    remote[index] = value
    assert bytes(block.content) == expected.tobytes()
    assert sum(block.writes) == expected[(*index, ...) if ... not in index else index].nbytes


@given(st.data(), arrays_of.array_shapes(min_dims=1, max_dims=4, max_side=9), st.sampled_from([0, 1, 8, 40, 10**9]))
@settings(max_examples=60, deadline=None)
def test_runs_hold_everything_once_and_keep_to_their_bounds(
    data: st.DataObject, shape: tuple[int, ...], gap: int
) -> None:
    asked = parse_index(data.draw(arrays_of.basic_indices(shape, allow_newaxis=False)), shape)
    longest = data.draw(st.sampled_from([0, 16, 100, 10**9]))
    layout = Layout(shape, 4, asked.axes, gap=gap, max_run=longest)
    runs = list(layout.runs())
    ends = [0, *(run.offset + run.length for run in runs)]
    assert all(run.offset >= end for run, end in zip(runs, ends, strict=False))
    wanted = 4 * int(np.prod(asked.counts))
    moved = sum(run.length for run in runs)
    assert moved >= wanted
    if layout.is_exact:
        assert moved == wanted
    else:
        assert all(run.length <= longest for run in runs)
    if gap == 0:
        assert layout.is_exact


def test_a_slice_moves_only_its_own_bytes() -> None:
    remote, block = stored(np.arange(10**6, dtype="<f8").reshape(1000, 1000))
    assert remote[500].sum() == float(np.arange(500_000, 501_000).sum())
    assert block.reads == [8000]
    assert remote[3, 4] == 3004
    assert block.reads == [8000, 8]
    assert remote[10:20].shape == (10, 1000)
    assert block.reads == [8000, 8, 80_000]


def test_rows_that_are_far_apart_are_read_one_by_one_and_those_that_are_near_in_one_go() -> None:
    far, block = stored(np.zeros((64, MAX_GAP_BYTES), "<u2"))
    assert far[::8, :10].shape == (8, 10)
    assert (block.reads, block.calls) == ([20] * 8, 1)
    near, block = stored(np.zeros((64, 100), "<u2"))
    assert near[:, 0].shape == (64,)
    assert block.reads == [63 * 200 + 2]


def test_a_column_of_a_large_array_is_read_in_pieces_of_bounded_size() -> None:
    remote, block = stored(np.ones((3000, 1000), "<f8"))
    assert remote[:, 7].sum() == 3000
    assert max(block.reads) <= MAX_BATCH_BYTES
    assert len(block.reads) == 3


def test_writing_a_column_touches_nothing_between_its_elements() -> None:
    remote, block = stored(np.ones((3000, 10), "<f8"))
    remote[:, 7] = np.arange(3000)
    assert block.writes == [8] * 3000
    assert block.calls == 2


def test_a_value_that_has_to_be_spread_first_is_spread_in_pieces() -> None:
    array = np.zeros((5, 1_000_000), "<f4")
    remote, block = stored(array)
    remote[:, ::-1] = np.arange(1_000_000)
    array[:, ::-1] = np.arange(1_000_000)
    assert bytes(block.content) == array.tobytes()
    assert max(block.writes) <= MAX_BATCH_BYTES


@pytest.mark.parametrize("index", [[1, 2], np.array([True, False, True]), None, True, "a", 1.0, (0, [1])])
def test_what_is_no_basic_index_says_what_to_do_instead(index: Any) -> None:
    remote, block = stored(np.arange(12).reshape(3, 4))
    with pytest.raises(IndexError, match="take a slice first"):
        remote[index]
    with pytest.raises(IndexError, match="take a slice first"):
        remote[index] = 1
    assert block.calls == 0


@pytest.mark.parametrize("index", [3, -4, (0, 4), (0, 0, 0), (..., 0, ...)])
def test_an_index_out_of_bounds_is_an_error_as_in_numpy(index: Any) -> None:
    array = np.arange(12).reshape(3, 4)
    remote, _ = stored(array)
    for each in (array, remote):
        with pytest.raises(IndexError):
            each[index]


def test_a_value_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    remote, block = stored(np.arange(12).reshape(3, 4))
    with pytest.raises(ValueError, match="does not fit"):
        remote[0] = [1, 2, 3]
    assert block.calls == 0


def test_chunks_and_rows_go_through_the_whole_array() -> None:
    array = np.arange(3 * 700_000, dtype="<f8").reshape(-1, 7)
    remote, _ = stored(array)
    chunks = list(remote.chunks())
    assert len(chunks) == 3
    assert np.array_equal(np.concatenate(chunks), array)
    assert [len(chunk) for chunk in remote.chunks(rows=200_000)] == [200_000, 100_000]
    small, _ = stored(array[:5])
    assert [row.tolist() for row in small] == array[:5].tolist()
    empty, _ = stored(array[:0])
    assert list(empty) == []


def test_a_failed_read_ahead_reaches_whoever_reads_that_chunk() -> None:
    remote, block = stored(np.zeros((4, 4)))
    chunks = remote.chunks(rows=2)
    assert next(chunks).shape == (2, 4)
    del block.content[64:]
    with pytest.raises(AssertionError):
        list(remote.chunks(rows=2))


def test_a_remote_array_is_an_array_to_numpy() -> None:
    array = np.arange(12, dtype="<i4").reshape(3, 4)
    remote, _ = stored(array)
    assert (remote.shape, remote.ndim, remote.size, remote.nbytes, len(remote)) == ((3, 4), 2, 12, 48, 3)
    assert np.sum(remote) == 66
    assert np.asarray(remote, dtype="f8").dtype == np.float64
    assert "shape=(3, 4)" in repr(remote)
    with pytest.raises(ValueError, match="without a copy"):
        np.array(remote, copy=False)
    single, _ = stored(np.array(5.0))
    assert single[()] == 5.0
    for wrong in (len, iter, list):
        with pytest.raises(TypeError):
            wrong(single)


@given(some_arrays)
@settings(max_examples=50, deadline=None)
def test_what_is_noted_of_an_array_brings_it_back(array: np.ndarray[Any, Any]) -> None:
    assert parse_array_meta(array_meta(array), "b") == (array.shape, array.dtype)
    assert bytes_of(np.ascontiguousarray(array)).tobytes() == array.tobytes()


def test_structured_types_are_noted_with_their_fields() -> None:
    array = np.zeros(3, FIELDS)
    assert parse_array_meta(array_meta(array), "b") == ((3,), FIELDS)
    remote, block = stored(array)
    remote[1] = ("x", np.ones((2, 3)), (1, -2))
    assert as_array(block, array)[1]["inner"]["b"] == -2


def test_objects_do_not_travel() -> None:
    for kind in ("O", [("a", "<i4"), ("b", "O")]):
        with pytest.raises(BadInput, match="Python objects"):
            array_meta(np.zeros(3, kind))


@pytest.mark.parametrize(
    "meta",
    ["", "no json", "[]", '{"array": 1}', '{"array": {"shape": [-1], "dtype": "<f8"}}', '{"length": 0}',
     '{"array": {"shape": [1], "dtype": "O"}}', '{"array": {"shape": [1], "dtype": "no type"}}'],
)  # fmt: skip
def test_a_block_without_an_array_says_so(meta: str) -> None:
    with pytest.raises(BadInput, match="block b"):
        parse_array_meta(meta, "b")


def test_halves_of_an_axis_are_the_axis() -> None:
    (first, low), (second, high) = Axis(3, 2, 5).halves()
    assert (first, second) == (Axis(3, 2, 2), Axis(7, 2, 3))
    assert (low, high) == (slice(0, 2), slice(2, None))
