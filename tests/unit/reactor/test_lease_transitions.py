"""Transitions of leases: making room with notice and wait, gangs that are whole or not there; no core is lent twice."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.events import (
    JobSubmitted,
    LeaseAsked,
    LeaseExtended,
    LeaseReleased,
    NodeDrained,
    NodeStopped,
)
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState
from distributed_grid.errors import BadInput, Refused
from distributed_grid.reactor.effects import attempt_effects
from tests.support.builders import Scenario, a_command, a_node, a_request

STOPPED = Outcome(Ending.SIGNALLED, signal=15)


def busy(scenario: Scenario, *jobs: tuple[str, float], priority: str = "low") -> Scenario:
    """Jobs of so many cores, running for a while."""
    for uid, cores in jobs:
        scenario.submit(a_request(uid, cores=cores, priority=priority), starts=True)
        scenario.advance(1)
    scenario.advance(2)
    return scenario


def in_use(scenario: Scenario) -> float:
    """The cores that somebody uses now."""
    started = [lease for lease in scenario.ledger.leases.values() if lease.holds and not lease.awaits]
    return NodeClaims(lease.claim for lease in started if lease.claim is not None).cpu_milli / 1000


def to_start(scenario: Scenario) -> set[str]:
    return {effect.job.uid for effect in attempt_effects(scenario.ledger) if effect.job.state is JobState.ASSIGNED}


def test_a_plain_lease_is_taken_away_at_once_and_says_for_whom(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1", cores=4, priority="low"))
    scenario.advance(2)
    result = scenario.handle(LeaseAsked(a_request("vip", cores=4, priority="urgent")))
    gone = result.changes[0]
    assert (gone.id, gone.end, gone.detail) == ("r1", LeaseEnd.PREEMPTED, "made room for urgent request vip")
    assert scenario.ledger.leases["vip"].state is LeaseState.ACTIVE
    assert [record.type for record in result.records] == ["requested", "granted", "preempted"]


def test_what_a_victim_held_beyond_the_need_goes_to_the_line(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1", cores=4, priority="low"))
    scenario.ask(a_request("waits", cores=2))
    scenario.advance(2)
    scenario.ask(a_request("vip", cores=1, priority="urgent"))
    assert scenario.ledger.leases["waits"].state is LeaseState.ACTIVE


def test_a_plain_lease_that_made_room_is_active_when_its_victim_is_gone(new_scenario):
    scenario = busy(new_scenario(), ("j1", 4))
    lease = scenario.ask(a_request("vip", cores=2, priority="urgent", duration_s=60))
    assert (lease.state, lease.awaits) == (LeaseState.RESERVING, ("j1.1",))
    assert scenario.ledger.claims_on("gpu1").cpu_milli == 6000
    scenario.end("j1", STOPPED)
    lease = scenario.ledger.leases["vip"]
    assert (lease.state, lease.awaits) == (LeaseState.ACTIVE, ())


def test_a_victim_that_is_being_stopped_is_not_lent_to_anybody_else_meanwhile(new_scenario):
    scenario = busy(new_scenario(), ("j1", 4))
    scenario.submit(a_request("vip", cores=2, priority="urgent"))
    assert scenario.ask(a_request("r2", cores=1)).state is LeaseState.ASKED
    scenario.end("j1", STOPPED)
    assert scenario.ledger.leases["r2"].state is LeaseState.ACTIVE
    assert scenario.job("j1").state is JobState.QUEUED


@pytest.mark.parametrize("order", list(itertools.permutations(["a", "b", "c"])))
def test_several_preemptors_and_partly_freed_victims_never_overcommit(new_scenario, order):
    scenario = busy(new_scenario(a_node("gpu1", cores=6)), ("a", 1), ("b", 2), ("c", 3))
    for uid, cores in (("vip1", 3), ("vip2", 2), ("vip3", 1)):
        scenario.submit(a_request(uid, cores=cores, priority="urgent"))
        scenario.ledger.check()
    for uid in order:
        for vip in sorted(to_start(scenario)):
            scenario.start(vip)
        if uid in scenario.ledger.jobs and scenario.job(uid).state is JobState.STOPPING:
            scenario.end(uid, STOPPED)
        scenario.ledger.check()
        assert in_use(scenario) <= 6
    assert all(not scenario.lease_of(vip).awaits for vip in ("vip1", "vip2", "vip3"))


def test_the_first_preemptor_starts_when_its_own_victim_is_gone_the_second_when_both_are(new_scenario):
    scenario = busy(new_scenario(), ("a", 2), ("b", 2))
    scenario.submit(a_request("vip1", cores=2, priority="urgent"))
    scenario.submit(a_request("vip2", cores=2, priority="urgent"))
    first = scenario.lease_of("vip1").awaits[0].split(".")[0]
    second = ({"a", "b"} - {first}).pop()
    scenario.end(first, STOPPED)
    assert to_start(scenario) == {"vip1"}
    scenario.end(second, STOPPED)
    assert to_start(scenario) == {"vip1", "vip2"}


def test_the_second_preemptor_does_not_start_on_what_the_first_waits_for(new_scenario):
    scenario = busy(new_scenario(), ("a", 2), ("b", 2))
    scenario.submit(a_request("vip1", cores=2, priority="urgent"))
    scenario.submit(a_request("vip2", cores=2, priority="urgent"))
    first = scenario.lease_of("vip1").awaits[0].split(".")[0]
    second = ({"a", "b"} - {first}).pop()
    scenario.end(second, STOPPED)
    assert to_start(scenario) == set()


def test_a_gpu_that_is_being_cleared_is_never_on_two_leases(new_scenario):
    scenario = new_scenario(a_node("gpu1", gpus=2))
    for uid in ("a", "b", "c"):
        scenario.submit(a_request(uid, gpus=0.6 if uid != "c" else 0.4, priority="low"), starts=True)
    scenario.advance(2)
    scenario.ask(a_request("vip1", gpus=1, priority="urgent"))
    scenario.ask(a_request("vip2", gpus=1, priority="urgent"))
    for uid in ("c", "b", "a"):
        scenario.end(uid, STOPPED)
        scenario.ledger.check()
    held = [scenario.ledger.leases[vip].claim.gpus[0].index for vip in ("vip1", "vip2")]
    assert sorted(held) == [0, 1]


def test_a_preemptor_that_gives_up_leaves_the_room_to_the_next(new_scenario):
    scenario = busy(new_scenario(), ("j1", 4))
    scenario.ask(a_request("vip", cores=4, priority="urgent"))
    scenario.handle(LeaseReleased("vip", "ada"))
    scenario.ledger.check()
    scenario.end("j1", STOPPED)
    assert scenario.job("j1").attempt.number == 2


def test_an_urgent_request_that_found_its_victim_too_young_displaces_it_when_time_has_passed(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1", cores=4, priority="low"), starts=True)
    assert scenario.ask(a_request("vip", cores=4, priority="urgent")).state is LeaseState.ASKED
    scenario.advance(1)
    assert scenario.ledger.leases["vip"].awaits == ("j1.1",)


def test_a_preempted_job_may_go_on_elsewhere(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    scenario.submit(a_request("j1", cores=4, priority="low", prefer=["gpu1"]), starts=True)
    scenario.ask(a_request("r2", cores=4, require=["gpu2"], duration_s=4))
    scenario.advance(2)
    scenario.submit(a_request("vip", cores=4, priority="urgent", require=["gpu1"]))
    scenario.advance(2)
    scenario.end("j1", STOPPED)
    assert scenario.lease_of("j1").node == "gpu2"


def test_a_preemptor_whose_term_ends_before_it_starts_is_over(new_scenario):
    scenario = busy(new_scenario(), ("j1", 4))
    scenario.submit(a_request("vip", cores=4, priority="urgent", duration_s=5))
    scenario.advance(5)
    assert "vip" not in scenario.ledger.jobs
    scenario.end("j1", STOPPED)
    assert scenario.job("j1").attempt.number == 2


def test_high_priority_waits_where_urgent_would_not(new_scenario):
    scenario = busy(new_scenario(), ("j1", 4))
    assert scenario.ask(a_request("high", cores=4, priority="high")).state is LeaseState.ASKED
    assert scenario.job("j1").state is JobState.RUNNING


@pytest.fixture
def trio() -> Scenario:
    return Scenario(*(a_node(name, cores=4) for name in ("n1", "n2", "n3")))


def places(scenario: Scenario, gang: str = "g1") -> list[str]:
    return sorted(scenario.ledger.leases[member].node for member in scenario.ledger.gangs.get(gang, ()))


def test_every_member_gets_a_node_of_its_own(trio):
    lease = trio.ask(a_request("g1", cores=3, gang=3))
    assert lease.state is LeaseState.ACTIVE
    assert places(trio) == ["n1", "n2", "n3"]
    fences = [trio.ledger.leases[member].fence for member in trio.ledger.gangs["g1"]]
    assert len(set(fences)) == 3
    trio.ledger.check()


def test_a_gang_that_does_not_fit_whole_holds_nothing(trio):
    trio.ask(a_request("r1", cores=2, require=["n2"]))
    lease = trio.ask(a_request("g1", cores=3, gang=3))
    assert lease.state is LeaseState.ASKED
    assert places(trio) == []
    trio.release("r1")
    assert places(trio) == ["n1", "n2", "n3"]
    trio.ledger.check()


def test_a_gang_larger_than_the_grid_is_refused_at_once(trio):
    with pytest.raises(Refused, match="a gang of 4 needs as many nodes, 3 could serve a member"):
        trio.handle(LeaseAsked(a_request("g1", gang=4)))


def test_releasing_any_member_releases_all(trio):
    trio.ask(a_request("g1", cores=3, gang=3))
    trio.release("g1:2")
    assert trio.ledger.is_empty
    trio.ledger.check()
    assert trio.ask(a_request("r1", cores=4, require=["n3"])).node == "n3"


@pytest.mark.parametrize("event", [NodeDrained("n2"), NodeStopped("n2")])
def test_losing_one_node_ends_the_whole_gang(trio, event):
    trio.ask(a_request("g1", cores=3, gang=3))
    stepped = trio.handle(event)
    assert trio.ledger.is_empty
    ended = {row.id: row.end for row in stepped.changes if row.kind == "lease"}
    assert set(ended) == {"g1", "g1:2", "g1:3"}
    assert len(set(ended.values())) == 1
    assert LeaseEnd.RELEASED not in ended.values()


def test_an_urgent_request_that_displaces_one_member_ends_all(trio):
    trio.ask(a_request("g1", cores=3, gang=3, priority="low"))
    trio.advance(60)
    urgent = trio.ask(a_request("r1", cores=4, priority="urgent"))
    assert urgent.state is LeaseState.ACTIVE
    assert "g1" not in trio.ledger.gangs
    assert set(trio.ledger.leases) == {"r1"}
    trio.ledger.check()


def test_more_time_is_for_all_members(trio):
    trio.ask(a_request("g1", gang=2, duration_s=10))
    trio.handle(LeaseExtended("g1", "ada", 60_000))
    trio.advance(30)
    assert len(trio.ledger.gangs["g1"]) == 2
    trio.advance(60)
    assert trio.ledger.is_empty


def test_asking_again_with_the_same_id_gets_the_same_gang(trio):
    first = trio.ask(a_request("g1", gang=2))
    assert trio.handle(LeaseAsked(a_request("g1", gang=2))).answer.lease == first
    assert len(trio.ledger.leases) == 2


def test_a_command_runs_on_one_node(trio):
    with pytest.raises(BadInput, match="a command runs on one node"):
        trio.handle(JobSubmitted(id="job", command=a_command(), request=a_request("g1", gang=2)))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans()), max_size=12))
def test_a_gang_is_whole_or_not_there_whatever_happens(steps):
    scenario = Scenario(*(a_node(f"n{i}", cores=4) for i in range(4)))
    for number, (cores, size, lets_go) in enumerate(steps):
        scenario.ask(a_request(f"g{number}", cores=cores, gang=size))
        if lets_go:
            held = [lease.id for lease in scenario.ledger.leases.values() if lease.holds]
            if held:
                scenario.release(held[number % len(held)])
        for gang, members in scenario.ledger.gangs.items():
            assert len(members) == scenario.ledger.leases[gang].request.gang
            assert len({scenario.ledger.leases[member].node for member in members}) == len(members)
        scenario.ledger.check()
