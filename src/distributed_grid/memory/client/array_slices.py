"""Which bytes of a stored array an index asks for: runs of its block, as few as are worth a request each.

Rule 1. Here are shapes, ranges and offsets alone; nothing touches bytes.
Rule 2. Runs come in the order of the result, do not overlap, and hold every element that was asked for.
Rule 3. Only a reader passes over bytes that nobody asked for; with a `gap` of 0 a run holds nothing else.
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
    """What is asked for along one axis: the first place, the steps to the next ones (forwards), how many."""

    start: int
    step: int
    count: int

    def halves(self) -> Iterator[tuple[Axis, slice]]:
        """The same in two parts, each with its place in the whole."""
        first = self.count // 2
        yield Axis(self.start, self.step, first), slice(0, first)
        yield Axis(self.start + first * self.step, self.step, self.count - first), slice(first, None)


class Asked(NamedTuple):
    """What an index asks for: every axis, those that are wanted backwards, and those that the result does not have."""

    axes: tuple[Axis, ...]
    backwards: tuple[bool, ...]
    dropped: tuple[bool, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The shape of the result, with the axes it does not have."""
        return tuple(axis.count for axis in self.axes)


class ByteRun(NamedTuple):
    """Bytes of a block, and where in the result their elements belong."""

    offset: int
    length: int
    where: tuple[int | slice, ...]


def asked_of(index: Any, shape: Sequence[int]) -> Asked:
    """What a basic index asks for of an array of this shape; IndexError for one that makes no sense."""
    words = index if isinstance(index, tuple) else (index,)
    for word in words:
        if not (word is Ellipsis or isinstance(word, slice) or _is_number(word)):
            raise IndexError(
                f"a remote array is indexed by whole numbers, slices and ..., not by {type(word).__name__}; "
                "take a slice first and index that: array[10:20][mask]"
            )
    found = _along(words, len(shape))
    parts = [_axis(word, size, axis) for axis, (word, size) in enumerate(zip(found, shape, strict=True))]
    dropped = tuple(not isinstance(word, slice) for word in found)
    return Asked(tuple(axis for axis, _ in parts), tuple(turned for _, turned in parts), dropped)


def _is_number(word: object) -> bool:
    """Whether this is an index; True and False are masks to NumPy."""
    if isinstance(word, bool) or getattr(word, "shape", ()) != () or "bool" in type(word).__name__:
        return False
    return hasattr(word, "__index__")


def _along(words: tuple[Any, ...], axes: int) -> list[Any]:
    """One word for every axis: `...` and what is missing stand for whole axes."""
    dots = sum(word is Ellipsis for word in words)
    missing = axes - (len(words) - dots)
    if dots > 1 or missing < 0:
        raise IndexError(f"an index of {len(words)} parts does not fit an array of {axes} dimensions")
    whole = [slice(None)] * missing
    if not dots:
        return [*words, *whole]
    at = next(place for place, word in enumerate(words) if word is Ellipsis)
    return [*words[:at], *whole, *words[at + 1 :]]


def _axis(word: Any, size: int, axis: int) -> tuple[Axis, bool]:
    if not isinstance(word, slice):
        place = operator.index(word)
        if not -size <= place < size:
            raise IndexError(f"index {place} is out of bounds for axis {axis} with size {size}")
        return Axis(place % size, 1, 1), False
    places = range(*word.indices(size))
    backwards = places.step < 0
    if backwards:
        places = places[::-1]
    return Axis(places.start, places.step, len(places)), backwards


class Layout:
    """The runs that hold what is asked for of an array in C order.

    Axes are joined into one run from the innermost one outwards, as long as no more than `gap` bytes lie between two
    of its parts; a run with gaps is no longer than `longest`. `is_exact` says that the runs have no gaps.
    """

    def __init__(
        self, shape: Sequence[int], itemsize: int, axes: Sequence[Axis], *, gap: int = 0, longest: int = 0
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
        while self._outer and 0 not in self._counts and self._join(gap, longest):
            self._outer -= 1
        self.strides = tuple(self._strides[self._outer - bool(self._group) :])
        """Bytes between the elements of a run, for each axis that lies in it."""

    def _join(self, gap: int, longest: int) -> bool:
        """Take one more axis into the run, if that is worth it."""
        count, stride = self._counts[self._outer - 1], self._strides[self._outer - 1]
        grown = self.length + (count - 1) * stride
        if count <= 1:
            return True
        if stride == self.length and self.is_exact:
            self.length = grown
            return True
        if stride - self.length > gap:
            return False
        if grown > longest:
            together = max(longest - self.length, 0) // stride + 1
            if together > 1:
                self._group, self.is_exact = together, False
            return False
        self.length, self.is_exact = grown, False
        return True

    def runs(self) -> Iterator[ByteRun]:
        """Every run, in order; none where nothing is asked for."""
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
