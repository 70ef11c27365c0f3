"""A floor is no promise that room can be made so cheaply, but a promise that it cannot be made more cheaply."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.leases import Request
from distributed_grid.errors import GridError
from distributed_grid.scheduling.preemption.cost_bounds import NOT_PREFERRED, cost_bounds, victim_weight
from distributed_grid.scheduling.preemption.preemption import PreemptionPlan, plan_preemption
from distributed_grid.scheduling.preemption.victims import PreemptionCandidates, work_lost
from tests.support.builders import Scenario, a_node, a_request

parts = st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8])
held = st.lists(
    st.tuples(
        st.one_of(parts, st.sampled_from([1, 2])),
        st.sampled_from([1, 2]),
        st.sampled_from(["low", "low", "medium", "high"]),
        st.sampled_from([0, 1, 2, 30]),
        st.sampled_from(["n0", "n1", "n2"]),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=2,
    max_size=14,
)


def a_shared_grid(work: list[tuple[float, int, str, int, str, bool]]) -> Scenario:
    """Three machines with two GPUs each, held in whole and in parts for different times; some are being stopped."""
    scenario = Scenario(*(a_node(f"n{number}", cores=8, gpus=2) for number in range(3)))
    for number, (gpus, cores, priority, seconds, node, leaves) in enumerate(work):
        request = a_request(f"r{number}", gpus=gpus, cores=cores, priority=priority, require=[node], wait_s=0)
        try:
            scenario.submit(request, starts=True)
        except GridError:
            continue  # it has no room: what is there is enough
        scenario.advance(seconds)
        if leaves:
            scenario.cancel(request.id)
    return scenario


def weight(scenario: Scenario, way: PreemptionPlan, request: Request) -> int:
    """What a way costs, victim by victim."""
    costs, ledger = PreemptionCandidates(scenario.ledger, request, scenario.now, work_lost).costs, scenario.ledger
    unwished = 0 if way.node in request.prefer else NOT_PREFERRED
    return unwished + sum(
        victim_weight(int(ledger.leases[victim].request.priority), int(costs[ledger.running.slots[victim]]))
        for victim in way.victims
    )


def floors_and_truth(scenario: Scenario, request: Request) -> dict[str, tuple[int, int]]:
    """Of every node where room can be made: what it costs at the least by the floors, and what it costs."""
    ledger = scenario.ledger
    low = {
        one.node: one.weight
        for one in cost_bounds(ledger, request, PreemptionCandidates(ledger, request, scenario.now, work_lost))
    }
    ways = {node: plan_preemption(ledger, replace(request, require=(node,)), scenario.now) for node in ledger.nodes}
    return {node: (low[node], weight(scenario, way, request)) for node, way in ways.items() if way is not None}


@settings(max_examples=60)
@given(held, parts, st.sampled_from([0, 1, 4]), st.sampled_from([(), ("n1",)]))
def test_no_floor_is_above_what_making_room_costs(work, gpus, cores, prefer):
    scenario = a_shared_grid(work)
    request = a_request("vip", gpus=gpus, cores=cores, priority="urgent", prefer=prefer)
    for low, true in floors_and_truth(scenario, request).values():
        assert low <= true


def test_the_part_of_a_gpu_that_is_free_already_does_not_have_to_be_made_free():
    scenario = Scenario(a_node("n0", gpus=1), a_node("n1", gpus=1))
    for node, first in (("n0", 0.3), ("n1", 0.5)):
        scenario.ask(a_request(f"small-{node}", gpus=first, priority="low", require=[node]))
        scenario.ask(a_request(f"rest-{node}", gpus=0.3, priority="low", require=[node]))
        scenario.advance(60)
    found = floors_and_truth(scenario, a_request("vip", gpus=0.7, priority="urgent"))
    one = {node: low // victim_weight(0, 0) for node, (low, _) in found.items()}
    assert one == {"n0": 1, "n1": 1}, "0.4 and 0.2 are free: one of 0.3, or one of 0.5, is enough"
    assert all(low == true for low, true in found.values())


def test_what_somebody_gives_back_who_is_leaving_does_not_have_to_be_made_free():
    scenario = Scenario(a_node("n0", gpus=1), a_node("n1", gpus=1))
    for node in ("n0", "n1"):
        for name in ("a", "b"):
            scenario.submit(a_request(f"{name}-{node}", gpus=0.5, priority="low", require=[node]), starts=True)
        scenario.advance(60)
    scenario.cancel("a-n1")
    found = floors_and_truth(scenario, a_request("vip", gpus=0.5, priority="urgent"))
    assert {node: low // victim_weight(0, 0) for node, (low, _) in found.items()} == {"n0": 1, "n1": 0}
