"""`grid ledger` and `grid events`: the lending report by lender, borrower and day; the audit trail."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from distributed_grid.cli.command_line import IntRange, Option, WordChoice, command
from distributed_grid.cli.output import echo, format_amount, format_time, note, print_answer, printable, table
from distributed_grid.cli.session import CliSession
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import JsonObject
from distributed_grid.errors import BadInput
from distributed_grid.quantities import seconds_of

if TYPE_CHECKING:
    from distributed_grid.api.answers.reports import EventRecord, LendingRow, LentTotals

NAMES = {"node_id": "LENDER", "user": "BORROWER", "target_node": "FOR", "day": "DAY"}
SHOWN_EVENTS = 100
PAGE_EVENTS = 1000
TYPE_WIDTH = 14  # longer types of events are rare
AMOUNTS = ("LEASES", "CORE HOURS", "GB HOURS", "GPU HOURS", "HELD NOW")


@command(
    Option("--since", default="30d", show_default=True, help="How far back: 90min, 12h, 7d, 4w."),
    Option("--by", type=WordChoice(["user", "node", "day"]), help="Summed up by borrower, lender or day alone."),
)
def ledger(session: CliSession, since: str, by: Literal["user", "node", "day"] | None) -> None:
    """Lent amounts: each lender and borrower, with the hours of cores, memory and GPUs.

    A lease counts from its grant to its end, with the requested amounts. Leases that ended more than 30 days ago are
    kept as sums by day, and count on the day of their end.
    """
    report = session.query.get_lending_report(since_seconds=seconds(since), by=by or "")
    rows, began = report.rows, f"since {format_time(report.since)}"
    keys = [key for key in NAMES if any(getattr(row, key) for row in rows)]
    lines = [(*(getattr(row, key) for key in keys), *_amounts(row)) for row in rows]
    if len(rows) > 1:
        lines.append((*("all" if at == 0 else "" for at in range(len(keys))), *_amounts(report.total)))
    headings = (*(NAMES[key] for key in keys), *AMOUNTS)
    parts = [_table(headings, lines, left=len(keys)) if rows else f"nothing was lent {began}"]
    if rows and report.by is None:
        parts += [_totals("LENDER", "node_id", report.lenders), _totals("BORROWER", "user", report.borrowers)]
    print_answer(session, report, "\n\n".join([*(part for part in parts if part), *([began] if rows else [])]))


def seconds(word: str) -> float:
    """The time that a word such as 7d means."""
    length = seconds_of(word)
    if not length > 0:
        raise BadInput(f"--since needs a time such as 90min, 12h, 7d or 4w, not {word!r}")
    return length


def _totals(heading: str, key: str, rows: Sequence[LendingRow]) -> str:
    if len(rows) < 2:
        return ""
    return _table((heading, *AMOUNTS), [(getattr(row, key), *_amounts(row)) for row in rows], left=1)


def _amounts(row: LentTotals) -> tuple[str, ...]:
    """The cells of a row under `AMOUNTS`."""
    hours = [getattr(row, name) for name in ("core_hours", "gb_hours", "gpu_hours")]
    shown = ("-" if not each else f"{each:,.2f}" if each >= 0.01 else "<0.01" for each in hours)
    kinds = (("held_cores", "cpu"), ("held_gb", "memory"), ("held_gpus", "gpu"))
    parts = [format_amount(kind, getattr(row, name)) for name, kind in kinds if getattr(row, name)]
    count = row.held_leases
    held = f"{count:,} lease{'' if count == 1 else 's'}: {', '.join(parts) or 'others'}" if count else "-"
    return (f"{row.leases:,}", *shown, held)


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, left: int) -> str:
    """A table whose numbers are flush right; the last column is text again."""
    numbers = range(left, len(headings) - 1)
    wide = {at: max(len(str(row[at])) for row in [headings, *rows]) for at in numbers}
    flush = [[str(cell).rjust(wide[at]) if at in wide else cell for at, cell in enumerate(row)] for row in rows]
    head = [word.rjust(wide[at]) if at in wide else word for at, word in enumerate(headings)]
    return table(head, flush, empty="")


@command(
    Option("-f", "--follow", is_flag=True, help="Continue with new events."),
    Option(
        "-l",
        "--limit",
        type=IntRange(1, 1_000_000),
        help=f"How many (default: the newest {SHOWN_EVENTS} on a terminal and with --follow, else all).",
    ),
    Option("-a", "--all", "all_", is_flag=True, help="All that are kept, on a terminal, too."),
    Option("--subject", help="Only events of this job, or of the lease of this full id."),
    Option("--type", "types", multiple=True, help="Only events of this type; may be given several times."),
    Option("--after", type=IntRange(at_least=0), help="Only events after this number."),
)
def events(
    session: CliSession,
    follow: bool,
    limit: int | None,
    all_: bool,
    subject: str | None,
    types: tuple[str, ...],
    after: int | None,
) -> None:
    """The event stream: every request, grant, refusal, start, stop and release, kept for 30 days.

    With --json, one event a line.
    """
    if all_ and limit is not None:
        raise BadInput("give --all or --limit, not both")
    filters: dict[str, Any] = {"subject": subject, "types": types}
    shows_part = limit is None and not all_ and (follow or (sys.stdout.isatty() and not session.json))
    if follow:
        if all_:
            after = after or 0
        elif shows_part and after is None:
            after = _show_part(session, filters, None, may_start=False)
        options = {"limit": limit or PAGE_EVENTS, "after": after, **filters}
        # It continues with the events of the next control plane.
        following = session.follow(
            lambda client: client.list_events(**options, follow=True), query_only=True, may_start=False
        )
        for _, event in following:
            if isinstance(event, JsonObject) and event.seq is not None:
                _show_events(session, [cast("EventRecord", event)])
                options["after"] = event.seq
    elif shows_part:
        _show_part(session, filters, after)
    else:
        with session.client(query_only=True) as client:
            if limit is not None:
                _show_events(session, _page(client, limit=limit, after=after, **filters))
                return
            after = after or 0
            while True:
                page = _page(client, limit=PAGE_EVENTS, after=after, **filters)
                _show_events(session, page)
                if len(page) < PAGE_EVENTS:
                    return
                after = page[-1].seq


def _show_part(session: CliSession, filters: dict[str, Any], after: int | None, *, may_start: bool = True) -> int:
    """Show `SHOWN_EVENTS` events, and say so where there are more; returns the number of the last one."""
    with session.client(query_only=True, may_start=may_start) as client:
        events = _page(client, limit=SHOWN_EVENTS + 1, after=after, **filters)
    is_cut = len(events) > SHOWN_EVENTS
    shown = events[:SHOWN_EVENTS] if after is not None else events[-SHOWN_EVENTS:]
    _show_events(session, shown)
    if is_cut and after is not None:
        note(f"there are more events: --after {shown[-1].seq} continues, --all shows all")
    elif is_cut:
        note(f"only the newest {SHOWN_EVENTS} events are shown: --limit N shows more of them, --all all")
    return shown[-1].seq if shown else after or 0


def _page(client: Client, **options: Any) -> list[EventRecord]:
    parts = [part for _, part in client.list_events(**options)]
    return [cast("EventRecord", part) for part in parts if isinstance(part, JsonObject) and part.seq is not None]


def _show_events(session: CliSession, events: Iterable[EventRecord]) -> None:
    for event in events:
        if session.json:
            echo(json.dumps(event))
            continue
        user, reason = event.user, event.reason
        parts = [format_time(event.time), event.type.ljust(TYPE_WIDTH), event.job_id or event.subject]
        parts += [event.data.get("state", "")] if event.type == "move-advanced" else []
        parts += [f"on {event.node_id}"] if event.node_id else []
        parts += [f"by {user}"] if user else []
        parts += [f"({reason})"] if reason not in (None, "", event.type, f"by {user}") else []
        echo(printable("  ".join(parts)))
