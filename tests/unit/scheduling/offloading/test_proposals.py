"""Which work of a node is proposed to go, where to, and what keeps the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.moves import Move, MoveConsent, MovedProcess, Way
from distributed_grid.scheduling.offloading.processes import ObstacleKind
from distributed_grid.scheduling.offloading.proposals import (
    MAX_REASONS,
    MoveTargets,
    amounts_text,
    files_to_check,
    process_ask,
    propose,
)
from tests.support.builders import GB, NOW, Scenario, a_node, a_request, an_ask
from tests.support.rebalance_rounds import a_reading, apart, three
from tests.unit.scheduling.offloading.processes import a_process
from tests.unit.scheduling.offloading.proposing import BIG, PRESSED, a_scan, propose_all, the_only


def a_job(scenario: Scenario, uid: str, *, memory_gb: float = 8, restartable: bool = False, **request: Any) -> None:
    """A job that runs on master."""
    scenario.submit(a_request(uid, memory_gb=memory_gb, cores=1, prefer=("master",), **request), starts=True)
    scenario.ledger.apply([replace(scenario.job(uid), restartable=restartable)])


# ---------------------------------------------------------------------- jobs
def test_a_job_that_marks_checkpoints_restarts_from_there() -> None:
    scenario = Scenario(*three())
    a_job(scenario, "j1")
    scenario.advance(60)
    job = scenario.job("j1")
    scenario.ledger.apply([replace(job, attempts=(replace(job.attempts[-1], marked_at_ms=scenario.now - 5_000),))])
    one = the_only(propose_all(scenario))
    assert (one.way, one.job_id, one.movable, one.recommended) == (Way.CHECKPOINT_RESTART, "job-j1", True, True)
    assert one.target in ("gpu1", "gpu2")
    assert one.lost_ms == 5_000
    assert not one.needs_consent
    assert "memory at 90 %" in one.reasons[0]


def test_a_declared_job_restarts_and_loses_all_of_its_run() -> None:
    scenario = Scenario(*three())
    a_job(scenario, "j1", restartable=True)
    scenario.advance(60)
    one = the_only(propose_all(scenario))
    assert (one.way, one.lost_ms, one.recommended) == (Way.RESTART, 60_000, True)
    assert "run again" in " ".join(one.reasons)


def test_a_job_that_was_not_declared_stays() -> None:
    scenario = Scenario(*three())
    a_job(scenario, "j1")
    one = the_only(propose_all(scenario))
    assert (one.way, one.movable, one.recommended) == (None, False, False)
    assert one.obstacles[0].kind is ObstacleKind.NOT_DECLARED


def test_a_job_that_has_not_started_loses_nothing() -> None:
    scenario = Scenario(*three())
    scenario.submit(a_request("j1", memory_gb=8, prefer=("master",)))
    one = the_only(propose_all(scenario))
    assert (one.way, one.lost_ms) == (Way.QUEUE_ELSEWHERE, 0)


def test_a_waiting_job_of_the_node_is_listed() -> None:
    scenario = Scenario(*three())
    scenario.ask(a_request("full", memory_gb=30, require=("master",)))
    scenario.submit(a_request("j1", memory_gb=4, require=("master",)))
    one = the_only(propose_all(scenario))
    assert one.job_id == "job-j1"
    assert one.obstacles[0].kind is ObstacleKind.NO_TARGET
    assert "not one of the required nodes (master)" in one.obstacles[0].text


def test_a_job_for_this_node_alone_stays() -> None:
    scenario = Scenario(*three())
    scenario.submit(a_request("j1", memory_gb=8, require=("master",)), starts=True)
    assert the_only(propose_all(scenario)).obstacles[0].kind is ObstacleKind.BOUND


def test_a_job_that_is_moved_already_is_not_proposed_again() -> None:
    scenario = Scenario(*three())
    a_job(scenario, "j1", restartable=True)
    request = a_request("move-1", memory_gb=8)
    scenario.ledger.apply(
        [
            Move(
                id="move-1",
                user="ada",
                source="master",
                target="gpu1",
                way=Way.RESTART,
                request=request,
                requested_at_ms=NOW,
                job="j1",
            )
        ]
    )
    assert the_only(propose_all(scenario)).obstacles[0].kind is ObstacleKind.MOVING


# ---------------------------------------------------------------------- processes
def test_a_process_needs_consent_for_its_shape_and_is_recommended_anyway() -> None:
    scenario = Scenario(*three())
    one = the_only(propose_all(scenario, a_process("python3", "sim.py", "--n", "4", **BIG)))
    assert (one.way, one.movable, one.recommended, one.needs_consent) == (Way.PROCESS_RESTART, True, True, True)
    assert one.shape == "python sim.py --n"
    assert "consent for `python sim.py --n`" in " ".join(one.reasons)


def test_a_consent_counts_for_the_user_who_asks() -> None:
    scenario = Scenario(*three())
    process = a_process(**BIG)
    scenario.ledger.apply([MoveConsent(user="bob", shape="python sim.py", given_at_ms=NOW, cwd=process.cwd)])
    assert the_only(propose_all(scenario, process)).needs_consent
    assert not the_only(propose_all(scenario, process, user="bob")).needs_consent


@pytest.mark.parametrize("cwd", ["/elsewhere", ""])
def test_a_consent_for_another_directory_or_for_none_does_not_count(cwd: str) -> None:
    scenario = Scenario(*three())
    process = a_process(**BIG)
    scenario.ledger.apply([MoveConsent(user="bob", shape="python sim.py", given_at_ms=NOW, cwd=cwd)])
    assert the_only(propose_all(scenario, process, user="bob")).needs_consent


def test_obstacles_leave_no_way() -> None:
    one = the_only(propose_all(Scenario(*three()), a_process(traced=True, **BIG)))
    assert (one.way, one.target, one.recommended) == (None, "", False)
    assert one.obstacles[0].kind is ObstacleKind.TRACED


def test_a_process_that_is_moved_already_is_not_proposed_again() -> None:
    scenario = Scenario(*three())
    process = a_process(**BIG)
    moved = MovedProcess(process.identity, process.cwd)
    request = a_request("move-1", memory_gb=8)
    scenario.ledger.apply(
        [
            Move(
                id="move-1",
                user="ada",
                source="master",
                target="gpu1",
                way=Way.PROCESS_RESTART,
                request=request,
                requested_at_ms=NOW,
                process=moved,
            )
        ]
    )
    assert the_only(propose_all(scenario, process)).obstacles[0].kind is ObstacleKind.MOVING


def test_checked_files_make_a_proposal_surer() -> None:
    scenario = Scenario(*three())
    process = a_process(**BIG, needs=(("/data/x.bin", 7),))
    first = the_only(propose_all(scenario, process))
    checked = the_only(propose_all(scenario, process, absent={first.target: ()}))
    assert checked.target == first.target
    assert 0 < first.confidence < checked.confidence <= 1000


def test_names_and_paths_that_steer_a_terminal_are_shown_harmless() -> None:
    evil = "\x1b[2J\n"
    found = propose_all(
        Scenario(*three()),
        a_process(f"./a{evil}", f"--x{evil}", cwd=f"/srv/alice/{evil}", **BIG),
        a_process(evil, parent=evil, listening=(evil,), needs=((evil, 1),), unreadable=evil),
    )
    for one in found:
        texts = (one.command, one.shape, *one.reasons, *(obstacle.text for obstacle in one.obstacles))
        assert all(text.isprintable() for text in texts)


# ---------------------------------------------------------------------- what is recommended
def test_just_enough_is_recommended_and_the_least_lost_work_first() -> None:
    scenario = Scenario(*three())
    work = [a_process("./a", pid=pid, pss_bytes=8 * GB, cpu_milli=100, cpu_ms=pid) for pid in (3, 1, 2)]
    reading = a_reading("master", memory=850, cpu=100)  # 16.5 GB above the low mark of 30 GB
    found = propose_all(scenario, *work, reading=reading)
    assert [(one.process.pid, one.recommended) for one in found if one.process] == [(1, True), (2, True), (3, True)]
    reading = a_reading("master", memory=810, cpu=100)
    scan = a_scan(scenario, reading, low=600)  # 6.3 GB
    found = propose(scan, "master", work, {})
    assert [(one.process.pid, one.recommended) for one in found if one.process] == [(1, True), (2, False), (3, False)]


def test_nothing_is_recommended_on_a_node_without_pressure() -> None:
    one = the_only(propose_all(Scenario(*three()), a_process(**BIG), reading=a_reading("master", memory=500)))
    assert (one.movable, one.recommended) == (True, False)


def test_servers_and_small_work_are_not_recommended() -> None:
    scenario = Scenario(*three())
    small = a_process("./a", pss_bytes=GB // 100)
    server = a_process("nginx", pid=4001, pss_bytes=4 * GB)
    assert [one.recommended for one in propose_all(scenario, small, server)] == [False, False]


def test_work_that_is_recommended_together_fits_its_targets_together() -> None:
    nodes = (apart(a_node("master", cores=16, memory_gb=64)), apart(a_node("gpu1", cores=16, memory_gb=32)))
    scenario = Scenario(*nodes)
    work = [a_process("./a", pid=pid, pss_bytes=8 * GB, cpu_milli=100) for pid in range(5)]
    found = propose_all(scenario, *work)
    recommended = [one for one in found if one.recommended]
    assert all(one.movable for one in found)
    assert len(recommended) == 2  # gpu1 keeps a fifth of its 32 GB free, and each gets 10
    assert "beside what is recommended" in " ".join(found[-1].reasons)


def test_processes_of_a_simulated_node_do_not_relieve_it() -> None:
    nodes = tuple(replace(node, simulated=True) for node in three())
    one = the_only(propose_all(Scenario(*nodes), a_process(**BIG)))
    assert (one.movable, one.recommended) == (True, False)


def test_what_is_asked_for_a_process_is_rounded_up() -> None:
    ask = process_ask(a_process(cpu_milli=1001, pss_bytes=GB))
    assert ask.cpu_milli == 2000
    assert GB < ask.memory_bytes <= 1.6 * GB
    assert ask.gpu_milli == 0


@given(st.integers(-(2**70), 2**70), st.integers(-(2**70), 2**70), st.integers(-(2**70), 2**70))
def test_lies_of_an_agent_are_still_a_request_that_somebody_could_make(cpu: int, memory: int, gpu: int) -> None:
    assert process_ask(a_process(cpu_milli=cpu, pss_bytes=memory, gpu_memory_bytes=gpu)).problem() is None


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4000), st.integers(0, 10**6)), max_size=12))
def test_recommended_work_is_always_movable_and_never_more_than_the_targets_spare(
    work: list[tuple[int, int, int]],
) -> None:
    scenario = Scenario(*three())
    processes = [
        a_process("./a", pid=pid, pss_bytes=memory * GB, cpu_milli=cpu, cpu_ms=lost)
        for pid, (memory, cpu, lost) in enumerate(work)
    ]
    taken: dict[str, int] = {}
    for one in propose_all(scenario, *processes):
        assert one.movable or one.obstacles
        assert 0 <= one.confidence <= 1000
        if one.recommended:
            assert one.movable
            taken[one.target] = taken.get(one.target, 0) + one.ask.memory_bytes
    assert all(size <= 24 * GB for size in taken.values())


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
