"""Liveness: heartbeats and the offers that follow from them, silence that is not death, and owners who come back."""

# mypy: disable-error-code="arg-type,comparison-overlap,return-value"
# A state changes between two lines that look at it; mypy does not see that.

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.engines import EngineResources
from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptPaused,
    AttemptsListed,
    AttemptStarted,
    ClocksConfirmed,
    ControlPlaneStarted,
    EngineNode,
    EngineObserved,
    EngineRegistered,
    GroupBound,
    HeartbeatReceived,
    NodeDeclared,
    NodeDrained,
    NodeHeard,
    TimePassed,
)
from distributed_grid.domain.jobs import Ending, Job, Outcome
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.states import JobState, LeaseEnd, NodeState
from distributed_grid.reactor import decide
from distributed_grid.reactor.dispatch import REPORT_BURST
from distributed_grid.reactor.effects import attempt_effects
from distributed_grid.reactor.jobs import CLOSED_MS, NOT_RUN_AGAIN
from distributed_grid.reactor.node_liveness import SUSPECT_AFTER_MS
from distributed_grid.reactor.nodes import HOLD_GRACE_MS
from tests.support.builders import GB, NOW, Scenario, a_capacity, a_node, a_request, a_usage, an_exit, thresholds


def test_a_declared_node_joins_and_is_alive_from_its_first_heartbeat(new_scenario):
    scenario = new_scenario(ledger=Ledger())
    declared = scenario.handle(NodeDeclared(a_node("gpu1")))
    assert scenario.ledger.nodes["gpu1"].state is NodeState.JOINING
    assert [record.type for record in declared.records] == ["node-declared"]
    heard = scenario.heartbeat("gpu1")
    assert scenario.ledger.nodes["gpu1"].state is NodeState.ALIVE
    assert [record.type for record in heard.records] == ["node-alive"]
    assert scenario.ledger.lends("gpu1") == a_capacity()


def test_a_heartbeat_from_before_the_capacity_was_known_says_nothing_about_idleness(new_scenario):
    node = a_node("gpu1", cores=4, memory_gb=16, thresholds=thresholds())
    scenario = new_scenario(ledger=Ledger())
    scenario.handle(NodeDeclared(replace(node, capacity=Capacity())))
    scenario.heartbeat("gpu1")
    scenario.handle(NodeDeclared(node))
    scenario.now += 2_000
    scenario.heartbeat("gpu1")
    assert scenario.ledger.lends("gpu1").cpu_milli > 0, "idle as it is, it waits for a dwell"


def test_a_heartbeat_of_a_node_nobody_declared_changes_nothing(new_scenario):
    scenario = new_scenario()
    assert scenario.heartbeat("stranger").changes == []


def test_a_heartbeat_that_says_nothing_new_is_only_an_observation(new_scenario):
    scenario = new_scenario()
    scenario.now += 2_000
    assert [row.kind for row in scenario.heartbeat("gpu1").changes] == ["observation"]


def test_an_offer_is_made_anew_when_it_says_something_else(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4, thresholds=thresholds()))
    scenario.heartbeat("gpu1", a_usage(cpu_outside=0.5))
    offer = scenario.ledger.offers["gpu1"]
    assert (offer.generation, offer.lends.cpu_milli) == (2, 2000)


def test_an_owners_short_visit_leaves_the_offer_but_not_its_size(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=10, thresholds=thresholds(cpu_busy_max=0.3)))
    for outside in (*[0.0] * 10, 0.6, 0.0, 0.6, 0.0):
        scenario.now += 2_000
        scenario.heartbeat("gpu1", a_usage(cpu_outside=outside))
        assert scenario.ledger.lends("gpu1").cpu_milli == 10_000 * (1 - outside)


def test_an_owner_who_stays_gets_the_offer_withdrawn_and_keeps_the_node_for_a_while(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=10, thresholds=thresholds(cpu_busy_max=0.3, dwell_s=60)))
    lends = []
    paused = []
    for usage in [a_usage()] * 30 + [a_usage(cpu_outside=0.6)] * 30 + [a_usage()] * 60:
        scenario.now += 2_000
        scenario.heartbeat("gpu1", usage)
        lends.append(scenario.ledger.lends("gpu1").cpu_milli)
        paused.append(scenario.ledger.offers["gpu1"].paused)
    assert [amount for amount, before in zip(lends, [None, *lends], strict=False) if amount != before] == [
        10_000,
        4_000,
        0,
        10_000,
    ]
    assert paused[lends.index(0)] == ("cpu",)
    assert lends.index(0) == 45, "half a minute at twice the mark is the mark, and one beat more is above it"
    assert paused[59] == (), "withdrawn by then"
    assert lends.index(10_000, 60) > 90


def test_what_a_withdrawn_offer_had_learnt_is_not_forgotten(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=10, thresholds=thresholds(cpu_busy_max=0.3, dwell_s=60)))
    for _ in range(30):
        scenario.now += 2_000
        scenario.heartbeat("gpu1", a_usage(cpu_outside=0.6))
    scenario.ledger.apply([replace(scenario.ledger.offers["gpu1"], withdrawn=True)])
    scenario.now += 2_000
    scenario.heartbeat("gpu1")
    assert scenario.ledger.lends("gpu1").cpu_milli == 0


def test_an_offer_is_made_anew_when_it_grows_old(new_scenario):
    scenario = new_scenario(replace(a_node("gpu1"), refresh_ms=60_000, offer_ms=300_000))
    scenario.now += 60_000
    scenario.heartbeat("gpu1")
    offer = scenario.ledger.offers["gpu1"]
    assert (offer.generation, offer.made_at_ms, offer.expires_at_ms) == (2, NOW + 60_000, NOW + 360_000)


def test_an_offer_expires_when_nobody_renews_it(new_scenario):
    scenario = new_scenario(replace(a_node("gpu1"), offer_ms=5_000))
    scenario.advance(4.999, heard=False)
    assert "gpu1" in scenario.ledger.offers
    scenario.advance(0.001, heard=False)
    assert scenario.ledger.offers == {}
    assert scenario.ask(a_request()).state == "asked"


def test_a_node_nobody_hears_is_suspect_gets_nothing_new_and_keeps_what_it_has(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1"))
    scenario.advance(SUSPECT_AFTER_MS / 1000, heard=False)
    assert scenario.ledger.nodes["gpu1"].state is NodeState.ALIVE
    passed = scenario.advance(0.001, heard=False)
    assert scenario.ledger.nodes["gpu1"].state is NodeState.SUSPECT
    assert [record.type for record in passed.records] == ["node-suspect"]
    assert scenario.ledger.leases["r1"].state == "active"
    assert scenario.ask(a_request("r2")).state == "asked"


def test_a_suspect_node_that_is_heard_serves_those_who_waited(new_scenario):
    scenario = new_scenario()
    scenario.advance(7, heard=False)
    assert scenario.ask(a_request("r1")).state == "asked"
    scenario.heartbeat("gpu1")
    assert scenario.ledger.leases["r1"].state == "active"


def test_a_lost_node_that_is_heard_joins_again(new_scenario):
    scenario = new_scenario()
    scenario.ledger.apply([replace(scenario.ledger.nodes["gpu1"], state=NodeState.LOST)])
    scenario.heartbeat("gpu1")
    assert scenario.ledger.nodes["gpu1"].state is NodeState.ALIVE


HOLD = 60
"""Seconds, as in `far_scenario`."""
SIGNS_OF_LIFE = ("heartbeat", "heartbeat", "heard", "greeting", "tick", "tick", "late tick", "drain", "job")


@given(st.lists(st.sampled_from(SIGNS_OF_LIFE), max_size=40))
def test_what_was_decided_lost_is_not_renewed_before_a_greeting(signs: list[str]) -> None:
    scenario = Scenario(a_node("gpu2", cores=64, hold_s=HOLD))
    decided, number = False, 0
    for sign in signs:
        before = scenario.ledger.observations["gpu2"]
        if sign == "heartbeat":
            scenario.heartbeat("gpu2")
        elif sign == "heard":
            scenario.handle(NodeHeard("gpu2"))
        elif sign == "greeting":
            scenario.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot", machine="dir"))
            decided = False
        elif sign == "drain":
            scenario.handle(NodeDrained("gpu2", "its owner wants it back"))
        elif sign == "job":
            number += 1
            scenario.submit(a_request(f"r{number}", cores=1))
        else:
            scenario.now += 7_000 if sign == "tick" else 1000 * HOLD + HOLD_GRACE_MS
            decided |= any(record.type == "node-lost" for record in scenario.handle(TimePassed()).records)
        after = scenario.ledger.observations["gpu2"]
        if decided:
            assert after.held_until_ms == before.held_until_ms
            assert state_of(scenario) is not NodeState.ALIVE


def test_a_lost_node_has_a_hold_again_from_the_first_heartbeat_after_its_greeting(far_scenario: Scenario) -> None:
    far_scenario.submit(a_request("r1"), starts=True)
    far_scenario.advance(7, heard=False)
    far_scenario.advance(HOLD, heard=False)
    assert state_of(far_scenario) is NodeState.LOST
    far_scenario.heartbeat("gpu2")
    far_scenario.handle(NodeHeard("gpu2"))
    assert state_of(far_scenario) is NodeState.LOST
    assert far_scenario.ledger.observations["gpu2"].held_until_ms <= far_scenario.now
    far_scenario.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot", machine="dir"))
    far_scenario.handle(NodeHeard("gpu2"))
    far_scenario.handle(TimePassed())
    assert state_of(far_scenario) is NodeState.LOST, "a greeting alone is no sign of life"
    far_scenario.heartbeat("gpu2")
    assert state_of(far_scenario) is NodeState.ALIVE
    assert far_scenario.ledger.observations["gpu2"].held_until_ms == far_scenario.now + 1000 * HOLD + HOLD_GRACE_MS


def state_of(far_scenario: Scenario, name: str = "gpu2") -> NodeState:
    return far_scenario.ledger.nodes[name].state


def test_a_draining_node_whose_work_was_given_up_renews_nothing_either(far_scenario: Scenario) -> None:
    far_scenario.submit(a_request("r1"), retries=1, starts=True)
    far_scenario.handle(NodeDrained("gpu2", "its owner wants it back"))
    far_scenario.advance(HOLD + HOLD_GRACE_MS / 1000, heard=False)
    assert far_scenario.job("r1").state is JobState.QUEUED
    before = far_scenario.ledger.observations["gpu2"]
    far_scenario.heartbeat("gpu2")
    assert far_scenario.ledger.observations["gpu2"] == before
    far_scenario.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot", machine="dir"))
    far_scenario.heartbeat("gpu2")
    assert far_scenario.ledger.observations["gpu2"].held_until_ms > far_scenario.now


def test_a_silent_node_is_doubted_keeps_its_work_and_gets_nothing_new(far_scenario: Scenario) -> None:
    far_scenario.submit(a_request("r1"), starts=True)
    far_scenario.advance(7, heard=False)
    assert state_of(far_scenario) is NodeState.SUSPECT
    assert far_scenario.job("r1").state is JobState.RUNNING
    assert far_scenario.submit(a_request("r2")).state is JobState.QUEUED


def test_a_node_heard_again_within_its_hold_goes_on_as_if_nothing_was(far_scenario: Scenario) -> None:
    far_scenario.submit(a_request("r1"), starts=True)
    far_scenario.advance(HOLD - 1, heard=False)
    far_scenario.heartbeat("gpu2")
    assert state_of(far_scenario) is NodeState.ALIVE
    assert far_scenario.job("r1").state is JobState.RUNNING


def test_nothing_is_lent_again_before_the_hold_and_its_grace_are_over(far_scenario: Scenario) -> None:
    far_scenario.submit(a_request("r1", cores=4), starts=True)
    far_scenario.advance(7, heard=False)
    far_scenario.advance(HOLD - 7 + HOLD_GRACE_MS / 1000 - 0.001, heard=False)
    assert far_scenario.ledger.claims_on("gpu2").cpu_milli == 4000
    far_scenario.advance(0.001, heard=False)
    assert far_scenario.ledger.claims_on("gpu2").cpu_milli == 0
    assert state_of(far_scenario) is NodeState.LOST


def test_a_lost_job_ends_as_lost_and_runs_again_only_with_retries(far_scenario: Scenario) -> None:
    far_scenario.submit(a_request("r1"), starts=True)
    far_scenario.submit(a_request("r2"), retries=1, starts=True)
    far_scenario.advance(7, heard=False)
    result = far_scenario.advance(HOLD, heard=False)
    assert "r1" not in far_scenario.ledger.jobs
    assert far_scenario.job("r2").state is JobState.QUEUED
    ended = next(record for record in result.records if record.type == "stopped" and record.subject == "r1")
    assert ended.data["ending"] == "lost"


def test_a_lease_without_a_job_ends_with_its_node(far_scenario: Scenario) -> None:
    assert far_scenario.ask(a_request("r1")) is not None
    far_scenario.advance(7, heard=False)
    far_scenario.advance(HOLD, heard=False)
    assert "r1" not in far_scenario.ledger.leases


def test_a_report_after_the_node_was_given_up_is_history_and_nothing_else(far_scenario: Scenario) -> None:
    attempt = far_scenario.submit(a_request("r1"), retries=1, starts=True).attempt
    assert attempt is not None
    far_scenario.advance(7, heard=False)
    far_scenario.advance(HOLD, heard=False)
    before = far_scenario.ledger.rows(durable_only=True)
    result = far_scenario.handle(
        AttemptEnded(uid="r1", number=attempt.number, fence=attempt.fence, outcome=an_exit(), nodes=("gpu2",))
    )
    assert [record.type for record in result.records] == ["late-report"]
    assert far_scenario.ledger.rows(durable_only=True) == before


def test_a_control_plane_that_was_restarted_waits_a_whole_hold_before_it_gives_anything_up(
    far_scenario: Scenario,
) -> None:
    far_scenario.submit(a_request("r1"), starts=True)
    far_scenario.now += 1_000_000_000
    far_scenario.handle(ControlPlaneStarted(9))
    far_scenario.advance(HOLD + HOLD_GRACE_MS / 1000 - 0.001, heard=False)
    assert "r1" in far_scenario.ledger.jobs
    far_scenario.advance(0.001, heard=False)
    assert "r1" not in far_scenario.ledger.jobs


def test_a_node_of_this_machine_is_never_given_up() -> None:
    far_scenario = Scenario(a_node("here"))
    far_scenario.submit(a_request("r1"), starts=True)
    far_scenario.advance(7, heard=False)
    far_scenario.advance(1_000_000, heard=False)
    assert state_of(far_scenario, "here") is NodeState.SUSPECT
    assert far_scenario.job("r1").state is JobState.RUNNING


def test_nobody_reports_about_another_nodes_attempts(far_scenario: Scenario) -> None:
    far_scenario.handle(NodeDeclared(a_node("liar", hold_s=HOLD)))
    attempt = far_scenario.submit(a_request("r1")).attempt
    assert attempt is not None
    far_scenario.handle(AttemptStarted(uid="r1", number=1, fence=attempt.fence, pid=7, cores=(), nodes=("liar",)))
    far_scenario.handle(AttemptEnded(uid="r1", number=1, fence=attempt.fence, outcome=an_exit(), nodes=("liar",)))
    assert far_scenario.job("r1").state is JobState.ASSIGNED


def test_what_is_paused_for_the_owner_is_shown_and_goes_on(far_scenario: Scenario) -> None:
    attempt = far_scenario.submit(a_request("r1"), starts=True).attempt
    assert attempt is not None
    result = far_scenario.handle(
        AttemptPaused(uid="r1", number=1, fence=attempt.fence, paused=True, detail="its owner is back", nodes=("gpu2",))
    )
    assert (far_scenario.job("r1").state, result.records[0].type) == (JobState.PAUSED, "paused")
    far_scenario.handle(AttemptPaused(uid="r1", number=1, fence=attempt.fence, paused=True, detail="", nodes=("gpu2",)))
    far_scenario.handle(
        AttemptPaused(uid="r1", number=1, fence=attempt.fence, paused=False, detail="", nodes=("gpu2",))
    )
    assert far_scenario.job("r1").state is JobState.RUNNING
    far_scenario.end("r1")
    assert "r1" not in far_scenario.ledger.jobs


def test_what_the_owner_takes_back_waits_for_another_place_and_the_offer_is_withdrawn(far_scenario: Scenario) -> None:
    far_scenario.submit(a_request("r1"), starts=True, restartable=True)
    far_scenario.end("r1", Outcome(Ending.RECLAIMED, detail="its owner needs the memory"))
    assert far_scenario.job("r1").state is JobState.QUEUED
    assert far_scenario.job("r1").retries_left == 0
    assert "gpu2" not in far_scenario.ledger.offers
    far_scenario.heartbeat("gpu2")
    assert far_scenario.job("r1").state is JobState.QUEUED, "the node that evicted it is closed to it"
    for _ in range(CLOSED_MS // 5_000):
        far_scenario.advance(5)
        far_scenario.heartbeat("gpu2")
    far_scenario.advance(1)
    assert far_scenario.job("r1").state is JobState.ASSIGNED


def test_a_node_that_gives_way_offers_nothing(far_scenario: Scenario) -> None:
    far_scenario.handle(HeartbeatReceived(name="gpu2", usage=Usage(), yields=True, generation=5))
    assert far_scenario.submit(a_request("r1")).state is JobState.QUEUED
    far_scenario.handle(HeartbeatReceived(name="gpu2", usage=Usage(), generation=6))
    assert far_scenario.lease_of("r1").generation == 6


def test_what_an_agent_withdraws_is_withdrawn_with_its_heartbeat_before_anything_else_is_decided(
    far_scenario: Scenario,
) -> None:
    seen = decide(
        far_scenario.ledger, HeartbeatReceived(name="gpu2", usage=Usage(), yields=True, generation=5), far_scenario.now
    )
    assert all(row.is_volatile for row in seen.changes)
    far_scenario.ledger.apply(seen.changes)
    assert far_scenario.submit(a_request("r1")).state is JobState.QUEUED


def test_what_was_assigned_before_the_machine_was_restarted_is_lost_not_ordered_again(far_scenario: Scenario) -> None:
    far_scenario.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1"))
    far_scenario.submit(a_request("r1"))
    far_scenario.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-1"))
    assert len(attempt_effects(far_scenario.ledger)) == 1
    far_scenario.handle(AttemptsListed(node="gpu2", attempts=(), boot="boot-2"))
    assert "r1" not in far_scenario.ledger.jobs
    far_scenario.submit(a_request("r2"))
    attempt = far_scenario.job("r2").attempt
    assert attempt is not None
    assert attempt.boot == "boot-2"


def test_what_a_lost_node_held_is_given_up_though_somebody_waits(far_scenario: Scenario) -> None:
    far_scenario.submit(a_request("r1", cores=4), starts=True)
    assert far_scenario.submit(a_request("r2", cores=4, priority="urgent")).state is JobState.QUEUED
    far_scenario.advance(7, heard=False)
    far_scenario.advance(HOLD, heard=False)
    assert state_of(far_scenario) is NodeState.LOST
    assert "r1" not in far_scenario.ledger.jobs
    assert far_scenario.ledger.claims_on("gpu2").cpu_milli == 0


def test_a_preemptor_on_a_lost_node_waits_for_another_place(far_scenario: Scenario) -> None:
    far_scenario.submit(a_request("r1", cores=4, priority="low"), starts=True)
    urgent: Request = replace(a_request("r2", cores=4, priority="urgent"))
    far_scenario.advance(120)
    assert far_scenario.submit(urgent).state is JobState.ASSIGNED
    assert far_scenario.lease_of("r2").awaits
    far_scenario.advance(7, heard=False)
    far_scenario.advance(HOLD, heard=False)
    assert far_scenario.job("r2").state is JobState.QUEUED
    assert far_scenario.job("r1").state is JobState.QUEUED


ROOM = EngineResources(4000, 16 * GB, 2000)
IDLE = a_usage(cpu_outside=0.1)
BUSY = a_usage(cpu_outside=0.9)


@pytest.fixture
def scenario(new_scenario) -> Scenario:
    """A node of four cores and two GPUs with an owner, in Ray, lending to three requests."""
    scenario = new_scenario(a_node("gpu1", cores=4, gpus=2, thresholds=thresholds(cpu_busy_max=0.3, dwell_s=0)))
    scenario.handle(EngineRegistered(name="ray", mode="attached", address="head"))
    scenario.handle(
        EngineObserved(
            name="ray", session="s", asked_at_ms=scenario.now, nodes=(EngineNode(id="n1", name="gpu1", room=ROOM),)
        )
    )
    scenario.heartbeat("gpu1", IDLE)
    for name, asked in (("old", {"cores": 1}), ("gpu", {"gpus": 1}), ("young", {"cores": 1})):
        scenario.advance(1, heard=False)
        scenario.heartbeat("gpu1", IDLE)
        scenario.ask(a_request(name, **asked))
        scenario.handle(GroupBound(next(key for key in scenario.ledger.bindings if key.startswith(name))))
    return scenario


def heartbeat(scenario: Scenario, usage, seconds: float) -> list[tuple[str, LeaseEnd]]:
    """What ends while the node measures the same for so long."""
    over = []
    for _ in range(int(seconds / 2)):
        scenario.now += 2000
        result = scenario.heartbeat("gpu1", usage)
        over += [(row.id, row.end) for row in result.changes if isinstance(row, Lease) and row.end]
    return over


def test_an_owner_who_comes_back_gets_the_youngest_first_and_only_what_it_is_short_of(scenario):
    assert heartbeat(scenario, a_usage(cpu_outside=0.7), 20) == [("young", LeaseEnd.RECLAIMED)]
    assert heartbeat(scenario, BUSY, 20) == [("old", LeaseEnd.RECLAIMED)]
    assert "gpu" in scenario.ledger.leases


def test_a_moment_is_not_enough(scenario):
    assert heartbeat(scenario, BUSY, 2) == []
    assert heartbeat(scenario, IDLE, 20) == []


def test_below_the_mark_nothing_is_taken_back(scenario):
    assert heartbeat(scenario, a_usage(cpu_outside=0.34), 60) == []


def test_an_owner_on_a_gpu_gets_that_gpu(scenario):
    (share,) = scenario.ledger.leases["gpu"].claim.gpus
    assert heartbeat(scenario, a_usage(gpus={share.index: (0.9, 1)}), 20) == [("gpu", LeaseEnd.RECLAIMED)]


def test_a_node_without_an_owner_takes_nothing_back(new_scenario):
    scenario = new_scenario(a_node("gpu1"))
    scenario.handle(EngineRegistered(name="ray", mode="attached", address="head"))
    scenario.handle(
        EngineObserved(
            name="ray", session="s", asked_at_ms=scenario.now, nodes=(EngineNode(id="n1", name="gpu1", room=ROOM),)
        )
    )
    scenario.ask(a_request("r1"))
    assert heartbeat(scenario, BUSY, 60) == []


def test_a_jump_of_a_nodes_clock_is_recorded_once_and_so_is_its_end(new_scenario):
    scenario = new_scenario()
    jumped = HeartbeatReceived(name="gpu1", usage=Usage(), clock_jump_ms=40 * 86_400_000, clock_waits_ms=60_000)
    (record,) = scenario.handle(jumped).records
    assert (record.type, record.node, record.data["jumped_seconds"]) == ("clock-jumped", "gpu1", 40 * 86_400)
    assert scenario.handle(jumped).records == []
    (record,) = scenario.handle(HeartbeatReceived(name="gpu1", usage=Usage())).records
    assert record.type == "clock-steady"
    assert scenario.handle(HeartbeatReceived(name="gpu1", usage=Usage())).records == []


def test_confirmed_clocks_are_told_to_the_agents_until_their_jumps_are_over(new_scenario):
    scenario = new_scenario()
    jumped = HeartbeatReceived(name="gpu1", usage=Usage(), clock_jump_ms=5_000_000, clock_waits_ms=60_000)
    assert scenario.handle(ClocksConfirmed("ana")).records == []
    scenario.handle(jumped)
    (record,) = scenario.handle(ClocksConfirmed("ana")).records
    assert (record.type, record.user, record.node) == ("clock-confirmed", "ana", "gpu1")
    assert scenario.handle(ClocksConfirmed("ana")).records == []
    scenario.handle(jumped)
    assert scenario.ledger.observations["gpu1"].clock_confirmed
    scenario.handle(replace(jumped, clock_jump_ms=9_000_000))
    assert not scenario.ledger.observations["gpu1"].clock_confirmed, "that is another jump"


def test_an_agent_whose_clock_jumps_without_end_fills_no_audit_trail(new_scenario):
    scenario = new_scenario()
    records = 0
    for number in range(1000):
        found = scenario.handle(
            HeartbeatReceived(name="gpu1", usage=Usage(), clock_jump_ms=1_000_000 + number, clock_waits_ms=1)
        )
        records += len(found.records)
    assert records <= REPORT_BURST


def test_a_busy_node_whose_first_heartbeat_knows_no_rates_lends_nothing(new_scenario):
    scenario = new_scenario(ledger=Ledger())
    scenario.handle(NodeDeclared(a_node("gpu1", gpus=1, thresholds=thresholds())))
    scenario.handle(HeartbeatReceived(name="gpu1", usage=Usage(cpu_measured=False, gpus_measured=False)))
    assert scenario.ledger.lends("gpu1") == Capacity()
    scenario.now += 250
    scenario.heartbeat("gpu1", a_usage(cpu_outside=1))
    assert scenario.ledger.lends("gpu1").cpu_milli == 0


def test_the_first_measured_heartbeat_decides_at_once(new_scenario):
    scenario = new_scenario(ledger=Ledger())
    scenario.handle(NodeDeclared(a_node("gpu1", cores=4, gpus=1, thresholds=thresholds())))
    scenario.handle(HeartbeatReceived(name="gpu1", usage=Usage(cpu_measured=False, gpus_measured=False)))
    scenario.now += 250
    scenario.heartbeat("gpu1", a_usage())
    assert (scenario.ledger.lends("gpu1").cpu_milli, len(scenario.ledger.lends("gpu1").gpus)) == (4000, 1)


def test_an_older_offer_ends_with_a_heartbeat_that_knows_no_rates(new_scenario):
    scenario = new_scenario(ledger=Ledger())
    scenario.handle(NodeDeclared(a_node("gpu1", thresholds=thresholds())))
    scenario.heartbeat("gpu1", a_usage())
    assert scenario.ledger.lends("gpu1").cpu_milli > 0
    scenario.now += 2_000
    scenario.handle(HeartbeatReceived(name="gpu1", usage=Usage(cpu_measured=False)))
    assert scenario.ledger.lends("gpu1") == Capacity()


EVICTED = Outcome(Ending.RECLAIMED, detail="its owner needs the memory")


def test_a_job_that_may_not_run_again_ends_when_its_node_takes_it_back(far_scenario: Scenario) -> None:
    far_scenario.submit(a_request("r1"), starts=True)
    ended = far_scenario.end("r1", EVICTED)
    (job,) = (row for row in ended.changes if isinstance(row, Job))
    assert job.outcome == replace(EVICTED, detail=f"{EVICTED.detail}; {NOT_RUN_AGAIN}")
    assert [record.type for record in ended.records] == ["released", "stopped"]


@pytest.mark.parametrize("allowed", [{"retries": 1}, {"restartable": True}])
def test_a_job_that_may_run_again_is_queued_without_using_up_a_retry(far_scenario: Scenario, allowed) -> None:
    far_scenario.submit(a_request("r1"), starts=True, **allowed)
    far_scenario.end("r1", EVICTED)
    job = far_scenario.job("r1")
    assert (job.state, job.retries_left) == (JobState.QUEUED, allowed.get("retries", 0))


def test_a_job_that_its_node_takes_back_before_it_started_is_queued(far_scenario: Scenario) -> None:
    far_scenario.submit(a_request("r1"))
    far_scenario.end("r1", EVICTED)
    assert far_scenario.job("r1").state is JobState.QUEUED
