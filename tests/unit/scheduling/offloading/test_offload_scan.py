"""Scan of all nodes by the thresholds of offloading: who is relieved first, who could take a job, and what lasts."""

from __future__ import annotations

from distributed_grid.domain.rebalancing import PressureReading
from distributed_grid.scheduling.offloading.offload_scan import (
    excess_bytes,
    nodes_to_relieve,
    track_offload,
    will_be_short_of_memory,
)
from tests.support.offload_looks import Looks, ahead, apart, scan_now

GB = 1024**3


def test_memory_comes_before_what_works_harder():
    grid = Looks(*apart("ash", "birch", "cedar"))
    scan = scan_now(grid, ash=PressureReading("ash", 900, 100, 990), birch=PressureReading("birch", 500, 900, 100))
    watches = track_offload(scan)
    assert nodes_to_relieve(scan, watches) == ("birch", "ash")


def test_a_sure_forecast_of_memory_is_believed_and_says_how_much_has_to_go():
    grid = Looks()
    scan = scan_now(grid, ash=ahead("ash", 700, 900), birch=ahead("birch", 100, 900))
    assert will_be_short_of_memory(scan, "ash")
    assert not will_be_short_of_memory(scan, "birch")  # it is far from it now
    assert excess_bytes(scan, "ash") == 32 * GB * 200 // 1000
    assert not will_be_short_of_memory(scan_now(grid, ash=ahead("ash", 700, 805)), "ash")
