"""Targets of moves: the least loaded node that can take a piece of work, or why none can."""

from __future__ import annotations

from distributed_grid.scheduling.offloading.move_targets import MAX_REASONS, MoveTargets, amounts_text
from distributed_grid.scheduling.offloading.obstacles import ObstacleKind
from distributed_grid.scheduling.offloading.proposals import files_to_check, propose
from tests.support.builders import Scenario, a_node, a_request, an_ask
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


def test_of_those_with_room_the_least_loaded_is_the_target() -> None:
    scan = a_scan(Scenario(*three()), PRESSED, a_reading("gpu1", cpu=300))
    assert MoveTargets(scan, "master").find(a_request(cores=1)).node == "gpu2"


def test_what_was_assigned_to_a_target_is_not_spared_twice() -> None:
    scan = a_scan(Scenario(*three()), PRESSED, a_reading("gpu1", cpu=100))
    targets, request = MoveTargets(scan, "master"), a_request(cores=4)
    assert [targets.find(request).node for _ in range(2)] == ["gpu2", "gpu2"], "asking alone assigns nothing"
    assert [targets.find(request, assign=True).node for _ in range(3)] == ["gpu2", "gpu1", ""]
    assert "to spare, 4 cores needed" in targets.find(request).reason


def test_a_named_target_need_not_spare_anything_but_has_to_have_room() -> None:
    scan = a_scan(Scenario(*three()), PRESSED, a_reading("gpu1", memory=950, cpu=950))
    assert MoveTargets(scan, "master").find(a_request(cores=8)).node == ""
    assert MoveTargets(scan, "master", "gpu1").find(a_request(cores=8)).node == "gpu1"
    assert MoveTargets(scan, "master", "gpu1").find(a_request(cores=9)).reason.startswith("gpu1: ")
    assert MoveTargets(scan, "master", "gpu9").find(a_request()).reason == "there is no other node gpu9"


def test_a_target_says_how_sure_it_is_and_which_files_keep_the_work_from_all() -> None:
    scan = a_scan(Scenario(*three()), PRESSED)
    needs = (("/data/x.bin", 7), ("/data/y.bin", 0))
    found = MoveTargets(scan, "master", absent={"gpu1": ["/data/y.bin"]}).find(a_request(), needs)
    assert (found.node, found.missing, found.reason) == ("gpu2", (), "")
    assert 0 < found.confidence <= 1000
    nowhere = MoveTargets(scan, "master", absent={"gpu1": ["/data/y.bin"], "gpu2": ["/data/x.bin"]})
    assert nowhere.find(a_request(), needs).missing in {("/data/x.bin",), ("/data/y.bin",)}


def test_only_so_many_reasons_are_told() -> None:
    names = [f"n{number}" for number in range(MAX_REASONS + 3)]
    scenario = Scenario(*three(), *(apart(a_node(name, cores=1)) for name in names))
    scan = a_scan(scenario, PRESSED, *(a_reading(name) for name in names))
    reason = MoveTargets(scan, "master").find(a_request(cores=64)).reason
    assert reason.count("; ") == MAX_REASONS
    assert reason.endswith("; and 5 more")


def test_what_is_asked_for_is_told_in_words() -> None:
    assert amounts_text(an_ask(2, 4, 1)) == "4.0 GB, 2 cores, 1 GPU"
