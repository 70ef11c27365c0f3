"""Laws of scaling, over random histories of a queue: bounds, no needless start, no flapping, more demand no less."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import ScalingRules, WorkerResources
from distributed_grid.scheduling.scaling.demand import Bins, UnmetDemand, WaitingShape, size_of, workers_for
from tests.support.builders import GB, a_node, a_request
from tests.support.scaling import ScalingScenario, a_type, rules

TYPES = (a_type(cores=4), a_type(cores=2, price=0.06), a_type("gpu", cores=4, gpus=1, price=1.0))
steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "release", "evaluate", "deliver", "end", "wait", "home"]),
        st.integers(0, 30),
    ),
    max_size=40,
)
shapes = st.lists(
    st.tuples(st.sampled_from([0.5, 1, 2, 4]), st.sampled_from([0, 1, 4, 8]), st.integers(1, 40)), max_size=6
)


def play(scaling: ScalingRules, history: Sequence[tuple[str, int]]) -> ScalingScenario:
    """Play a history and check the laws around every evaluation."""
    scenario = ScalingScenario(a_node("home", cores=4), scaling=scaling)
    for number, (what, amount) in enumerate(history):
        held = [lease for lease in scenario.ledger.leases.values() if lease.holds]
        if what == "ask":
            scenario.ask(a_request(f"r{number}", cores=1 + amount % 4, gpus=amount % 3 // 2, wait_s=86_400))
        elif what == "release" and held:
            scenario.release(held[amount % len(held)].id)
        elif what == "evaluate":
            check_evaluation(scenario, amount)
        elif what == "deliver":
            scenario.deliver()
        elif what == "home":
            scenario.bring_home()
        elif what == "end":
            scenario.end_terminating()
        scenario.advance(amount)
    return scenario


def check_evaluation(scenario: ScalingScenario, seconds: int) -> None:
    ledger, limits = scenario.ledger, scenario.ledger.scaling
    scenario.advance(seconds)
    before = set(ledger.workers)
    leased = {worker for worker in before if ledger.leases_on.get(worker)}
    waiting = bool(ledger.waiting)
    plan = scenario.evaluate()
    new = set(ledger.workers) - before
    assert len(ledger.workers) <= max(limits.max_workers, len(before)), "more than the maximum"
    assert waiting or not new or len(before) < limits.min_workers, "something was started though nobody waits"
    draining = set(scenario.in_state(WorkerState.DRAINING))
    assert not draining & leased, "a worker with a lease is given back"
    serving = len(ledger.workers) - len(draining) - len(scenario.in_state(WorkerState.TERMINATING))
    if plan.action == "scale_down":
        assert serving >= limits.min_workers, "less than the minimum"


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 2), st.integers(2, 6))
def test_the_bounds_hold_in_every_history(history: list[tuple[str, int]], least: int, most: int) -> None:
    play(rules(*TYPES, min_workers=least, max_workers=most, window_ms=20_000), history)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=40, max_size=80))
def test_a_noisy_load_makes_no_worker_come_and_go(noise: list[int]) -> None:
    """Load that changes every ten seconds around what the grid has: within one cooldown nothing is started twice."""
    scenario = ScalingScenario(a_node("home", cores=8), scaling=rules(up_cooldown_ms=300_000, down_cooldown_ms=600_000))
    starts = 0
    for number, load in enumerate(noise):
        for lease in [one for one in scenario.ledger.leases.values() if one.holds]:
            scenario.release(lease.id)
        for task in range(6 + load):
            scenario.ask(a_request(f"n{number}t{task}", cores=1, wait_s=10))
        starts += scenario.evaluate(seconds=10).action == "scale_up"
        scenario.deliver()
        scenario.bring_home()
        scenario.end_terminating()
    assert starts <= 1 + len(noise) * 10 // 300


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(0, 5))
def test_more_demand_never_calls_for_fewer_workers(waiting: list[tuple[float, int, int]], more: int) -> None:
    resources = WorkerResources(4000, 16 * GB)
    few = UnmetDemand(tuple(_shape(*one) for one in waiting))
    many = UnmetDemand(tuple(replace(one, count=one.count + more) for one in few.shapes))
    (less, served), (rather_more, more_served) = (workers_for(one, resources, 1000) for one in (few, many))
    assert less <= rather_more
    assert (served, more_served) == (few.requests, many.requests), "all of them fit an empty worker"


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_no_worker_is_packed_beyond_what_it_has(waiting: list[tuple[float, int, int]]) -> None:
    resources = WorkerResources(4000, 16 * GB)
    bins = Bins.of_workers([resources] * 5)
    taken = [bins.take(size_of(_shape(*one).request.ask), one[2]) for one in waiting]
    for place in range(5):
        cores = sum(int(counts[place]) * one[0] for counts, one in zip(taken, waiting, strict=True))
        memory = sum(int(counts[place]) * one[1] for counts, one in zip(taken, waiting, strict=True))
        assert cores <= 4
        assert memory <= 16


def _shape(cores: float, memory_gb: int, count: int) -> WaitingShape:
    return WaitingShape(a_request(cores=cores, memory_gb=memory_gb), False, count)
