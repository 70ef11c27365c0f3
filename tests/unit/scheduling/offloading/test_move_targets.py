"""Targets of moves: the least loaded node that can take a piece of work, or why none can."""

from __future__ import annotations

from distributed_grid.scheduling.offloading.obstacles import ObstacleKind
from distributed_grid.scheduling.offloading.proposals import files_to_check, propose
from tests.support.builders import Scenario, a_node
from tests.support.rebalance_rounds import a_reading, apart, three
from tests.unit.scheduling.offloading.processes import a_process
from tests.unit.scheduling.offloading.proposing import BIG, PRESSED, a_scan, propose_all, the_only


def test_a_target_that_lacks_a_needed_file_is_passed_over() -> None:
    scenario = Scenario(*three())
    process = a_process(**BIG, needs=(("/data/x.bin", 7),))
    first = the_only(propose_all(scenario, process))
    assert files_to_check([first]) == {first.target: (("/data/x.bin", 7),)}
    second = the_only(propose_all(scenario, process, absent={first.target: ["/data/x.bin"]}))
    assert second.movable
    assert second.target != first.target
    none = the_only(propose_all(scenario, process, absent={"gpu1": ["/data/x.bin"], "gpu2": ["/data/x.bin"]}))
    assert none.obstacles[0].kind is ObstacleKind.MISSING_FILES
    assert "/data/x.bin" in none.obstacles[0].text
    assert files_to_check([none]) == {}


def test_a_named_target_is_the_only_one() -> None:
    scenario = Scenario(*three())
    assert the_only(propose_all(scenario, a_process(**BIG), target="gpu2")).target == "gpu2"
    for wrong in ("master", "nobody"):
        one = the_only(propose_all(scenario, a_process(**BIG), target=wrong))
        assert one.obstacles[0].kind is ObstacleKind.NO_TARGET


def test_nobody_with_room_is_said_node_by_node() -> None:
    scenario = Scenario(*three())
    busy = [a_reading(name, memory=950) for name in ("gpu1", "gpu2")]
    found = propose(a_scan(scenario, PRESSED, *busy), "master", [a_process(**BIG)], {})
    assert the_only(found).obstacles[0].kind is ObstacleKind.NO_TARGET
    assert "gpu1" in found[0].obstacles[0].text
    assert "gpu2" in found[0].obstacles[0].text


def test_a_node_that_is_unknown_or_alone_has_no_target() -> None:
    alone = Scenario(apart(a_node("master", memory_gb=30)))
    assert "no other machine" in the_only(propose_all(alone, a_process(**BIG))).obstacles[0].text
    assert propose(a_scan(alone), "nobody", [a_process()], {}) == []
