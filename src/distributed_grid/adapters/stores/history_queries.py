"""SQL over the history tables `ended`, `events` and `summaries`: reading and folding; sums and order for every store.

Only constant text of this file goes into a statement; every value is bound. Each query names its index: without
statistics SQLite prefers the one that saves a sort, and then walks all of history for one request id.

Sums are exact: integers of any size, amount times duration, never rounded. Folding in pieces gives the same as folding
at once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from distributed_grid.errors import Conflict
from distributed_grid.ports import EndedFilters, EndedRow, EventFilters, EventRow, LentRow, NumberedRow, SummaryRow

DAY_MS = 86_400_000
LEASE_KIND = "lease"
LAST_CHARACTER = chr(0x10FFFF)
ENDED_COLUMNS = ", ".join(EndedRow.__struct_fields__)
EVENT_COLUMNS = ", ".join(EventRow.__struct_fields__)
TOTAL_COLUMNS = "count, cpu_milli_ms, memory_byte_ms, gpu_milli_ms"
INSERT_ENDED = f"INSERT INTO ended ({ENDED_COLUMNS}) VALUES ({', '.join('?' * 13)})"
INSERT_EVENT = f"INSERT INTO events ({EVENT_COLUMNS}) VALUES ({', '.join('?' * 8)})"
CLOCK_SLACK_EVENTS = 1000
_WITHOUT_DAY = "user, node, target, 0 AS day"
_LEASES = (
    "SELECT {key}, cpu_milli, memory_bytes, gpu_milli, max(ended_at_ms - max(started_at_ms, ?), 0) AS ms"
    " FROM ended INDEXED BY ended_by_time WHERE kind = ? AND ended_at_ms >= ? AND started_at_ms > 0 AND node != ''"
)
_SUMS = (
    "SELECT {names}, count(*), sum(cpu_milli * ms), sum((memory_bytes >> 20) * ms),"
    " sum((memory_bytes & 1048575) * ms), sum(gpu_milli * ms) FROM ({leases}) GROUP BY {names}"
)


class SummaryKey(NamedTuple):
    day: int
    kind: str
    user: str
    node: str
    reason: str
    target: str = ""


class SummaryTotals(NamedTuple):
    rows: int = 0
    cpu_milli_ms: int = 0
    memory_byte_ms: int = 0
    gpu_milli_ms: int = 0

    def plus(self, other: SummaryTotals) -> SummaryTotals:
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
    for key, totals in more.items():
        into[key] = into.get(key, SummaryTotals()).plus(totals)


def summary_rows(folded: Folded) -> list[SummaryRow]:
    return [SummaryRow(*key[:-1], *folded[key], key.target) for key in sorted(folded)]


def _sum_by_key(parts: Iterable[tuple[SummaryKey, SummaryTotals]]) -> Folded:
    folded: Folded = {}
    for key, totals in parts:
        folded[key] = folded.get(key, SummaryTotals()).plus(totals)
    return folded


def _ended_totals(row: EndedRow) -> SummaryTotals:
    ran_ms = max(0, row.ended_at_ms - row.started_at_ms) if row.started_at_ms > 0 else 0
    return SummaryTotals(1, row.cpu_milli * ran_ms, row.memory_bytes * ran_ms, row.gpu_milli * ran_ms)


class LendingKey(NamedTuple):
    """Borrower, lender and target of a lease; or only its day."""

    user: str
    node: str
    target: str
    day: int


LentTotals = dict[LendingKey, SummaryTotals]


def lending_key(user: str, node: str, target: str, day: int, *, by_day: bool) -> LendingKey:
    return LendingKey("", "", "", day) if by_day else LendingKey(user, node, target, 0)


def add_lent(into: LentTotals, key: LendingKey, totals: SummaryTotals) -> None:
    into[key] = into.get(key, SummaryTotals()).plus(totals)


def add_folded(into: LentTotals, folded: Folded, *, since_ms: int, by_day: bool) -> None:
    """Add the summaries of days that are wholly since then; a lease that was never granted has no node."""
    for key, totals in folded.items():
        if key.kind == LEASE_KIND and key.node and key.day * DAY_MS >= since_ms:
            add_lent(into, lending_key(key.user, key.node, key.target, key.day, by_day=by_day), totals)


def lent_rows(lent: LentTotals) -> list[LentRow]:
    return [LentRow(*key, *lent[key]) for key in sorted(lent)]


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


KEY_COLUMNS = ", ".join(SummaryKey._fields)


Parameter = str | int


class WhereClause:
    """The terms of a WHERE clause, joined by AND, with the values to bind."""

    def __init__(self) -> None:
        self._terms: list[str] = []
        self.values: list[Parameter] = []

    def add(self, term: str, value: Parameter | None) -> None:
        """Add a term; a value of None adds nothing."""
        if value is not None:
            self._terms.append(term)
            self.values.append(value)

    def add_term(self, term: str, values: Sequence[Parameter]) -> None:
        """Add a term with several values."""
        self._terms.append(term)
        self.values.extend(values)

    def add_any_of(self, column: str, values: Sequence[str]) -> None:
        """Require one of several values; an empty sequence adds nothing."""
        if values:
            self._terms.append(f"{column} IN ({', '.join('?' * len(values))})")
            self.values.extend(values)

    def __str__(self) -> str:
        return " AND ".join(self._terms) or "TRUE"


def select_ended(db: sqlite3.Connection, kind: str, filters: EndedFilters, limit: int) -> list[EndedRow]:
    """Ended rows that match, newest first."""
    index = _index_for(filters)
    where = WhereClause()
    where.add("kind = ?", kind)
    where.add("key = ?", filters.get("key"))
    if prefix := filters.get("key_prefix"):
        where.add("key >= ?", prefix)
        where.add("key < ?", end_of_prefix(prefix))
    where.add("request_id = ?", filters.get("request_id"))
    where.add("user = ?", filters.get("user"))
    where.add("node = ?", filters.get("node"))
    where.add("ended_at_ms >= ?", filters.get("since_ms"))
    sql = (
        f"SELECT {ENDED_COLUMNS} FROM ended INDEXED BY {index} WHERE {where} ORDER BY ended_at_ms DESC, id DESC LIMIT ?"
    )
    return [EndedRow(*row) for row in db.execute(sql, (*where.values, max(0, limit)))]


def select_last_ended_number(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT coalesce(max(id), 0) FROM ended").fetchone()[0])


def select_ended_after(
    db: sqlite3.Connection, kind: str, number: int, user: str | None, limit: int
) -> list[NumberedRow]:
    """Rows of a kind with higher numbers, the lowest first: a scan of the table from that row on."""
    where = WhereClause()
    where.add("id > ?", number)
    where.add("kind = ?", kind)
    where.add("user = ?", user)
    sql = f"SELECT id, {ENDED_COLUMNS} FROM ended NOT INDEXED WHERE {where} ORDER BY id LIMIT ?"
    return _numbered(db.execute(sql, (*where.values, max(0, limit))))


def select_ended_before(
    db: sqlite3.Connection, kind: str, last_number: int, place: tuple[int, int] | None, user: str | None, limit: int
) -> list[NumberedRow]:
    """Rows of a kind up to a number, newest first, from a place on in the index by time."""
    where = WhereClause()
    where.add("kind = ?", kind)
    where.add("user = ?", user)
    where.add("id <= ?", last_number)
    if place is not None:
        where.add("ended_at_ms <= ?", place[0])
        where.add_term("(ended_at_ms, id) < (?, ?)", place)
    index = "ended_by_user" if user else "ended_by_time"
    sql = (
        f"SELECT id, {ENDED_COLUMNS} FROM ended INDEXED BY {index} WHERE {where} "
        "ORDER BY ended_at_ms DESC, id DESC LIMIT ?"
    )
    return _numbered(db.execute(sql, (*where.values, max(0, limit))))


def _numbered(rows: Iterable[Sequence[Any]]) -> list[NumberedRow]:
    return [NumberedRow(number, EndedRow(*columns)) for number, *columns in rows]


def count_ended(db: sqlite3.Connection, kind: str, user: str | None) -> int:
    """How many ended rows of a kind are kept, counted in an index."""
    where = WhereClause()
    where.add("kind = ?", kind)
    where.add("user = ?", user)
    index = "ended_by_time" if user is None else "ended_by_user"
    return int(db.execute(f"SELECT COUNT(*) FROM ended INDEXED BY {index} WHERE {where}", where.values).fetchone()[0])


def _index_for(filters: EndedFilters) -> str:
    if filters.get("request_id"):
        return "ended_by_request"
    if filters.get("key") or filters.get("key_prefix"):
        return "ended_by_key"
    return "ended_by_user" if filters.get("user") else "ended_by_time"


def select_events(db: sqlite3.Connection, filters: EventFilters, limit: int, *, newest: bool) -> list[EventRow]:
    """Events that match, in order; the first `limit`, or the newest."""
    rows = [EventRow(*row) for row in _matching_events(db, EVENT_COLUMNS, filters, limit, newest=newest)]
    rows.sort(key=lambda row: row.seq)
    return rows[-limit:] if newest and limit > 0 else rows[: max(0, limit)]


def select_begin_of_newest(db: sqlite3.Connection, filters: EventFilters, count: int) -> int:
    """Number after which the newest `count` matching events begin."""
    seqs = sorted((seq for (seq,) in _matching_events(db, "seq", filters, count + 1, newest=True)), reverse=True)
    return seqs[count] if len(seqs) > count else filters.get("after_seq", 0)


def _matching_events(
    db: sqlite3.Connection, columns: str, filters: EventFilters, limit: int, *, newest: bool
) -> list[tuple[Any, ...]]:
    """Columns of the first or the newest events that match: of each type as many as that."""
    after_seq, since_ms = filters.get("after_seq", 0), filters.get("since_ms")
    if since_ms is not None:
        # Numbers and times grow together, since the grid's clock never goes back: older events are not scanned. The
        # slack tolerates small exceptions.
        (first,) = db.execute(
            "SELECT min(seq) FROM (SELECT seq FROM events WHERE at_ms >= ? ORDER BY at_ms LIMIT ?)",
            (since_ms, CLOCK_SLACK_EVENTS),
        ).fetchone()
        after_seq = max(after_seq, last_event_seq(db) if first is None else first - 1)
    subject, types = filters.get("subject"), dict.fromkeys(filters.get("types", ()))
    index = "NOT INDEXED" if not types else "INDEXED BY events_by_type"
    order = "DESC" if newest else "ASC"
    rows: list[tuple[Any, ...]] = []
    # One type at a time: with several, SQLite would sort all their events ever to find the first.
    for kind in types if types and subject is None else (None,):
        where = WhereClause()
        where.add("seq > ?", after_seq)
        where.add("+at_ms >= ?", since_ms)  # the plus keeps SQLite from using the index on at_ms
        where.add("subject = ?", subject)
        where.add("type = ?", kind)
        if subject is not None:
            index = "INDEXED BY events_by_subject"
            where.add_any_of("type", tuple(types))
        sql = f"SELECT {columns} FROM events {index} WHERE {where} ORDER BY seq {order} LIMIT ?"
        rows += db.execute(sql, (*where.values, max(0, limit)))
    return rows


def select_summaries(db: sqlite3.Connection) -> list[SummaryRow]:
    return summary_rows(_select_folded(db, "TRUE"))


def _select_folded(db: sqlite3.Connection, where: str, *values: Parameter) -> Folded:
    sql = f"SELECT {KEY_COLUMNS}, {TOTAL_COLUMNS} FROM summaries WHERE {where}"
    folded: Folded = {}
    for *key, count, cpu, memory, gpu in db.execute(sql, values):
        folded[SummaryKey(*key)] = SummaryTotals(count, int(cpu), int(memory), int(gpu))
    return folded


def select_lent(db: sqlite3.Connection, *, since_ms: int, by_day: bool) -> list[LentRow]:
    """Resource time of leases since then, summed by SQLite, or in Python where 64 bits do not suffice."""
    lent: LentTotals = {}
    first_day = -(-since_ms // DAY_MS)
    add_folded(
        lent, _select_folded(db, "kind = ? AND day >= ?", LEASE_KIND, first_day), since_ms=since_ms, by_day=by_day
    )
    key = f"'' AS user, '' AS node, '' AS target, ended_at_ms / {DAY_MS} AS day" if by_day else _WITHOUT_DAY
    leases, values = _LEASES.format(key=key), (since_ms, LEASE_KIND, since_ms)
    try:
        sums = db.execute(_SUMS.format(names="user, node, target, day", leases=leases), values).fetchall()
    except sqlite3.OperationalError as failure:
        if "overflow" not in str(failure):
            raise
        sums = None
    if sums is None or any(isinstance(number, float) for row in sums for number in row):
        for *names, cpu, memory, gpu, ms in db.execute(leases, values):
            add_lent(lent, LendingKey(*names), SummaryTotals(1, cpu * ms, memory * ms, gpu * ms))
        return lent_rows(lent)
    for *names, count, cpu, mebibytes, rest, gpu in sums:
        add_lent(lent, LendingKey(*names), SummaryTotals(count, cpu, (mebibytes << 20) + rest, gpu))
    return lent_rows(lent)


def last_event_seq(db: sqlite3.Connection) -> int:
    """The number of the last event ever stored, including folded ones."""
    (stored,) = db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
    (folded,) = db.execute("SELECT coalesce(max(value), 0) FROM marks WHERE name = 'last_folded_event'").fetchone()
    return max(int(stored), int(folded))


def fold_step(db: sqlite3.Connection, *, before_ms: int, limit: int) -> int:
    """Fold up to `limit` old rows, in the caller's transaction; how many were folded."""
    folded: Folded = {}
    count = 0
    for kind in _kinds(db):
        rows = db.execute(
            f"SELECT id, {ENDED_COLUMNS} FROM ended WHERE kind = ? AND ended_at_ms < ? ORDER BY ended_at_ms LIMIT ?",
            (kind, before_ms, limit - count),
        ).fetchall()
        merge_totals(folded, fold_ended(EndedRow(*row) for _, *row in rows))
        db.executemany("DELETE FROM ended WHERE id = ?", [(row[0],) for row in rows])
        count += len(rows)
    old_events = db.execute(
        f"SELECT {EVENT_COLUMNS} FROM events WHERE at_ms < ? ORDER BY at_ms LIMIT ?", (before_ms, limit - count)
    )
    events = [EventRow(*row) for row in old_events]
    merge_totals(folded, fold_events(events))
    db.executemany("DELETE FROM events WHERE seq = ?", [(row.seq,) for row in events])
    highest = max((row.seq for row in events), default=0)
    db.execute("UPDATE marks SET value = max(value, ?) WHERE name = 'last_folded_event'", (highest,))
    count += len(events)
    for key, totals in folded.items():
        before = db.execute(
            f"SELECT {TOTAL_COLUMNS} FROM summaries"
            " WHERE day = ? AND kind = ? AND user = ? AND node = ? AND reason = ? AND target = ?",
            key,
        ).fetchone()
        rows_folded, *amounts = totals.plus(SummaryTotals(*map(int, before))) if before else totals
        db.execute(
            f"INSERT OR REPLACE INTO summaries ({KEY_COLUMNS}, {TOTAL_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*key, rows_folded, *map(str, amounts)),
        )
    return count


def _kinds(db: sqlite3.Connection) -> list[str]:
    """The kinds of ended rows, by skipping through the index: DISTINCT would scan all of it."""
    kinds: list[str] = []
    while True:
        above = kinds[-1] if kinds else ""
        (kind,) = db.execute("SELECT min(kind) FROM ended WHERE kind > ?", (above,)).fetchone()
        if kind is None:
            return kinds
        kinds.append(kind)
