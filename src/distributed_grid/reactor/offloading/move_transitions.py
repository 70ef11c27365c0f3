"""Transitions of a move that its deciders share: the next state, the end, and their audit records."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import Move, MoveEnd
from distributed_grid.domain.states import LeaseEnd, Step, advance_move
from distributed_grid.reactor.decision import Decision, MoveAnswer, Record, RecordType
from distributed_grid.reactor.lease_transitions import end_lease
from distributed_grid.reactor.offloading.move_outcomes import count_end


def move_record(type_: RecordType, move: Move, reason: str = "", **data: Any) -> Record:
    """An audit record about a move: what it is of, from where to where, and by which way."""
    known: dict[str, Any] = {"from": move.source, "to": move.target, "way": str(move.way), "automatic": move.automatic}
    if move.job:
        known |= {"job": move.job, "job_id": move.job_id}
    if move.process is not None:
        known["pid"] = move.process.identity.pid
    return Record(type_, move.user, move.id, move.source, reason, known | data)


def advance(move: Move, *steps: Step, now: int, **news: Any) -> tuple[Move, list[Record]]:
    """The move after these steps, and a record of each."""
    records = []
    for step in steps:
        move = replace(move, state=advance_move(move.state, step), state_at_ms=now)
    moved = replace(move, **news)
    if steps:
        why = moved.problem or str(moved.state)
        records.append(move_record("move-advanced", moved, why, state=str(moved.state)))
    return moved, records


def end_move(ledger: Ledger, move: Move, end: MoveEnd, problem: str, now: int) -> Decision:
    """End a move; the room that is kept for it is given back."""
    decision = release_reservation(ledger, move, f"move {move.id} has ended", now)
    frozen_ms = move.frozen_for_ms or (now - move.frozen_at_ms if move.frozen_at_ms else 0)
    over = replace(
        move,
        state=advance_move(move.state, Step.END),
        state_at_ms=now,
        lease_id="",
        frozen_for_ms=frozen_ms,
        ending=None,
        problem=problem,
        end=end,
        ended_at_ms=now,
    )
    data: dict[str, Any] = {"end": str(end), "state": str(move.state), "frozen_ms": frozen_ms}
    data |= {"returned": move.returned, "kept": [*move.kept]} if move.is_returned else {}
    rows, counted = count_end(ledger, over, now)
    decision.changes += [over, *rows]
    decision.records += counted
    decision.records.append(move_record("move-ended", over, problem or str(end), **data))
    decision.answer = MoveAnswer(over)
    return decision


def release_reservation(ledger: Ledger, move: Move, why: str, now: int) -> Decision:
    """Give back the room that is kept for a move, where it still is."""
    lease = ledger.leases.get(move.lease_id)
    return Decision() if lease is None else end_lease(ledger, lease, LeaseEnd.RELEASED, why, now)
