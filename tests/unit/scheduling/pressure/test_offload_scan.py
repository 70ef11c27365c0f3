"""Scan of all nodes by the thresholds of offloading: who is relieved first, who could take a job, and what lasts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import DegradedNode, OffloadRules
from distributed_grid.domain.rebalancing import PressureReading
from distributed_grid.domain.resources import ResourceType
from distributed_grid.scheduling.pressure.plan import MAX_RELIEVED, nodes_to_relieve, track_offload
from distributed_grid.scheduling.pressure.relief import HOUR_MS, describe_pressure
from distributed_grid.scheduling.pressure.scan import scan_pressure
from tests.support.offload_looks import Looks, ahead, apart, rebalance_rules, scan_now

GB = 1024**3


def test_memory_comes_before_what_works_harder():
    grid = Looks(*apart("ash", "birch", "cedar"))
    scan = scan_now(
        grid,
        ash=PressureReading(node="ash", score=900, memory=100, cpu=990),
        birch=PressureReading(node="birch", score=500, memory=900, cpu=100),
    )
    watches = track_offload(scan)
    assert nodes_to_relieve(scan, watches) == ("birch", "ash")


def test_a_sure_forecast_of_memory_is_believed_and_says_how_much_has_to_go():
    grid = Looks()
    scan = scan_now(grid, ash=ahead("ash", 700, 900), birch=ahead("birch", 100, 900))
    assert scan.will_be_short_of_memory("ash")
    assert not scan.will_be_short_of_memory("birch")  # it is far from it now
    assert scan.excess_bytes("ash") == 32 * GB * 200 // 1000
    assert not scan_now(grid, ash=ahead("ash", 700, 805)).will_be_short_of_memory("ash")


def tracked(grid: Looks, **levels: int | PressureReading) -> None:
    grid.ledger.apply(track_offload(scan_now(grid, **levels)))


def test_a_level_is_above_since_the_first_look_and_no_more_after_one_below():
    grid = Looks()
    tracked(grid, ash=900)
    since = grid.now
    grid.advance(60)
    tracked(grid, ash=900)
    assert grid.watch("ash").memory_since_ms == since
    tracked(grid, ash=500)
    assert grid.watch("ash").memory_since_ms is None
    assert grid.watch("birch").memory_since_ms is None


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=10))
def test_what_is_remembered_of_a_node_follows_from_its_last_levels(levels):
    grid = Looks()
    for level in levels:
        tracked(grid, ash=level)
        grid.advance(60)
    high = scan_now(grid).threshold(ResourceType.MEMORY)
    runs = len(levels) - next((at for at in range(len(levels), 0, -1) if levels[at - 1] <= high), 0)
    since = grid.watch("ash").memory_since_ms
    assert since == (grid.now - 60_000 * runs if runs else None)
    assert grid.watch("ash").looked_at_ms == grid.now - 60_000


@pytest.mark.parametrize("kind", [ResourceType.MEMORY, ResourceType.CPU, ResourceType.GPU])
@given(mark=st.integers(0, 1000))
def test_a_low_mark_is_below_its_threshold_and_never_negative(kind, mark):
    rules = OffloadRules(memory_high=mark, cpu_high=mark, gpu_high=mark)
    scan = scan_pressure(Ledger(), (), rebalance_rules(), 0, offload=rules)
    assert 0 <= scan.low_mark(kind) <= scan.threshold(kind) == mark


def test_targets_are_those_with_headroom_least_loaded_first():
    grid = Looks(*apart("ash", "birch", "cedar", "elm"))
    assert scan_now(grid, ash=900, birch=200, cedar=100).schedule.with_headroom == ("elm", "cedar", "birch")
    grid.ledger.apply([DegradedNode("elm", grid.now, "memory")])
    tracked(grid)
    grid.ledger.apply([replace(grid.watch("cedar"), moved_at_ms=grid.now)])
    assert scan_now(grid, ash=900, birch=200).schedule.with_headroom == ("birch",)
    grid.now += grid.offload.cooldown_ms
    assert scan_now(grid, ash=900, birch=200).schedule.with_headroom == ("cedar", "birch")


def test_a_node_that_is_new_rests_as_after_the_last_move():
    grid = Looks()
    assert not scan_now(grid).rests("ash")
    grid.ledger.apply([replace(grid.ledger.auto_offload, moved_at_ms=grid.now)])
    assert scan_now(grid).rests("ash")


def test_a_job_that_was_tried_is_forgotten_after_an_hour():
    grid = Looks()
    tracked(grid)
    grid.ledger.apply([replace(grid.watch("ash"), tried=(("r1", grid.now), ("r2", grid.now + 1)))])
    grid.now += HOUR_MS
    tracked(grid)
    assert grid.watch("ash").tried == (("r2", grid.now - HOUR_MS + 1),)


def test_so_many_nodes_are_relieved_at_one_look_and_degraded_ones_come_last():
    names = [f"n{number:03}" for number in range(MAX_RELIEVED + 5)]
    grid = Looks(*apart(*names))
    grid.ledger.apply([DegradedNode("n000", grid.now, "memory")])
    levels: dict[str, int | PressureReading] = dict.fromkeys(names, 900)
    named = nodes_to_relieve(scan_now(grid, **levels), track_offload(scan_now(grid, **levels)))
    assert named == tuple(names[1 : MAX_RELIEVED + 1])


def test_only_who_evens_out_is_told_by_how_much_nodes_differ():
    grid = Looks(rules=rebalance_rules("dynamic_balancing", "aggressive"))
    tracked(grid, ash=700)
    assert grid.watch("ash").spread_since_ms == grid.now
    assert describe_pressure(scan_now(grid, ash=700), "ash", "spread").startswith("ash works at 70 %, birch at 0 %")
    assert describe_pressure(scan_now(grid, ash=900), "ash", "cpu").startswith("cpu at 90 %, above the threshold of ")
