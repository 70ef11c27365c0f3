"""A restart with 10,000 active leases and 100,000 ended ones: how long until it answers, how big the file is."""

from __future__ import annotations

import time

from bench.control_plane import BIG_NODE, temporary_grid
from bench.sizes import sized
from bench.table import Line
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.client.client import Client
from distributed_grid.control.batch import batch_of
from distributed_grid.domain.events import HeartbeatReceived, LeaseAsked, LeaseReleased, NodeDeclared
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.domain.rows import Row
from distributed_grid.reactor import Record, step
from distributed_grid.state_dir import StateDir

ACTIVE, ENDED, BATCH = sized((10_000, 100_000, 500), smoke=(20, 40, 10))
DAY_MS = 86_400_000


def measure() -> list[Line]:
    """Seconds to the first answer after a start, and the size of the file before and after folding."""
    with temporary_grid(BIG_NODE) as (state_dir, client_config):
        state_dir.create()
        _fill(state_dir)
        began = time.perf_counter()
        with Client(state_dir, client_config) as client:
            status = client.call("get_status")
        taken = time.perf_counter() - began
        assert len(status["allocations"]) == ACTIVE, len(status["allocations"])
    before, after = _rollup_sizes()
    return [
        Line("ready after a start, 10,000 active and 100,000 ended leases", taken, 2, "s", lower_is_better=True),
        Line("grid.db 31 days later, of its size before", after / before, 1, "×", lower_is_better=True),
    ]


def _fill(state_dir: StateDir) -> None:
    """Real history through the real deciders and the real store."""
    now = int(time.time() * 1000) - DAY_MS
    store, ledger = SqliteStore(state_dir.database), Ledger()
    changes: list[Row] = []
    records: list[Record] = []
    seq = 0

    def apply_event(event: LeaseAsked | LeaseReleased | NodeDeclared | HeartbeatReceived) -> None:
        nonlocal seq
        stepped = step(ledger, event, now)
        changes.extend(stepped.changes)
        records.extend(stepped.records)
        if len(changes) > BATCH:
            flush()

    def flush() -> None:
        nonlocal seq
        store.commit(batch_of(changes, records, now, seq))
        seq += len(records)
        changes.clear()
        records.clear()

    apply_event(NodeDeclared(Node(name="big", capacity=Capacity(10**9, 2**50))))
    apply_event(HeartbeatReceived(name="big", usage=Usage()))
    for i in range(ENDED + ACTIVE):
        apply_event(LeaseAsked(Request(id=f"r{i:08x}", user="somebody", ask=Amounts(cpu_milli=1000))))
        if i < ENDED:
            apply_event(LeaseReleased(f"r{i:08x}", "somebody"))
    flush()
    store.close()


def _rollup_sizes() -> tuple[int, int]:
    """The size of a full database, and of the same one when all its history is older than 30 days."""
    with temporary_grid() as (state_dir, _):
        state_dir.create()
        _fill(state_dir)
        before = state_dir.database.stat().st_size
        store = SqliteStore(state_dir.database)
        while store.summarise(before_ms=int(time.time() * 1000) + DAY_MS, limit=20_000):
            pass
        store.close()
        return before, state_dir.database.stat().st_size
