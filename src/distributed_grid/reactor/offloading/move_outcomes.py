"""Outcomes of automatic moves: nodes rest after one, and failures in a row stop automatic offloading."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import AutoOffloadState, Move, MoveEnd
from distributed_grid.domain.offload_watch import OffloadWatch
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.rows import Row
from distributed_grid.reactor.decision import Record

MAX_FAILURES = 3
"""So many moves that fail one after the other stop it."""


def count_end(ledger: Ledger, move: Move, now: int) -> tuple[list[Row], list[Record]]:
    """What the end of a move means for those that come: nodes rest after it, and failures in a row stop it."""
    if not move.automatic:
        return [], []
    watches = ledger.offload_watches
    ends = (name for name in (move.source, move.target) if name in ledger.nodes)
    rows: list[Row] = [replace(watches.get(name) or OffloadWatch(name), moved_at_ms=now) for name in ends]
    state = replace(ledger.auto_offload, moved_at_ms=now)
    if move.end is MoveEnd.DONE and move.ran_on in ("", move.target):
        return [*rows, replace(state, failures=0)], []
    if move.end not in (MoveEnd.FAILED, MoveEnd.DONE):
        return [*rows, state], []
    state, records = counted(state, f"{move.id} failed: {move.problem}")
    return [*rows, state], records


def counted(state: AutoOffloadState, why: str) -> tuple[AutoOffloadState, list[Record]]:
    """One more failure; the third in a row stops it."""
    failures = state.failures + 1
    if failures < MAX_FAILURES or state.stopped_why:
        return replace(state, failures=failures), []
    stopped = f"automatic offloading has stopped after {failures} failures in a row, the last one: {why}"
    return replace(state, failures=failures, stopped_why=stopped), [auto_record("stopped", "auto", "", stopped)]


def auto_record(action: str, subject: str, node: str, reason: str) -> Record:
    return Record("auto-offload", GRID_USER, subject, node, reason, {"action": action})
