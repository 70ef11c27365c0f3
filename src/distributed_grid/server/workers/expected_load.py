"""Expected load of the grid, for the predictive policy: samples of the ledger, learned and kept over restarts.

Five-minute sums of the last eight days are in a file of their own; without it, or with a damaged one, it begins anew.
"""

from __future__ import annotations

import asyncio
import struct

from distributed_grid.adapters.stores.minute_store import MinuteStore
from distributed_grid.control.grid import Grid
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.prediction.warm_pool import KEPT_MS, SLOT_MS, LoadSlot, WarmPool
from distributed_grid.scheduling.scaling.demand import read_demand
from distributed_grid.scheduling.scaling.idle_workers import has_work

_ROW = struct.Struct("<qqq")
ROW_BYTES = _ROW.size
LOAD = "load"
"""The name under which the slots are stored."""


class ExpectedLoad:
    """Learns the load of a grid, and says how many workers to keep."""

    def __init__(self, grid: Grid, store: MinuteStore) -> None:
        self._grid = grid
        self._store = store
        self._pool = WarmPool()

    async def start(self, wall_ms: int) -> None:
        """Learn what was known before."""
        rows = await asyncio.to_thread(self._store.load, wall_ms - KEPT_MS, wall_ms)
        await asyncio.to_thread(self._learn, rows)

    def _learn(self, rows: list[tuple[str, bytes]]) -> None:
        for _, row in rows:
            slot, load_sum, counts = _ROW.unpack(row)
            self._pool.learn(LoadSlot(slot, load_sum, counts >> 32, counts & 0xFFFFFFFF))

    async def sample(self, wall_ms: int) -> int:
        """Learn the load of this moment; how many workers are to be kept."""
        load, own, workers, in_use = await self._grid.read(lambda ledger, now: read_load(ledger))
        ended = self._pool.observe(wall_ms, load, in_use)
        if ended is not None:
            row = _ROW.pack(ended.slot, ended.load_sum, ended.samples << 32 | ended.workers_in_use)
            written = [(ended.slot * SLOT_MS, LOAD, row)]
            await asyncio.to_thread(self._store.write, written, before_ms=wall_ms - KEPT_MS)
        rules = self._grid.ledger.scaling
        return self._pool.size(workers, in_use, own_milli=own, target_milli=rules.target_milli, limit=rules.max_workers)

    @property
    def expected_milli(self) -> int | None:
        """The load that is expected soon, in thousandths of a worker; None while too little is known."""
        return self._pool.expected_milli()

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._store.close()


def read_load(ledger: Ledger) -> tuple[int, int, int, int]:
    """What is lent and waits, and what nodes have that are no workers, in thousandths of a worker of the preferred
    type; how many workers there are, and how many of them are in use."""
    serving = [one for one in ledger.workers.values() if one.is_on_its_way or one.state is WorkerState.JOINED]
    in_use = sum(has_work(ledger, worker.node) for worker in serving)
    types = ledger.scaling.types
    if not types:
        return 0, 0, len(serving), in_use
    unit = types[0].resources
    lent = [sum(parts) for parts in zip(*(_lent_on(ledger, name) for name in ledger.node_claims), strict=True)]
    for shape in read_demand(ledger, [one.resources for one in types]).shapes:
        ask = shape.request.ask
        asked = (ask.cpu_milli, ask.memory_bytes, ask.gpu_milli)
        lent = [one + shape.members * more for one, more in zip(lent or [0, 0, 0], asked, strict=True)]
    own = [node.lendable for node in ledger.nodes.values() if node.name not in ledger.workers]
    has = (
        sum(one.cpu_milli for one in own),
        sum(one.memory_bytes for one in own),
        WHOLE_GPU * sum(len(one.gpus) for one in own),
    )
    load = max(_parts(lent or [0, 0, 0], unit), default=0)
    return load, min(_parts(has, unit), default=0), len(serving), in_use


def _lent_on(ledger: Ledger, node: str) -> tuple[int, int, int]:
    claims = ledger.claims_on(node)
    return claims.cpu_milli, claims.memory_bytes, sum(claims.gpu_milli.values())


def _parts(amounts: list[int] | tuple[int, int, int], unit: WorkerResources) -> list[int]:
    """Each resource in thousandths of what a worker has of it."""
    sizes = (unit.cpu_milli, unit.memory_bytes, WHOLE_GPU * unit.gpu_count)
    return [1000 * amount // size for amount, size in zip(amounts, sizes, strict=True) if size]
