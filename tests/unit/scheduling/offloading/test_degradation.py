"""Which nodes are degraded, which jobs stand still there, and when that is over."""

from __future__ import annotations

import pytest

from distributed_grid.domain.offload_watch import DegradedNode
from distributed_grid.domain.rebalancing import PressureReading
from distributed_grid.domain.resources import Priority
from distributed_grid.scheduling.offloading.degradation import jobs_to_pause, why_degraded, why_restored
from distributed_grid.scheduling.offloading.offload_scan import OffloadScan, scan_offload
from distributed_grid.scheduling.offloading.relief import Relief, ReliefOutcome
from tests.support.offload_looks import Looks


def scan_at(grid: Looks, memory: int | None) -> OffloadScan:
    readings = (PressureReading("ash", memory, memory, 0), PressureReading("birch", 0, 0, 0))
    return scan_offload(grid.ledger, readings, grid.rules, grid.offload, grid.now)


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
    assert bool(why_degraded(scan_at(Looks(), memory), "ash", Relief(outcome, "why", "memory"))) is degraded


def test_only_memory_degrades_a_node():
    assert not why_degraded(scan_at(Looks(), 990), "ash", Relief(ReliefOutcome.NO_ROOM, "why", "cpu"))


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
