"""Output of `grid offload`: proposals, moves and automatic offloading as tables and lines, and the live view."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from distributed_grid.cli.output import (
    BOLD,
    PLAIN,
    bold,
    cut_to_width,
    echo,
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
from distributed_grid.cli.session import CliSession
from distributed_grid.cli.signals import handled_signals, raise_keyboard_interrupt
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import required

if TYPE_CHECKING:
    from distributed_grid.api.answers.offloading import AutoOffloadView, MoveRow, ProposalList, ProposalRow
    from distributed_grid.api.answers.reports import GridStatus

COMMAND_CHARS = 48
WAYS = {
    "start_elsewhere": "start elsewhere",
    "queue_elsewhere": "wait elsewhere",
    "checkpoint_restart": "restart from its checkpoint",
    "restart": "restart",
    "process_restart": "restart of a process",
}

MAX_CAUSES, CAUSE_CHARS, HEAD_CHARS = 2, 100, 110
MAX_MOVABLE = 20  # limit of movable work that is shown without `--all`: the advised ones and those that use most
MAX_OBSTACLES = 10  # limit of unmovable work that is shown without `--all`: those that use most


def scan_parts(scan: ProposalList, node: str, *, everything: bool = False) -> Iterator[str]:
    """A scan in paragraphs: movable work, unmovable work, and the commands to type."""
    rows = scan.proposals
    movable = [row for row in rows if row.movable]
    movable.sort(key=lambda row: (row.recommended, *_weight(row)), reverse=True)
    all_movable, movable = len(movable), movable if everything else movable[:MAX_MOVABLE]
    others = [row for row in rows if not row.movable]
    empty = f"nothing on {node} could run elsewhere" if node else "no node is above a mark; name one with -n NODE"
    yield proposals_table(movable, empty=empty if not others else "nothing of it could run elsewhere")
    if movable:
        yield "\n".join(printable(f"{subject_of(row)}: {'; '.join(row.reasons)}") for row in movable)
    if len(movable) < all_movable:
        yield f"and {all_movable - len(movable)} more that could move; --all shows them"
    if others:
        others.sort(key=_weight, reverse=True)
        shown = others if everything else others[:MAX_OBSTACLES]
        yield "\n".join(obstacle_lines(shown, everything=everything))
        if len(shown) < len(others):
            yield f"and {len(others) - len(shown)} more that cannot be moved; --all shows them"
    for line in scan.problems or ():
        yield printable(line)
    if movable:
        first = movable[0]
        consent = " --consent" if first.needs_consent else ""
        steps = [printable(f"move it: grid offload execute {subject_of(first)} -n {first.node_id}{consent}")]
        if any(row.way in ("restart", "process_restart") for row in movable):
            steps.append("a restart begins from the beginning: what the work has sent or written by then happens again")
        yield "\n".join(steps)


def _weight(row: ProposalRow) -> tuple[float, float]:
    return row.cpu_cores, row.memory_gb


def subject_of(row: ProposalRow | MoveRow) -> str:
    """The argument of `execute`: the pid of a process, the id of a job."""
    return str(row.job_id if row.pid is None else row.pid)


def proposals_table(rows: Sequence[ProposalRow], *, empty: str) -> str:
    cells = [
        (
            subject_of(row),
            row.node_id,
            row.process_type.replace("_", " "),
            f"{row.cpu_cores:.1f}",
            f"{row.memory_gb:.1f} GB",
            _way(row) + (", asks for consent" if row.needs_consent else ""),
            row.target_node,
            f"{100 * row.confidence:.0f} %",
            "yes" if row.recommended else "-",
            shorten(row.command, COMMAND_CHARS),
        )
        for row in rows
    ]
    headings = ("CAN MOVE", "FROM", "TYPE", "CORES", "MEMORY", "WAY", "TO", "SURE", "ADVISED", "COMMAND")
    return table(*narrowed(headings, cells, terminal_width()), empty=empty)


def obstacle_lines(rows: Sequence[ProposalRow], *, everything: bool = False) -> Iterator[str]:
    """Unmovable work, each with its causes below it: the first of them, or every one."""
    yield bold("CANNOT MOVE")
    wide = max(len(subject_of(row)) for row in rows)
    for row in rows:
        kind = row.process_type.replace("_", " ")
        head = f"{subject_of(row):{wide}}  on {row.node_id}, {kind}: {row.command}"
        yield printable(head if everything else shorten(head, HEAD_CHARS))
        causes = row.obstacles or ["no way is known"]
        shown = causes if everything else [shorten(cause, CAUSE_CHARS) for cause in causes[:MAX_CAUSES]]
        yield from (f"{'':{wide}}    {printable(cause)}" for cause in shown)
        if len(shown) < len(causes):
            more = len(causes) - len(shown)
            yield f"{'':{wide}}    and {more} more cause{'' if more == 1 else 's'}"


def progress_text(row: MoveRow) -> str:
    waits = f", waits for {row.waits_for}" if row.waits_for else ""
    return printable(f"{row.move_id}: {row.state}{waits}")


def move_text(row: MoveRow) -> str:
    what = f"job {row.job_id}" if row.pid is None else f"process {row.pid}"
    if row.end is None and row.state == "running":
        there = row.job_id or what
        text = f"{what} of {row.source_node} runs on {row.target_node}"
        follow = f"; its output: grid jobs logs -f {there}" if row.job_id else ""
        return printable(f"{row.move_id}: {text}{follow}")
    if row.end is None:
        waits = f", waits for {row.waits_for}" if row.waits_for else ""
        text = f"{what} leaves {row.source_node} for {row.target_node}: {row.state}{waits}"
        return printable(f"{row.move_id}: {text}")
    ends = {
        "done": f"{what} was moved from {row.source_node} to {row.target_node}",
        "cancelled": f"cancelled, {what} goes on at {row.source_node}",
        "failed": f"failed, {what} was left as it was",
        "not_needed": f"{what} has ended by itself",
    }
    reason = f": {row.problem}" if row.problem else ""
    return printable(f"{row.move_id}: {ends.get(row.end, row.end)}{reason}")


def moves_table(rows: Sequence[MoveRow]) -> str:
    short = unique_prefixes(row.move_id for row in rows)
    cells = [
        (
            short[row.move_id],
            row.end or row.state,
            row.job_id if row.pid is None else row.pid,
            row.source_node,
            row.target_node,
            _way(row) + (", by the grid" if row.automatic else ""),
            format_time(row.ended_at or row.state_since),
            row.problem or (f"waits for {row.waits_for}" if row.waits_for else row.reason),
        )
        for row in rows
    ]
    headings = ("MOVE", "STATE", "WHAT", "FROM", "TO", "WAY", "SINCE", "DETAIL")
    return table(*narrowed(headings, cells, terminal_width()), empty="no moves")


def move_lines(row: MoveRow) -> list[str]:
    frozen = row.frozen_seconds
    has_job = row.pid is None or row.state in ("dead", "running") or row.end == "done"
    shown = [
        ("move", row.move_id),
        ("state", row.state),
        ("waits for", row.waits_for),
        ("end", row.end),
        ("problem", row.problem),
        ("process", row.pid),
        ("job", row.job_id if has_job else None),
        ("command", row.command),
        ("from", row.source_node),
        ("to", row.target_node),
        ("way", _way(row)),
        ("because", row.reason),
        ("asked", f"{format_time(row.requested_at)} by {'the grid' if row.automatic else row.user}"),
        ("since", format_time(row.state_since)),
        ("shipped", format_size(row.shipped_bytes) if row.shipped_bytes else None),
        ("stood still", f"{frozen:.2f} s" if frozen is not None else None),
        ("result", row.result),
        ("files back", row.returned_files or None),
        ("ended", format_time(row.ended_at)),
    ]
    lines = [f"{name + ':':14}{printable(value)}" for name, value in shown if value not in (None, "", "-")]
    lines += [printable(f"not shipped: {file}") for file in row.left_out_files]
    lines += [printable(f"not replaced, changed at {row.source_node} since: {path}") for path in row.kept_files]
    lines += [printable(note) for note in row.notes]
    return lines


def cancel_text(row: MoveRow) -> str:
    if row.end is not None:
        return move_text(row)
    return printable(f"{row.move_id}: is being cancelled" + (f", waits for {row.waits_for}" if row.waits_for else ""))


def auto_lines(state: AutoOffloadView) -> list[str]:
    configured = "on" if state.configured else "off"
    by = f"set by {state.set_by} at {format_time(state.set_at)}; the config says {configured}"
    lines = [
        f"automatic offloading is {'on' if state.enabled else 'off'}, " + (by if state.set_by else "as the config says")
    ]
    if state.stopped:
        hint = "; go on with grid offload auto --enable" if state.failures else ""
        lines.append(f"it has stopped: {state.stopped}{hint}")
    marks = ", ".join(f"{name} {100 * mark:.0f} %" for name, mark in state.thresholds.items())
    lines.append(f"relieves nodes above: {marks}")
    lines.append(
        f"looks every {format_span(state.check_interval_seconds)}, "
        f"rests {format_span(state.cooldown_seconds)} after a move"
    )
    if state.failures:
        lines.append(f"failed moves in a row: {state.failures}")
    if state.last_move_at:
        lines.append(f"last move: {format_time(state.last_move_at)}")
    lines += [f"{node} is degraded: {why}" for node, why in state.degraded.items()]
    for look in state.nodes:
        if look.node_id not in state.degraded:
            lines.append(f"{look.node_id} at {format_time(look.at)}: {look.reason}")
        lines += [f"  {job.job_id}: {job.reason}" for job in look.jobs]
    return [printable(line) for line in lines]


def _way(row: MoveRow | ProposalRow) -> str:
    return WAYS.get(row.way or "", str(row.way))


MAX_ENDED = 5  # limit of moves in the live view that have ended meanwhile
SCAN_SECONDS = 10.0  # a scan reads every process of the nodes, so it is not made more often
ALTERNATE_SCREEN, MAIN_SCREEN, HOME, CLEAR_REST = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H", "\x1b[J"


class OffloadPicture:
    def __init__(
        self,
        status: GridStatus,
        levels: dict[str, dict[str, float]],
        auto: AutoOffloadView,
        proposals: list[ProposalRow],
        moves: list[MoveRow],
    ) -> None:
        self.nodes = status.nodes
        self.levels = levels
        self.auto = auto
        self.proposals = [row for row in proposals if row.movable]
        self.moves = moves

    def as_json(self) -> dict[str, Any]:
        nodes = [
            {"node_id": node.node_id, "pressure": node.pressure, **self.levels.get(node.node_id, {})}
            for node in self.nodes
        ]
        return {"nodes": nodes, "auto_offload": self.auto, "proposals": self.proposals, "moves": self.moves}

    def facts(self) -> dict[str, str]:
        """Facts that get a line when they change, by subject: a degraded node is one, its pressure is not."""
        facts = {"auto": f"automatic offloading is {'on' if self.auto.enabled else 'off'}"}
        if self.auto.stopped:
            facts["auto"] += f", it has stopped: {self.auto.stopped}"
        facts |= {f"node {node}": f"{node} is degraded: {why}" for node, why in self.auto.degraded.items()}
        for row in self.proposals:
            where = f"{row.target_node}, {100 * row.confidence:.0f} % sure" if row.target_node else "nowhere"
            text = f"{subject_of(row)} on {row.node_id} could run on {where}: {row.command}"
            facts[f"proposal {row.node_id} {subject_of(row)}"] = text if row.recommended else f"{text} (no advice)"
        return facts | {f"move {row.move_id}": move_text(row) for row in self.moves}

    def screen(self) -> Iterator[str]:
        rows = []
        for node in self.nodes:
            name, used = node.node_id, self.levels.get(node.node_id, {})
            cells = (f"{100 * used[kind]:.0f} %" if kind in used else "-" for kind in ("cpu", "memory", "gpu"))
            pressure = "unknown"
            if node.pressure is not None:
                full = min(round(20 * node.pressure), 20)
                pressure = f"[{'#' * full}{'.' * (20 - full)}] {100 * node.pressure:3.0f} %"
            rows.append((name, node.state, pressure, *cells, self.auto.degraded.get(name)))
        headings = ("NODE", "STATE", "PRESSURE", "CPU", "MEMORY", "GPU", "DEGRADED")
        yield table(*narrowed(headings, rows, terminal_width()), empty="no nodes")
        yield printable(self.facts()["auto"])
        yield proposals_table(self.proposals, empty="nothing should run elsewhere")
        yield moves_table(self.moves)


def changed_lines(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """New, changed and ended facts, one line each."""
    lines = [text for about, text in now.items() if before.get(about) != text]
    gone = (about for about in before if about not in now)
    return [*lines, *(f"no longer: {before[about]}" for about in gone if not about.startswith("move "))]


def watch_offload(session: CliSession, interval: float, node: str) -> None:
    """Show changes until an interrupt, which is a clean end."""
    is_screen = sys.stdout.isatty() and not session.json
    with handled_signals(raise_keyboard_interrupt, signal.SIGTERM, signal.SIGHUP):
        try:
            with session.client(query_only=True) as client:
                poller = _OffloadPoller(client, node)
                before: dict[str, str] = {}
                shown = ""
                if is_screen:
                    echo(ALTERNATE_SCREEN, nl=False)
                while True:
                    picture = poller.poll()
                    if is_screen:
                        width, height = shutil.get_terminal_size()
                        lines = []  # cut to the terminal, each cleared to its end, so that nothing flickers
                        for row in "\n\n".join(picture.screen()).splitlines()[: height - 1]:
                            plain = row.removeprefix(BOLD).removesuffix(PLAIN)
                            cut = cut_to_width(plain, width)
                            lines.append(
                                f"{cut if plain == row else f'{BOLD}{cut}{PLAIN}'}\x1b[K"
                            )  # headings stay bold
                        echo(HOME + "\r\n".join(lines) + CLEAR_REST, nl=False)
                    elif session.json:
                        text = json.dumps(picture.as_json())
                        if text != shown:
                            echo(text)
                        shown = text
                    else:
                        facts = picture.facts()
                        for line in changed_lines(before, facts):
                            echo(printable(f"{time.strftime('%H:%M:%S')}  {line}"))
                        before = facts
                    time.sleep(interval)
        except KeyboardInterrupt:
            return
        finally:
            if is_screen:
                echo(MAIN_SCREEN, nl=False)


class _OffloadPoller:
    """Asks for the content of the live view; a scan is kept for a while."""

    def __init__(self, client: Client, node: str) -> None:
        self._client = client
        self._node = node
        self._proposals: list[ProposalRow] = []
        self._scanned_at = float("-inf")
        self._ended_before: set[str] | None = None

    def poll(self) -> OffloadPicture:
        status = self._client.get_status()
        auto = self._client.get_auto_offload().auto_offload
        if time.monotonic() - self._scanned_at >= SCAN_SECONDS:
            self._proposals = self._client.scan_offload(node=self._node).proposals
            self._scanned_at = time.monotonic()
        levels = required(self._client.get_metrics(kind="levels").levels)
        moves = self._client.list_moves(all=True).moves
        ended = [row for row in moves if row.end is not None]
        if self._ended_before is None:
            self._ended_before = {row.move_id for row in ended}
        new = [row for row in ended if row.move_id not in self._ended_before]
        shown = [row for row in moves if row.end is None] + new[:MAX_ENDED]
        return OffloadPicture(status, levels, auto, self._proposals, shown)
