"""Bins: free capacity as columns, onto which equal requests are packed many at a time.

Cores, memory and GPUs only: what a new worker has of anything else is not known. A part of a GPU takes the part of a
device that as many as possible of its size leave it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Amounts
from distributed_grid.domain.workers import WorkerResources

MEMORY_KEPT = 8
"""One part in so many of a worker's memory is not lent: its system and its reserve have it."""
Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]
Size = tuple[int, int, int, int]
"""Millicores, bytes of memory, thousandths of GPUs, whole GPUs."""


def size_of(ask: Amounts) -> Size:
    """What one request takes."""
    gpu = ask.gpu_milli
    if 0 < gpu < WHOLE_GPU:
        gpu = WHOLE_GPU // (WHOLE_GPU // gpu)
    return ask.cpu_milli, ask.memory_bytes, gpu, gpu // WHOLE_GPU if ask.gpu_milli >= WHOLE_GPU else 0


def usable(resources: WorkerResources) -> WorkerResources:
    """What an empty worker would lend of what it has."""
    return replace(resources, memory_bytes=resources.memory_bytes - resources.memory_bytes // MEMORY_KEPT)


def fits(size: Size, resources: WorkerResources) -> bool:
    """Whether an empty worker could serve one request of this size."""
    cpu, memory, gpu, _ = size
    return cpu <= resources.cpu_milli and memory <= resources.memory_bytes and gpu <= WHOLE_GPU * resources.gpu_count


class Bins:
    """What is free on each of many machines."""

    def __init__(self, free: NDArray[np.int64]) -> None:
        self._free = free

    @classmethod
    def of_nodes(cls, ledger: Ledger) -> Bins:
        """The nodes that take new leases, in the order of their rows."""
        columns = ledger.columns
        free = np.stack([columns.cpu, columns.memory, columns.gpu_left, columns.gpu_whole])
        return cls(np.where(columns.open, np.maximum(free, 0), 0))

    @classmethod
    def of_workers(cls, workers: Iterable[WorkerResources]) -> Bins:
        """Workers that are still empty."""
        return cls(_empty_columns(list(workers)))

    def __len__(self) -> int:
        return int(self._free.shape[1])

    def grow(self, resources: WorkerResources, count: int) -> None:
        """Add so many empty workers."""
        self._free = np.concatenate((self._free, _empty_columns([resources] * count)), axis=1)

    def room(self, size: Size, *, apart: bool, allowed: Mask | None = None) -> Counts:
        """How many requests of a size each machine could take; at most one each where they must be `apart`."""
        found = np.full(len(self), np.iinfo(np.int64).max, dtype=np.int64)
        for row, amount in zip(self._free, size, strict=True):
            if amount:
                np.minimum(found, row // amount, out=found)
        if apart:
            np.minimum(found, 1, out=found)
        return found if allowed is None else np.where(allowed, found, 0)

    def take(self, size: Size, count: int, *, apart: bool = False, allowed: Mask | None = None) -> Counts:
        """Pack up to so many, the first machines first; how many each got."""
        room = np.minimum(self.room(size, apart=apart, allowed=allowed), count)
        before = np.cumsum(room) - room
        taken: Counts = np.clip(count - before, 0, room)
        for row, amount in zip(self._free, size, strict=True):
            if amount:
                row -= taken * amount
        return taken


def _empty_columns(workers: list[WorkerResources]) -> NDArray[np.int64]:
    rows = [(one.cpu_milli, one.memory_bytes, WHOLE_GPU * one.gpu_count, one.gpu_count) for one in workers]
    return np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()
