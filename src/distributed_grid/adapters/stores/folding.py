"""How history becomes summaries: exact sums, the same for every store.

Rule 1. Integers only, of any size: a total is the sum of amount times duration, never rounded.
Rule 2. Folding in pieces gives what folding at once gives.
"""

from collections.abc import Iterable
from typing import NamedTuple

from distributed_grid.ports import EndedRow, EventRow, SummaryRow

DAY_MS = 86_400_000


class SummaryKey(NamedTuple):
    """What one summary row is about."""

    day: int
    kind: str
    user: str
    node: str
    reason: str


class Totals(NamedTuple):
    """What a summary row has counted so far."""

    rows: int = 0
    cpu_milli_ms: int = 0
    memory_byte_ms: int = 0
    gpu_milli_ms: int = 0

    def plus(self, other: "Totals") -> "Totals":
        """Both together."""
        return Totals(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


Folded = dict[SummaryKey, Totals]


def fold_ended(rows: Iterable[EndedRow]) -> Folded:
    """Sums per day, kind, user, node and reason."""
    return _gather((_ended_key(row), _ended_totals(row)) for row in rows)


def fold_events(rows: Iterable[EventRow]) -> Folded:
    """Counts per day, type, user, node and reason."""
    return _gather((_event_key(row), Totals(rows=1)) for row in rows)


def merge(into: Folded, more: Folded) -> None:
    """Add `more` to `into`."""
    for key, totals in more.items():
        into[key] = into.get(key, Totals()).plus(totals)


def summary_rows(folded: Folded) -> list[SummaryRow]:
    """The summaries in the order of their keys."""
    return [SummaryRow(*key, *folded[key]) for key in sorted(folded)]


def _gather(parts: Iterable[tuple[SummaryKey, Totals]]) -> Folded:
    folded: Folded = {}
    for key, totals in parts:
        folded[key] = folded.get(key, Totals()).plus(totals)
    return folded


def _ended_key(row: EndedRow) -> SummaryKey:
    return SummaryKey(row.ended_at_ms // DAY_MS, row.kind, row.user, row.node, row.reason)


def _event_key(row: EventRow) -> SummaryKey:
    return SummaryKey(row.at_ms // DAY_MS, f"event:{row.type}", row.user, row.node, row.reason)


def _ended_totals(row: EndedRow) -> Totals:
    ran_ms = max(0, row.ended_at_ms - row.started_at_ms) if row.started_at_ms > 0 else 0
    return Totals(1, row.cpu_milli * ran_ms, row.memory_bytes * ran_ms, row.gpu_milli * ran_ms)
