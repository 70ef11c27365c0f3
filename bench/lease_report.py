"""Lending report: adding up 100,000 leases that ended within a month."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from bench.sizes import sized
from bench.table import Line
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.ports import Batch, EndedRow

LEASES = sized(100_000, smoke=1_000)
DAY_MS = 86_400_000
NOW_MS = 20_000 * DAY_MS
USERS, NODES = 40, 60
BLOB = b"x" * 320
"""As long as a stored lease is."""


def measure() -> list[Line]:
    """The time of one question over a month, as the table and by day."""
    with tempfile.TemporaryDirectory(prefix="grid-bench-") as folder:
        store = SqliteStore(Path(folder) / "grid.db")
        dice = random.Random(1)
        rows = sorted((_ended(dice) for _ in range(LEASES)), key=lambda row: row.ended_at_ms)
        for at in range(0, LEASES, 1_000):
            store.commit(Batch(ended=rows[at : at + 1_000]))
        since_ms = NOW_MS - 30 * DAY_MS
        table = min(_seconds(store, since_ms, by_day=False) for _ in range(3))
        by_day = min(_seconds(store, since_ms, by_day=True) for _ in range(3))
        store.close()
    return [
        Line(f"who lent whom, {LEASES:,} leases", 1000 * table, 1000, "ms", lower_is_better=True),
        Line("  the same, by day", 1000 * by_day, 2000, "ms", lower_is_better=True),
    ]


def _seconds(store: SqliteStore, since_ms: int, *, by_day: bool) -> float:
    began = time.perf_counter()
    rows = store.lent(since_ms=since_ms, by_day=by_day)
    took = time.perf_counter() - began
    assert sum(row.count for row in rows) == LEASES
    return took


def _ended(dice: random.Random) -> EndedRow:
    ended_ms = NOW_MS - dice.randrange(30 * DAY_MS)
    return EndedRow(
        "lease",
        f"{dice.getrandbits(128):032x}",
        f"{dice.getrandbits(128):032x}",
        f"user{dice.randrange(USERS)}",
        f"node{dice.randrange(NODES)}",
        ended_ms,
        ended_ms - dice.randrange(1, 4 * 3_600_000),
        "released",
        dice.choice((250, 500, 1000, 2000, 4000)),
        dice.choice((0, 2**30, 2**32, 2**34)),
        dice.choice((0, 0, 0, 500, 1000)),
        BLOB,
        dice.choice(("", "", "", "node1")),
    )
