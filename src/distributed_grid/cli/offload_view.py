"""Live view of `grid offload watch`: pressure, proposals and moves; on a terminal redrawn, else line by line."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from distributed_grid.cli.offload_output import move_text, moves_table, proposals_table, subject_of
from distributed_grid.cli.output import BOLD, PLAIN, cut_to_width, echo, narrowed, printable, table, terminal_width
from distributed_grid.cli.session import CliSession
from distributed_grid.cli.signals import handled_signals, raise_keyboard_interrupt
from distributed_grid.client.client import Client

Row = dict[str, Any]
MAX_ENDED = 5
"""So many moves are shown that have ended meanwhile."""
SCAN_SECONDS = 10.0
"""A scan reads every process of the nodes, so it is not made more often."""
ALTERNATE_SCREEN, MAIN_SCREEN, HOME, CLEAR_REST = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H", "\x1b[J"


class OffloadPicture:
    """What is shown at one moment."""

    def __init__(
        self, status: Row, levels: dict[str, dict[str, float]], auto: Row, proposals: list[Row], moves: list[Row]
    ) -> None:
        self.nodes: list[Row] = status["nodes"]
        self.levels = levels
        self.auto = auto
        self.proposals = [row for row in proposals if row["movable"]]
        self.moves = moves

    def as_json(self) -> Row:
        nodes = [
            {"node_id": node["node_id"], "pressure": node["pressure"], **self.levels.get(node["node_id"], {})}
            for node in self.nodes
        ]
        return {"nodes": nodes, "auto_offload": self.auto, "proposals": self.proposals, "moves": self.moves}

    def facts(self) -> dict[str, str]:
        """What is worth a line when it changes, by what it is about: pressure is not, a node that is degraded is."""
        found = {"auto": f"automatic offloading is {'on' if self.auto['enabled'] else 'off'}"}
        if self.auto["stopped"]:
            found["auto"] += f", it has stopped: {self.auto['stopped']}"
        found |= {f"node {node}": f"{node} is degraded: {why}" for node, why in self.auto["degraded"].items()}
        for row in self.proposals:
            where = f"{row['target_node']}, {100 * row['confidence']:.0f} % sure" if row["target_node"] else "nowhere"
            text = f"{subject_of(row)} on {row['node_id']} could run on {where}: {row['command']}"
            found[f"proposal {row['node_id']} {subject_of(row)}"] = (
                text if row["recommended"] else f"{text} (no advice)"
            )
        return found | {f"move {row['move_id']}": move_text(row) for row in self.moves}

    def screen(self) -> Iterator[str]:
        """The whole picture, paragraph by paragraph."""
        rows = []
        for node in self.nodes:
            name, used = node["node_id"], self.levels.get(node["node_id"], {})
            cells = (f"{100 * used[kind]:.0f} %" if kind in used else "-" for kind in ("cpu", "memory", "gpu"))
            rows.append((name, node["state"], _pressure(node), *cells, self.auto["degraded"].get(name)))
        headings = ("NODE", "STATE", "PRESSURE", "CPU", "MEMORY", "GPU", "DEGRADED")
        yield table(*narrowed(headings, rows, terminal_width()), empty="no nodes")
        yield printable(self.facts()["auto"])
        yield proposals_table(self.proposals, empty="nothing should run elsewhere")
        yield moves_table(self.moves)


def _pressure(node: Row) -> str:
    if node["pressure"] is None:
        return "unknown"
    full = min(round(20 * node["pressure"]), 20)
    return f"[{'#' * full}{'.' * (20 - full)}] {100 * node['pressure']:3.0f} %"


def changed_lines(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """What is new, what is different and what is over, one line each."""
    lines = [text for about, text in now.items() if before.get(about) != text]
    gone = (about for about in before if about not in now)
    return [*lines, *(f"no longer: {before[about]}" for about in gone if not about.startswith("move "))]


def watch_offload(session: CliSession, interval: float, node: str) -> None:
    """Show what changes until an interrupt, which is a clean end."""
    is_screen = sys.stdout.isatty() and not session.json
    with handled_signals(raise_keyboard_interrupt, signal.SIGTERM, signal.SIGHUP):
        try:
            with session.client(query_only=True) as client:
                _watch(_OffloadPoller(client, node), session, interval, is_screen=is_screen)
        except KeyboardInterrupt:
            return
        finally:
            if is_screen:
                echo(MAIN_SCREEN, nl=False)


def _watch(poller: _OffloadPoller, session: CliSession, interval: float, *, is_screen: bool) -> None:
    before: dict[str, str] = {}
    shown = ""
    if is_screen:
        echo(ALTERNATE_SCREEN, nl=False)
    while True:
        picture = poller.poll()
        if is_screen:
            echo(_fit("\n\n".join(picture.screen())), nl=False)
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


def _fit(text: str) -> str:
    """A picture cut to the terminal, each line cleared to its end, so that nothing flickers."""
    width, height = shutil.get_terminal_size()
    lines = [_fit_line(line, width) for line in text.splitlines()]
    return HOME + "\r\n".join(f"{line}\x1b[K" for line in lines[: height - 1]) + CLEAR_REST


def _fit_line(line: str, width: int) -> str:
    """A line cut to the terminal; the heading of a table stays bold."""
    plain = line.removeprefix(BOLD).removesuffix(PLAIN)
    return cut_to_width(line, width) if plain == line else f"{BOLD}{cut_to_width(plain, width)}{PLAIN}"


class _OffloadPoller:
    """Asks for what is shown; a scan is kept for a while."""

    def __init__(self, client: Client, node: str) -> None:
        self._client = client
        self._node = node
        self._proposals: list[Row] = []
        self._scanned_at = float("-inf")
        self._ended_before: set[str] | None = None

    def poll(self) -> OffloadPicture:
        status = self._client.call("get_status")
        auto = self._client.call("get_auto_offload")["auto_offload"]
        if time.monotonic() - self._scanned_at >= SCAN_SECONDS:
            self._proposals = self._client.call("scan_offload", node=self._node)["proposals"]
            self._scanned_at = time.monotonic()
        levels = self._client.call("get_metrics", kind="levels")["levels"]
        return OffloadPicture(status, levels, auto, self._proposals, self._moves())

    def _moves(self) -> list[Row]:
        """The moves that go on, and the last of those that have ended since the first poll."""
        moves: list[Row] = self._client.call("list_moves", all=True)["moves"]
        ended = [row for row in moves if row["end"] is not None]
        if self._ended_before is None:
            self._ended_before = {row["move_id"] for row in ended}
        new = [row for row in ended if row["move_id"] not in self._ended_before]
        return [row for row in moves if row["end"] is None] + new[:MAX_ENDED]
