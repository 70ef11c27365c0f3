"""Which job leaves a node above its thresholds, where to, and why none does; which nodes are degraded, and how long."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import PressureRead
from distributed_grid.domain.moves import DegradedNode, OffloadRules, Way
from distributed_grid.domain.rebalancing import PressureReading, PressureWatch, RebalanceState
from distributed_grid.domain.resources import Priority
from distributed_grid.scheduling.pressure.plan import nodes_to_relieve, track_offload
from distributed_grid.scheduling.pressure.relief import (
    Relief,
    ReliefOutcome,
    find_relief,
    jobs_to_pause,
    why_degraded,
    why_restored,
)
from distributed_grid.scheduling.pressure.scan import PressureScan, scan_with_lenders
from tests.support.offload_looks import HOUR_MS, Looks, apart, rebalance_rules, scan_now


def relief_after(grid: Looks, seconds: float, node: str = "ash", **levels: int | PressureReading) -> Relief:
    """Relief for a node at these levels for so long."""
    grid.ledger.apply(track_offload(scan_now(grid, **levels)))
    grid.advance(seconds)
    scan = scan_now(grid, **levels)
    grid.ledger.apply(track_offload(scan))
    return find_relief(scan_now(grid, **levels), node)


@pytest.fixture
def grid() -> Looks:
    """A node with a restartable job that has just begun, and an idle one."""
    found = Looks()
    found.run_job("r1", "ash")
    return found


def test_a_restartable_job_goes_to_the_node_with_room(grid: Looks):
    found = relief_after(grid, 60, ash=900)
    assert (found.outcome, found.job, found.target, found.way) == (ReliefOutcome.MOVE, "r1", "birch", Way.RESTART)
    assert found.reason.startswith("memory at 90 %, above the threshold of 80 %; job job-r1 holds 4.0 GB; about ")


def test_a_flicker_moves_nothing(grid: Looks):
    grid.look(ash=950)
    grid.advance(60)
    grid.look(ash=500)
    grid.advance(60)
    found = relief_after(grid, 0, ash=950)
    assert found.outcome is ReliefOutcome.WAIT
    assert found.reason == "memory at 95 %, above the threshold of 80 %: for 0 s, acts after 60 s"


@pytest.mark.parametrize(("policy", "seconds"), [("conservative", 300), ("balanced", 60), ("aggressive", 60)])
def test_it_waits_as_long_as_the_policy_and_for_a_second_look(policy, seconds):
    grid = Looks(rules=rebalance_rules(policy=policy))
    grid.run_job("r1", "ash")
    assert relief_after(grid, seconds - 40, ash=900).outcome is ReliefOutcome.WAIT
    grid.advance(40)
    assert find_relief(scan_now(grid, ash=900), "ash").outcome is ReliefOutcome.MOVE


def test_a_job_that_nobody_has_declared_stays(grid: Looks):
    grid = Looks()
    grid.run_job("r1", "ash", restartable=False)
    found = relief_after(grid, 60, ash=900)
    assert found.outcome is ReliefOutcome.NOTHING_MOVABLE
    assert "it has marked no checkpoint and is not declared restartable" in found.reason
    grid.mark("r1")
    found = find_relief(scan_now(grid, ash=900), "ash")
    assert (found.outcome, found.way) == (ReliefOutcome.MOVE, Way.CHECKPOINT_RESTART)


def test_what_has_least_to_do_again_goes_first():
    grid = Looks()
    grid.run_job("r1", "ash")
    grid.advance(600)
    grid.run_job("r2", "ash")
    grid.advance(30)
    grid.run_job("r3", "ash", restartable=False)
    assert relief_after(grid, 60, ash=900).job == "r2"
    grid.mark("r1")
    assert find_relief(scan_now(grid, ash=900), "ash").job == "r1"


def test_of_two_alike_the_less_important_one_goes():
    grid = Looks()
    grid.run_job("r1", "ash", priority=Priority.HIGH)
    grid.run_job("r2", "ash", priority=Priority.LOW)
    assert relief_after(grid, 60, ash=900).job == "r2"


def test_a_job_that_holds_none_of_what_is_short_stays():
    grid = Looks()
    grid.run_job("r1", "ash", memory_gb=0, cores=1)
    found = relief_after(grid, 60, ash=PressureReading(node="ash", score=500, memory=900, cpu=100))
    assert found.outcome is ReliefOutcome.NOTHING_MOVABLE
    assert "no job of the grid is there that holds any of it" in found.reason


def test_a_job_that_is_nearly_done_stays_and_the_numbers_say_why():
    grid = Looks()
    grid.run_job("r1", "ash", expected_s=70)
    found = relief_after(grid, 60, ash=900)
    assert found.outcome is ReliefOutcome.NOT_WORTH_IT
    assert "a move to birch does not pay: about 10 s left" in found.reason


def test_a_job_is_moved_at_most_once_an_hour(grid: Looks):
    grid.ledger.apply([replace(grid.job("r1"), moved_at_ms=grid.now)])
    found = relief_after(grid, 60, ash=900)
    assert found.outcome is ReliefOutcome.NOTHING_MOVABLE
    assert "within the last hour" in found.reason
    grid.now += HOUR_MS
    grid.mark("r1")
    grid.advance(0)
    assert find_relief(scan_now(grid, ash=900), "ash").outcome is ReliefOutcome.MOVE


def test_nobody_takes_a_job_that_would_put_it_above_its_own_thresholds():
    grid = Looks(*apart("ash", "birch"))
    grid.run_job("r1", "ash", memory_gb=16)
    found = relief_after(grid, 60, ash=900, birch=300)
    assert found.outcome is ReliefOutcome.NO_ROOM
    assert "no other node has 16.0 GB" in found.reason
    assert find_relief(scan_now(grid, ash=900, birch=0), "ash").outcome is ReliefOutcome.MOVE


def test_the_least_loaded_node_is_asked_first():
    grid = Looks(*apart("ash", "birch", "cedar"))
    grid.run_job("r1", "ash")
    assert relief_after(grid, 60, ash=900, birch=200, cedar=100).target == "cedar"


def test_a_job_that_insists_on_a_node_stays_there():
    grid = Looks()
    grid.run_job("r1", "ash", require=["ash"])
    found = relief_after(grid, 60, ash=900)
    assert found.outcome is ReliefOutcome.NO_ROOM
    assert "it insists on ash" in found.reason


def test_a_node_that_was_degraded_or_rests_takes_nothing(grid: Looks):
    relief_after(grid, 60, ash=900)
    watch = grid.watch("birch")
    grid.ledger.apply([replace(watch, moved_at_ms=grid.now)])
    assert find_relief(scan_now(grid, ash=900), "ash").outcome is ReliefOutcome.NO_ROOM


def test_a_node_rests_after_a_move(grid: Looks):
    relief_after(grid, 60, ash=900)
    grid.ledger.apply([replace(grid.watch("ash"), moved_at_ms=grid.now)])
    found = find_relief(scan_now(grid, ash=900), "ash")
    assert found.reason.endswith("rests for 300 s after the last move")
    grid.now += 300_000
    assert find_relief(scan_now(grid, ash=900), "ash").outcome is ReliefOutcome.MOVE


def test_after_a_restart_of_the_control_plane_all_nodes_rest_as_after_the_last_move(grid: Looks):
    grid.ledger.apply([replace(grid.ledger.auto_offload, moved_at_ms=grid.now)])
    assert "rests" in relief_after(grid, 60, ash=900).reason


def test_share_and_offload_borrows_first():
    grid = Looks(rules=rebalance_rules("share_and_offload"))
    grid.run_job("r1", "ash")
    found = relief_after(grid, 60, ash=900)
    assert (found.outcome, "it borrows first" in found.reason) == (ReliefOutcome.WAIT, True)
    grid.advance(90)
    assert find_relief(scan_now(grid, ash=900), "ash").outcome is ReliefOutcome.MOVE


def test_share_and_offload_moves_at_once_where_borrowing_was_refused():
    grid = Looks(rules=rebalance_rules("share_and_offload"))
    grid.run_job("r1", "ash")
    grid.ledger.apply([RebalanceState(node="ash", memory=PressureWatch(refused=True))])
    assert relief_after(grid, 60, ash=900).outcome is ReliefOutcome.MOVE


def test_dynamic_balancing_evens_out_below_the_thresholds_and_others_do_not():
    for mode, policy, expected in [
        ("dynamic_balancing", "aggressive", ReliefOutcome.MOVE),
        ("dynamic_balancing", "conservative", None),
        ("offload_only", "aggressive", None),
    ]:
        grid = Looks(rules=rebalance_rules(mode, policy))
        grid.run_job("r1", "ash", memory_gb=2)
        relief_after(grid, 60, ash=700)
        scan = scan_now(grid, ash=700)
        named = nodes_to_relieve(scan, list(grid.ledger.offload_watches.values()))
        assert named == (("ash",) if expected else ())
        if expected:
            assert find_relief(scan, "ash").outcome is expected


def test_evening_out_never_makes_the_other_node_the_busier_one():
    grid = Looks(rules=rebalance_rules("dynamic_balancing", "aggressive"))
    grid.run_job("r1", "ash", memory_gb=16, cores=4)
    assert relief_after(grid, 60, ash=700, birch=300).outcome is not ReliefOutcome.MOVE


def test_where_the_node_has_borrowed_work_goes_before_all_others():
    grid = Looks(*apart("ash", "birch", "cedar"), rules=rebalance_rules("share_and_offload"))
    grid.run_job("r1", "ash", memory_gb=2, cores=0)
    short = PressureReading(node="ash", score=500, memory=900, cpu=100)
    for _ in range(3):
        readings = (short, *(grid._reading(name, 0) for name in ("birch", "cedar")))
        grid.handle(PressureRead(readings, grid.rules))
        grid.advance(30)
    (lender,) = {lease.node for lease in grid.ledger.leases.values() if lease.request.target == "ash"}
    grid.ledger.apply([RebalanceState(node="ash", memory=PressureWatch(refused=True))])
    levels: dict[str, int | PressureReading] = {"ash": short, lender: 100}
    found = relief_after(grid, 60, "ash", **levels)
    assert (found.outcome, found.target) == (ReliefOutcome.MOVE, lender)


def test_without_another_node_there_is_no_room_and_it_says_so():
    grid = Looks(*apart("ash"), offload=OffloadRules(enabled=True))
    grid.run_job("r1", "ash")
    assert "there is no other node" in relief_after(grid, 60, ash=900).reason


def scan_at(grid: Looks, memory: int | None) -> PressureScan:
    readings = (
        PressureReading(node="ash", score=memory, memory=memory, cpu=0),
        PressureReading(node="birch", score=0, memory=0, cpu=0),
    )
    return scan_with_lenders(grid.ledger, readings, grid.rules, grid.now, grid.offload)


@pytest.mark.parametrize(
    ("outcome", "memory", "degraded"),
    [
        (ReliefOutcome.NO_ROOM, 850, True),
        (ReliefOutcome.NOTHING_MOVABLE, 850, True),
        (ReliefOutcome.NOT_WORTH_IT, 850, False),
        (ReliefOutcome.NOT_WORTH_IT, 960, True),
        (ReliefOutcome.WAIT, 990, False),
        (ReliefOutcome.MOVE, 990, False),
    ],
)
def test_a_node_is_degraded_when_nothing_can_leave_it(outcome, memory, degraded):
    assert (
        bool(why_degraded(scan_at(Looks(), memory), "ash", Relief(outcome=outcome, reason="why", cause="memory")))
        is degraded
    )


def test_only_memory_degrades_a_node():
    assert not why_degraded(
        scan_at(Looks(), 990), "ash", Relief(outcome=ReliefOutcome.NO_ROOM, reason="why", cause="cpu")
    )


def test_a_degraded_node_is_restored_when_it_has_been_below_the_low_mark_at_two_looks():
    grid, row = Looks(), DegradedNode("ash", 0, "why")
    assert not why_restored(scan_at(grid, 750), row, None)  # between the marks nothing changes
    assert not why_restored(scan_at(grid, 650), row, grid.now)
    assert not why_restored(scan_at(grid, None), row, grid.now - 60_000)  # not heard: nobody knows
    why = why_restored(scan_at(grid, 650), row, grid.now - 60_000)
    assert why == "memory at 65 %, below the low mark of 70 %"


def test_a_degraded_node_that_has_left_the_grid_is_forgotten():
    assert why_restored(scan_at(Looks(), 900), DegradedNode("oak", 0, "why"), None)


def test_low_jobs_stand_still_and_others_go_on():
    grid = Looks()
    grid.run_job("r1", "ash", priority=Priority.LOW)
    grid.run_job("r2", "ash", priority=Priority.MEDIUM)
    grid.run_job("r3", "birch", priority=Priority.LOW)
    assert jobs_to_pause(grid.ledger, "ash") == frozenset()
    grid.ledger.apply([DegradedNode("ash", grid.now, "why")])
    assert jobs_to_pause(grid.ledger, "ash") == {"r1"}
    assert jobs_to_pause(grid.ledger, "birch") == frozenset()


def test_where_all_are_low_the_oldest_goes_on_so_that_memory_comes_free():
    grid = Looks()
    grid.run_job("r2", "ash", priority=Priority.LOW)
    grid.advance(1)
    grid.run_job("r1", "ash", priority=Priority.LOW)
    grid.ledger.apply([DegradedNode("ash", grid.now, "why")])
    assert jobs_to_pause(grid.ledger, "ash") == {"r1"}
    grid.end("r2")
    assert jobs_to_pause(grid.ledger, "ash") == frozenset()
