"""`RemoteArray`: an array whose bytes are in a block of the memory pool; an index moves only what it selects.

Elements are in C order from the block's first byte on; shape and type are stored with the block, as JSON. Reading
includes small gaps, because a request costs more than they do; writing never touches a gap. A type with Python objects
in it is refused, so nothing is ever unpickled.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distributed_grid.errors import BadInput
from distributed_grid.memory.client.array_slices import Axis, ByteRun, Layout, Selection, parse_index
from distributed_grid.memory.client.buffers import populate_pages

MAX_GAP_BYTES = 32 * 1024
"""So many bytes cost about as much to read as another request."""
MIN_DIRECT_BYTES = 256 * 1024
"""A run this long is moved straight to or from the array; shorter ones are batched."""
MAX_BATCH_BYTES = 8 << 20
MAX_BATCH_RUNS = 2048


class BlockReaderWriter(Protocol):
    """Reads and writes blocks; `BlockClient` is one."""

    def read_into(self, block_id: str, buffer: Any, offset: int = 0) -> None: ...
    def write(self, block_id: str, data: Any, offset: int = 0) -> None: ...
    def read_many(self, requests: Sequence[tuple[str, int, int]]) -> list[bytes]: ...
    def write_many(self, requests: Sequence[tuple[str, Any, int]]) -> None: ...


def array_meta(array: NDArray[Any]) -> str:
    """Shape and type of an array as the meta of its block; BadInput for a type that cannot be stored."""
    return json.dumps({"array": {"shape": list(array.shape), "dtype": _descr_of(array.dtype)}})


def _descr_of(dtype: np.dtype[Any]) -> Any:
    if dtype.hasobject:
        raise BadInput(f"an array of type {dtype} holds Python objects, which cannot be stored; give it a plain type")
    descr = np.lib.format.dtype_to_descr(dtype)
    if _type_of(descr) != dtype:
        raise BadInput(f"an array of type {dtype} cannot be stored; store its plain bytes: array.view('u1')")
    return descr


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
        found = json.loads(meta)["array"]
        shape = tuple(int(size) for size in found["shape"])
        dtype = _type_of(found["dtype"])
    except (ValueError, TypeError, KeyError):
        raise BadInput(f"block {block_id} holds no array; read its bytes instead") from None
    if min(shape, default=0) < 0 or dtype.hasobject:
        raise BadInput(f"the array in block {block_id} cannot be read: invalid shape or type")
    return shape, dtype


def bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a contiguous array, without a copy, whatever its type."""
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
        """What the index selects, as a new array; a single element as a NumPy scalar."""
        selection = parse_index(index, self.shape)
        found = _orient(self._read(selection), selection)
        has_dots = any(word is Ellipsis for word in (index if isinstance(index, tuple) else (index,)))
        return found if has_dots else found[()]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write what the index selects; the value is broadcast as NumPy does."""
        selection = parse_index(index, self.shape)
        known = value if isinstance(value, np.ndarray | np.generic) else np.asarray(value, self.dtype)
        self._write(selection.axes, _broadcast(np.asarray(known), selection))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a remote array cannot be had without a copy")
        whole: NDArray[Any] = self._read(parse_index(Ellipsis, self.shape))
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __iter__(self) -> Iterator[Any]:
        """Row by row; rows are read in chunks, the next one while this one is used."""
        return itertools.chain.from_iterable(self.chunks())

    def chunks(self, rows: int | None = None) -> Iterator[NDArray[Any]]:
        """The array in pieces of so many rows (default: about 8 MiB); the next one is read ahead."""
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
        found: NDArray[Any] = np.empty(selection.counts, self.dtype)
        layout = Layout(self.shape, self.dtype.itemsize, selection.axes, gap=MAX_GAP_BYTES, max_run=MAX_BATCH_BYTES)
        if not found.nbytes:
            return found
        if layout.is_exact and layout.length >= MIN_DIRECT_BYTES:
            flat, at = bytes_of(found), 0
            populate_pages(found, found.ctypes.data, found.nbytes)
            for run in layout.runs():
                self._blocks.read_into(self.block_id, flat[at : at + run.length], run.offset)
                at += run.length
            return found
        for runs in _batches(layout.runs()):
            pieces = self._blocks.read_many([(self.block_id, run.length, run.offset) for run in runs])
            for run, piece in zip(runs, pieces, strict=True):
                there = found[(*run.where, ...)]
                there[...] = np.ndarray(there.shape, self.dtype, piece, strides=layout.strides)
        return found

    def _write(self, axes: tuple[Axis, ...], value: NDArray[Any]) -> None:
        """Write along all axes, forwards; a value that has to be converted first is converted piece by piece."""
        fits = value.dtype == self.dtype and value.flags.c_contiguous
        if not fits and value.size > 1 and value.size * self.dtype.itemsize > MAX_BATCH_BYTES:
            cut = next(place for place, axis in enumerate(axes) if axis.count > 1)
            for half, part in axes[cut].halves():
                self._write((*axes[:cut], half, *axes[cut + 1 :]), value[(*[slice(None)] * cut, part)])
            return
        flat, at = bytes_of(np.ascontiguousarray(value, self.dtype)), 0
        layout = Layout(self.shape, self.dtype.itemsize, axes)
        if not flat.size:
            return
        if layout.length >= MIN_DIRECT_BYTES:
            for run in layout.runs():
                self._blocks.write(self.block_id, flat[at : at + run.length], run.offset)
                at += run.length
            return
        for runs in _batches(layout.runs()):
            length = layout.length
            self._blocks.write_many(
                [
                    (self.block_id, flat[at + place * length : at + (place + 1) * length], run.offset)
                    for place, run in enumerate(runs)
                ]
            )
            at += len(runs) * length


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


def _orient(found: NDArray[Any], selection: Selection) -> NDArray[Any]:
    """What was read, reversed where the index goes backwards, without the axes indexed by a number."""
    parts = zip(selection.dropped, selection.backwards, strict=True)
    chosen = tuple(0 if dropped else slice(None, None, -1 if turned else 1) for dropped, turned in parts)
    view: NDArray[Any] = found[(*chosen, ...)]
    return view


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
