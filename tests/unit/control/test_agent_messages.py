"""Messages to and from agents: orders and reports of moves."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from distributed_grid.control.agent_messages import event_of_move, move_order, orders_to, unknown_moves
from distributed_grid.domain import events
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import Move, MovedProcess, Way
from distributed_grid.domain.processes import ProcessIdentity
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.states import MoveState, Step
from distributed_grid.reactor.effects import OrderMoveStep
from distributed_grid.wire import AgentHello, MoveOrder, MoveReport

PROCESS = MovedProcess(ProcessIdentity(70, 5, "boot"), "/srv/ann")
MOVE = Move(
    id="move-1",
    user="ann",
    source="gpu1",
    target="gpu2",
    way=Way.PROCESS_RESTART,
    request=Request(id="move-1", user="grid", ask=Amounts(1000)),
    requested_at_ms=1,
    process=PROCESS,
)


def reported(state: MoveState, move_id: str = "move-1", **fields: Any) -> MoveReport:
    return MoveReport(seq=1, move_id=move_id, state=state, **fields)


def ledger(**fields: object) -> Ledger:
    return Ledger([replace(MOVE, **fields)])


def test_every_order_names_the_original_and_only_what_its_step_needs() -> None:
    move = replace(MOVE, freeze_ms=700, final="f" * 64, results="r" * 64)
    opened = MoveOrder(node="gpu1", move_id="move-1", step=Step.OPEN, process=PROCESS.identity)
    assert move_order(OrderMoveStep(move, Step.OPEN)) == opened
    assert move_order(OrderMoveStep(move, Step.FREEZE)).freeze_ms == 700
    returned = move_order(OrderMoveStep(move, Step.RETURN))
    assert (returned.manifest, returned.shipped) == ("r" * 64, "f" * 64)


def test_an_agent_is_ordered_what_the_ledger_calls_for_on_its_node() -> None:
    found = ledger(state=MoveState.RESERVED)
    assert [order.step for order in orders_to(found, "gpu1")] == ["open"]
    assert orders_to(found, "gpu2") == []


def test_a_move_that_is_not_known_is_to_be_forgotten() -> None:
    hello = AgentHello(protocol=3, version="1", node="gpu1", moves=("move-1", "move-2"))
    assert [order.move_id for order in unknown_moves(ledger(), hello, ("gpu1",))] == ["move-2"]
    # the target of a move has no say in it
    assert len(unknown_moves(ledger(), replace(hello, node="gpu2"), ("gpu2",))) == 2
    # several nodes of one machine have one agent
    assert [one.move_id for one in unknown_moves(ledger(), replace(hello, node="gpu0"), ("gpu0", "gpu1"))] == ["move-2"]


def test_reports_become_events_with_the_nodes_of_the_reporter() -> None:
    found = ledger(state=MoveState.FROZEN)
    nodes = ("gpu1",)
    assert event_of_move(reported(MoveState.OPENED), found, nodes) is None
    event = events.MoveReported(move_id="move-1", state=MoveState.FROZEN, nodes=nodes)
    assert event_of_move(reported(MoveState.FROZEN, left_ms=9), found, nodes) == event
    for state in (MoveState.DECIDED, MoveState.DEAD):
        assert event_of_move(reported(state), found, nodes) == replace(event, state=state)
    for state in (MoveState.GONE, MoveState.THAWED, MoveState.FAILED):
        report = reported(state, detail="it ended", frozen_ms=7)
        assert event_of_move(report, found, nodes) == replace(event, state=state, detail="it ended", frozen_ms=7)
    returned = event_of_move(reported(MoveState.RETURNED, files=2, kept=("a",), notes=("b",)), found, nodes)
    assert returned == replace(event, state=MoveState.RETURNED, files=2, kept=("a",), notes=("b",))


def test_reports_of_others_and_of_unknown_moves_change_nothing() -> None:
    found = ledger(state=MoveState.FROZEN)
    assert event_of_move(reported(MoveState.DEAD), found, ("gpu2",)) is None
    assert event_of_move(reported(MoveState.DEAD, "move-9"), found, ("gpu1",)) is None
