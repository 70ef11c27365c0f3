"""What `grid offload` shows: proposals, moves and the state of automatic offloading, as tables and lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from distributed_grid.cli.output import (
    bold,
    format_size,
    format_span,
    format_time,
    narrowed,
    printable,
    shorten,
    table,
    terminal_width,
    unique_prefixes,
)

Row = dict[str, Any]
COMMAND_CHARS = 48
WAYS = {
    "start_elsewhere": "start elsewhere",
    "queue_elsewhere": "wait elsewhere",
    "checkpoint_restart": "restart from its checkpoint",
    "restart": "restart",
    "process_restart": "restart of a process",
}
"""What people are shown for each way."""


MAX_CAUSES, CAUSE_CHARS, HEAD_CHARS = 2, 100, 110
MAX_MOVABLE = 20
"""So many that can be moved are shown without `--all`, those that are advised and those that use most."""
MAX_OBSTACLES = 10
"""So many that cannot be moved are shown without `--all`, those that use most."""


def scan_parts(found: Row, node: str, *, everything: bool = False) -> Iterator[str]:
    """A scan in paragraphs: what can be moved, what cannot, and what to type."""
    rows = found["proposals"]
    movable = [row for row in rows if row["movable"]]
    movable.sort(key=lambda row: (row["recommended"], *_weight(row)), reverse=True)
    all_movable, movable = len(movable), movable if everything else movable[:MAX_MOVABLE]
    others = [row for row in rows if not row["movable"]]
    empty = f"nothing on {node} could run elsewhere" if node else "no node is above a mark; name one with -n NODE"
    yield proposals_table(movable, empty=empty if not others else "nothing of it could run elsewhere")
    if movable:
        yield "\n".join(printable(f"{subject_of(row)}: {'; '.join(row['reasons'])}") for row in movable)
    if len(movable) < all_movable:
        yield f"and {all_movable - len(movable)} more that could move; --all shows them"
    if others:
        others.sort(key=_weight, reverse=True)
        shown = others if everything else others[:MAX_OBSTACLES]
        yield "\n".join(obstacle_lines(shown, everything=everything))
        if len(shown) < len(others):
            yield f"and {len(others) - len(shown)} more that cannot be moved; --all shows them"
    for line in found.get("problems") or ():
        yield printable(line)
    if movable:
        yield "\n".join(_next_steps(movable))


def _weight(row: Row) -> tuple[float, float]:
    return row["cpu_cores"], row["memory_gb"]


def subject_of(row: Row) -> str:
    """What `execute` takes: the pid of a process, the id of a job."""
    return str(row["job_id"] if row["pid"] is None else row["pid"])


def proposals_table(rows: Sequence[Row], *, empty: str) -> str:
    """A table of what can be moved, the recommended first."""
    cells = [
        (
            subject_of(row),
            row["node_id"],
            row["process_type"].replace("_", " "),
            f"{row['cpu_cores']:.1f}",
            f"{row['memory_gb']:.1f} GB",
            _way(row) + (", asks for consent" if row["needs_consent"] else ""),
            row["target_node"],
            f"{100 * row['confidence']:.0f} %",
            "yes" if row["recommended"] else "-",
            shorten(row["command"], COMMAND_CHARS),
        )
        for row in rows
    ]
    headings = ("CAN MOVE", "FROM", "TYPE", "CORES", "MEMORY", "WAY", "TO", "SURE", "ADVISED", "COMMAND")
    return table(*narrowed(headings, cells, terminal_width()), empty=empty)


def obstacle_lines(rows: Sequence[Row], *, everything: bool = False) -> Iterator[str]:
    """What cannot be moved, each with its causes below it: the first of them, or every one."""
    yield bold("CANNOT MOVE")
    wide = max(len(subject_of(row)) for row in rows)
    for row in rows:
        kind = row["process_type"].replace("_", " ")
        head = f"{subject_of(row):{wide}}  on {row['node_id']}, {kind}: {row['command']}"
        yield printable(head if everything else shorten(head, HEAD_CHARS))
        causes = row["obstacles"] or ["no way is known"]
        shown = causes if everything else [shorten(cause, CAUSE_CHARS) for cause in causes[:MAX_CAUSES]]
        yield from (f"{'':{wide}}    {printable(cause)}" for cause in shown)
        if len(shown) < len(causes):
            more = len(causes) - len(shown)
            yield f"{'':{wide}}    and {more} more cause{'' if more == 1 else 's'}"


def _next_steps(movable: Sequence[Row]) -> Iterator[str]:
    first = movable[0]
    consent = " --consent" if first["needs_consent"] else ""
    yield printable(f"move it: grid offload execute {subject_of(first)} -n {first['node_id']}{consent}")
    if any(row["way"] in ("restart", "process_restart") for row in movable):
        yield "a restart begins from the beginning: what the work has sent or written by then happens again"


def progress_text(row: Row) -> str:
    """How far a move is, in one line."""
    waits = f", waits for {row['waits_for']}" if row["waits_for"] else ""
    return printable(f"{row['move_id']}: {row['state']}{waits}")


def move_text(row: Row) -> str:
    """What a move has done or does, in one line."""
    what = f"job {row['job_id']}" if row["pid"] is None else f"process {row['pid']}"
    if row["end"] is None and row["state"] == "running":
        there = row["job_id"] or what
        text = f"{what} of {row['source_node']} runs on {row['target_node']}"
        follow = f"; its output: grid jobs logs -f {there}" if row["job_id"] else ""
        return printable(f"{row['move_id']}: {text}{follow}")
    if row["end"] is None:
        waits = f", waits for {row['waits_for']}" if row["waits_for"] else ""
        text = f"{what} leaves {row['source_node']} for {row['target_node']}: {row['state']}{waits}"
        return printable(f"{row['move_id']}: {text}")
    ends = {
        "done": f"{what} was moved from {row['source_node']} to {row['target_node']}",
        "cancelled": f"cancelled, {what} goes on at {row['source_node']}",
        "failed": f"failed, {what} was left as it was",
        "not_needed": f"{what} has ended by itself",
    }
    why = f": {row['problem']}" if row["problem"] else ""
    return printable(f"{row['move_id']}: {ends.get(row['end'], row['end'])}{why}")


def moves_table(rows: Sequence[Row]) -> str:
    """A table of moves."""
    short = unique_prefixes(row["move_id"] for row in rows)
    cells = [
        (
            short[row["move_id"]],
            row["end"] or row["state"],
            row["job_id"] if row["pid"] is None else row["pid"],
            row["source_node"],
            row["target_node"],
            _way(row) + (", by the grid" if row["automatic"] else ""),
            format_time(row["ended_at"] or row["state_since"]),
            row["problem"] or (f"waits for {row['waits_for']}" if row["waits_for"] else row["reason"]),
        )
        for row in rows
    ]
    headings = ("MOVE", "STATE", "WHAT", "FROM", "TO", "WAY", "SINCE", "DETAIL")
    return table(*narrowed(headings, cells, terminal_width()), empty="no moves")


def move_lines(row: Row) -> list[str]:
    """Everything about a move, line by line."""
    frozen = row["frozen_seconds"]
    shown = [
        ("move", row["move_id"]),
        ("state", row["state"]),
        ("waits for", row["waits_for"]),
        ("end", row["end"]),
        ("problem", row["problem"]),
        ("process", row["pid"]),
        ("job", row["job_id"] if row["pid"] is None or _has_job(row) else None),
        ("command", row["command"]),
        ("from", row["source_node"]),
        ("to", row["target_node"]),
        ("way", _way(row)),
        ("because", row["reason"]),
        ("asked", f"{format_time(row['requested_at'])} by {'the grid' if row['automatic'] else row['user']}"),
        ("since", format_time(row["state_since"])),
        ("shipped", format_size(row["shipped_bytes"]) if row["shipped_bytes"] else None),
        ("stood still", f"{frozen:.2f} s" if frozen is not None else None),
        ("result", row["result"]),
        ("files back", row["returned_files"] or None),
        ("ended", format_time(row["ended_at"])),
    ]
    lines = [f"{name + ':':14}{printable(value)}" for name, value in shown if value not in (None, "", "-")]
    lines += [printable(f"not shipped: {file}") for file in row["left_out_files"]]
    lines += [printable(f"not replaced, changed at {row['source_node']} since: {path}") for path in row["kept_files"]]
    lines += [printable(note) for note in row["notes"]]
    return lines


def cancel_text(row: Row) -> str:
    """What cancelling a move has done, in one line."""
    if row["end"] is not None:
        return move_text(row)
    return printable(
        f"{row['move_id']}: is being cancelled" + (f", waits for {row['waits_for']}" if row["waits_for"] else "")
    )


def auto_lines(found: Row) -> list[str]:
    """How automatic offloading stands, line by line."""
    configured = "on" if found["configured"] else "off"
    by = f"set by {found['set_by']} at {format_time(found['set_at'])}; the config says {configured}"
    lines = [
        f"automatic offloading is {'on' if found['enabled'] else 'off'}, "
        + (by if found["set_by"] else "as the config says")
    ]
    if found["stopped"]:
        hint = "; go on with grid offload auto --enable" if found["failures"] else ""
        lines.append(f"it has stopped: {found['stopped']}{hint}")
    marks = ", ".join(f"{name} {100 * mark:.0f} %" for name, mark in found["thresholds"].items())
    lines.append(f"relieves nodes above: {marks}")
    lines.append(
        f"looks every {format_span(found['check_interval_seconds'])}, "
        f"rests {format_span(found['cooldown_seconds'])} after a move"
    )
    if found["failures"]:
        lines.append(f"failed moves in a row: {found['failures']}")
    if found["last_move_at"]:
        lines.append(f"last move: {format_time(found['last_move_at'])}")
    lines += [f"{node} is degraded: {why}" for node, why in found["degraded"].items()]
    for look in found["nodes"]:
        if look["node_id"] not in found["degraded"]:
            lines.append(f"{look['node_id']} at {format_time(look['at'])}: {look['reason']}")
        lines += [f"  {job['job_id']}: {job['reason']}" for job in look["jobs"]]
    return [printable(line) for line in lines]


def _has_job(row: Row) -> bool:
    """Whether the job that takes the place of a process exists by now."""
    return row["state"] in ("dead", "running") or row["end"] == "done"


def _way(row: Row) -> str:
    return WAYS.get(row["way"], str(row["way"]))
