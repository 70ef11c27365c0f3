"""A worker on the machine of a node holds a lease there: nothing of it is lent twice."""

# mypy: disable-error-code="comparison-overlap"
# A state changes between two lines that look at it; mypy does not see that.

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.events import (
    ControlPlaneStarted,
    Event,
    LeaseLost,
    ListedInstance,
    NodeDrained,
    NodeResumed,
    WallTimePassed,
    WorkerAsked,
    WorkerBooted,
    WorkerGone,
    WorkerRefused,
    WorkerRequested,
    WorkersListed,
    WorkerTerminationRequested,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Priority
from distributed_grid.domain.states import LeaseState, WorkerState
from distributed_grid.domain.workers import Worker, WorkerResources
from distributed_grid.errors import GridError, Refused
from distributed_grid.reactor.effects import CreateWorker, TerminateWorker, worker_effects
from distributed_grid.reactor.workers.host_leases import host_lease_id
from tests.support.builders import NOW, Scenario, a_node, a_request, caps

GIB = 1 << 30
WALL = 1_800_000_000_000


def a_worker(name: str = "w1", cores: int = 2, memory_gb: int = 2, *, here: bool = True) -> Worker:
    resources = WorkerResources(cores * 1000, memory_gb * GIB)
    return Worker(
        id=name,
        provider="docker_local",
        worker_type="cpu",
        resources=resources,
        created_at_ms=NOW,
        offer="docker-cpu",
        price_micro=0,
        by="ada",
        on_this_machine=here,
    )


def want(scenario: Scenario, worker: Worker) -> Worker:
    scenario.handle(WorkerRequested(worker, WALL))
    return scenario.ledger.workers[worker.id]


def boot(scenario: Scenario, worker: Worker) -> None:
    want(scenario, worker)
    scenario.handle(WorkerAsked(worker.id))
    scenario.handle(WorkerBooted(worker.id, "c0ffee"))


def effects(scenario: Scenario) -> list[type]:
    return [type(effect) for effect in worker_effects(scenario.ledger, scenario.now)]


@pytest.fixture
def scenario(new_scenario) -> Scenario:
    """One machine of four cores and 16 GB."""
    begun: Scenario = new_scenario(a_node("gpu1", cores=4, memory_gb=16))
    return begun


def test_what_a_worker_has_is_leased_from_its_host_before_it_is_asked_for(scenario):
    want(scenario, a_worker())
    lease = scenario.ledger.leases[host_lease_id("w1")]
    assert (lease.node, lease.state, lease.request.user) == ("gpu1", LeaseState.ACTIVE, "ada")
    assert (lease.claim.cpu_milli, lease.claim.memory_bytes) == (2000, 2 * GIB)
    assert effects(scenario) == [CreateWorker]
    with pytest.raises(Refused):
        scenario.ask(a_request("r1", cores=3, wait_s=0))
    assert scenario.ask(a_request("r2", cores=2)).state is LeaseState.ACTIVE


def test_a_worker_elsewhere_holds_no_lease(scenario):
    want(scenario, a_worker(here=False))
    assert not scenario.ledger.leases
    assert effects(scenario) == [CreateWorker]


def test_a_machine_that_is_no_node_or_lends_nothing_cannot_lend_twice(new_scenario):
    for nodes in ((a_node("far", hold_s=60),), (a_node("gpu1", caps=caps(can_share=False)),)):
        scenario = new_scenario(*nodes)
        assert want(scenario, a_worker()).host == ""
        assert not scenario.ledger.leases


def test_a_worker_for_which_its_host_has_no_room_is_refused_and_nothing_is_changed(scenario):
    scenario.submit(a_request("j1", cores=3), starts=True)
    before = scenario.ledger.rows()
    with pytest.raises(Refused, match="gpu1, on which it would run, cannot lend what it needs: gpu1: 1 core free"):
        want(scenario, a_worker())
    assert scenario.ledger.rows() == before


def test_it_does_not_pass_those_who_wait_for_the_machine(scenario):
    scenario.submit(a_request("j1", cores=3), starts=True)
    scenario.ask(a_request("r1", cores=4, wait_s=300))
    scenario.end("j1")
    with pytest.raises(Refused):
        want(scenario, a_worker(cores=1))


def test_more_than_its_host_lends_is_clamped_with_a_warning_and_may_be_asked_for_again(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4, memory_gb=16, caps=caps(cores=3)))
    worker = want(scenario, a_worker(cores=8, memory_gb=4))
    assert worker.resources == WorkerResources(3000, 4 * GIB)
    assert worker.warning == "3 cores instead of 8: gpu1 lends no more"
    assert want(scenario, a_worker(cores=8, memory_gb=4)) == worker
    scenario.handle(WorkerAsked("w1"))
    scenario.handle(WorkerBooted("w1", "c0ffee"))
    assert scenario.ledger.workers["w1"].warning == worker.warning


def test_the_lease_ends_with_the_worker_and_not_before(scenario):
    boot(scenario, a_worker())
    scenario.handle(WorkerTerminationRequested("w1", "ada", "not needed", WALL))
    assert scenario.ledger.workers["w1"].state is WorkerState.TERMINATING
    assert scenario.ledger.leases[host_lease_id("w1")].state is LeaseState.ACTIVE
    scenario.handle(WorkerGone("w1", "removed", WALL))
    assert not scenario.ledger.leases
    assert not scenario.ledger.workers


def test_a_worker_that_was_never_made_gives_its_lease_back(scenario):
    want(scenario, a_worker())
    scenario.handle(WorkerAsked("w1"))
    scenario.handle(WorkerRefused("w1", "image grid-worker is not there", WALL))
    assert not scenario.ledger.leases
    want(scenario, a_worker("w2"))
    scenario.handle(WorkerTerminationRequested("w2", "ada", "changed my mind", WALL))
    assert not scenario.ledger.leases


def test_nobody_else_releases_or_preempts_it(scenario):
    boot(scenario, a_worker(cores=4))
    with pytest.raises(Refused, match="w1-host is what worker w1 runs on; to end it type: grid workers terminate w1"):
        scenario.release(host_lease_id("w1"))
    scenario.ask(a_request("r1", cores=1, priority=Priority.URGENT, wait_s=300))
    assert scenario.ledger.leases[host_lease_id("w1")].state is LeaseState.ACTIVE
    assert scenario.ledger.leases["r1"].state is LeaseState.ASKED


def test_an_owner_who_wants_the_machine_back_gets_it_when_the_worker_is_gone(scenario):
    boot(scenario, a_worker())
    scenario.handle(NodeDrained("gpu1", "I need it", cooling=True))
    assert scenario.ledger.leases[host_lease_id("w1")].state is LeaseState.RELEASING
    scenario.handle(WallTimePassed(WALL))
    assert scenario.ledger.workers["w1"].state is WorkerState.TERMINATING
    assert effects(scenario) == [TerminateWorker]
    scenario.handle(WorkerGone("w1", "removed", WALL))
    assert not scenario.ledger.leases


def test_one_that_is_only_wanted_ends_at_once_when_its_host_is_needed(scenario):
    want(scenario, a_worker())
    scenario.handle(NodeDrained("gpu1", "I need it", cooling=True))
    assert effects(scenario) == []
    scenario.handle(WallTimePassed(WALL))
    assert not scenario.ledger.workers
    assert not scenario.ledger.leases


def test_a_worker_whose_host_was_lost_is_terminated(scenario):
    boot(scenario, a_worker())
    scenario.handle(LeaseLost(host_lease_id("w1"), "gpu1 is gone"))
    assert host_lease_id("w1") not in scenario.ledger.leases
    scenario.handle(WallTimePassed(WALL))
    worker = scenario.ledger.workers["w1"]
    assert (worker.state, worker.why) == (
        WorkerState.TERMINATING,
        "gpu1, on which it runs, does not lend it anything any more",
    )


def test_worker_and_lease_survive_a_restart_together(scenario):
    boot(scenario, a_worker())
    again = Scenario(now=scenario.now, ledger=Ledger(scenario.ledger.rows(durable_only=True)))
    again.handle(ControlPlaneStarted(2))
    assert again.ledger.leases[host_lease_id("w1")].state is LeaseState.ACTIVE
    again.heartbeat("gpu1")
    again.handle(WallTimePassed(WALL))
    assert again.ledger.workers["w1"].state is WorkerState.BOOTING


def test_a_machine_that_its_provider_says_is_ending_is_terminated(scenario):
    boot(scenario, a_worker())
    scenario.advance(60)
    ended = ListedInstance(worker_id="w1", instance="c0ffee", state="stopping", detail="exited (3) 5 seconds ago")
    scenario.handle(WorkersListed("docker_local", scenario.now, (ended,), WALL))
    worker = scenario.ledger.workers["w1"]
    assert (worker.state, worker.why) == (WorkerState.TERMINATING, "exited (3) 5 seconds ago")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["want", "ask", "boot", "drain", "resume", "end", "gone", "check", "job"]), st.integers(0, 2)
    ),
    max_size=30,
)


@given(STEPS)
def test_whatever_happens_a_worker_that_may_run_holds_its_lease(steps):
    scenario = Scenario(a_node("gpu1", cores=4, memory_gb=16))
    for number, (step, index) in enumerate(steps):
        name = f"w{index}"
        events: dict[str, Event] = {
            "want": WorkerRequested(a_worker(name, cores=index + 1), WALL),
            "ask": WorkerAsked(name),
            "boot": WorkerBooted(name, "c0ffee"),
            "drain": NodeDrained("gpu1", "mine", cooling=True),
            "resume": NodeResumed("gpu1"),
            "end": WorkerTerminationRequested(name, "ada", "enough", WALL),
            "gone": WorkerGone(name, "removed", WALL),
            "check": WallTimePassed(WALL),
        }
        try:
            if step == "job":
                scenario.ask(a_request(f"r{number}", cores=1, wait_s=60))
            else:
                scenario.handle(events[step])
        except GridError:
            continue
        finally:
            scenario.ledger.check()
        held = {one for one in scenario.ledger.leases if one.endswith("-host")}
        assert held == {host_lease_id(one) for one in scenario.ledger.workers}
        lent = sum(lease.claim.cpu_milli for lease in scenario.ledger.leases_of("gpu1") if lease.claim is not None)
        assert lent <= 4000
