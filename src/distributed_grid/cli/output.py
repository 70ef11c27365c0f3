"""Output of commands: tables, amounts, sizes and times for people, JSON for programs. GB is 1024³ bytes."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

from distributed_grid.api.framing import STDOUT
from distributed_grid.api.id_prefixes import generated_part
from distributed_grid.cli.session import CliSession, is_terminal
from distributed_grid.cli.standard_streams import print_message
from distributed_grid.client.conversation import present
from distributed_grid.errors import BadInput
from distributed_grid.number_text import GIB, counted, plain_number, size_text

if TYPE_CHECKING:
    from distributed_grid.api.answers.cluster import ClusterNodeRow
    from distributed_grid.api.answers.explanation import PlacementRow
    from distributed_grid.api.answers.jobs import JobRow, OutcomeRow, SizingRow
    from distributed_grid.api.answers.nodes import NodeRow, UnusedBorrowing

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
MIN_SHOWN_CHARS = 8  # shown characters of an id, besides the prefix of its kind
MAX_DETACHED_SHOWN = 5
COMMAND_CHARS = 60  # length of a command in a table that is not shown on a terminal
MIN_LAST_CHARS = 12  # of the last column of a table on a narrow terminal
COUNTED = {"cpu": "core", "gpu": "GPU"}
MIN_GB = 0.01  # less memory than this is shown in a smaller unit
_RANDOM = re.compile(r"[0-9a-f]{12,}([.:]\d+)?")
"""An id that was drawn at random, perhaps of one run of a job or one copy of a block."""


def print_answer(session: CliSession, data: Any, text: str) -> None:
    echo(json.dumps(data, indent=2) if session.json else text)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text at once. A message on stderr that cannot be written is dropped."""
    end = "\n" if nl else ""
    if err:
        print_message(text, end)
    else:
        print(text, end=end, flush=True)


def confirm(question: str) -> bool:
    """Ask the person at the terminal; anything but yes is no, the end of the input and a closed terminal included."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, OSError):
        echo("")
        return False


def note(text: str) -> None:
    echo(f"grid: {text}", err=True)


def named_in_part(names: Sequence[str], count: int) -> list[str]:
    """The first `count` names; the last word gives the number of the others."""
    return [*names[:count], *([f"and {len(names) - count:,} more"] if len(names) > count else [])]


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> str:
    """Columns as wide as needed; one plain line where there are no rows."""
    if not rows:
        return empty
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headings), *cells]) for i in range(len(headings))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    head = "  ".join(word.ljust(width) for word, width in zip(headings, widths, strict=True)).rstrip()
    return "\n".join([bold(head), *lines])


def terminal_width() -> int:
    """Width of the terminal on stdout; 0 if there is none or it is unknown, for unlimited output."""
    return _columns_of(1) if sys.stdout.isatty() else 0


def _columns_of(descriptor: int) -> int:
    """The width of a terminal at this moment, else $COLUMNS, else 0."""
    try:
        columns = os.get_terminal_size(descriptor).columns
    except OSError:
        columns = 0
    given = os.environ.get("COLUMNS", "")
    return columns or (int(given) if given.isdecimal() else 0)


def narrowed(
    headings: Sequence[str], rows: Sequence[Sequence[object]], width: int
) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """The table within `width` columns if possible: without empty columns, the last column cut."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if not width or _total_width(headings, cells) <= width:
        return headings, rows
    kept = [i for i in range(len(headings)) if any(row[i] != "-" for row in cells)]
    headings, cells = [headings[i] for i in kept], [[row[i] for i in kept] for row in cells]
    too_much = _total_width(headings, cells) - width
    if too_much > 0:
        longest = max(len(row[-1]) for row in cells)
        room = max(longest - too_much, len(headings[-1]), MIN_LAST_CHARS)
        cells = [[*row[:-1], shorten(row[-1], room)] for row in cells]
    return headings, cells


def _total_width(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    widths = [max(len(line[i]) for line in [headings, *cells]) for i in range(len(headings))]
    return sum(widths) + 2 * (len(widths) - 1)


def bold(text: str) -> str:
    return f"{BOLD}{text}{PLAIN}" if is_terminal() else text


def printable(value: object) -> str:
    """A value as one safe line: control characters from outside never reach the terminal."""
    if value is None or value == "":
        return "-"
    text = plain_number(value) if isinstance(value, float) else str(value)
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def shorten(text: str, length: int) -> str:
    """The text cut to `length` characters, with a sign where it was cut."""
    return text if len(text) <= length else text[: length - 1] + "…"


def format_amount(kind: str, value: float) -> str:
    """An amount with its unit; a command of `boost run` asks for nothing of its own."""
    if not value:
        return "-"
    if kind == "memory":
        return f"{plain_number(round(value, 2))} GB" if value >= MIN_GB else size_text(round(value * GIB))
    if kind in COUNTED:
        return counted(value, COUNTED[kind])
    return f"{plain_number(value)} {kind}"


def format_sizing(sizing: SizingRow) -> str:
    """Which memory limit the grid gave a job, and why."""
    runs = f"{sizing.samples} earlier run{'' if sizing.samples == 1 else 's'}"
    how = f"{sizing.tier}, confidence {sizing.confidence:.2f}"
    again = f"; {sizing.overruns} of its runs went over" if sizing.overruns else ""
    learned = sizing.reduced_from_gb
    less = f"; {format_amount('memory', learned)} were not free within a minute" if learned is not None else ""
    grows = "; it grows with the job" if sizing.may_outgrow else ""
    size = format_amount("memory", sizing.memory_gb)
    return f"sized by the grid: {size} from {runs} ({how}){less}{grows}{again}"


def format_unused_borrowing(row: UnusedBorrowing) -> str:
    """A resource that an automatic lease held for a node until it went back unused."""
    kind, amount = row.resource_type, row.amount
    size = size_text(round(amount * GIB)) if kind == "memory" else format_amount(kind, amount)
    unused = format_span(row.unused_seconds)
    return f"borrowed {size}, unused for {unused}, given back; asked again when work waits"


FREE_AND_LENT = ("CORES FREE+LENT", "MEMORY FREE+LENT", "GPUS FREE+LENT")


def free_and_lent(node: NodeRow) -> tuple[str, ...]:
    """The cells of a node under `FREE_AND_LENT`."""
    return (
        f"{plain_number(node.cpu_free)} + {plain_number(node.cpu_lent)}",
        f"{node.memory_free_gb:.1f} + {node.memory_lent_gb:.1f} GB",
        f"{plain_number(node.gpus_free)} + {plain_number(node.gpus_lent)}" if node.gpus else "-",
    )


def node_state(node: NodeRow | ClusterNodeRow) -> str:
    if node.cooling:
        return "cooling down"
    return "stopped" if present(node.stopped) else node.state or "-"


def format_time(moment: str | None) -> str:
    """A time of today as hours, another day's with its date."""
    if moment is None:
        return "-"
    from datetime import datetime

    when = datetime.fromisoformat(moment).astimezone()
    today = datetime.now(when.tzinfo).date() == when.date()
    return when.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M")


def unique_prefixes(ids: Iterable[str]) -> dict[str, str]:
    """Each id with its shortest unique prefix, which a user can type in its place.

    Readable names are not shortened.
    """
    ordered = sorted(set(ids))
    lengths = []
    for name in ordered:
        part = generated_part(name)
        is_random = _RANDOM.fullmatch(name.removeprefix(part)) is not None
        lengths.append(MIN_SHOWN_CHARS + len(part) if is_random else len(name))
    for place, pair in enumerate(pairwise(ordered)):
        needed = sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], zip(*pair, strict=False))) + 1
        lengths[place], lengths[place + 1] = max(lengths[place], needed), max(lengths[place + 1], needed)
    return {name: name[:length] for name, length in zip(ordered, lengths, strict=True)}


def write_output(kind: bytes, chunk: bytes) -> None:
    """Pass a job's bytes on as they are, at once."""
    stream = sys.stdout.buffer if kind == STDOUT else sys.stderr.buffer
    stream.write(chunk)
    stream.flush()


def follow_command(job: JobRow) -> str:
    return f"grid jobs logs {'' if job.state == 'ended' else '-f '}{job.job_id}"


def detached_lines(jobs: Sequence[JobRow]) -> list[str]:
    """Running jobs whose followers have ended, and the commands to follow them again."""
    left = [job for job in jobs if job.detached_at and job.state != "ended"]
    lines = [
        f"{job.job_id} was detached at {format_time(job.detached_at)}: {follow_command(job)}"
        for job in left[-MAX_DETACHED_SHOWN:]
    ]
    return [*map(printable, lines), *([f"and {len(left) - len(lines)} more"] if len(left) > len(lines) else [])]


def format_outcome(end: OutcomeRow | PlacementRow) -> str:
    if end.outcome is None:
        return "-"
    if end.outcome == "exited":
        return f"exit {end.exit_code}"
    if end.outcome == "signalled":
        return f"signal {end.signal}"
    return str(end.outcome).replace("_", " ")


DRAW_SECONDS = 0.2
USUAL_COLUMNS = 80
BAR_WIDTH = 30
UNITS = ("", "K", "M", "G", "T", "P")
MAX_BLOCK_BYTES = 1 << 46
_SPANS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def parse_size(text: str) -> int:
    """Bytes of a size such as `5GB`, `1.5GiB` or `4096`; raises BadInput."""
    from distributed_grid.quantities import bytes_of  # few commands have a size

    size = bytes_of(text, unit=1)
    if math.isnan(size):
        raise BadInput(f"a size is written as 4096, 512MB or 1.5GB, not {text!r}")
    if not size.is_integer() and text.strip()[-1].isdigit():
        raise BadInput(f"{text!r} is no whole number of bytes")
    if not 1 <= size <= MAX_BLOCK_BYTES:
        raise BadInput(f"a block has 1 byte to {format_size(MAX_BLOCK_BYTES)}, not {text}")
    return round(size)


def format_size(size: int) -> str:
    """A size in the largest unit of which there is one: `1.5 GB`."""
    if size < 1024:
        return f"{size} byte{'' if size == 1 else 's'}"
    power = min(int(math.log2(size)) // 10, len(UNITS) - 1)
    return f"{size / 1024**power:.4g} {UNITS[power]}B"


def format_span(seconds: float, digits: str = ".0f", *, least: int = 2) -> str:
    """A duration in the largest unit of which there are at least `least`: `55 min`."""
    for length, unit in _SPANS:
        if seconds >= least * length:
            return f"{seconds / length:{digits}} {unit}"
    return f"{max(seconds, 0):{digits}} s"


def parse_seconds(text: str | float) -> float:
    """More than no seconds; BadInput for anything else."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadInput(f"a time is a number of seconds above zero, not {text!r}")
    return seconds


def display_width(text: str) -> int:
    """How many columns of a terminal a text takes: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    import unicodedata

    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.category(letter) in ("Mn", "Me", "Cf") for letter in text)


def cut_to_width(text: str, columns: int) -> str:
    """The text cut to this number of columns, with a sign where it was cut."""
    if display_width(text) <= columns:
        return text
    kept, room = "", columns - 1
    for letter in text:
        room -= display_width(letter)
        if room < 0:
            break
        kept += letter
    return kept + "…" if columns > 0 else ""


class ProgressLine:
    """A line on stderr that is redrawn while a person waits; nothing is written where stderr is no terminal.

    It is cut to one column less than the terminal has, because a line that wraps cannot be redrawn.
    """

    def __init__(self) -> None:
        self.is_shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn_at = time.monotonic()
        self._drawn = False

    def draw(self, text: Callable[[], str]) -> None:
        """Redraw the line, unless it was drawn a moment ago."""
        now = time.monotonic()
        if self.is_shown and now - self._drawn_at >= DRAW_SECONDS:
            self._drawn_at, self._drawn = now, True
            echo(f"\r\x1b[K{cut_to_width(text(), (_columns_of(2) or USUAL_COLUMNS) - 1)}", err=True, nl=False)

    def clear(self) -> None:
        if self._drawn:
            echo("\r\x1b[K", err=True, nl=False)
            self._drawn = False


def progress_bar(done: int, total: int) -> str:
    full = BAR_WIDTH * done // max(total, 1)
    return f"[{'#' * full}{'.' * (BAR_WIDTH - full)}]"
