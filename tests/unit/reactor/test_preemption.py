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


def busy(tale: Scenario, *jobs: tuple[str, float], priority: str = "low") -> Scenario:
    """Jobs of so many cores, running for a while."""
    for uid, cores in jobs:
        tale.submit(a_request(uid, cores=cores, priority=priority), starts=True)
        tale.later(1)
    tale.later(2)
    return tale


def in_use(tale: Scenario) -> float:
    """The cores that somebody uses now."""
    started = [lease for lease in tale.ledger.leases.values() if lease.holds and not lease.awaits]
    return NodeClaims(lease.claim for lease in started if lease.claim is not None).cpu_milli / 1000


def to_start(tale: Scenario) -> set[str]:
    return {effect.job.uid for effect in pending(tale.ledger) if effect.job.state is JobState.ASSIGNED}


def test_a_plain_lease_is_taken_away_at_once_and_says_for_whom(story):
    tale = story()
    tale.ask(a_request("r1", cores=4, priority="low"))
    tale.later(2)
    told = tale.tell(LeaseAsked(a_request("vip", cores=4, priority="urgent")))
    gone = told.changes[0]
    assert (gone.id, gone.end, gone.detail) == ("r1", LeaseEnd.PREEMPTED, "made room for urgent request vip")
    assert tale.ledger.leases["vip"].state is LeaseState.ACTIVE
    assert [record.type for record in told.records] == ["requested", "granted", "preempted"]


def test_what_a_victim_held_beyond_the_need_goes_to_the_line(story):
    tale = story()
    tale.ask(a_request("r1", cores=4, priority="low"))
    tale.ask(a_request("waits", cores=2))
    tale.later(2)
    tale.ask(a_request("vip", cores=1, priority="urgent"))
    assert tale.ledger.leases["waits"].state is LeaseState.ACTIVE


def test_a_plain_lease_that_made_room_is_active_when_its_victim_is_gone(story):
    tale = busy(story(), ("j1", 4))
    lease = tale.ask(a_request("vip", cores=2, priority="urgent", duration_s=60))
    assert (lease.state, lease.awaits) == (LeaseState.RESERVING, ("j1.1",))
    assert tale.ledger.claims_on("gpu1").cpu_milli == 6000
    tale.end("j1", STOPPED)
    lease = tale.ledger.leases["vip"]
    assert (lease.state, lease.awaits) == (LeaseState.ACTIVE, ())


def test_a_victim_that_is_being_stopped_is_not_lent_to_anybody_else_meanwhile(story):
    tale = busy(story(), ("j1", 4))
    tale.submit(a_request("vip", cores=2, priority="urgent"))
    assert tale.ask(a_request("r2", cores=1)).state is LeaseState.ASKED
    tale.end("j1", STOPPED)
    assert tale.ledger.leases["r2"].state is LeaseState.ACTIVE
    assert tale.job("j1").state is JobState.QUEUED


@pytest.mark.parametrize("order", list(itertools.permutations(["a", "b", "c"])))
def test_several_preemptors_and_partly_freed_victims_never_overcommit(story, order):
    tale = busy(story(a_node("gpu1", cores=6)), ("a", 1), ("b", 2), ("c", 3))
    for uid, cores in (("vip1", 3), ("vip2", 2), ("vip3", 1)):
        tale.submit(a_request(uid, cores=cores, priority="urgent"))
        tale.ledger.check()
    for uid in order:
        for vip in sorted(to_start(tale)):
            tale.start(vip)
        if uid in tale.ledger.jobs and tale.job(uid).state is JobState.STOPPING:
            tale.end(uid, STOPPED)
        tale.ledger.check()
        assert in_use(tale) <= 6
    assert all(not tale.lease_of(vip).awaits for vip in ("vip1", "vip2", "vip3"))


def test_the_first_preemptor_starts_when_its_own_victim_is_gone_the_second_when_both_are(story):
    tale = busy(story(), ("a", 2), ("b", 2))
    tale.submit(a_request("vip1", cores=2, priority="urgent"))
    tale.submit(a_request("vip2", cores=2, priority="urgent"))
    first = tale.lease_of("vip1").awaits[0].split(".")[0]
    second = ({"a", "b"} - {first}).pop()
    tale.end(first, STOPPED)
    assert to_start(tale) == {"vip1"}
    tale.end(second, STOPPED)
    assert to_start(tale) == {"vip1", "vip2"}


def test_the_second_preemptor_does_not_start_on_what_the_first_waits_for(story):
    tale = busy(story(), ("a", 2), ("b", 2))
    tale.submit(a_request("vip1", cores=2, priority="urgent"))
    tale.submit(a_request("vip2", cores=2, priority="urgent"))
    first = tale.lease_of("vip1").awaits[0].split(".")[0]
    second = ({"a", "b"} - {first}).pop()
    tale.end(second, STOPPED)
    assert to_start(tale) == set()


def test_a_gpu_that_is_being_cleared_is_never_on_two_leases(story):
    tale = story(a_node("gpu1", gpus=2))
    for uid in ("a", "b", "c"):
        tale.submit(a_request(uid, gpus=0.6 if uid != "c" else 0.4, priority="low"), starts=True)
    tale.later(2)
    tale.ask(a_request("vip1", gpus=1, priority="urgent"))
    tale.ask(a_request("vip2", gpus=1, priority="urgent"))
    for uid in ("c", "b", "a"):
        tale.end(uid, STOPPED)
        tale.ledger.check()
    held = [tale.ledger.leases[vip].claim.gpus[0].index for vip in ("vip1", "vip2")]
    assert sorted(held) == [0, 1]


def test_a_preemptor_that_gives_up_leaves_the_room_to_the_next(story):
    tale = busy(story(), ("j1", 4))
    tale.ask(a_request("vip", cores=4, priority="urgent"))
    tale.tell(LeaseReleased("vip", "ada"))
    tale.ledger.check()
    tale.end("j1", STOPPED)
    assert tale.job("j1").attempt.number == 2


def test_an_urgent_request_that_found_its_victim_too_young_displaces_it_when_time_has_passed(story):
    tale = story()
    tale.submit(a_request("j1", cores=4, priority="low"), starts=True)
    assert tale.ask(a_request("vip", cores=4, priority="urgent")).state is LeaseState.ASKED
    tale.later(1)
    assert tale.ledger.leases["vip"].awaits == ("j1.1",)


def test_a_preempted_job_may_go_on_elsewhere(story):
    tale = story(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    tale.submit(a_request("j1", cores=4, priority="low", prefer=["gpu1"]), starts=True)
    tale.ask(a_request("r2", cores=4, require=["gpu2"], duration_s=4))
    tale.later(2)
    tale.submit(a_request("vip", cores=4, priority="urgent", require=["gpu1"]))
    tale.later(2)
    tale.end("j1", STOPPED)
    assert tale.lease_of("j1").node == "gpu2"


def test_a_preemptor_whose_term_ends_before_it_starts_is_over(story):
    tale = busy(story(), ("j1", 4))
    tale.submit(a_request("vip", cores=4, priority="urgent", duration_s=5))
    tale.later(5)
    assert "vip" not in tale.ledger.jobs
    tale.end("j1", STOPPED)
    assert tale.job("j1").attempt.number == 2


def test_high_priority_waits_where_urgent_would_not(story):
    tale = busy(story(), ("j1", 4))
    assert tale.ask(a_request("high", cores=4, priority="high")).state is LeaseState.ASKED
    assert tale.job("j1").state is JobState.RUNNING
