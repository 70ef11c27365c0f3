"""Automatic offloading: its moves and their pace, its stop, and its help for nodes short of memory."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.blocks import MemoryServerRow
from distributed_grid.domain.events import (
    AttemptStarted,
    AutoOffloadSet,
    BlockAsked,
    MemoryServed,
    MoveCancelled,
    NodeDrained,
    NodeForgotten,
    NodeResumed,
    OffloadPressureRead,
)
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import OffloadRules, Way
from distributed_grid.domain.rebalancing import PressureReading
from distributed_grid.domain.resources import NOTHING
from distributed_grid.domain.states import JobState
from distributed_grid.errors import Refused
from distributed_grid.reactor import Record, step
from distributed_grid.reactor.effects import StopAttempt, attempt_effects
from tests.support.builders import a_request
from tests.support.offload_looks import Looks, ahead, apart, degraded_grid, kinds, pauses

GB = 1024**3
OFF = OffloadRules()


def moved(grid: Looks, uid: str) -> str:
    """Let the agents carry a move of a job out; where it runs then."""
    grid.end(uid, Outcome(Ending.MOVED))
    grid.start(uid)
    attempt = grid.job(uid).attempt
    assert attempt is not None
    return attempt.node


def test_a_pressed_nodes_restartable_job_moves_by_itself():
    grid = Looks()
    grid.run_job("r1", "ash")
    records = grid.looks(2, ash=900)
    (move,) = grid.ledger.moves.values()
    assert (move.job, move.source, move.target, move.way) == ("r1", "ash", "birch", Way.RESTART)
    assert move.automatic
    assert "would be saved" in move.reason
    assert "move-requested" in kinds(records)
    assert isinstance(attempt_effects(grid.ledger, node="ash")[0], StopAttempt)
    assert moved(grid, "r1") == "birch"
    assert not grid.ledger.moves
    assert grid.ledger.auto_offload.moved_at_ms == grid.now
    assert grid.ledger.auto_offload.failures == 0


def test_nothing_moves_while_it_is_not_enabled():
    grid = Looks(offload=OFF)
    grid.run_job("r1", "ash")
    assert grid.looks(5, ash=950) == []
    assert not grid.ledger.moves
    assert not grid.ledger.offload_watches


def test_a_person_overrules_the_config_until_a_reset():
    grid = Looks(offload=OFF)
    grid.run_job("r1", "ash")
    grid.handle(AutoOffloadSet(True, "ada"))
    grid.looks(2, ash=950)
    assert grid.ledger.moves
    on = Looks()
    on.run_job("r1", "ash")
    on.handle(AutoOffloadSet(False, "ada"))
    on.looks(3, ash=950)
    assert not on.ledger.moves
    assert (on.ledger.auto_offload.enabled, on.ledger.auto_offload.set_by) == (False, "ada")
    on.handle(AutoOffloadSet(None, "ada"))
    on.looks(2, ash=950)
    assert on.ledger.moves


def test_setting_it_twice_is_recorded_once():
    grid = Looks()
    first = grid.handle(AutoOffloadSet(True, "ada"))
    assert [(one.type, one.reason) for one in first.records] == [("auto-offload", "enabled")]
    assert grid.handle(AutoOffloadSet(True, "ada")).changes == []


def test_a_job_that_was_not_declared_never_moves_and_it_is_said_why():
    grid = Looks()
    grid.run_job("r1", "ash", restartable=False)
    grid.looks(5, ash=(500, 950))
    assert not grid.ledger.moves
    (considered,) = grid.watch("ash").considered
    assert considered.job == "r1"
    assert "not declared restartable" in considered.reason


def test_one_move_at_a_time_and_a_rest_after_it():
    grid = Looks(*apart("ash", "birch", "cedar"))
    for uid in ("r1", "r2", "r3"):
        grid.run_job(uid, "ash")
    grid.looks(3, ash=900)
    assert len(grid.ledger.moves) == 1
    assert "is under way" in grid.watch("ash").reason
    (move,) = grid.ledger.moves.values()
    moved(grid, move.job)
    grid.looks(4, ash=900)
    assert not grid.ledger.moves
    assert "rests for 300 s" in grid.watch("ash").reason
    grid.looks(2, ash=900)
    assert len(grid.ledger.moves) == 1


def test_two_pressed_nodes_do_not_choose_the_same_target_at_one_look():
    grid = Looks(*apart("ash", "birch", "cedar", "dogwood"))
    grid.run_job("r1", "ash")
    grid.run_job("r2", "birch")
    grid.looks(2, ash=900, birch=950)
    assert len({move.target for move in grid.ledger.moves.values()}) == 2


def fail_a_move(grid: Looks) -> list[Record]:
    """Wait until the rest is over, and let the next move go wrong: its target leaves before the job is there."""
    grid.advance(300)
    grid.looks(2, ash=900)
    (move,) = grid.ledger.moves.values()
    records = grid.handle(NodeDrained(move.target, "maintenance", cooling=True)).records
    records += grid.end(move.job, Outcome(Ending.MOVED)).records
    records += grid.handle(NodeResumed(move.target)).records
    grid.heartbeat(move.target)
    started = grid.job(move.job).attempt
    assert started is not None
    assert started.node != move.target
    return (
        records + grid.handle(AttemptStarted(uid=move.job, number=started.number, fence=started.fence, pid=7)).records
    )


def test_it_stops_itself_after_three_failures_in_a_row_and_says_so():
    grid = Looks()
    for uid in ("r1", "r2", "r3", "r4"):
        grid.run_job(uid, "ash", cores=1, memory_gb=1)
    records = [record for _ in range(3) for record in fail_a_move(grid)]
    state = grid.ledger.auto_offload
    assert state.failures == 3
    assert state.stopped_why.startswith(
        "automatic offloading has stopped after 3 failures in a row, the last one: move-"
    )
    assert [record.data["action"] for record in records if record.type == "auto-offload"] == ["stopped"]
    grid.advance(300)
    grid.looks(2, ash=900)
    assert not grid.ledger.moves
    assert "has stopped" in grid.watch("ash").reason
    grid.handle(AutoOffloadSet(True, "ada"))
    assert (grid.ledger.auto_offload.stopped_why, grid.ledger.auto_offload.failures) == ("", 0)
    grid.looks(2, ash=900)
    assert grid.ledger.moves


def test_a_move_that_succeeds_forgets_the_failures_before_it():
    grid = Looks()
    grid.run_job("r1", "ash")
    grid.ledger.apply([replace(grid.ledger.auto_offload, failures=2)])
    grid.looks(2, ash=900)
    moved(grid, "r1")
    assert grid.ledger.auto_offload.failures == 0


def test_an_automatic_move_of_a_job_that_is_stopped_already_cannot_be_cancelled():
    grid = Looks()
    grid.run_job("r1", "ash")
    grid.looks(2, ash=900)
    (move,) = grid.ledger.moves.values()
    with pytest.raises(Refused, match="does not go on"):
        grid.handle(MoveCancelled(move.id, "ada"))
    moved(grid, "r1")
    assert grid.ledger.auto_offload.failures == 0


def test_a_refusal_is_counted_and_not_an_error():
    grid = Looks()
    grid.run_job("r1", "ash")
    grid.look(ash=900)
    grid.advance(60)
    readings = tuple(grid._reading(name, level) for name, level in (("ash", 900), ("birch", 0)))
    records = grid.handle(OffloadPressureRead(readings, grid.rules, grid.offload, ("no-move",))).records
    assert not grid.ledger.moves
    assert grid.ledger.auto_offload.failures == 1
    assert [(one.type, one.data["action"]) for one in records] == [("auto-offload", "refused")]
    assert "the id of a move begins with" in grid.watch("ash").reason
    grid.advance(300)
    grid.looks(2, ash=900)
    assert not grid.ledger.moves  # it was tried within the last hour
    assert "within the last hour" in grid.watch("ash").considered[0].reason


def test_without_an_id_left_nothing_moves_and_nothing_breaks():
    grid = Looks()
    grid.run_job("r1", "ash")
    grid.look(ash=900)
    grid.advance(60)
    readings = tuple(grid._reading(name, level) for name, level in (("ash", 900), ("birch", 0)))
    grid.handle(OffloadPressureRead(readings, grid.rules, grid.offload))
    assert not grid.ledger.moves
    assert not grid.ledger.degraded


# ------------------------------------------------------------------ memory
def a_block(grid: Looks, block_id: str, size_gb: float, lender: str) -> None:
    """A block of the pool in the memory of a node, whose servers all are known."""
    for name in grid.ledger.nodes:
        if name not in grid.ledger.memory_servers:
            grid.handle(MemoryServed(MemoryServerRow(node=name, host="host", port=1, incarnation="i1")))
    grid.handle(
        BlockAsked(id=block_id, user="ada", size_bytes=round(size_gb * GB), term_ms=10**9, prefer=lender, home="cedar")
    )
    (place,) = grid.ledger.blocks[block_id].places
    assert place.node == lender


def test_on_a_sure_forecast_blocks_leave_and_jobs_stay():
    grid = Looks(*apart("ash", "birch", "cedar"))
    grid.run_job("r1", "ash")
    a_block(grid, "b1", 2, "ash")
    grid.looks(2, ash=ahead("ash", 700, 900))
    moving = grid.ledger.blocks["b1"].moving
    assert moving is not None
    assert (moving.place.node, moving.place.on_disk) == ("birch", False)
    assert "is expected at 90 %" in moving.why
    assert not grid.ledger.moves


def test_above_the_threshold_blocks_go_before_jobs():
    grid = Looks(*apart("ash", "birch", "cedar"))
    grid.run_job("r1", "ash")
    a_block(grid, "b1", 2, "ash")
    grid.looks(2, ash=900)
    assert grid.ledger.blocks["b1"].moving is not None
    assert not grid.ledger.moves
    assert "1 blocks of the memory pool leave first" in grid.watch("ash").reason
    grid.looks(1, ash=900)
    assert grid.ledger.moves


def test_a_flicker_of_memory_moves_no_block():
    grid = Looks(*apart("ash", "birch", "cedar"))
    a_block(grid, "b1", 2, "ash")
    grid.look(ash=950)
    grid.advance(60)
    grid.look(ash=500)
    assert grid.ledger.blocks["b1"].moving is None


def full(*names: str) -> dict[str, int | tuple[int, int] | PressureReading | None]:
    return dict.fromkeys(names, 900)


def test_where_nobody_has_room_the_node_is_degraded_and_its_blocks_go_to_disk():
    grid = Looks(*apart("ash", "birch", "cedar"))
    grid.run_job("r1", "ash")
    a_block(grid, "b1", 2, "ash")
    records = grid.looks(2, **full("ash", "birch", "cedar"))
    row = grid.ledger.degraded["ash"]
    assert "no other node is below its thresholds" in row.why
    assert ("node-degraded", "ash") in [(one.type, one.subject) for one in records]
    moving = grid.ledger.blocks["b1"].moving
    assert moving is not None
    assert (moving.place.on_disk, moving.place.node) == (True, "cedar")
    assert not grid.ledger.moves


def test_a_degraded_node_gets_no_new_work_and_gets_it_again_afterwards():
    grid = Looks(*apart("ash"))
    grid.run_job("r1", "ash", restartable=False, memory_gb=1)
    grid.looks(2, ash=900)
    assert grid.ledger.lends("ash") == NOTHING
    grid.heartbeat("ash")
    assert grid.ledger.lends("ash") == NOTHING
    assert grid.ledger.offers["ash"].withheld[0].startswith("degraded: memory at 90 %")
    waiting = grid.submit(a_request("r2", cores=1))
    assert waiting.state is JobState.QUEUED
    grid.looks(1, ash=750)
    assert "ash" in grid.ledger.degraded  # between the marks nothing changes
    records = grid.looks(2, ash=600)
    assert "node-restored" in kinds(records)
    assert not grid.ledger.degraded
    assert grid.job("r2").state is JobState.ASSIGNED


def test_a_restart_of_the_control_plane_knows_degraded_nodes_and_undoes_them_where_it_is_off():
    grid = degraded_grid()
    grid.looks(2, ash=900)
    stored = Ledger(grid.ledger.rows(durable_only=True))
    assert set(stored.degraded) == {"ash"}
    assert pauses([*attempt_effects(stored)]) == {"r1": True}
    again = Looks(*apart("ash"), offload=OFF)
    again.ledger = stored
    records = again.handle(OffloadPressureRead((), again.rules, OFF)).records
    assert kinds(records) == ["node-restored"]
    assert not stored.degraded


def test_switching_it_off_undoes_what_was_done_to_degraded_nodes_at_once():
    grid = degraded_grid()
    grid.looks(2, ash=900)
    records = grid.handle(AutoOffloadSet(False, "ada")).records
    assert kinds(records) == ["auto-offload", "node-restored"]
    assert not grid.ledger.degraded


def test_without_sharing_everything_is_undone():
    grid = degraded_grid()
    grid.looks(2, ash=900)
    assert kinds(grid.handle(OffloadPressureRead((), None, grid.offload)).records) == ["node-restored"]


def test_a_node_that_leaves_the_grid_is_not_degraded_any_more():
    grid = Looks(*apart("ash", "birch"))
    grid.looks(2, **full("ash", "birch"))
    assert set(grid.ledger.degraded) == {"ash", "birch"}
    grid.handle(NodeForgotten("birch"))
    grid.looks(1, ash=900)
    assert set(grid.ledger.degraded) == {"ash"}


def test_a_degraded_node_gives_jobs_away_as_soon_as_another_has_room():
    grid = Looks(*apart("ash", "birch"))
    grid.run_job("r1", "ash")
    grid.looks(2, ash=900, birch=780)
    assert set(grid.ledger.degraded) == {"ash"}
    grid.looks(1, ash=900, birch=0)
    assert grid.ledger.moves


def test_pressure_of_cpu_alone_degrades_nothing():
    grid = Looks(*apart("ash"))
    grid.run_job("r1", "ash")
    grid.looks(4, ash=(100, 990))
    assert not grid.ledger.degraded


def test_many_pressed_nodes_are_looked_at_in_several_steps_and_none_is_forgotten():
    names = tuple(f"n{number:02}" for number in range(40))
    grid = Looks(*apart(*names))
    grid.looks(2, **full(*names))
    assert set(grid.ledger.degraded) == set(names)
    first = step(grid.ledger, OffloadPressureRead((), grid.rules, grid.offload), grid.now)
    assert first.later == []  # nobody is known to be above
    readings = tuple(PressureReading(node=name, score=900, memory=900, cpu=900) for name in names)
    assert step(grid.ledger, OffloadPressureRead(readings, grid.rules, grid.offload), grid.now).later
