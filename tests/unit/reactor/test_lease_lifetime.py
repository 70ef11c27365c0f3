"""Claims: leases that a new ledger learns of from elsewhere, held until their nodes confirm them.

Deadlines: a request that cannot end in time is given up instead of started; running jobs are left alone.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import (
    AgentRequested,
    ControlPlaneStarted,
    LeaseAsked,
    LeaseReclaimed,
    LeaseRecovered,
    LeaseReleased,
    LeasesRecovered,
    NodeDeclared,
    NodeDrained,
    NodeForgotten,
    NodeStopped,
    TimePassed,
)
from distributed_grid.domain.followups import Cause, ScanQueue
from distributed_grid.domain.leases import MAX_EPOCH_LEAD, MAX_FENCE
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Amounts, Claim, GpuShare
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState, NodeState
from distributed_grid.errors import Refused
from distributed_grid.reactor import step
from distributed_grid.reactor.decision import MAX_LEASES_PER_STEP
from distributed_grid.reactor.lease_lifetime import CLAIMS_READ, MAX_EXPIRED_PER_STEP, MAX_REASONS_PER_STEP, NO_ROOM
from distributed_grid.reactor.leases import MAX_GRANTS_PER_STEP
from tests.support.builders import GB, NOW, Scenario, a_node, a_request

FENCE = (7 << 32) + 5
HOUR_MS = 3_600_000


def a_claim(
    name: str = "b1", *, node: str = "gpu2", cores: int = 2, fence: int = FENCE, at: int = NOW
) -> LeaseRecovered:
    request = a_request(name, cores=cores, target="gpu1", anti_affinity=("gpu1",), duration_s=3600)
    return LeaseRecovered(
        request=request, node=node, claim=Claim(1000 * cores), fence=fence, granted_at_ms=at, ends_at_ms=NOW + HOUR_MS
    )


def a_start(new_scenario, *nodes) -> Scenario:
    """A new ledger with declared nodes of four cores that nobody has heard yet."""
    scenario: Scenario = new_scenario(ledger=Ledger())
    scenario.handle(ControlPlaneStarted(1))
    for node in nodes or (a_node("gpu1", cores=4), a_node("gpu2", cores=4)):
        scenario.handle(NodeDeclared(node))
    return scenario


def ended(stepped):
    return next(row for row in stepped.changes if row.kind == "lease" and row.is_over)


def test_a_claim_is_reserved_until_its_node_is_heard(new_scenario):
    scenario = a_start(new_scenario)
    scenario.handle(LeasesRecovered((a_claim(),)))
    lease = scenario.ledger.leases["b1"]
    assert (lease.state, lease.recovered) == (LeaseState.RESERVING, True)
    scenario.ledger.check()
    scenario.heartbeat("gpu1")
    assert scenario.ledger.leases["b1"].recovered
    heard = scenario.heartbeat("gpu2")
    lease = scenario.ledger.leases["b1"]
    assert (lease.state, lease.recovered) == (LeaseState.ACTIVE, False)
    assert (lease.node, lease.fence, lease.ends_at_ms) == ("gpu2", FENCE, NOW + HOUR_MS)
    assert "confirmed" in [record.type for record in heard.records]


def test_nobody_else_gets_what_is_claimed(new_scenario):
    scenario = a_start(new_scenario)
    scenario.handle(LeasesRecovered((a_claim(cores=3),)))
    scenario.heartbeat("gpu2")
    assert scenario.ask(a_request("r1", cores=2, require=["gpu2"])).state is LeaseState.ASKED
    assert scenario.ask(a_request("r2", cores=1, require=["gpu2"])).node == "gpu2"


def test_fences_stay_above_what_was_claimed(new_scenario):
    scenario = a_start(new_scenario)
    scenario.handle(LeasesRecovered((a_claim(),)))
    scenario.heartbeat("gpu2")
    assert scenario.ask(a_request("r1", require=["gpu2"])).fence > FENCE
    assert scenario.ledger.counters["epoch"] == 1
    scenario.heartbeat("gpu1")
    assert scenario.ask(a_request("r2", require=["gpu1"])).fence < 2 << 32, "another node's fences are as they were"


@pytest.mark.parametrize("fence", [(MAX_EPOCH_LEAD + 2) << 32, MAX_FENCE, 2**70])
def test_a_claim_with_a_fence_that_this_grid_cannot_have_given_ends_at_once(new_scenario, fence):
    scenario = a_start(new_scenario)
    over = ended(scenario.handle(LeasesRecovered((a_claim(fence=fence),))))
    assert over.detail == "recovered, but its fence cannot be one of this grid"
    assert scenario.ledger.nodes["gpu2"].epoch == 0


def test_a_claim_that_its_node_cannot_have_lent_ends_with_the_reason(new_scenario):
    scenario = a_start(new_scenario)
    scenario.handle(LeasesRecovered((a_claim("b1"), a_claim("b2", cores=3, fence=FENCE + 1, at=NOW + 1))))
    over = ended(scenario.heartbeat("gpu2"))
    assert (over.id, over.end) == ("b2", LeaseEnd.FAILED)
    assert over.detail == "recovered, but gpu2 cannot have lent it: 5000 of 4000 millicores lent"
    assert scenario.ledger.leases["b1"].state is LeaseState.ACTIVE


def test_a_claim_on_a_device_that_is_not_there_ends(new_scenario):
    scenario = a_start(new_scenario, a_node("gpu1"), a_node("gpu2", gpus=1))
    event = a_claim()
    scenario.handle(LeasesRecovered((replace(event, claim=Claim(gpus=(GpuShare(1, 1000),))),)))
    assert "GPU 1" in ended(scenario.heartbeat("gpu2")).detail


def test_a_claim_on_a_node_that_is_gone_ends_at_once_and_raises_no_fence(new_scenario):
    scenario = a_start(new_scenario)
    stepped = scenario.handle(LeasesRecovered((a_claim(node="gpu9"),)))
    assert ended(stepped).detail == "recovered, but gpu9 is not a node of this grid"
    assert scenario.ledger.counters["fence"] == 1 << 32


def test_a_claim_on_a_node_that_has_not_said_what_it_has_waits_for_its_word(new_scenario):
    far = a_node("far", cores=0, memory_gb=0, hold_s=60)
    scenario = a_start(new_scenario, a_node("gpu1"), far)
    scenario.handle(LeasesRecovered((a_claim(node="far"),)))
    scenario.ledger.check()
    scenario.handle(NodeDeclared(a_node("far", cores=4, hold_s=60)))
    scenario.heartbeat("far")
    assert scenario.ledger.leases["b1"].state is LeaseState.ACTIVE


def test_a_claim_whose_time_is_over_expires_like_any_lease(new_scenario):
    scenario = a_start(new_scenario)
    scenario.handle(LeasesRecovered((replace(a_claim(), ends_at_ms=NOW),)))
    over = ended(scenario.advance(0, heard=False))
    assert over.end is LeaseEnd.EXPIRED


def test_claims_are_read_once_and_the_ledger_knows_better(new_scenario):
    scenario = a_start(new_scenario)
    assert scenario.handle(LeasesRecovered()).changes
    assert scenario.ledger.counters[CLAIMS_READ] == 1
    assert scenario.handle(LeasesRecovered((a_claim(),))).changes == []
    scenario.heartbeat("gpu2")
    scenario.ask(a_request("b1", require=["gpu2"]))
    assert scenario.handle(a_claim()).changes == []


def test_a_claim_on_a_node_that_was_heard_already_is_settled_at_once(new_scenario):
    scenario = new_scenario(a_node("gpu1"), a_node("gpu2"))
    scenario.handle(a_claim())
    assert scenario.ledger.leases["b1"].state is LeaseState.ACTIVE


def test_a_claim_can_be_given_back(new_scenario):
    scenario = a_start(new_scenario)
    scenario.handle(LeasesRecovered((a_claim(),)))
    scenario.release("b1")
    assert not scenario.ledger.leases


@pytest.fixture
def full() -> Scenario:
    new_scenario = Scenario(a_node("n1", cores=1))
    new_scenario.ask(a_request("first"))
    return new_scenario


def test_what_cannot_be_over_in_time_is_refused_at_once():
    new_scenario = Scenario(a_node("n1"))
    with pytest.raises(Refused, match="it takes 60 s, but its deadline is in 30 s"):
        new_scenario.handle(LeaseAsked(a_request(expects_ms=60_000, deadline_ms=NOW + 30_000)))


def test_a_wait_ends_when_the_deadline_cannot_be_met_any_more(full):
    full.ask(a_request("r1", expects_ms=20_000, deadline_ms=NOW + 60_000, wait_s=300))
    full.advance(39)
    assert full.ledger.leases["r1"].state is LeaseState.ASKED
    stepped = full.advance(2)
    (over,) = [row for row in stepped.changes if row.kind == "lease"]
    assert over.end is LeaseEnd.WITHDRAWN
    assert over.detail.startswith("its deadline cannot be met any more, after a wait of 41 s: n1: 0 cores free")


def test_a_job_in_line_ends_with_its_deadline_too(full):
    full.submit(a_request("j1", deadline_ms=NOW + 5_000))
    stepped = full.advance(6)
    (job,) = [row for row in stepped.changes if row.kind == "job"]
    assert job.state is JobState.ENDED
    assert "its deadline cannot be met any more" in job.outcome.detail


def test_what_runs_is_not_stopped_by_its_deadline_and_what_was_displaced_runs_again():
    new_scenario = Scenario(a_node("n1", cores=1))
    new_scenario.submit(a_request("j1", deadline_ms=NOW + 5_000), starts=True)
    new_scenario.advance(10)
    assert new_scenario.job("j1").state is JobState.RUNNING
    new_scenario.handle(LeaseReclaimed(new_scenario.job("j1").lease_id, "the owner is back"))
    new_scenario.end("j1")
    new_scenario.advance(1)
    assert new_scenario.job("j1").state is JobState.ASSIGNED


def a_full_node_with(new_scenario, waiting: int, *, wait_s: float = 10) -> Scenario:
    """One node of a thousand cores, all lent, and so many who wait for one of them."""
    scenario: Scenario = new_scenario(a_node("gpu1", cores=1000))
    scenario.ask(a_request("full", cores=1000))
    for number in range(waiting):
        scenario.ask(a_request(f"r{number:04}", cores=1, wait_s=wait_s))
    return scenario


def test_waits_that_are_over_at_once_are_settled_so_many_in_one_step(new_scenario):
    scenario = a_full_node_with(new_scenario, 2 * MAX_EXPIRED_PER_STEP + 1)
    scenario.now += 10_000
    left: list[int] = []
    ahead: list[Cause] = [TimePassed()]
    while ahead:
        ahead = step(scenario.ledger, ahead[0], scenario.now).later
        left.append(len(scenario.ledger.waiting))
    assert left == [MAX_EXPIRED_PER_STEP + 1, 1, 0]


def test_what_a_term_frees_is_offered_to_the_queue_before_a_wait_of_the_same_moment_is_over(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=2))
    scenario.ask(a_request("held-a", cores=1, duration_s=10))
    scenario.ask(a_request("held-b", cores=1, duration_s=10))
    for name in ("waits-a", "waits-b", "waits-c"):
        scenario.ask(a_request(name, cores=1, wait_s=10))
    scenario.advance(10)
    assert sorted(scenario.ledger.leases) == ["waits-a", "waits-b"]


def test_a_scan_grants_so_many_in_one_step(new_scenario):
    scenario = a_full_node_with(new_scenario, MAX_GRANTS_PER_STEP + 2)
    released = step(scenario.ledger, LeaseReleased("full", "ada"), scenario.now)
    assert (len(scenario.ledger.waiting), released.later) == (2, [ScanQueue()])
    assert step(scenario.ledger, ScanQueue(), scenario.now).later == []
    assert not scenario.ledger.waiting


def test_nodes_that_are_gone_at_once_are_lost_so_many_leases_in_one_step(new_scenario):
    nodes = [a_node(f"n{number}", cores=MAX_LEASES_PER_STEP, hold_s=15) for number in range(3)]
    scenario = new_scenario(*nodes)
    for number in range(3 * MAX_LEASES_PER_STEP):
        scenario.ask(a_request(f"r{number}", cores=1))
    scenario.advance(7, heard=False)
    scenario.now += 60_000
    left: list[int] = []
    ahead: list[Cause] = [TimePassed()]
    while ahead:
        ahead = step(scenario.ledger, ahead[0], scenario.now).later
        left.append(len(scenario.ledger.leases))
    assert left == [2 * MAX_LEASES_PER_STEP, MAX_LEASES_PER_STEP, 0]


def a_node_that_lends(new_scenario, leases: int) -> Scenario:
    scenario = new_scenario(a_node("n1", cores=leases, hold_s=15))
    for number in range(leases):
        scenario.ask(a_request(f"r{number}", cores=1))
    assert len(scenario.ledger.leases) == leases
    return scenario


@pytest.mark.parametrize("event", [NodeDrained("n1"), NodeStopped("n1"), TimePassed()])
def test_what_one_node_lent_is_ended_so_much_in_one_step(new_scenario, event):
    scenario = a_node_that_lends(new_scenario, 2 * MAX_LEASES_PER_STEP + 1)
    if event == TimePassed():
        scenario.advance(7, heard=False)
        scenario.now += 60_000
    left: list[int] = []
    ahead: list[Cause] = [event]
    while ahead:
        ahead = step(scenario.ledger, ahead[0], scenario.now).later
        left.append(len(scenario.ledger.leases))
    assert left == [MAX_LEASES_PER_STEP + 1, 1, 0]


def test_a_drained_node_whose_next_step_was_lost_goes_on_with_the_next_tick(new_scenario):
    scenario = a_node_that_lends(new_scenario, 3 * MAX_LEASES_PER_STEP)
    step(scenario.ledger, NodeDrained("n1", "maintenance"), scenario.now)
    assert scenario.ledger.leases
    scenario.handle(TimePassed())
    assert not scenario.ledger.leases
    assert scenario.ledger.nodes["n1"].reclaim == "maintenance"
    scenario.handle(AgentRequested("n1", wanted=True))
    assert scenario.ledger.nodes["n1"].reclaim == ""


def test_a_node_being_stopped_whose_next_step_was_lost_gives_up_the_rest_with_its_hold(new_scenario):
    scenario = a_node_that_lends(new_scenario, 3 * MAX_LEASES_PER_STEP)
    step(scenario.ledger, NodeStopped("n1"), scenario.now)
    assert scenario.ledger.nodes["n1"].state is NodeState.DRAINING
    scenario.advance(60, heard=False)
    assert not scenario.ledger.leases


def test_a_forgotten_node_reclaims_nothing_though_it_was_drained_before(new_scenario):
    scenario = a_node_that_lends(new_scenario, 4)
    scenario.handle(NodeDrained("n1"))
    scenario.handle(AgentRequested("n1", wanted=True))
    scenario.heartbeat("n1")
    scenario.ask(a_request("again", cores=1))
    scenario.handle(NodeForgotten("n1"))
    scenario.advance(1)
    assert list(scenario.ledger.leases) == ["again"]


def test_waits_of_very_different_requests_that_are_over_at_once_share_their_reasons(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4))
    scenario.ask(a_request("full", cores=4))
    scenario.ask(replace(a_request("alike", cores=1, wait_s=10), expects_ms=1))
    for number in range(MAX_REASONS_PER_STEP + 1):
        ask = Amounts(1000, GB + number)
        scenario.ask(replace(a_request(f"r{number:02}", cores=1, wait_s=10), ask=ask))
    scenario.now += 10_000
    records = step(scenario.ledger, TimePassed(), scenario.now).records
    details = [record.reason for record in records if record.type == "withdrawn"]
    assert len(details) == MAX_REASONS_PER_STEP + 2
    assert sum("gpu1: " in detail for detail in details) == MAX_REASONS_PER_STEP
    assert sum(detail.endswith(NO_ROOM) for detail in details) == 2
