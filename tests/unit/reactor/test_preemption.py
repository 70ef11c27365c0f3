"""Making room: notice, wait, start; and never a core lent twice on the way."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import itertools

import pytest

from distributed_grid.domain.events import LeaseAsked, LeaseReleased
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState
from distributed_grid.reactor import pending
from tests.support.builders import Scenario, a_node, a_request

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
    return {effect.job.uid for effect in pending(scenario.ledger) if effect.job.state is JobState.ASSIGNED}


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
