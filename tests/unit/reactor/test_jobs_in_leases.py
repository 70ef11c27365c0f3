"""Commands under a lease that is held already: they add nothing to the books and go when it goes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.control.agent_sessions import order_of
from distributed_grid.domain.engines import EngineResources
from distributed_grid.domain.events import EngineNode, EngineObserved, EngineWanted, GroupBound
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.leases import Request
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.states import JobState
from distributed_grid.errors import NotFound, Refused
from distributed_grid.reactor import pending
from tests.support.builders import GB, a_node, a_request, a_submission


def using(lease_id: str, request_id: str = "j1", user: str = "ada") -> Request:
    return replace(a_request(request_id, user=user), ask=Amounts(), within=lease_id)


def test_a_command_runs_with_what_the_lease_has_and_takes_nothing_besides(story):
    tale = story(a_node(cores=4))
    lease = tale.ask(a_request("b1", cores=3, duration_s=60))
    tale.submit(using("b1"))
    assert tale.ledger.claims_on("gpu1").cpu_milli == 3000
    (start,) = pending(tale.ledger)
    assert order_of(tale.ledger, start).claim == lease.claim


@pytest.mark.parametrize("ends", ["released", "expired"])
def test_it_is_stopped_when_the_lease_is_over(story, ends):
    tale = story()
    tale.ask(a_request("b1", duration_s=60))
    tale.submit(using("b1"), starts=True)
    if ends == "released":
        tale.release("b1")
    else:
        tale.later(61)
    job = tale.job("j1")
    assert (job.state, job.stop.ending, job.stop.requeue) == (JobState.STOPPING, Ending.CANCELLED, False)
    assert "b1" in job.stop.detail


def test_an_engine_has_nothing_to_reserve_for_it(story):
    tale = story()
    tale.tell(EngineWanted("ray", "attached", "head:6379"))
    place = EngineNode("n1", name="gpu1", room=EngineResources(4000, 16 * GB, 0))
    tale.tell(EngineObserved("ray", "s1", tale.now, (place,), ()))
    tale.ask(a_request("b1"))
    (binding,) = tale.ledger.bindings.values()
    tale.tell(GroupBound(binding.key))
    tale.submit(using("b1"), starts=True)
    tale.later(1)
    tale.tell(EngineObserved("ray", "s1", tale.now, (place,), ((binding.group, "n1"),)))
    assert list(tale.ledger.bindings) == [binding.key]


def test_one_command_at_a_time(story):
    tale = story()
    tale.ask(a_request("b1"))
    tale.submit(using("b1"), starts=True)
    with pytest.raises(Refused, match="in use by job-j1"):
        tale.tell(a_submission(using("b1", "j2")))
    tale.end("j1")
    tale.submit(using("b1", "j2"))


def test_only_its_own_user_and_only_while_it_is_active(story):
    tale = story(a_node(cores=1))
    tale.ask(a_request("b1"))
    tale.ask(a_request("b2"))
    for request, said in ((using("b1", user="eve"), "belongs to ada"), (using("b2"), "is asked"), (using("b3"), "b3")):
        with pytest.raises((Refused, NotFound), match=said):
            tale.tell(a_submission(request))


def test_a_command_that_its_node_took_back_does_not_wait_for_another_place(story):
    tale = story()
    tale.ask(a_request("b1"))
    tale.submit(using("b1"), starts=True)
    tale.end("j1", Outcome(Ending.RECLAIMED, detail="the owner is back"))
    assert "j1" not in tale.ledger.jobs


def test_it_goes_with_a_lease_that_made_room_for_an_urgent_one(story):
    tale = story(a_node(cores=1))
    tale.ask(a_request("b1", priority="low"))
    tale.submit(using("b1"), starts=True)
    tale.later(3600)
    tale.ask(a_request("hot", priority="urgent"))
    assert "b1" not in tale.ledger.leases
    tale.later(1)
    assert tale.job("j1").state is JobState.STOPPING
