"""Builders of moves: a job or a process that is to leave gpu1 for gpu2."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from distributed_grid.domain import events
from distributed_grid.domain.followups import Cause, CheckMove
from distributed_grid.domain.jobs import Command
from distributed_grid.domain.moves import Move, MovedProcess, MoveEnd, Way
from distributed_grid.domain.processes import ProcessIdentity
from distributed_grid.domain.states import MoveState
from distributed_grid.reactor.decision import MoveAnswer
from distributed_grid.reactor.dispatch import StepResult
from tests.support.builders import NOW, Scenario, a_node, a_request, a_submission

HERE = ("gpu1",)
UNCOMMITTED = (MoveState.RESERVED, MoveState.SHIPPED, MoveState.FROZEN)
IDENTITY = ProcessIdentity(4711, 815, "boot-1")


def a_job_move(uid: str, way: Way = Way.RESTART, *, move_id: str = "move-1", target: str = "gpu2") -> Move:
    return Move(
        id=move_id,
        user="ada",
        source="gpu1",
        target=target,
        way=way,
        request=a_request("unused"),
        requested_at_ms=NOW,
        job=uid,
        reason="gpu1 is full",
    )


def a_process_move(
    *, move_id: str = "move-1", identity: ProcessIdentity = IDENTITY, cores: float = 1, source: str = "gpu1"
) -> Move:
    return Move(
        id=move_id,
        user="ada",
        source=source,
        target="gpu2",
        way=Way.PROCESS_RESTART,
        request=a_request("unused", cores=cores),
        requested_at_ms=NOW,
        process=MovedProcess(identity, "/data/run"),
        command=Command(("python3", "train.py")),
        job_id="train",
    )


def reported(state: MoveState, nodes: tuple[str, ...] = ("gpu1",), move_id: str = "move-1", **fields: Any) -> Cause:
    """A report of the agent that serves these nodes."""
    return events.MoveReported(move_id=move_id, state=state, nodes=nodes, **fields)


def hear_boot(scenario: Scenario, node: str, boot: str, machine: str = "m1-dir") -> None:
    """The agent of a node comes, with nothing running."""
    scenario.handle(events.AttemptsListed(node=node, attempts=(), boot=boot, machine=machine))


def move_through(scenario: Scenario, until: MoveState, move_id: str = "move-1") -> Move:
    """Let a process's move go on without trouble until it is in this state."""
    steps: dict[MoveState, Cause] = {
        MoveState.RESERVED: CheckMove(move_id),
        MoveState.SHIPPED: events.MoveShipped(move_id, "ahead", 50),
        MoveState.FROZEN: reported(MoveState.FROZEN, move_id=move_id),
        MoveState.DECIDED: reported(MoveState.DECIDED, move_id=move_id),
        MoveState.DEAD: reported(MoveState.DEAD, move_id=move_id),
    }
    for state, event in steps.items():
        if state is MoveState.DECIDED:
            scenario.handle(events.MoveFilesSettled(move_id, "final", 1))
        scenario.handle(event)
        if state is until:
            break
    move = scenario.ledger.moves[move_id]
    assert move.state is until
    return move


def ended(result: StepResult) -> Move:
    """The move that has ended in a step."""
    over = [row for row in result.changes if isinstance(row, Move) and row.is_over]
    assert over, "no move has ended"
    return over[-1]


def end_of(result: StepResult) -> MoveEnd | None:
    return ended(result).end


def answered(result: StepResult) -> Move:
    answer = result.answer
    assert isinstance(answer, MoveAnswer)
    return answer.move


THREE = (a_node("gpu1", cores=4), a_node("gpu2", cores=4), a_node("gpu3", cores=4))


def submit_job(scenario, uid="r1", *, restartable=True, marks=False, starts=True, **request):
    """A job on gpu1 that may be moved."""
    wanted = a_request(uid, prefer=("gpu1",), **({"cores": 2} | request))
    scenario.handle(replace(a_submission(wanted), restartable=restartable))
    if starts:
        scenario.start(uid)
    if marks:
        attempt = scenario.job(uid).attempt
        scenario.handle(events.AttemptMarked(uid, attempt.number, attempt.fence, 0))
    return scenario.job(uid)


def request_move(scenario, *args, **kwargs):
    return scenario.handle(events.MoveRequested(a_job_move(*args, **kwargs)))


def begin_process_move(scenario):
    """Three nodes; a process is to leave gpu1 for gpu2, and its source was heard."""
    hear_boot(scenario, "gpu1", "boot-1")
    scenario.handle(events.MoveRequested(a_process_move()))
    return scenario
