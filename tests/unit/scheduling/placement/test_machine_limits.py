"""Limits of machines: what takes long goes where the machine lives so long; simulated nodes share real memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.blocks import MemoryServerRow
from distributed_grid.domain.events import BlockAsked, BlockReleased, JobSubmitted, MemoryServed, WorkerBooted
from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.domain.states import JobState
from distributed_grid.errors import Refused
from distributed_grid.scheduling.queue.reasons import texts, why_not_now
from distributed_grid.scheduling.scaling.demand import TOO_LONG, read_demand, worker_could_serve
from tests.support.builders import GB, Scenario, a_command, a_node, a_request
from tests.support.scaling import ScalingScenario, a_type, rules

HOUR = 3600.0
LONG_S = 4 * SchedulingPolicy().minimum_run_ms / 1000
ROOM = Usage(memory_room_bytes=10 * GB)
"""Less half a GB of reserve: 9.5 GB for all."""


def a_grid(lifetime_s: float) -> tuple[ScalingScenario, str]:
    """A worker of four cores that its provider ends after so long; the node at home is full."""
    offered = replace(a_type(), lifetime_ms=round(1000 * lifetime_s))
    scenario = ScalingScenario(a_node("home", cores=2), scaling=rules(offered, up_cooldown_ms=0))
    scenario.ask(a_request("all", cores=2))
    scenario.ask(a_request("first", cores=4))
    scenario.evaluate()
    (worker_id,) = scenario.deliver()
    scenario.handle(WorkerBooted(worker_id, "i-1", ends_in_ms=round(1000 * lifetime_s)))
    scenario.release("first")
    return scenario, worker_id


def test_a_lease_that_would_outlive_the_machine_is_not_placed_there() -> None:
    grid, worker = a_grid(HOUR)
    grid.ask(a_request("long", cores=1, duration_s=2 * HOUR))
    grid.ask(a_request("expected", cores=1, expects_ms=round(2000 * HOUR)))
    assert not grid.ledger.leases.keys() & {"long", "expected"} or not grid.ledger.leases_on.get(worker)
    grid.ask(a_request("short", cores=1, duration_s=HOUR / 2))
    grid.ask(a_request("unknown", cores=1))
    assert grid.ledger.leases["short"].node == worker, "nobody waits behind what cannot be placed there"
    assert grid.ledger.leases["unknown"].node == worker


def test_explain_says_why() -> None:
    grid, worker = a_grid(HOUR)
    request = a_request("long", cores=1, duration_s=2 * HOUR)
    assert f"{worker}: its machine ends in 3600 s, and this takes 7200 s" in texts(
        why_not_now(grid.ledger, request, grid.now)
    )


def test_a_worker_that_lives_too_short_by_now_makes_room_for_another_one() -> None:
    grid, worker = a_grid(HOUR)
    for _ in range(18):
        grid.advance(100)
    grid.ask(a_request("long", cores=4, duration_s=3 * HOUR / 4))
    assert not grid.ledger.leases["long"].holds
    plan = grid.evaluate()
    assert (plan.action, plan.count) == ("scale_up", 1), plan.reason
    (other,) = grid.deliver()
    assert grid.ledger.leases["long"].node == other != worker


def test_request_longer_than_every_lifetime_starts_no_worker() -> None:
    grid, _ = a_grid(HOUR)
    request = a_request("too-long", cores=4, duration_s=2 * HOUR)
    grid.ask(request)
    lent = [one.resources for one in grid.ledger.scaling.types]
    assert read_demand(grid.ledger, lent).not_counted == {TOO_LONG: 1}
    assert not worker_could_serve(grid.ledger, request)
    assert grid.evaluate(seconds=1).action == "none"


def a_machine(*, simulated: bool = True) -> Scenario:
    scenario = Scenario(*(replace(a_node(name, memory_gb=64), simulated=simulated) for name in ("gpu1", "gpu2")))
    for name in ("gpu1", "gpu2", ""):
        scenario.handle(MemoryServed(MemoryServerRow(node=name, host="10.0.0.1", port=7000, key_bytes=b"k" * 32)))
    pass_time(scenario, 0)
    return scenario


def pass_time(scenario: Scenario, seconds: float) -> None:
    scenario.advance(seconds, heard=False)
    for name in ("gpu1", "gpu2"):
        scenario.heartbeat(name, ROOM)


def a_job(name: str, gb: float, node: str = "", **more: Any) -> Request:
    return a_request(name, memory_gb=gb, limits_memory=True, require=(node,) if node else (), **more)


def a_block(scenario: Scenario, name: str, gb: int) -> None:
    scenario.handle(BlockAsked(id=name, user="ada", size_bytes=gb * GB, term_ms=3_600_000))


def test_the_limits_of_all_jobs_together_fit_into_the_machine():
    scenario = a_machine()
    scenario.submit(a_job("one", 6, "gpu1"))
    waiting = scenario.submit(a_job("two", 4, "gpu2"))
    assert waiting.state is JobState.QUEUED
    scenario.submit(a_job("three", 3, "gpu2"))
    assert scenario.job("three").state is JobState.ASSIGNED
    scenario.end("one")
    assert scenario.job("two").state is JobState.ASSIGNED


def test_blocks_and_jobs_count_together_and_the_refusal_has_the_numbers():
    scenario = a_machine()
    a_block(scenario, "b1", 6)
    with pytest.raises(Refused) as refused:
        scenario.submit(a_job("one", 4, "gpu2", wait_s=0))
    assert str(refused.value) == (
        "No resource offers available: gpu2: simulated on a machine with 9.5 GB for jobs and blocks of all its nodes, "
        "3.5 GB of it free, 4.0 GB asked"
    )
    with pytest.raises(
        Refused, match=r"9\.5 GB for jobs and blocks of all its nodes, 3\.5 GB of it free, 4\.0 GB asked"
    ):
        a_block(scenario, "b2", 4)
    a_block(scenario, "b3", 3)
    scenario.handle(BlockReleased("b3", "ada"))


def test_more_than_the_machine_has_is_refused_at_once():
    with pytest.raises(Refused) as refused:
        a_machine().submit(a_job("one", 20, "gpu1"))
    assert str(refused.value) == (
        "No node can ever lend 20.0 GB: gpu1: simulated on a machine with 9.5 GB for jobs and blocks, 20.0 GB asked"
    )


def test_reservations_may_exceed_the_machine_until_a_job_uses_them():
    scenario = a_machine()
    boost = scenario.ask(a_request("boost", memory_gb=40, target="gpu1"))
    assert boost is not None
    within = Request(id="run", user="ada", ask=replace(boost.request.ask, memory_bytes=0), use_lease="boost")
    with pytest.raises(Refused, match=r"gpu[12]: simulated on a machine with 9\.5 GB .* 40\.0 GB asked"):
        scenario.handle(JobSubmitted(id="run", command=a_command(), request=within))
    small = scenario.ask(a_request("small", memory_gb=5, target="gpu1"))
    assert small is not None
    scenario.handle(JobSubmitted(id="run", command=a_command(), request=replace(within, use_lease="small")))
    assert scenario.submit(a_job("one", 5)).state is JobState.QUEUED


def test_an_urgent_job_preempts_nobody_where_that_would_not_give_it_the_memory():
    scenario = a_machine()
    a_block(scenario, "b1", 6)
    scenario.submit(a_job("one", 1, "gpu1"), starts=True)
    pass_time(scenario, LONG_S)
    scenario.submit(a_job("two", 5, "gpu1", priority="urgent"))
    assert scenario.job("one").state is JobState.RUNNING
    assert scenario.job("two").state is JobState.QUEUED


@pytest.mark.parametrize("node", ["gpu1", "gpu2"])
def test_an_urgent_job_waits_for_the_memory_of_those_it_preempts_wherever_they_are(node):
    scenario = a_machine()
    for name, gb, where in (("one", 6, "gpu1"), ("two", 2, "gpu1"), ("three", 1, "gpu2")):
        scenario.submit(a_job(name, gb, where), starts=True)
    pass_time(scenario, LONG_S)
    urgent = scenario.submit(a_job("urgent", 6, node, priority="urgent"))
    states = [scenario.job(name).state for name in ("one", "two", "three")]
    assert states == [JobState.STOPPING, JobState.RUNNING, JobState.RUNNING]
    assert scenario.ledger.leases[urgent.lease_id].awaits == (scenario.job("one").lease_id,)
    also = scenario.submit(a_job("also", 6, node, priority="urgent"))
    assert also.state is JobState.QUEUED, "what the first waits for is not given twice"
    scenario.end("one")
    assert scenario.ledger.leases[urgent.lease_id].awaits == ()
    assert scenario.job("urgent").state is JobState.ASSIGNED


def test_an_urgent_job_waits_for_the_memory_of_those_who_leave_anyway():
    scenario = a_machine()
    scenario.submit(a_job("one", 6, "gpu1"), starts=True)
    scenario.submit(a_job("two", 3, "gpu2"), starts=True)
    pass_time(scenario, LONG_S)
    scenario.cancel("one")
    urgent = scenario.submit(a_job("urgent", 6, "gpu2", priority="urgent"))
    assert scenario.job("two").state is JobState.RUNNING
    assert scenario.ledger.leases[urgent.lease_id].awaits == (scenario.job("one").lease_id,)


def test_nodes_that_are_measured_are_not_added_up():
    scenario = a_machine(simulated=False)
    for name in ("gpu1", "gpu2"):
        assert scenario.submit(a_job(name, 6, name)).state is JobState.ASSIGNED


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6), st.sampled_from(["gpu1", "gpu2"]), st.sampled_from(["block", "low", "high", "urgent"])
        ),
        max_size=12,
    )
)
def test_whatever_is_asked_for_never_more_is_used_than_there_is(asks):
    scenario = a_machine()
    for number, (gb, node, kind) in enumerate(asks):
        try:
            if kind == "block":
                a_block(scenario, f"b{number}", gb)
            else:
                job = scenario.submit(a_job(f"j{number}", gb, node, priority=kind))
                if job.state is JobState.ASSIGNED and not scenario.lease_of(job.uid).awaits:
                    scenario.start(job.uid)
        except Refused:
            continue
        pass_time(scenario, LONG_S / 4)
        leases = [lease for name in ("gpu1", "gpu2") for lease in scenario.ledger.leases_of(name)]
        assert sum(lease.claim.memory_bytes for lease in leases if lease.claim and not lease.awaits) <= 9.5 * GB
        scenario.ledger.check()
    for lease in [lease for lease in scenario.ledger.leases.values() if lease.awaits]:
        for awaited in scenario.ledger.leases[lease.id].awaits:
            scenario.end(scenario.ledger.leases[awaited].job)
        assert scenario.ledger.leases[lease.id].awaits == ()
    held = sum(scenario.ledger.claims_on(name).memory_bytes for name in ("gpu1", "gpu2"))
    assert held <= 9.5 * GB
