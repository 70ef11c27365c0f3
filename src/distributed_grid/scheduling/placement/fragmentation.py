"""Fragmentation: how much of the free GPUs the typical requests could use, and what each placement would lose of it.

Shapes. Requests for GPUs are counted rounded down (amounts to an eighth, GPUs to a hundredth). At most `MAX_SHAPES` are
kept; a new one replaces the rarest and inherits its count, so no count is too low, and none too high by more than the
rarest. From `HALVE_AFTER` requests on all counts are halved. Weights are integers, retaken after a fifth more requests.

Usable capacity. Of a node's free GPUs a shape can use as many multiples of itself as the devices of its model hold,
limited by CPU and memory in proportion (times `HEADROOM`, as other work there often needs less of them), and nothing
where that is not enough for one. All numbers are integers below 2**53, so floats add up exactly in any order.

Index. The loss of a placement is how much less its node is worth to all shapes afterwards, by weight. Only changed rows
are counted again. Equal losses go to the first row, and there to the first device. The index is a cache of the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from distributed_grid.domain.indexes.columns import NO_DEVICE, WHOLE_ONLY, FreeColumns
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Amounts
from distributed_grid.domain.statistics import RequestShape, RequestShapes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

HEADROOM = 1.5
NO_LIMIT = 2.0**40
CHUNK_ROWS = 512  # rows per chunk, so that the intermediate arrays stay in the CPU cache
_ROUNDING = 1 + 2.0**-40  # keeps an amount that is exactly enough from being rounded down


class UsableCapacity:
    """Tables over some shapes (S) with their weights; every method takes rows (R) at once."""

    def __init__(self, weights: Sequence[tuple[RequestShape, int]], columns: FreeColumns) -> None:
        shapes = [shape for shape, _ in weights]
        self._weights = np.array([weight for _, weight in weights], dtype=np.float64)
        self._gpu = np.array([shape.gpu_milli for shape in shapes], dtype=np.float64)
        self._cpu = _HostLimit([shape.cpu_milli for shape in shapes], self._gpu)
        self._memory = _HostLimit([shape.memory_bytes for shape in shapes], self._gpu)
        allowed = np.array([columns.of_model(shape.models) for shape in shapes], dtype=np.float64)
        self._allowed = allowed.reshape(len(shapes), len(columns.models)).T.copy()
        self._choosy = any(shape.models for shape in shapes)
        free = np.arange(WHOLE_GPU + 1)
        self.table = np.zeros((WHOLE_GPU + 3, len(shapes)))
        """By what is free of a device: how much of it each shape could use. `NO_DEVICE` is the last row."""
        for i, shape in enumerate(shapes):
            if shape.is_part:
                self.table[: WHOLE_GPU + 1, i] = free // shape.gpu_milli * shape.gpu_milli
            else:
                self.table[WHOLE_GPU : WHOLE_ONLY + 1, i] = WHOLE_GPU

    def held(self, devices: Ints, model: Ints) -> Floats:
        """GPU amounts (R × S) on devices (R × G) for each shape; 0 on devices of another model."""
        held: Floats = np.add.reduce(self.table.take(devices, axis=0), axis=1)
        if self._choosy:
            held *= self._allowed.take(model, axis=0)
        return held

    def limits(self, cpu: Ints, memory: Ints) -> Floats:
        """Limits by CPU and memory (R) for each shape (R × S)."""
        limits = self._cpu.of(cpu)
        np.minimum(limits, self._memory.of(memory), out=limits)
        return np.floor(limits, out=limits)

    def usable(self, held: Floats, limits: Floats) -> Floats:
        usable = np.minimum(held, limits)
        usable *= usable >= self._gpu
        return usable

    def worth(self, held: Floats, limits: Floats) -> Floats:
        """Weighted sum over all shapes (R)."""
        return self.usable(held, limits) @ self._weights


class _HostLimit:
    """For how much GPU of each shape (S) an amount of CPU, or of memory, is enough."""

    def __init__(self, needs: Sequence[int], gpu: Floats) -> None:
        need = np.array(needs, dtype=np.float64)
        self._rate = np.where(need > 0, HEADROOM * _ROUNDING * gpu / np.maximum(need, 1), 0)
        self._at_least = np.where(need > 0, 0, NO_LIMIT) if not need.all() else None

    def of(self, amount: Ints) -> Floats:
        allows: Floats = np.multiply.outer(amount, self._rate)
        if self._at_least is not None:
            allows += self._at_least
        return allows


def usable_supply(shapes: Sequence[tuple[RequestShape, int]], columns: FreeColumns, mask: Mask) -> list[int]:
    """Usable part of the free GPUs on the rows of a mask, by shape."""
    useful, total = UsableCapacity(shapes, columns), np.zeros(len(shapes))
    for rows in chunks(mask.nonzero()[0]):
        held = useful.held(columns.devices.take(rows, axis=0), columns.model.take(rows))
        limits = useful.limits(columns.cpu.take(rows), columns.memory.take(rows))
        total += useful.usable(held, limits).sum(axis=0)
    return [int(amount) for amount in total]


def chunks(rows: Ints) -> Iterator[Ints]:
    """The rows in chunks of `CHUNK_ROWS`."""
    for start in range(0, len(rows), CHUNK_ROWS):
        yield rows[start : start + CHUNK_ROWS]


MAX_COLUMNS = 128  # shapes whose losses are cached
_FEW_ROWS = 8  # of so few rows every device is tried; leaving out some would take longer


class FragmentationIndex:
    """Cached losses of recent shapes by row; valid for one layout of the columns."""

    def __init__(self, columns: FreeColumns, request_shapes: RequestShapes) -> None:
        self._columns = columns
        self.layout = columns.layout
        self._some_only_whole = False
        self.set_weights(request_shapes)

    def set_weights(self, request_shapes: RequestShapes) -> None:
        self.request_shapes = request_shapes
        self._useful = UsableCapacity(request_shapes.weights, self._columns)
        self._models = len(self._columns.models)
        self._held = np.zeros((len(self._columns.cpu), len(request_shapes.weights)))
        self._worth = np.zeros(len(self._columns.cpu))
        self._counted = -1
        self._kept: dict[RequestShape, _LossColumn] = {}

    def losses(self, shape: RequestShape) -> Floats:
        """Loss of placing a shape, by row: integers from 0 on, infinite without room. Do not write to it."""
        return self._column(shape).losses

    def device(self, shape: RequestShape, row: int) -> int:
        """Device of a row where part of one loses least; meaningless if the row has no room."""
        return int(self._column(shape).devices[row])

    def _column(self, shape: RequestShape) -> _LossColumn:
        """The losses of a shape, up to date."""
        self._count_changed()
        column = self._kept.pop(shape, None)
        if column is None:
            column = _LossColumn(shape, self._columns)
            if len(self._kept) >= MAX_COLUMNS:
                del self._kept[next(iter(self._kept))]
        self._kept[shape] = column  # the last one asked for is the last to go
        if column.counted < self._columns.clock:
            for rows in chunks((self._columns.changed > column.counted).nonzero()[0]):
                self._fill(column, shape, rows)
            column.counted = self._columns.clock
        return column

    def _count_changed(self) -> None:
        """Recount the GPU amounts of the changed rows and their worth."""
        if len(self._columns.models) != self._models:
            self.set_weights(self.request_shapes)
        if self._counted == self._columns.clock:
            return
        columns, useful = self._columns, self._useful
        for rows in chunks((columns.changed > self._counted).nonzero()[0]):
            devices = columns.devices.take(rows, axis=0)
            self._held[rows] = held = useful.held(devices, columns.model.take(rows))
            self._worth[rows] = useful.worth(held, useful.limits(columns.cpu.take(rows), columns.memory.take(rows)))
            self._some_only_whole |= int(devices.max()) == WHOLE_ONLY
        self._counted = self._columns.clock

    def _fill(self, column: _LossColumn, shape: RequestShape, rows: Ints) -> None:
        columns, useful = self._columns, self._useful
        cpu, memory = columns.cpu.take(rows) - shape.cpu_milli, columns.memory.take(rows) - shape.memory_bytes
        fits: Mask = (cpu >= 0) & (memory >= 0)
        if shape.models:
            fits &= column.allowed.take(columns.model.take(rows))
        held, limits = self._held.take(rows, axis=0), useful.limits(cpu, memory)
        if shape.is_part:
            worth, column.devices[rows] = self._best_devices(shape, rows, fits, held, limits)
        else:
            if shape.gpu_milli:
                fits &= columns.gpu_whole.take(rows) >= shape.gpu_milli // WHOLE_GPU
                # Subtract `wanted` whole devices from the amounts of each shape; devices lent only whole go first.
                wanted = shape.gpu_milli // WHOLE_GPU
                table = self._useful.table
                if self._some_only_whole:
                    idle = np.add.reduce(self._columns.devices.take(rows, axis=0) == WHOLE_ONLY, axis=1)
                    held -= np.minimum(idle, wanted)[:, np.newaxis] * (table[WHOLE_ONLY] - table[WHOLE_GPU])
                held -= wanted * table[WHOLE_GPU]
            worth = np.where(fits, useful.worth(held, limits), -np.inf)
        column.losses[rows] = self._worth.take(rows) - worth

    def _best_devices(
        self, shape: RequestShape, rows: Ints, fits: Mask, held: Floats, limits: Floats
    ) -> tuple[Floats, Ints]:
        """The most that each row can be worth with part of a device taken, and of which."""
        devices, table = self._columns.devices.take(rows, axis=0), self._useful.table
        tries = (devices >= shape.gpu_milli) & fits[:, np.newaxis]
        if self._some_only_whole:
            tries &= devices <= WHOLE_GPU
        if len(rows) <= _FEW_ROWS:
            after = held[:, np.newaxis] - table.take(devices, axis=0)
            after += table.take(devices - shape.gpu_milli, axis=0)
            worth = np.where(tries, self._useful.worth(after, limits[:, np.newaxis]), -np.inf)
        else:  # of many rows only the devices where it fits, and of those alike only one
            alike = devices[:, :, np.newaxis] == devices[:, np.newaxis, :]
            first: Mask = alike.argmax(axis=2) == np.arange(devices.shape[1])
            at, device = (tries & first).nonzero()
            free = devices[at, device]
            after = held.take(at, axis=0) - table.take(free, axis=0)
            after += table.take(free - shape.gpu_milli, axis=0)
            worth = np.full(devices.shape, -np.inf)
            worth[at, device] = self._useful.worth(after, limits.take(at, axis=0))
        return np.maximum.reduce(worth, axis=1), worth.argmax(axis=1)


class _LossColumn:
    """Losses and devices of one shape, counted up to a moment of the clock."""

    __slots__ = ("allowed", "counted", "devices", "losses")

    def __init__(self, shape: RequestShape, columns: FreeColumns) -> None:
        self.allowed = columns.of_model(shape.models)
        self.losses = np.full(len(columns.cpu), np.inf)
        self.devices = np.full(len(columns.cpu), NO_DEVICE, dtype=np.int64)
        self.counted = -1


MAX_SHAPES = 64
HALVE_AFTER = 2**14
TOTAL_WEIGHT = 2**17  # sum of the weights, but for rounding. With 64 devices on a node its worth stays below 2**33.
MIN_SUPPLY_DIVISOR = 100
"""A supply below a hundredth of all free GPUs counts as a hundredth: no shape alone decides everything."""


def count_shape(request_shapes: RequestShapes, shape: RequestShape) -> RequestShapes:
    """The shapes after one more request; one without a GPU changes nothing."""
    if not shape.gpu_milli:
        return request_shapes
    shape, counts = shape.rounded, list(request_shapes.counts)
    at = next((i for i, (known, _) in enumerate(counts) if known == shape), None)
    if at is None and len(counts) == MAX_SHAPES:
        at = min(range(MAX_SHAPES), key=lambda i: (counts[i][1], counts[i][0]))
    if at is None:
        counts.append((shape, 1))
    else:
        counts[at] = (shape, counts[at][1] + 1)
    after = RequestShapes(tuple(counts), request_shapes.counted + 1, request_shapes.weights, request_shapes.taken)
    if after.counted < HALVE_AFTER:
        return after
    halves = tuple((shape, count // 2) for shape, count in after.counts if count > 1)
    return RequestShapes(halves, sum(half for _, half in halves), after.weights, after.taken // 2)


def reweigh(request_shapes: RequestShapes, supply: Sequence[int], free_milli: int) -> RequestShapes:
    """The shapes with new weights: the scarcer the supply of a shape, the heavier it is.

    `supply` is the usable part of all free GPUs by shape. A weight is demand over supply, so that the sum of weight ×
    supply lost is the loss of the others: the marginal loss of Σ demand × log(supply).
    """
    least = max(free_milli // MIN_SUPPLY_DIVISOR, 1)
    parts = [(count << 60) // max(had, least) for (_, count), had in zip(request_shapes.counts, supply, strict=True)]
    total = max(sum(parts), 1)
    shapes = [shape for shape, _ in request_shapes.counts]
    weights = [(shape, max(TOTAL_WEIGHT * part // total, 1)) for shape, part in zip(shapes, parts, strict=True)]
    return RequestShapes(request_shapes.counts, request_shapes.counted, tuple(weights), request_shapes.counted)


def shape_of(ask: Amounts) -> RequestShape:
    return RequestShape(ask.cpu_milli, ask.memory_bytes, ask.gpu_milli, ask.gpu_models)


def learn_shape(ledger: Ledger, request: Request) -> RequestShapes | None:
    """The shapes after this request; None where it teaches nothing."""
    if not request.ask.gpu_milli:
        return None
    request_shapes = count_shape(ledger.request_shapes, shape_of(request.ask))
    if not request_shapes.is_due:
        return request_shapes
    columns = ledger.columns
    could_use = usable_supply(request_shapes.counts, columns, columns.open)
    return reweigh(request_shapes, could_use, int(columns.gpu_left[columns.open].sum()))


def fragmentation_index(ledger: Ledger) -> FragmentationIndex:
    """The index of a ledger, up to date with its rows and its request shapes."""
    index = ledger.cached(FragmentationIndex)
    if index is None or index.layout != ledger.columns.layout:
        index = ledger.cache(FragmentationIndex(ledger.columns, ledger.request_shapes))
    elif index.request_shapes.weights is not ledger.request_shapes.weights:
        index.set_weights(ledger.request_shapes)
    return index
