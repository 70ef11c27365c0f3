"""In-memory store, for tests and simulation."""

import threading
from collections.abc import Callable
from typing import TypeVar, Unpack

from distributed_grid.adapters.stores.history_queries import (
    DAY_MS,
    LEASE_KIND,
    Folded,
    LentTotals,
    SummaryTotals,
    add_folded,
    add_lent,
    fold_ended,
    fold_events,
    last_seq_after,
    lending_key,
    lent_rows,
    merge_totals,
    summary_rows,
)
from distributed_grid.ports import (
    Batch,
    EndedFilters,
    EndedRow,
    EventFilters,
    EventRow,
    LentRow,
    LiveRow,
    LoadedRows,
    NumberedRow,
    SummaryRow,
)

SCHEMA_VERSION = 3
Row = TypeVar("Row")


class InMemoryStore:
    """The `Store` port in dictionaries and lists: the same guarantees, except durability."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[tuple[str, str], LiveRow] = {}
        self._ended: list[NumberedRow] = []
        self._last_ended_number = 0
        self._events: list[EventRow] = []
        self._folded: Folded = {}
        self._last_event_seq = 0

    def load(self) -> LoadedRows:
        with self._lock:
            return LoadedRows(
                [self._live[position] for position in sorted(self._live)], self._last_event_seq, SCHEMA_VERSION
            )

    def commit(self, batch: Batch) -> None:
        """Store the batch, all of it or nothing."""
        with self._lock:
            last = last_seq_after(batch.events, self._last_event_seq)
            for row in batch.live:
                if row.blob is None:
                    self._live.pop((row.kind, row.key), None)
                else:
                    self._live[row.kind, row.key] = row
            for number, ended in enumerate(batch.ended, self._last_ended_number + 1):
                self._ended.append(NumberedRow(number, ended))
            self._last_ended_number += len(batch.ended)
            self._events.extend(batch.events)
            self._last_event_seq = last

    def has_room(self) -> bool:
        return True

    def fill_reserve(self) -> None:
        """Memory has no reserve."""

    def ended(self, kind: str, *, limit: int = 100, **filters: Unpack[EndedFilters]) -> list[EndedRow]:
        """Ended rows that match every filter given, newest first."""
        key, request_id, user = filters.get("key"), filters.get("request_id"), filters.get("user")
        node = filters.get("node")
        prefix, since_ms = filters.get("key_prefix") or "", filters.get("since_ms")

        def matches(row: EndedRow) -> bool:
            return (
                row.kind == kind
                and key in (None, row.key)
                and row.key.startswith(prefix)
                and request_id in (None, row.request_id)
                and user in (None, row.user)
                and node in (None, row.node)
                and (since_ms is None or row.ended_at_ms >= since_ms)
            )

        with self._lock:
            rows = [ended.row for ended in reversed(self._ended) if matches(ended.row)]
        return sorted(rows, key=lambda row: row.ended_at_ms, reverse=True)[:limit]

    def last_ended_number(self) -> int:
        with self._lock:
            return self._ended[-1].number if self._ended else 0

    def ended_after(self, kind: str, number: int, *, limit: int, user: str | None = None) -> list[NumberedRow]:
        """Rows of a kind with higher numbers, the lowest first."""
        with self._lock:
            return [each for each in self._ended if each.number > number and _is_of(each.row, kind, user)][:limit]

    def ended_before(
        self,
        kind: str,
        last_number: int,
        *,
        limit: int,
        place: tuple[int, int] | None = None,
        user: str | None = None,
    ) -> list[NumberedRow]:
        """Rows of a kind up to a number, newest first."""
        with self._lock:
            found = [each for each in self._ended if each.number <= last_number and _is_of(each.row, kind, user)]
        found.sort(key=_end_of, reverse=True)
        return [each for each in found if place is None or _end_of(each) < place][:limit]

    def count_ended(self, kind: str, *, user: str | None = None) -> int:
        with self._lock:
            return sum(_is_of(each.row, kind, user) for each in self._ended)

    def events(self, *, limit: int = 1000, newest: bool = False, **filters: Unpack[EventFilters]) -> list[EventRow]:
        events = self._matching_events(filters)
        return events[max(0, len(events) - limit) :] if newest else events[:limit]

    def begin_of_newest(self, count: int, **filters: Unpack[EventFilters]) -> int:
        events = self._matching_events(filters)
        return events[-count - 1].seq if len(events) > count else filters.get("after_seq", 0)

    def _matching_events(self, filters: EventFilters) -> list[EventRow]:
        after_seq, types = filters.get("after_seq", 0), filters.get("types")
        subject, since_ms = filters.get("subject"), filters.get("since_ms")

        def matches(row: EventRow) -> bool:
            return (
                row.seq > after_seq
                and (since_ms is None or row.at_ms >= since_ms)
                and subject in (None, row.subject)
                and (not types or row.type in types)
            )

        with self._lock:
            return [row for row in self._events if matches(row)]

    def summarise(self, *, before_ms: int, limit: int = 5000) -> int:
        """Fold at most `limit` rows older than that into summaries; how many were folded."""
        with self._lock:
            old, self._ended = _split_old(self._ended, lambda each: each.row.ended_at_ms < before_ms, limit)
            merge_totals(self._folded, fold_ended(each.row for each in old))
            past, self._events = _split_old(self._events, lambda row: row.at_ms < before_ms, limit - len(old))
            merge_totals(self._folded, fold_events(past))
            return len(old) + len(past)

    def summaries(self) -> list[SummaryRow]:
        with self._lock:
            return summary_rows(self._folded)

    def lent(self, *, since_ms: int, by_day: bool = False) -> list[LentRow]:
        """Resource time of the leases that ended since then, counted from then on."""
        lent: LentTotals = {}
        with self._lock:
            add_folded(lent, self._folded, since_ms=since_ms, by_day=by_day)
            for row in (each.row for each in self._ended):
                if row.kind == LEASE_KIND and row.node and row.started_at_ms > 0 and row.ended_at_ms >= since_ms:
                    ms = max(row.ended_at_ms - max(row.started_at_ms, since_ms), 0)
                    key = lending_key(row.user, row.node, row.target, row.ended_at_ms // DAY_MS, by_day=by_day)
                    add_lent(lent, key, SummaryTotals(1, row.cpu_milli * ms, row.memory_bytes * ms, row.gpu_milli * ms))
        return lent_rows(lent)

    def close(self) -> None:
        """Nothing to close."""


def _is_of(row: EndedRow, kind: str, user: str | None) -> bool:
    return row.kind == kind and user in (None, row.user)


def _end_of(each: NumberedRow) -> tuple[int, int]:
    return each.row.ended_at_ms, each.number


def _split_old(rows: list[Row], is_old: Callable[[Row], bool], limit: int) -> tuple[list[Row], list[Row]]:
    """The first `limit` old rows, and all the others."""
    taken: list[Row] = []
    kept: list[Row] = []
    for row in rows:
        (taken if len(taken) < limit and is_old(row) else kept).append(row)
    return taken, kept
