"""Commands under a lease that is held already: they add nothing to the books and go when it goes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.control.agent_messages import order_of
from distributed_grid.domain.engines import EngineResources
from distributed_grid.domain.events import EngineNode, EngineObserved, EngineRegistered, GroupBound
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.leases import Request
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.states import JobState
from distributed_grid.errors import NotFound, Refused
from distributed_grid.reactor import pending
from tests.support.builders import GB, a_node, a_request, a_submission


def using(lease_id: str, request_id: str = "j1", user: str = "ada") -> Request:
    return replace(a_request(request_id, user=user), ask=Amounts(), within=lease_id)


def test_a_command_runs_with_what_the_lease_has_and_takes_nothing_besides(new_scenario):
    scenario = new_scenario(a_node(cores=4))
    lease = scenario.ask(a_request("b1", cores=3, duration_s=60))
    scenario.submit(using("b1"))
    assert scenario.ledger.claims_on("gpu1").cpu_milli == 3000
    (start,) = pending(scenario.ledger)
    assert order_of(scenario.ledger, start).claim == lease.claim


@pytest.mark.parametrize("ends", ["released", "expired"])
def test_it_is_stopped_when_the_lease_is_over(new_scenario, ends):
    scenario = new_scenario()
    scenario.ask(a_request("b1", duration_s=60))
    scenario.submit(using("b1"), starts=True)
    if ends == "released":
        scenario.release("b1")
    else:
        scenario.advance(61)
    job = scenario.job("j1")
    assert (job.state, job.stop.ending, job.stop.requeue) == (JobState.STOPPING, Ending.CANCELLED, False)
    assert "b1" in job.stop.detail


def test_an_engine_has_nothing_to_reserve_for_it(new_scenario):
    scenario = new_scenario()
    scenario.handle(EngineRegistered("ray", "attached", "head:6379"))
    place = EngineNode("n1", name="gpu1", room=EngineResources(4000, 16 * GB, 0))
    scenario.handle(EngineObserved("ray", "s1", scenario.now, (place,), ()))
    scenario.ask(a_request("b1"))
    (binding,) = scenario.ledger.bindings.values()
    scenario.handle(GroupBound(binding.key))
    scenario.submit(using("b1"), starts=True)
    scenario.advance(1)
    scenario.handle(EngineObserved("ray", "s1", scenario.now, (place,), ((binding.group, "n1"),)))
    assert list(scenario.ledger.bindings) == [binding.key]


def test_one_command_at_a_time(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("b1"))
    scenario.submit(using("b1"), starts=True)
    with pytest.raises(Refused, match="in use by job-j1"):
        scenario.handle(a_submission(using("b1", "j2")))
    scenario.end("j1")
    scenario.submit(using("b1", "j2"))


def test_only_its_own_user_and_only_while_it_is_active(new_scenario):
    scenario = new_scenario(a_node(cores=1))
    scenario.ask(a_request("b1"))
    scenario.ask(a_request("b2"))
    for request, said in ((using("b1", user="eve"), "belongs to ada"), (using("b2"), "is asked"), (using("b3"), "b3")):
        with pytest.raises((Refused, NotFound), match=said):
            scenario.handle(a_submission(request))


def test_a_command_that_its_node_took_back_does_not_wait_for_another_place(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("b1"))
    scenario.submit(using("b1"), starts=True)
    scenario.end("j1", Outcome(Ending.RECLAIMED, detail="the owner is back"))
    assert "j1" not in scenario.ledger.jobs


def test_it_goes_with_a_lease_that_made_room_for_an_urgent_one(new_scenario):
    scenario = new_scenario(a_node(cores=1))
    scenario.ask(a_request("b1", priority="low"))
    scenario.submit(using("b1"), starts=True)
    scenario.advance(3600)
    scenario.ask(a_request("hot", priority="urgent"))
    assert "b1" not in scenario.ledger.leases
    scenario.advance(1)
    assert scenario.job("j1").state is JobState.STOPPING
