"""How history becomes summaries: exact sums, the same for every store.

Rule 1. Integers only, of any size: a total is the sum of amount times duration, never rounded.
Rule 2. Folding in pieces gives what folding at once gives.
"""

from collections.abc import Iterable
from typing import NamedTuple

from distributed_grid.ports import EndedRow, EventRow, LentRow, SummaryRow

DAY_MS = 86_400_000


class SummaryKey(NamedTuple):
    """What one summary row is about."""

    day: int
    kind: str
    user: str
    node: str
    reason: str
    target: str = ""


class SummaryTotals(NamedTuple):
    """What a summary row has counted so far."""

    rows: int = 0
    cpu_milli_ms: int = 0
    memory_byte_ms: int = 0
    gpu_milli_ms: int = 0

    def plus(self, other: "SummaryTotals") -> "SummaryTotals":
        """Both together."""
        return SummaryTotals(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


Folded = dict[SummaryKey, SummaryTotals]


def fold_ended(rows: Iterable[EndedRow]) -> Folded:
    """Sums per day, kind, user, node, reason and target."""
    return _gather((_ended_key(row), _ended_totals(row)) for row in rows)


def fold_events(rows: Iterable[EventRow]) -> Folded:
    """Counts per day, type, user, node and reason."""
    return _gather((_event_key(row), SummaryTotals(rows=1)) for row in rows)


def merge(into: Folded, more: Folded) -> None:
    """Add `more` to `into`."""
    for key, totals in more.items():
        into[key] = into.get(key, SummaryTotals()).plus(totals)


def summary_rows(folded: Folded) -> list[SummaryRow]:
    """The summaries in the order of their keys."""
    return [SummaryRow(*key[:-1], *folded[key], key.target) for key in sorted(folded)]


def _gather(parts: Iterable[tuple[SummaryKey, SummaryTotals]]) -> Folded:
    folded: Folded = {}
    for key, totals in parts:
        folded[key] = folded.get(key, SummaryTotals()).plus(totals)
    return folded


def _ended_key(row: EndedRow) -> SummaryKey:
    return SummaryKey(row.ended_at_ms // DAY_MS, row.kind, row.user, row.node, row.reason, row.target)


def _event_key(row: EventRow) -> SummaryKey:
    return SummaryKey(row.at_ms // DAY_MS, f"event:{row.type}", row.user, row.node, row.reason)


def _ended_totals(row: EndedRow) -> SummaryTotals:
    ran_ms = max(0, row.ended_at_ms - row.started_at_ms) if row.started_at_ms > 0 else 0
    return SummaryTotals(1, row.cpu_milli * ran_ms, row.memory_bytes * ran_ms, row.gpu_milli * ran_ms)


# ------------------------------------------------------------------ what was lent

LEASE = "lease"


class LendingTotals(NamedTuple):
    """Who had from whom, and for whom; or when."""

    user: str
    node: str
    target: str
    day: int


Lent = dict[LendingTotals, SummaryTotals]


def lending(user: str, node: str, target: str, day: int, *, by_day: bool) -> LendingTotals:
    """What a lease is counted under."""
    return LendingTotals("", "", "", day) if by_day else LendingTotals(user, node, target, 0)


def add_lent(into: Lent, key: LendingTotals, totals: SummaryTotals) -> None:
    """Count some leases in."""
    into[key] = into.get(key, SummaryTotals()).plus(totals)


def add_folded(into: Lent, folded: Folded, *, since_ms: int, by_day: bool) -> None:
    """Count in what was folded, of the days that are wholly since then; where nothing was lent there is no node."""
    for key, totals in folded.items():
        if key.kind == LEASE and key.node and key.day * DAY_MS >= since_ms:
            add_lent(into, lending(key.user, key.node, key.target, key.day, by_day=by_day), totals)


def lent_rows(lent: Lent) -> list[LentRow]:
    """What was lent, in the order of its keys."""
    return [LentRow(*key, *lent[key]) for key in sorted(lent)]
