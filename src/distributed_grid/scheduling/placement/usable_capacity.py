"""How much of what is free on a node the typical requests could use.

Of a node's free GPUs a shape can use as many whole times itself as the devices hold, if the model is right. CPU and
memory limit that in proportion; they count half as much again as there is (`GENEROUS`), since what else comes to the
node will often need less of them. What does not suffice for one is of no use. A node's worth is the sum over all
shapes, by weight.

Rule 1: every number in a sum is whole and below 2**53, so floats add up exactly, in whatever order.
Rule 2: taking something from a node never makes it worth more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from distributed_grid.domain.indexes.free_columns import WHOLE_ONLY, FreeColumns
from distributed_grid.domain.request_shapes import RequestShape
from distributed_grid.domain.resources import WHOLE_GPU

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

GENEROUS = 1.5
NO_LIMIT = 2.0**40
AT_ONCE = 512
"""So many rows are counted at once: what that takes stays in a processor's cache."""
_EXACTLY = 1 + 2.0**-40
"""What is exactly enough does not round to too little."""


class UsableCapacity:
    """Tables over some shapes (S) with their weights; every method takes rows (R) at once."""

    def __init__(self, weights: Sequence[tuple[RequestShape, int]], columns: FreeColumns) -> None:
        shapes = [shape for shape, _ in weights]
        self._weights = np.array([weight for _, weight in weights], dtype=np.float64)
        self._gpu = np.array([shape.gpu_milli for shape in shapes], dtype=np.float64)
        self._cpu = _Limit([shape.cpu_milli for shape in shapes], self._gpu)
        self._memory = _Limit([shape.memory_bytes for shape in shapes], self._gpu)
        allowed = np.array([columns.of_model(shape.models) for shape in shapes], dtype=np.float64)
        self._allowed = allowed.reshape(len(shapes), len(columns.models)).T.copy()
        self._choosy = any(shape.models for shape in shapes)
        self.table = _held(shapes)
        """By what is free of a device: how much of it each shape could use. `NO_DEVICE` is the last row."""

    def held(self, devices: Ints, model: Ints) -> Floats:
        """What devices (R × G) hold of each shape (R × S): nothing where they are of another model."""
        held: Floats = np.add.reduce(self.table.take(devices, axis=0), axis=1)
        if self._choosy:
            held *= self._allowed.take(model, axis=0)
        return held

    def limits(self, cpu: Ints, memory: Ints) -> Floats:
        """What CPU and memory (R) allow of each shape (R × S)."""
        limits = self._cpu.of(cpu)
        np.minimum(limits, self._memory.of(memory), out=limits)
        return np.floor(limits, out=limits)

    def usable(self, held: Floats, limits: Floats) -> Floats:
        """What each shape could use (R × S): nothing where that is not enough for one."""
        usable = np.minimum(held, limits)
        usable *= usable >= self._gpu
        return usable

    def worth(self, held: Floats, limits: Floats) -> Floats:
        """What that is worth to all shapes (R)."""
        return self.usable(held, limits) @ self._weights


class _Limit:
    """For how much GPU of each shape (S) an amount of CPU, or of memory, is enough."""

    def __init__(self, needs: Sequence[int], gpu: Floats) -> None:
        need = np.array(needs, dtype=np.float64)
        self._rate = np.where(need > 0, GENEROUS * _EXACTLY * gpu / np.maximum(need, 1), 0)
        self._at_least = np.where(need > 0, 0, NO_LIMIT) if not need.all() else None

    def of(self, amount: Ints) -> Floats:
        allows: Floats = np.multiply.outer(amount, self._rate)
        if self._at_least is not None:
            allows += self._at_least
        return allows


def supply(shapes: Sequence[tuple[RequestShape, int]], columns: FreeColumns, mask: Mask) -> list[int]:
    """How much of what is free on the rows of a mask each shape could use."""
    useful, total = UsableCapacity(shapes, columns), np.zeros(len(shapes))
    for rows in parts(mask.nonzero()[0]):
        held = useful.held(columns.devices.take(rows, axis=0), columns.model.take(rows))
        limits = useful.limits(columns.cpu.take(rows), columns.memory.take(rows))
        total += useful.usable(held, limits).sum(axis=0)
    return [int(amount) for amount in total]


def parts(rows: Ints) -> Iterator[Ints]:
    """The rows, some at once."""
    for start in range(0, len(rows), AT_ONCE):
        yield rows[start : start + AT_ONCE]


def _held(shapes: Sequence[RequestShape]) -> Floats:
    """What one device holds of each shape, by what is free of it."""
    free = np.arange(WHOLE_GPU + 1)
    held = np.zeros((WHOLE_GPU + 3, len(shapes)))
    for i, shape in enumerate(shapes):
        if shape.is_part:
            held[: WHOLE_GPU + 1, i] = free // shape.gpu_milli * shape.gpu_milli
        else:
            held[WHOLE_GPU : WHOLE_ONLY + 1, i] = WHOLE_GPU
    return held
