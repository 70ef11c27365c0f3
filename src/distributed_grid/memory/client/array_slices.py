"""Byte runs of a stored array that an index selects: as few as are worth a request each.

Runs come in the order of the result, do not overlap, and hold every selected element. Only a reader includes bytes that
are not selected; with a `gap` of 0 a run holds nothing else.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Axis:
    """The selection along one axis: the first index, the step to the next ones (forwards), how many."""

    start: int
    step: int
    count: int

    def halves(self) -> Iterator[tuple[Axis, slice]]:
        """The same in two parts, each with its slice of the whole."""
        first = self.count // 2
        yield Axis(self.start, self.step, first), slice(0, first)
        yield Axis(self.start + first * self.step, self.step, self.count - first), slice(first, None)


class Selection(NamedTuple):
    """What an index selects: every axis, those that go backwards, and those that the result does not have."""

    axes: tuple[Axis, ...]
    backwards: tuple[bool, ...]
    dropped: tuple[bool, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The shape of the selection, dropped axes included."""
        return tuple(axis.count for axis in self.axes)


class ByteRun(NamedTuple):
    """Bytes of a block, and where in the result their elements belong."""

    offset: int
    length: int
    where: tuple[int | slice, ...]


def parse_index(index: Any, shape: Sequence[int]) -> Selection:
    """What a basic index selects of an array of this shape; IndexError for one that is not valid."""
    entries = index if isinstance(index, tuple) else (index,)
    for entry in entries:
        if not (entry is Ellipsis or isinstance(entry, slice) or _is_number(entry)):
            raise IndexError(
                f"a remote array is indexed by whole numbers, slices and ..., not by {type(entry).__name__}; "
                "take a slice first and index that: array[10:20][mask]"
            )
    found = _expand(entries, len(shape))
    parts = [_axis(entry, size, axis) for axis, (entry, size) in enumerate(zip(found, shape, strict=True))]
    dropped = tuple(not isinstance(entry, slice) for entry in found)
    return Selection(tuple(axis for axis, _ in parts), tuple(turned for _, turned in parts), dropped)


def _is_number(entry: object) -> bool:
    """Whether this is an index; True and False are masks to NumPy."""
    if isinstance(entry, bool) or getattr(entry, "shape", ()) != () or "bool" in type(entry).__name__:
        return False
    return hasattr(entry, "__index__")


def _expand(entries: tuple[Any, ...], axes: int) -> list[Any]:
    """One entry for every axis: `...` and what is missing stand for whole axes."""
    dots = sum(entry is Ellipsis for entry in entries)
    missing = axes - (len(entries) - dots)
    if dots > 1 or missing < 0:
        raise IndexError(f"an index of {len(entries)} parts does not fit an array of {axes} dimensions")
    whole = [slice(None)] * missing
    if not dots:
        return [*entries, *whole]
    at = next(place for place, entry in enumerate(entries) if entry is Ellipsis)
    return [*entries[:at], *whole, *entries[at + 1 :]]


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
    """The byte runs that hold a selection of an array in C order.

    Axes are joined into one run from the innermost one outwards, as long as no more than `gap` bytes lie between two
    of its parts; a run with gaps is no longer than `max_run`. `is_exact` says that the runs have no gaps.
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
        """So many places of the innermost outer axis share a run; 0: each has its own."""
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
