"""Rollup of history into summaries, and the order of keys and event numbers: the same for every store.

Sums are exact: integers of any size, amount times duration, never rounded. Folding in pieces gives what folding at once
gives.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from distributed_grid.errors import Conflict
from distributed_grid.ports import EndedRow, EventRow, LentRow, SummaryRow

DAY_MS = 86_400_000


class SummaryKey(NamedTuple):
    """The key of one summary row."""

    day: int
    kind: str
    user: str
    node: str
    reason: str
    target: str = ""


class SummaryTotals(NamedTuple):
    """The totals of one summary row."""

    rows: int = 0
    cpu_milli_ms: int = 0
    memory_byte_ms: int = 0
    gpu_milli_ms: int = 0

    def plus(self, other: SummaryTotals) -> SummaryTotals:
        """The sum of both."""
        return SummaryTotals(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


Folded = dict[SummaryKey, SummaryTotals]


def fold_ended(rows: Iterable[EndedRow]) -> Folded:
    """Sums per day, kind, user, node, reason and target."""
    return _sum_by_key(
        (
            SummaryKey(row.ended_at_ms // DAY_MS, row.kind, row.user, row.node, row.reason, target=row.target),
            _ended_totals(row),
        )
        for row in rows
    )


def fold_events(rows: Iterable[EventRow]) -> Folded:
    """Counts per day, type, user, node and reason."""
    return _sum_by_key(
        (SummaryKey(row.at_ms // DAY_MS, f"event:{row.type}", row.user, row.node, row.reason), SummaryTotals(rows=1))
        for row in rows
    )


def merge_totals(into: Folded, more: Folded) -> None:
    """Add `more` to `into`."""
    for key, totals in more.items():
        into[key] = into.get(key, SummaryTotals()).plus(totals)


def summary_rows(folded: Folded) -> list[SummaryRow]:
    """The summaries in the order of their keys."""
    return [SummaryRow(*key[:-1], *folded[key], key.target) for key in sorted(folded)]


def _sum_by_key(parts: Iterable[tuple[SummaryKey, SummaryTotals]]) -> Folded:
    folded: Folded = {}
    for key, totals in parts:
        folded[key] = folded.get(key, SummaryTotals()).plus(totals)
    return folded


def _ended_totals(row: EndedRow) -> SummaryTotals:
    ran_ms = max(0, row.ended_at_ms - row.started_at_ms) if row.started_at_ms > 0 else 0
    return SummaryTotals(1, row.cpu_milli * ran_ms, row.memory_bytes * ran_ms, row.gpu_milli * ran_ms)


LEASE_KIND = "lease"


class LendingKey(NamedTuple):
    """Borrower, lender and target of a lease; or only its day."""

    user: str
    node: str
    target: str
    day: int


LentTotals = dict[LendingKey, SummaryTotals]


def lending_key(user: str, node: str, target: str, day: int, *, by_day: bool) -> LendingKey:
    """The key a lease is counted under."""
    return LendingKey("", "", "", day) if by_day else LendingKey(user, node, target, 0)


def add_lent(into: LentTotals, key: LendingKey, totals: SummaryTotals) -> None:
    """Add the totals of some leases."""
    into[key] = into.get(key, SummaryTotals()).plus(totals)


def add_folded(into: LentTotals, folded: Folded, *, since_ms: int, by_day: bool) -> None:
    """Add the summaries of days that are wholly since then; a lease that was never granted has no node."""
    for key, totals in folded.items():
        if key.kind == LEASE_KIND and key.node and key.day * DAY_MS >= since_ms:
            add_lent(into, lending_key(key.user, key.node, key.target, key.day, by_day=by_day), totals)


def lent_rows(lent: LentTotals) -> list[LentRow]:
    """The lending totals in the order of their keys."""
    return [LentRow(*key, *lent[key]) for key in sorted(lent)]


LAST_CHARACTER = chr(0x10FFFF)


def last_seq_after(events: Iterable[EventRow], last_seq: int) -> int:
    """The number of the last event once these are stored; `Conflict` when they do not follow."""
    for event in events:
        if event.seq <= last_seq:
            raise Conflict(f"event {event.seq} does not follow event {last_seq}: numbers must grow")
        last_seq = event.seq
    return last_seq


def end_of_prefix(prefix: str) -> str | None:
    """The smallest string above all that begin with `prefix`; None when there is none."""
    stem = prefix.rstrip(LAST_CHARACTER)
    if not stem:
        return None
    following = ord(stem[-1]) + 1
    if 0xD800 <= following <= 0xDFFF:  # surrogates are not characters
        following = 0xE000
    return stem[:-1] + chr(following)
