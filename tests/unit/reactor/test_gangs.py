"""Gangs: as many nodes as members, all or nothing, held and ended together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.events import JobSubmitted, LeaseAsked, LeaseExtended, NodeDrained, NodeStopped
from distributed_grid.domain.states import LeaseEnd, LeaseState
from distributed_grid.errors import BadInput, Refused
from tests.support.builders import Scenario, a_command, a_node, a_request


@pytest.fixture
def trio() -> Scenario:
    return Scenario(*(a_node(name, cores=4) for name in ("n1", "n2", "n3")))


def places(scenario: Scenario, gang: str = "g1") -> list[str]:
    return sorted(scenario.ledger.leases[member].node for member in scenario.ledger.gangs.get(gang, ()))


def test_every_member_gets_a_node_of_its_own(trio):
    lease = trio.ask(a_request("g1", cores=3, gang=3))
    assert lease.state is LeaseState.ACTIVE
    assert places(trio) == ["n1", "n2", "n3"]
    fences = [trio.ledger.leases[member].fence for member in trio.ledger.gangs["g1"]]
    assert len(set(fences)) == 3
    trio.ledger.check()


def test_a_gang_that_does_not_fit_whole_holds_nothing(trio):
    trio.ask(a_request("r1", cores=2, require=["n2"]))
    lease = trio.ask(a_request("g1", cores=3, gang=3))
    assert lease.state is LeaseState.ASKED
    assert places(trio) == []
    trio.release("r1")
    assert places(trio) == ["n1", "n2", "n3"]
    trio.ledger.check()


def test_a_gang_larger_than_the_grid_is_refused_at_once(trio):
    with pytest.raises(Refused, match="a gang of 4 needs as many nodes, 3 could serve a member"):
        trio.handle(LeaseAsked(a_request("g1", gang=4)))


def test_releasing_any_member_releases_all(trio):
    trio.ask(a_request("g1", cores=3, gang=3))
    trio.release("g1:2")
    assert trio.ledger.is_empty
    trio.ledger.check()
    assert trio.ask(a_request("r1", cores=4, require=["n3"])).node == "n3"


@pytest.mark.parametrize("event", [NodeDrained("n2"), NodeStopped("n2")])
def test_losing_one_node_ends_the_whole_gang(trio, event):
    trio.ask(a_request("g1", cores=3, gang=3))
    stepped = trio.handle(event)
    assert trio.ledger.is_empty
    ended = {row.id: row.end for row in stepped.changes if row.kind == "lease"}
    assert set(ended) == {"g1", "g1:2", "g1:3"}
    assert len(set(ended.values())) == 1
    assert LeaseEnd.RELEASED not in ended.values()


def test_an_urgent_request_that_displaces_one_member_ends_all(trio):
    trio.ask(a_request("g1", cores=3, gang=3, priority="low"))
    trio.advance(60)
    urgent = trio.ask(a_request("r1", cores=4, priority="urgent"))
    assert urgent.state is LeaseState.ACTIVE
    assert "g1" not in trio.ledger.gangs
    assert set(trio.ledger.leases) == {"r1"}
    trio.ledger.check()


def test_more_time_is_for_all_members(trio):
    trio.ask(a_request("g1", gang=2, duration_s=10))
    trio.handle(LeaseExtended("g1", "ada", 60_000))
    trio.advance(30)
    assert len(trio.ledger.gangs["g1"]) == 2
    trio.advance(60)
    assert trio.ledger.is_empty


def test_asking_again_with_the_same_id_gets_the_same_gang(trio):
    first = trio.ask(a_request("g1", gang=2))
    assert trio.handle(LeaseAsked(a_request("g1", gang=2))).answer.lease == first
    assert len(trio.ledger.leases) == 2


def test_a_command_runs_on_one_node(trio):
    with pytest.raises(BadInput, match="a command runs on one node"):
        trio.handle(JobSubmitted("job", a_command(), a_request("g1", gang=2)))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans()), max_size=12))
def test_a_gang_is_whole_or_not_there_whatever_happens(steps):
    scenario = Scenario(*(a_node(f"n{i}", cores=4) for i in range(4)))
    for number, (cores, size, lets_go) in enumerate(steps):
        scenario.ask(a_request(f"g{number}", cores=cores, gang=size))
        if lets_go:
            held = [lease.id for lease in scenario.ledger.leases.values() if lease.holds]
            if held:
                scenario.release(held[number % len(held)])
        for gang, members in scenario.ledger.gangs.items():
            assert len(members) == scenario.ledger.leases[gang].request.gang
            assert len({scenario.ledger.leases[member].node for member in members}) == len(members)
        scenario.ledger.check()
