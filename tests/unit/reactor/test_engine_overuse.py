"""An owner who is back gets what its node's engine holds for others; a loan never drives itself away."""

# mypy: disable-error-code="arg-type,return-value,union-attr"

from __future__ import annotations

import pytest

from distributed_grid.domain.engines import EngineResources
from distributed_grid.domain.events import EngineNode, EngineObserved, EngineRegistered, GroupBound
from distributed_grid.domain.states import LeaseEnd
from tests.support.builders import GB, Scenario, a_node, a_request, a_usage, thresholds

ROOM = EngineResources(4000, 16 * GB, 2000)
IDLE = a_usage(cpu_outside=0.1)
BUSY = a_usage(cpu_outside=0.9)


@pytest.fixture
def scenario(new_scenario) -> Scenario:
    """A node of four cores and two GPUs with an owner, in Ray, lending to three requests."""
    scenario = new_scenario(a_node("gpu1", cores=4, gpus=2, thresholds=thresholds(cpu_busy_max=0.3, dwell_s=0)))
    scenario.handle(EngineRegistered("ray", "attached", "head"))
    scenario.handle(EngineObserved("ray", "s", scenario.now, (EngineNode("n1", name="gpu1", room=ROOM),)))
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
        over += [(row.id, row.end) for row in result.changes if getattr(row, "end", None)]
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
    scenario.handle(EngineRegistered("ray", "attached", "head"))
    scenario.handle(EngineObserved("ray", "s", scenario.now, (EngineNode("n1", name="gpu1", room=ROOM),)))
    scenario.ask(a_request("r1"))
    assert heartbeat(scenario, BUSY, 60) == []
