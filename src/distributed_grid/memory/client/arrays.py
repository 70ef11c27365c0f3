"""`RemoteArray`: an array whose bytes are in a block of the memory pool; an index moves only what it selects.

Elements are in C order from the block's first byte on; shape and type are stored with the block, as JSON. Reading
includes small gaps, because a request costs more than they do; writing never touches a gap. A type with Python objects
in it is refused, so nothing is ever unpickled.

An index becomes byte runs, as few as are worth a request each. They come in the order of the result, do not overlap,
and hold every selected element; with a `gap` of 0 they hold nothing else.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distributed_grid.errors import BadInput
from distributed_grid.memory.client.transfer_queue import populate_pages

MAX_GAP_BYTES = 32 * 1024
"""Bytes that cost about as much to read as another request."""
MIN_DIRECT_BYTES = 256 * 1024
"""A run this long is moved straight to or from the array; shorter ones are batched."""
MAX_BATCH_BYTES = 8 << 20
MAX_BATCH_RUNS = 2048


@dataclass(frozen=True, slots=True)
class Axis:
    """The selection along one axis: the first index, the step to the next ones (forwards), how many."""

    start: int
    step: int
    count: int

    def halves(self) -> Iterator[tuple[Axis, slice]]:
        """Two parts, each with its slice of the whole."""
        first = self.count // 2
        yield Axis(self.start, self.step, first), slice(0, first)
        yield Axis(self.start + first * self.step, self.step, self.count - first), slice(first, None)


class Selection(NamedTuple):
    """Selection by an index: every axis, the reversed ones, and those that the result does not have."""

    axes: tuple[Axis, ...]
    backwards: tuple[bool, ...]
    dropped: tuple[bool, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(axis.count for axis in self.axes)


class ByteRun(NamedTuple):
    """Bytes of a block, and where in the result their elements belong."""

    offset: int
    length: int
    where: tuple[int | slice, ...]


def parse_index(index: Any, shape: Sequence[int]) -> Selection:
    """Selection of a basic index in an array of this shape; IndexError for an invalid one."""
    entries = index if isinstance(index, tuple) else (index,)
    for entry in entries:
        # True and False are masks to NumPy.
        is_mask = isinstance(entry, bool) or getattr(entry, "shape", ()) != () or "bool" in type(entry).__name__
        is_number = hasattr(entry, "__index__") and not is_mask
        if not (entry is Ellipsis or isinstance(entry, slice) or is_number):
            raise IndexError(
                f"a remote array is indexed by whole numbers, slices and ..., not by {type(entry).__name__}; "
                "take a slice first and index that: array[10:20][mask]"
            )
    # One entry for every axis: `...` and missing entries stand for whole axes.
    axes = len(shape)
    dots = sum(entry is Ellipsis for entry in entries)
    missing = axes - (len(entries) - dots)
    if dots > 1 or missing < 0:
        raise IndexError(f"an index of {len(entries)} parts does not fit an array of {axes} dimensions")
    whole = [slice(None)] * missing
    if not dots:
        indexes = [*entries, *whole]
    else:
        position = next(place for place, entry in enumerate(entries) if entry is Ellipsis)
        indexes = [*entries[:position], *whole, *entries[position + 1 :]]
    parts = [_axis(entry, size, axis) for axis, (entry, size) in enumerate(zip(indexes, shape, strict=True))]
    dropped = tuple(not isinstance(entry, slice) for entry in indexes)
    return Selection(tuple(axis for axis, _ in parts), tuple(turned for _, turned in parts), dropped)


def _axis(entry: Any, size: int, axis: int) -> tuple[Axis, bool]:
    if not isinstance(entry, slice):
        place = operator.index(entry)
        if not -size <= place < size:
            raise IndexError(f"index {place} is out of bounds for axis {axis} with size {size}")
        return Axis(place % size, 1, 1), False
    places = range(*entry.indices(size))
    backwards = places.step < 0
    if backwards:
        places = places[::-1]
    return Axis(places.start, places.step, len(places)), backwards


class Layout:
    """Byte runs of a selection of an array in C order.

    Axes are joined into one run from the innermost one outwards, as long as no more than `gap` bytes lie between
    two of its parts; a run with gaps is no longer than `max_run`. `is_exact`: the runs have no gaps.
    """

    def __init__(
        self, shape: Sequence[int], itemsize: int, axes: Sequence[Axis], *, gap: int = 0, max_run: int = 0
    ) -> None:
        row = [itemsize * math.prod(shape[place + 1 :]) for place in range(len(shape))]
        self._counts = [axis.count for axis in axes]
        self._strides = [size * axis.step for size, axis in zip(row, axes, strict=True)]
        self._start = sum(size * axis.start for size, axis in zip(row, axes, strict=True))
        self._outer = len(axes)
        self._group = 0
        """Places of the innermost outer axis that share a run; 0: each has its own."""
        self.length = itemsize
        self.is_exact = True
        while self._outer and 0 not in self._counts and self._join(gap, max_run):
            self._outer -= 1
        self.strides = tuple(self._strides[self._outer - bool(self._group) :])
        """Bytes between the elements of a run, for each axis that lies in it."""

    def _join(self, gap: int, max_run: int) -> bool:
        """Extend the run by one more axis, if that is worth it."""
        count, stride = self._counts[self._outer - 1], self._strides[self._outer - 1]
        grown = self.length + (count - 1) * stride
        if count <= 1:
            return True
        if stride == self.length and self.is_exact:
            self.length = grown
            return True
        if stride - self.length > gap:
            return False
        if grown > max_run:
            together = max(max_run - self.length, 0) // stride + 1
            if together > 1:
                self._group, self.is_exact = together, False
            return False
        self.length, self.is_exact = grown, False
        return True

    def runs(self) -> Iterator[ByteRun]:
        """Every run, in order; none where nothing is selected."""
        if 0 in self._counts:
            return
        counts, strides = self._counts[: self._outer], self._strides[: self._outer]
        if self._group:
            *counts, last = counts
            *strides, step = strides
        places = itertools.product(*map(range, counts))
        offsets = itertools.product(
            *(range(0, count * size, size) for count, size in zip(counts, strides, strict=True))
        )
        for where, parts in zip(places, offsets, strict=True):
            begin = self._start + sum(parts)
            if not self._group:
                yield ByteRun(begin, self.length, where)
                continue
            for low in range(0, last, self._group):
                together = min(self._group, last - low)
                length = self.length + (together - 1) * step
                yield ByteRun(begin + low * step, length, (*where, slice(low, low + together)))


class BlockReaderWriter(Protocol):
    """Reads and writes blocks; `BlockClient` is one."""

    def read_into(self, block_id: str, buffer: Any, offset: int = 0) -> None: ...
    def write(self, block_id: str, data: Any, offset: int = 0) -> None: ...
    def read_many(self, requests: Sequence[tuple[str, int, int]]) -> list[bytes]: ...
    def write_many(self, requests: Sequence[tuple[str, Any, int]]) -> None: ...


def array_meta(array: NDArray[Any]) -> str:
    """Shape and type of an array as the meta of its block; BadInput for a type that cannot be stored."""
    if array.dtype.hasobject:
        raise BadInput(
            f"an array of type {array.dtype} holds Python objects, which cannot be stored; give it a plain type"
        )
    descr = np.lib.format.dtype_to_descr(array.dtype)
    if _type_of(descr) != array.dtype:
        raise BadInput(f"an array of type {array.dtype} cannot be stored; store its plain bytes: array.view('u1')")
    return json.dumps({"array": {"shape": list(array.shape), "dtype": descr}})


def _type_of(descr: Any) -> np.dtype[Any]:
    return np.lib.format.descr_to_dtype(_with_tuples(descr))


def _with_tuples(descr: Any) -> Any:
    """The fields of a structured type as NumPy wants them: JSON made lists of its tuples."""
    if not isinstance(descr, list | tuple):
        return descr
    return [
        (tuple(name) if isinstance(name, list) else name, _with_tuples(kind), *(tuple(size) for size in shape))
        for name, kind, *shape in descr
    ]


def parse_array_meta(meta: str, block_id: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type from the meta of a block; BadInput where it holds no array."""
    try:
        layout = json.loads(meta)["array"]
        shape = tuple(int(size) for size in layout["shape"])
        dtype = _type_of(layout["dtype"])
    except (ValueError, TypeError, KeyError):
        raise BadInput(f"block {block_id} holds no array; read its bytes instead") from None
    if min(shape, default=0) < 0 or dtype.hasobject:
        raise BadInput(f"the array in block {block_id} cannot be read: invalid shape or type")
    return shape, dtype


def bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


class RemoteArray:
    """An array in the memory of another node. It is read and written like a NumPy array, by whole numbers and slices.

    An index copies: changing what it returns changes nothing here.
    """

    def __init__(self, blocks: BlockReaderWriter, block_id: str, shape: Sequence[int], dtype: DTypeLike) -> None:
        self._blocks = blocks
        self.block_id = block_id
        self.shape = tuple(shape)
        self.dtype: np.dtype[Any] = np.dtype(dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"RemoteArray({self.block_id}, shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, index: Any) -> Any:
        """Selected part as a new array; a single element as a NumPy scalar."""
        selection = parse_index(index, self.shape)
        axes = zip(selection.dropped, selection.backwards, strict=True)
        chosen = tuple(0 if dropped else slice(None, None, -1 if turned else 1) for dropped, turned in axes)
        selected = self._read(selection)[(*chosen, ...)]
        has_dots = any(word is Ellipsis for word in (index if isinstance(index, tuple) else (index,)))
        return selected if has_dots else selected[()]

    def __setitem__(self, index: Any, value: Any) -> None:
        selection = parse_index(index, self.shape)
        known = value if isinstance(value, np.ndarray | np.generic) else np.asarray(value, self.dtype)
        self._write(selection.axes, _broadcast(np.asarray(known), selection))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a remote array cannot be had without a copy")
        whole: NDArray[Any] = self._read(parse_index(Ellipsis, self.shape))
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __iter__(self) -> Iterator[Any]:
        """Row by row; rows are read in chunks, the next one ahead."""
        return itertools.chain.from_iterable(self.chunks())

    def chunks(self, rows: int | None = None) -> Iterator[NDArray[Any]]:
        """The array in pieces of `rows` rows (default: about 8 MiB); the next one is read ahead."""
        if not self.shape:
            raise TypeError("an array without dimensions has no rows")
        if rows is not None and rows < 1:
            raise BadInput(f"a chunk must have at least one row, not {rows}")
        row_bytes = self.nbytes // len(self) if len(self) else 0
        return self._read_ahead(rows or max(MAX_BATCH_BYTES // max(row_bytes, 1), 1))

    def _read_ahead(self, rows: int) -> Iterator[NDArray[Any]]:
        begins = range(0, len(self), rows)
        with ThreadPoolExecutor(1, thread_name_prefix="remote-array") as reader:
            coming = [reader.submit(self.__getitem__, slice(low, low + rows)) for low in begins[:1]]
            for low in [*begins[1:], None]:
                if not coming:
                    return
                chunk = coming.pop().result()
                if low is not None:
                    coming.append(reader.submit(self.__getitem__, slice(low, low + rows)))
                yield chunk

    def _read(self, selection: Selection) -> NDArray[Any]:
        """Read the selection, with all axes and forwards."""
        array: NDArray[Any] = np.empty(selection.counts, self.dtype)
        layout = Layout(self.shape, self.dtype.itemsize, selection.axes, gap=MAX_GAP_BYTES, max_run=MAX_BATCH_BYTES)
        if not array.nbytes:
            return array
        if layout.is_exact and layout.length >= MIN_DIRECT_BYTES:
            flat, offset = bytes_of(array), 0
            populate_pages(array, array.ctypes.data, array.nbytes)
            for run in layout.runs():
                self._blocks.read_into(self.block_id, flat[offset : offset + run.length], run.offset)
                offset += run.length
            return array
        for runs in _batches(layout.runs()):
            pieces = self._blocks.read_many([(self.block_id, run.length, run.offset) for run in runs])
            for run, piece in zip(runs, pieces, strict=True):
                there = array[(*run.where, ...)]
                there[...] = np.ndarray(there.shape, self.dtype, piece, strides=layout.strides)
        return array

    def _write(self, axes: tuple[Axis, ...], value: NDArray[Any]) -> None:
        """Write along all axes, forwards; a value that has to be converted first is converted piece by piece."""
        fits = value.dtype == self.dtype and value.flags.c_contiguous
        if not fits and value.size > 1 and value.size * self.dtype.itemsize > MAX_BATCH_BYTES:
            cut = next(place for place, axis in enumerate(axes) if axis.count > 1)
            for half, part in axes[cut].halves():
                self._write((*axes[:cut], half, *axes[cut + 1 :]), value[(*[slice(None)] * cut, part)])
            return
        flat, offset = bytes_of(np.ascontiguousarray(value, self.dtype)), 0
        layout = Layout(self.shape, self.dtype.itemsize, axes)
        if not flat.size:
            return
        if layout.length >= MIN_DIRECT_BYTES:
            for run in layout.runs():
                self._blocks.write(self.block_id, flat[offset : offset + run.length], run.offset)
                offset += run.length
            return
        for runs in _batches(layout.runs()):
            length = layout.length
            self._blocks.write_many(
                [
                    (self.block_id, flat[offset + place * length : offset + (place + 1) * length], run.offset)
                    for place, run in enumerate(runs)
                ]
            )
            offset += len(runs) * length


def _batches(runs: Iterator[ByteRun]) -> Iterator[list[ByteRun]]:
    """Runs in groups that are moved together."""
    batch: list[ByteRun] = []
    size = 0
    for run in runs:
        if batch and (size + run.length > MAX_BATCH_BYTES or len(batch) >= MAX_BATCH_RUNS):
            yield batch
            batch, size = [], 0
        batch.append(run)
        size += run.length
    if batch:
        yield batch


def _broadcast(value: NDArray[Any], selection: Selection) -> NDArray[Any]:
    """A value in the shape of the selection, with all axes and forwards; a view, nothing is copied."""
    kept = tuple(count for count, dropped in zip(selection.counts, selection.dropped, strict=True) if not dropped)
    while value.ndim > len(kept) and value.shape[0] == 1:
        value = value[0]
    try:
        wide = np.broadcast_to(value, kept)
    except ValueError:
        raise ValueError(f"a value of the shape {value.shape} does not fit what it is written to: {kept}") from None
    parts = zip(selection.dropped, selection.backwards, strict=True)
    chosen = tuple(None if dropped else slice(None, None, -1 if turned else 1) for dropped, turned in parts)
    view: NDArray[Any] = wide[(*chosen, ...)]
    return view
