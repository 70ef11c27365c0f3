"""Messages about moves: the orders that effects become, and the events that reports of agents become."""

from __future__ import annotations

from distributed_grid.domain.events import (
    Event,
    MoveDecided,
    MoveDied,
    MoveFailed,
    MoveFrozen,
    MoveReturned,
    MoveThawed,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.reactor.effects import OrderMoveStep, pending_moves
from distributed_grid.wire import AgentHello, MoveOrder, MoveReport


def move_order(effect: OrderMoveStep) -> MoveOrder:
    """The order to the agent of the source that takes a step of a move."""
    move, step = effect.move, effect.step
    identity = move.process.identity if move.process is not None else None
    freeze_ms = move.freeze_ms if step == "freeze" else 0
    results, shipped = (move.results, move.final) if step == "return" else ("", "")
    return MoveOrder(move.source, move.id, step, identity, freeze_ms, results, shipped)


def orders_to(ledger: Ledger, node: str, now: int) -> list[MoveOrder]:
    """All that moves call for from the agent of a node."""
    if not ledger.moves_at.get(node):
        return []
    effects = (effect for effect in pending_moves(ledger, now) if isinstance(effect, OrderMoveStep))
    return [move_order(effect) for effect in effects if effect.move.source == node]


def unknown_moves(ledger: Ledger, hello: AgentHello, nodes: tuple[str, ...]) -> list[MoveOrder]:
    """Orders to forget the moves that an agent has a journal of and the ledger knows nothing of (any more)."""
    known = {move_id for node in nodes for move_id in ledger.moves_at.get(node, ())}
    ours = {move_id for move_id in known if ledger.moves[move_id].source in nodes}
    return [MoveOrder(hello.node, move_id, "close") for move_id in hello.moves if move_id not in ours]


def event_of_move(report: MoveReport, ledger: Ledger, nodes: tuple[str, ...]) -> Event | None:
    """What the report of an agent that serves these nodes means; None where it changes nothing."""
    move = ledger.moves.get(report.move_id)
    if move is None or move.source not in nodes:
        return None
    if report.step == "frozen":
        return MoveFrozen(move.id, report.left_ms, nodes)
    if report.step == "decided":
        return MoveDecided(move.id, nodes, report.frozen_ms)
    if report.step == "dead":
        return MoveDied(move.id, nodes, report.detail)
    if report.step in ("thawed", "gone"):
        return MoveThawed(move.id, report.detail, nodes, gone=report.step == "gone", frozen_ms=report.frozen_ms)
    if report.step == "returned":
        return MoveReturned(move.id, report.files, report.kept, report.detail, nodes)
    if report.step == "failed":
        return MoveFailed(move.id, report.detail or f"{move.source} could not carry out an order", nodes)
    return None
