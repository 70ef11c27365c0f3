"""Records of the grid: jobs and leases by id or prefix, the audit trail, and the decisions noted in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, Unpack

import msgspec
from msgspec import Struct

from distributed_grid.api.answers.common import HIDDEN, Viewer
from distributed_grid.api.answers.leases import DecisionRow
from distributed_grid.api.answers.reports import EventRecord
from distributed_grid.api.id_prefixes import is_prefix, not_found
from distributed_grid.api.requests import ListEvents
from distributed_grid.control.grid import Grid, event_key
from distributed_grid.domain.deliveries import Delivery
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import Move
from distributed_grid.domain.rows import decode_as
from distributed_grid.domain.states import LeaseState
from distributed_grid.errors import Ambiguous, BadInput, NotFound
from distributed_grid.ports import EndedFilters, EndedRow, EventRow, Store
from distributed_grid.reactor.decision import RECORD_TYPES
from distributed_grid.scheduling.placement.explanation import Choice
from distributed_grid.scheduling.placement.placement import strategy_of
from distributed_grid.scheduling.queue.start_estimate import estimate_newcomer_start

T = TypeVar("T", Job, Lease, Move)
EVENTS_PER_PAGE, EVENTS_PER_SLICE = 500, 50
MAX_EVENTS = 1_000
PUBLIC_EVENTS = ("node-", "engine-", "alert-", "clock-", "agent-rejected", "reports-omitted")
"""Beginnings of the event types that are about no user's work. Of every other type a reader sees its own in full."""


async def find_job(grid: Grid, name: str) -> Job:
    """The job of this id or uid, alive or ended; else of this unique prefix, living ones before ended ones."""
    job, others = await grid.read(lambda ledger, now: known_job(grid, ledger, name))
    return job if job is not None else await find_other_job(grid, name, others)


def known_job(grid: Grid, ledger: Ledger, name: str) -> tuple[Job | None, Sequence[Job]]:
    """The job of this id or uid that lives or has just ended; without one, where a prefix is long enough, all living
    jobs."""
    job = ledger.jobs.get(ledger.job_uids.get(name, name)) or grid.recently_ended(name)
    return job, tuple(ledger.jobs.values()) if job is None and is_prefix(name) else ()


async def find_other_job(grid: Grid, name: str, living: Sequence[Job], *, exact: bool = False) -> Job:
    """The ended job of this id or uid; else, unless it has to be `exact`, the job of this unique prefix."""

    def ended(store: Store) -> list[Job]:
        rows = store.ended("job", key=name, limit=1) or store.ended("job", request_id=name, limit=1)
        return [decode_as(Job, row.blob) for row in rows]

    def ended_beginning(store: Store) -> list[Job]:
        return [decode_as(Job, row.blob) for row in store.ended("job", key_prefix=name, limit=5)]

    def begins_so(job: Job) -> bool:
        return job.id.startswith(name) or job.uid.startswith(name)

    found = await grid.query(ended)
    if not found and is_prefix(name) and not exact:
        found = await grid.slices.select(living, begins_so) or await grid.query(ended_beginning)
    return _only_match({job.uid: job for job in found}, name, "job", lambda job: job.id)


async def find_delivery(grid: Grid, job: Job) -> Delivery | None:
    """The delivery of a job's files, on its way or over; the newest of several."""

    def ended(store: Store) -> list[EndedRow]:
        return store.ended(Delivery.kind, key=job.uid, limit=1)

    delivery = await grid.read(lambda ledger, now: ledger.deliveries.get(job.uid))
    if delivery is None and (rows := await grid.query(ended)):
        delivery = decode_as(Delivery, rows[0].blob)
    return delivery


async def find_lease(grid: Grid, name: str, *, exact: bool = False) -> Lease:
    """The lease of this id, alive or ended; else of this unique prefix, living ones before ended ones."""

    def begins_so(lease: Lease) -> bool:
        return lease.id.startswith(name)

    def ended(store: Store, **which: Unpack[EndedFilters]) -> list[Lease]:
        return [
            decode_as(Lease, row.blob) for row in store.ended("lease", limit=5 if "key_prefix" in which else 1, **which)
        ]

    lease = await grid.read(lambda ledger, now: ledger.leases.get(name))
    if lease is not None:
        return lease
    found = await grid.query(lambda store: ended(store, key=name))
    if not found and is_prefix(name) and not exact:
        found = await grid.scan(lambda ledger: ledger.leases.values(), begins_so) or await grid.query(
            lambda store: ended(store, key_prefix=name)
        )
    return _only_match({lease.id: lease for lease in found}, name, "lease", lambda lease: lease.id)


async def find_move(grid: Grid, name: str, *, exact: bool = False) -> Move:
    """The move of this id, over or not; else of this unique prefix, unless it has to be `exact`."""

    def begins_so(move: Move) -> bool:
        return move.id.startswith(name)

    def ended_beginning(store: Store) -> list[Move]:
        return [decode_as(Move, row.blob) for row in store.ended(Move.kind, limit=5, key_prefix=name)]

    move = await grid.read(lambda ledger, now: ledger.moves.get(name)) or await find_ended_move(grid, name)
    if move is not None:
        return move
    found: list[Move] = []
    if is_prefix(name) and not exact:
        found = await grid.scan(lambda ledger: ledger.moves.values(), begins_so) or await grid.query(ended_beginning)
    return _only_match({move.id: move for move in found}, name, "move", lambda move: move.id)


async def find_ended_move(grid: Grid, move_id: str) -> Move | None:
    """The ended move of this id."""
    rows = await grid.query(lambda store: store.ended(Move.kind, limit=1, key=move_id))
    return decode_as(Move, rows[0].blob) if rows else None


def _only_match(found: dict[str, T], name: str, what: str, shown: Callable[[T], str]) -> T:
    if not found:
        raise not_found(what, name)
    if len(found) > 1:
        candidates = sorted(shown(one) for one in found.values())
        raise Ambiguous(f"{name!r} fits several: {', '.join(candidates[:5])}", candidates)
    return next(iter(found.values()))


def held_leases(ledger: Ledger) -> list[tuple[Lease, Job | None]]:
    """The leases that hold something, each with its job."""
    return [(lease, ledger.jobs.get(lease.job)) for node in ledger.leases_on for lease in ledger.leases_of(node)]


async def stream_events(grid: Grid, viewer: Viewer, op: ListEvents) -> AsyncGenerator[EventRecord, None]:
    """The newest events (or those after a number), and with `follow` new ones until the caller ends the stream.

    A follower is woken by events of its types or subject only, and reads what is new since its last look.
    """
    check_event_types(op.types)
    subject = op.subject
    if subject is not None:
        with contextlib.suppress(NotFound):  # else no job: the name is the subject
            subject = (await find_job(grid, subject)).uid
    keys = [event_key(type_=name) for name in op.types] if subject is None else [event_key(subject=subject)]
    woken = asyncio.Event()
    for key in keys or [event_key()]:
        grid.watch(key, woken)
    seen, left, newest, page = op.after or 0, op.limit, op.after is None, EVENTS_PER_PAGE

    def read_page(store: Store) -> list[EventRow]:
        return store.events(after_seq=seen, limit=page, newest=newest, subject=subject, types=op.types)

    try:
        if op.limit > EVENTS_PER_PAGE and op.after is None:
            seen = await grid.query(lambda store: store.begin_of_newest(op.limit, subject=subject, types=op.types))
            newest = False
        while True:
            woken.clear()
            known = grid.last_event_seq
            page = EVENTS_PER_PAGE if op.follow and not newest else min(left, EVENTS_PER_PAGE)
            rows = await grid.query(read_page)
            for number, row in enumerate(rows, 1):
                seen = row.seq
                yield event_record(row, viewer)
                if number % EVENTS_PER_SLICE == 0:
                    await grid.slices.wait()
            left -= len(rows)
            is_last, newest = newest or len(rows) < page, False
            if op.follow and is_last:
                seen = max(seen, known)
                await woken.wait()
            elif not op.follow and (is_last or left <= 0):
                break
    finally:
        for key in keys or [event_key()]:
            grid.unwatch(key, woken)


def check_event_types(types: Iterable[str]) -> None:
    """Refuse a type that no event has."""
    for name in types:
        if name not in RECORD_TYPES:
            near = get_close_matches(name[:80], RECORD_TYPES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(RECORD_TYPES)}"
            raise BadInput(f"no event is of type {name[:80]!r}; {hint}")


def event_record(row: EventRow, viewer: Viewer) -> EventRecord:
    """An event as the reader sees it: about another user's work without the reason, and of the details the ids alone.
    The subject of a consent is a command line."""
    record = msgspec.json.decode(row.blob)
    data: dict[str, Any] = record.get("data") or {}
    job_id, reason, subject = data.get("job_id"), record.get("reason") or None, row.subject
    if not viewer.shows(row.user) and not row.type.startswith(PUBLIC_EVENTS):
        data = {name: data[name] for name in ("job_id", "allocation_id") if name in data}
        reason, subject = None, HIDDEN if row.type == "move-consent" else row.subject
    return EventRecord(
        seq=row.seq,
        time=viewer.time(row.at_ms),
        type=row.type,
        user=row.user or None,
        subject=subject,
        job_id=job_id,
        node_id=row.node or None,
        reason=reason,
        data=data,
    )


class DecisionRecord(Struct, frozen=True):
    """One event of the audit trail, decoded."""

    row: EventRow
    reason: str
    data: dict[str, Any]

    def is_about(self, lease_id: str) -> bool:
        return self.data.get("allocation_id") == lease_id


def decode_record(row: EventRow) -> DecisionRecord:
    record = msgspec.json.decode(row.blob)
    return DecisionRecord(row, record.get("reason", ""), record.get("data") or {})


async def history_of(grid: Grid, subject: str) -> list[DecisionRecord]:
    """Its events, in order."""
    rows = await grid.query(lambda store: store.events(subject=subject, limit=MAX_EVENTS, newest=True))
    return [decode_record(row) for row in rows]


def grants_of(history: Iterable[DecisionRecord], lease_id: str) -> list[DecisionRecord]:
    """Grants of this lease."""
    return [record for record in history if record.row.type == "granted" and record.is_about(lease_id)]


def choice_in(grant: DecisionRecord) -> Choice | None:
    """The choice noted with a grant; None where none was noted."""
    noted = grant.data.get("choice")
    return None if noted is None else msgspec.convert(noted, Choice)


async def decision_on(
    grid: Grid, viewer: Viewer, lease: Lease | None, choice: Choice | None, reasons: Iterable[str], subject: str
) -> DecisionRow:
    """The placement of a request and its reasons, or none yet; an earlier decision is found under its `subject`."""
    if choice is None and lease is not None and lease.state is LeaseState.ASKED:
        waits = lease

        def read(ledger: Ledger, now: int) -> tuple[str, int | None]:
            return str(strategy_of(ledger, waits.request)), estimate_newcomer_start(ledger, waits, now)

        strategy, starts_at_ms = await grid.read(read)
        return DecisionRow.undecided(strategy, reasons, viewer.time(starts_at_ms or 0))
    if choice is None:
        earlier = await history_of(grid, subject)
        grants = grants_of(earlier, lease.gang or lease.id) if lease is not None else []
        last = grants or [record for record in earlier if record.row.type == "granted" and lease is None]
        choice = choice_in(last[-1]) if last else None
    if choice is None:
        ended = [lease.detail] if lease is not None and lease.detail else []
        return DecisionRow.undecided(str(grid.ledger.policy.strategy), [*reasons, *ended], None)
    starts = viewer.time(lease.granted_at_ms) if lease is not None and not lease.awaits else None
    return DecisionRow.of(choice, starts)
