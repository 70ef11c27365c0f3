"""`grid events`: the event stream, which is also the audit trail."""

from __future__ import annotations

import json
from typing import Any

from distributed_grid.cli.command_line import IntRange, Option, command
from distributed_grid.cli.output import echo, format_time, printable
from distributed_grid.cli.session import CliSession


@command(
    Option("-f", "--follow", is_flag=True, help="Go on with what still comes."),
    Option("-l", "--limit", type=IntRange(1, 1_000_000), default=100, show_default=True),
    Option("--subject", help="Only events of this job, or of the lease of this full id."),
    Option("--type", "types", multiple=True, help="Only events of this type; may be given several times."),
    Option("--after", type=IntRange(at_least=0), help="Only events after this number."),
)
def events(
    session: CliSession, follow: bool, limit: int, subject: str | None, types: tuple[str, ...], after: int | None
) -> None:
    """The event stream: every request, grant, refusal, start, stop and release, kept for 30 days.

    With --json, one event a line.
    """
    options: dict[str, Any] = {"follow": follow, "limit": limit, "subject": subject, "types": types, "after": after}
    following = session.follow("list_events", lambda: options, reconnect=follow, query_only=True, may_start=not follow)
    for _, event in following:
        assert isinstance(event, dict)
        if "seq" in event:
            echo(json.dumps(event) if session.json else _line(event))
            options["after"] = event["seq"]


def _line(event: dict[str, Any]) -> str:
    parts = [format_time(event["time"]), event["type"].ljust(10), event["job_id"] or event["subject"][:16]]
    parts += [f"on {event['node_id']}"] if event["node_id"] else []
    parts += [f"by {event['user']}"] if event["user"] else []
    parts += [f"({event['reason']})"] if event["reason"] else []
    return printable("  ".join(parts))
