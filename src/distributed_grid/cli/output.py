"""Showing: tables, units and times for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from distributed_grid.api.framing import STDOUT
from distributed_grid.cli.global_options import CliSession, on_a_terminal


def answer(session: CliSession, data: Any, text: str) -> None:
    """Print the data as JSON where asked for, else the text."""
    click.echo(json.dumps(data, indent=2) if session.json else text)


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> str:
    """Columns as wide as needed; one plain line where there are no rows."""
    if not rows:
        return empty
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headings), *cells]) for i in range(len(headings))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    head = "  ".join(word.ljust(width) for word, width in zip(headings, widths, strict=True)).rstrip()
    return "\n".join([bold(head), *lines])


def bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if on_a_terminal() else text


def clean(value: object) -> str:
    """A value as one safe line: control characters from outside never reach the terminal."""
    if value is None or value == "":
        return "-"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def amount(kind: str, value: float) -> str:
    """An amount with its unit."""
    units = {"cpu": "core" if value == 1 else "cores", "memory": "GB", "gpu": "GPU" if value == 1 else "GPUs"}
    return f"{value:g} {units.get(kind, kind)}"


def clock(moment: str | None) -> str:
    """A time of today as hours, another day's with its date."""
    if moment is None:
        return "-"
    from datetime import datetime

    when = datetime.fromisoformat(moment).astimezone()
    today = datetime.now(when.tzinfo).date() == when.date()
    return when.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M")


def write_output(kind: bytes, chunk: bytes) -> None:
    """Pass a job's bytes on as they are, at once."""
    stream = sys.stdout.buffer if kind == STDOUT else sys.stderr.buffer
    stream.write(chunk)
    stream.flush()


def outcome(job: dict[str, Any]) -> str:
    """How a job ended, in a few words."""
    if job["outcome"] is None:
        return "-"
    if job["outcome"] == "exited":
        return f"exit {job['exit_code']}"
    if job["outcome"] == "signalled":
        return f"signal {job['signal']}"
    return str(job["outcome"]).replace("_", " ")
