"""Where a request cuts off least of what the typical requests could use.

A placement's loss is how much less its node is worth to them afterwards (`usefulness.py`): GPUs that have become too
small, or have too little CPU or memory beside them. What is taken from scarce GPUs weighs more (`typical.py`).

Rule 1: the same rows and the same weights always give the same choice, whatever was asked before.
Rule 2: of equal losses the first row wins, and on it the first device.
Rule 3: only rows that changed are counted again; with other weights all rows are.
"""

from __future__ import annotations

import numpy as np

from distributed_grid.domain.indexes.free_columns import NO_DEVICE, WHOLE_ONLY, FreeColumns
from distributed_grid.domain.request_shapes import RequestShape, RequestShapes
from distributed_grid.domain.resources import WHOLE_GPU
from distributed_grid.scheduling.placement.usable_capacity import Floats, Ints, Mask, UsableCapacity, parts

COLUMNS_MOST = 128
"""The losses of so many different shapes are kept."""
_FEW = 8
"""Of so few rows every device is tried; leaving out some would take longer."""


class FragmentationIndex:
    """The losses of what was asked for lately, kept by row. With another layout of the columns, make a new index."""

    def __init__(self, columns: FreeColumns, typical: RequestShapes) -> None:
        self._columns = columns
        self.layout = columns.layout
        self._some_only_whole = False
        self.use(typical)

    def use(self, typical: RequestShapes) -> None:
        """Count with these weights from now on."""
        self.typical = typical
        self._useful = UsableCapacity(typical.weights, self._columns)
        self._models = len(self._columns.models)
        self._held = np.zeros((len(self._columns.cpu), len(typical.weights)))
        self._worth = np.zeros(len(self._columns.cpu))
        self._counted = -1
        self._kept: dict[RequestShape, _Column] = {}

    def losses(self, shape: RequestShape) -> Floats:
        """What placing a shape loses, by row: whole numbers from 0 on, infinite without room. Do not write to it."""
        return self._column(shape).losses

    def device(self, shape: RequestShape, row: int) -> int:
        """The device of a row where part of one loses least; of no meaning where the row has no room."""
        return int(self._column(shape).devices[row])

    def _column(self, shape: RequestShape) -> _Column:
        """The losses of a shape, up to date."""
        self._count_changed()
        column = self._kept.pop(shape, None)
        if column is None:
            column = _Column(shape, self._columns)
            if len(self._kept) >= COLUMNS_MOST:
                del self._kept[next(iter(self._kept))]
        self._kept[shape] = column  # the last one asked for is the last to go
        if column.counted < self._columns.clock:
            for rows in parts((self._columns.changed > column.counted).nonzero()[0]):
                self._fill(column, shape, rows)
            column.counted = self._columns.clock
        return column

    def _count_changed(self) -> None:
        """Count what the changed rows hold of each shape, and what they are worth now."""
        if len(self._columns.models) != self._models:
            self.use(self.typical)
        if self._counted == self._columns.clock:
            return
        columns, useful = self._columns, self._useful
        for rows in parts((columns.changed > self._counted).nonzero()[0]):
            devices = columns.devices.take(rows, axis=0)
            self._held[rows] = held = useful.held(devices, columns.model.take(rows))
            self._worth[rows] = useful.worth(held, useful.limits(columns.cpu.take(rows), columns.memory.take(rows)))
            self._some_only_whole |= int(devices.max()) == WHOLE_ONLY
        self._counted = self._columns.clock

    def _fill(self, column: _Column, shape: RequestShape, rows: Ints) -> None:
        """Count some rows of a column."""
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
                self._take_devices(shape.gpu_milli // WHOLE_GPU, rows, held)
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
        if len(rows) <= _FEW:
            after = held[:, np.newaxis] - table.take(devices, axis=0)
            after += table.take(devices - shape.gpu_milli, axis=0)
            worth = np.where(tries, self._useful.worth(after, limits[:, np.newaxis]), -np.inf)
        else:  # of many rows only the devices where it fits, and of those alike only one
            at, device = (tries & _first_of_its_kind(devices)).nonzero()
            free = devices[at, device]
            after = held.take(at, axis=0) - table.take(free, axis=0)
            after += table.take(free - shape.gpu_milli, axis=0)
            worth = np.full(devices.shape, -np.inf)
            worth[at, device] = self._useful.worth(after, limits.take(at, axis=0))
        return np.maximum.reduce(worth, axis=1), worth.argmax(axis=1)

    def _take_devices(self, wanted: int, rows: Ints, held: Floats) -> None:
        """Take what so many whole devices hold of each shape. Those only lent whole go first."""
        table = self._useful.table
        if self._some_only_whole:
            idle = np.add.reduce(self._columns.devices.take(rows, axis=0) == WHOLE_ONLY, axis=1)
            held -= np.minimum(idle, wanted)[:, np.newaxis] * (table[WHOLE_ONLY] - table[WHOLE_GPU])
        held -= wanted * table[WHOLE_GPU]


class _Column:
    """Losses and devices of one shape, counted up to a moment of the clock."""

    __slots__ = ("allowed", "counted", "devices", "losses")

    def __init__(self, shape: RequestShape, columns: FreeColumns) -> None:
        self.allowed = columns.of_model(shape.models)
        self.losses = np.full(len(columns.cpu), np.inf)
        self.devices = np.full(len(columns.cpu), NO_DEVICE, dtype=np.int64)
        self.counted = -1


def _first_of_its_kind(devices: Ints) -> Mask:
    """The devices (R × G) that no device before them on their row is like: those alike need not all be tried."""
    alike = devices[:, :, np.newaxis] == devices[:, np.newaxis, :]
    first: Mask = alike.argmax(axis=2) == np.arange(devices.shape[1])
    return first
