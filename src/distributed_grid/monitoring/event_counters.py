"""How often things happened since this control plane started: counters that only grow, out of the audit trail."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from distributed_grid.ports import Store

REBALANCED = "rebalanced"
BATCH = 1_000
MOST_BATCHES = 100
"""Per call; where more has happened, the next call goes on from there."""


class _Record(msgspec.Struct):
    """What is needed of a line of the audit trail."""

    data: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(_Record)


class EventCounters:
    """Follows the audit trail; begins with what comes after it was made."""

    def __init__(self, store: Store) -> None:
        self._store = store
        newest = store.events(limit=1, newest=True)
        self._seq = newest[-1].seq if newest else 0
        self.events: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.rebalances: Counter[str] = Counter()

    def catch_up(self) -> None:
        """Count what has happened since the last call; blocks while it reads."""
        for _ in range(MOST_BATCHES):
            rows = self._store.events(after_seq=self._seq, limit=BATCH)
            for row in rows:
                self.events[row.type] += 1
                if row.type == "stopped":
                    ending = _decoder.decode(row.blob).data.get("ending")
                    self.outcomes[str(ending)] += 1
                elif row.type == REBALANCED:
                    self.rebalances[str(_decoder.decode(row.blob).data.get("action"))] += 1
                self._seq = row.seq
            if len(rows) < BATCH:
                return
