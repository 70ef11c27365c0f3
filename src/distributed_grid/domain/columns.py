"""What is free on every node, one contiguous int64 column per resource.

An index derived in `Ledger.apply`: nothing here is known only here. A filter over a
thousand nodes is a handful of vector operations instead of a thousand objects.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
_NAMES = ("cpu", "memory", "gpu_whole", "gpu_part", "slack", "lends_cpu", "lends_memory", "lends_gpus")


class Columns:
    """Parallel arrays over the nodes; `open` is 1 where a node takes new leases."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.names: list[str] = []
        self._size = 0
        self._grow(16)

    def _grow(self, room: int) -> None:
        for name in (*_NAMES, "open"):
            fresh: NDArray[Any] = np.zeros(room, dtype=np.bool_ if name == "open" else np.int64)
            if self._size:
                fresh[: self._size] = getattr(self, "_" + name)[: self._size]
            setattr(self, "_" + name, fresh)
        self._cut()

    def _cut(self) -> None:
        """Views over the rows in use."""
        for name in (*_NAMES, "open"):
            setattr(self, name, getattr(self, "_" + name)[: self._size])

    cpu: Column
    memory: Column
    gpu_whole: Column
    gpu_part: Column
    slack: Column
    lends_cpu: Column
    lends_memory: Column
    lends_gpus: Column
    open: NDArray[np.bool_]

    def row_of(self, node: str) -> int:
        """The row of a node, made on first use; rows are never given to another node."""
        row = self.rows.get(node)
        if row is None:
            row = self._size
            if row == len(self._open):  # type: ignore[attr-defined]
                self._grow(2 * row)
            self.rows[node] = row
            self.names.append(node)
            self._size += 1
            self._cut()
        return row

    def equals(self, other: Columns) -> bool:
        """Whether both say the same of every node, whatever the order of the rows."""
        if set(self.rows) != set(other.rows):
            return False
        return all(
            getattr(self, name)[row] == getattr(other, name)[other.rows[node]]
            for node, row in self.rows.items()
            for name in (*_NAMES, "open")
        )
