"""Messages to and from agents: orders and reports of moves."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.control.agent_messages import event_of_move, move_order, orders_to, unknown_moves
from distributed_grid.domain import events
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import Move, MovedProcess, Way
from distributed_grid.domain.processes import ProcessIdentity
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.states import MoveState
from distributed_grid.reactor.effects import OrderMoveStep
from distributed_grid.wire import AgentHello, MoveOrder, MoveReport

PROCESS = MovedProcess(ProcessIdentity(70, 5, "boot"), "/srv/ann")
MOVE = Move(
    "move-1", "ann", "gpu1", "gpu2", Way.PROCESS_RESTART, Request("move-1", "grid", Amounts(1000)), 1, process=PROCESS
)


def ledger(**fields: object) -> Ledger:
    return Ledger([replace(MOVE, **fields)])


def test_every_order_names_the_original_and_only_what_its_step_needs() -> None:
    move = replace(MOVE, freeze_ms=700, final="f" * 64, results="r" * 64)
    assert move_order(OrderMoveStep(move, "open")) == MoveOrder("gpu1", "move-1", "open", PROCESS.identity)
    assert move_order(OrderMoveStep(move, "freeze")).freeze_ms == 700
    returned = move_order(OrderMoveStep(move, "return"))
    assert (returned.manifest, returned.shipped) == ("r" * 64, "f" * 64)


def test_an_agent_is_ordered_what_the_ledger_calls_for_on_its_node() -> None:
    found = ledger(state=MoveState.RESERVED)
    assert [order.step for order in orders_to(found, "gpu1")] == ["open"]
    assert orders_to(found, "gpu2") == []


def test_a_move_that_is_not_known_is_to_be_forgotten() -> None:
    hello = AgentHello(3, "1", "gpu1", moves=("move-1", "move-2"))
    assert [order.move_id for order in unknown_moves(ledger(), hello, ("gpu1",))] == ["move-2"]
    # the target of a move has no say in it
    assert len(unknown_moves(ledger(), replace(hello, node="gpu2"), ("gpu2",))) == 2
    # several nodes of one machine have one agent
    assert [one.move_id for one in unknown_moves(ledger(), replace(hello, node="gpu0"), ("gpu0", "gpu1"))] == ["move-2"]


def test_reports_become_events_with_the_nodes_of_the_reporter() -> None:
    found = ledger(state=MoveState.FROZEN)
    nodes = ("gpu1",)
    assert event_of_move(MoveReport(1, "move-1", "opened"), found, nodes) is None
    assert event_of_move(MoveReport(1, "move-1", "frozen", left_ms=9), found, nodes) == events.MoveFrozen(
        "move-1", 9, nodes
    )
    assert event_of_move(MoveReport(1, "move-1", "decided"), found, nodes) == events.MoveDecided("move-1", nodes)
    assert event_of_move(MoveReport(1, "move-1", "dead"), found, nodes) == events.MoveDied("move-1", nodes, "")
    gone = event_of_move(MoveReport(1, "move-1", "gone", "it ended"), found, nodes)
    assert gone == events.MoveThawed("move-1", "it ended", nodes, gone=True)
    assert isinstance(event_of_move(MoveReport(1, "move-1", "failed", "why"), found, nodes), events.MoveFailed)
    returned = event_of_move(MoveReport(1, "move-1", "returned", files=2, kept=("a",)), found, nodes)
    assert returned == events.MoveReturned("move-1", 2, ("a",), nodes=nodes)


def test_reports_of_others_and_of_unknown_moves_change_nothing() -> None:
    found = ledger(state=MoveState.FROZEN)
    assert event_of_move(MoveReport(1, "move-1", "dead"), found, ("gpu2",)) is None
    assert event_of_move(MoveReport(1, "move-9", "dead"), found, ("gpu1",)) is None
