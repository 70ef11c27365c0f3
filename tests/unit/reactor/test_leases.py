"""Leases: asked for, granted, refused, extended, given back, over when their time is."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import LeaseAsked, LeaseExtended, LeaseReleased
from distributed_grid.domain.leases import MAX_NAMES, Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.states import LeaseEnd, LeaseState
from distributed_grid.errors import BadInput, Conflict, GridError, NotFound, Refused
from distributed_grid.reactor import LeaseAnswer, decide, step
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.reactor.leases import MAX_EXTENSIONS
from tests.support.builders import NOW, a_node, a_request, caps


def ended(stepped: StepResult) -> list[tuple[str, LeaseEnd | None]]:
    return [(row.id, row.end) for row in stepped.changes if isinstance(row, Lease) and row.is_over]


def refusal(ledger: Ledger, request) -> GridError:
    """The error an ask is refused with; nothing has changed by it."""
    before = ledger.rows()
    with pytest.raises(GridError) as found:
        step(ledger, LeaseAsked(request), NOW)
    assert ledger.rows() == before
    return found.value


def test_an_ask_that_fits_is_active_at_once(ledger):
    stepped = step(ledger, LeaseAsked(a_request("r1", cores=2, duration_s=60)), NOW)
    lease = ledger.leases["r1"]
    assert (stepped.answer.lease, stepped.answer.reasons) == (lease, ())
    assert (lease.state, lease.node, lease.fence) == (LeaseState.ACTIVE, "gpu1", 1)
    assert (lease.granted_at_ms, lease.ends_at_ms) == (NOW, NOW + 60_000)
    assert [(record.type, record.subject) for record in stepped.records] == [("requested", "r1"), ("granted", "r1")]
    assert stepped.records[1].data.pop("choice") == stepped.answer.choice
    assert stepped.records[1].data == {
        "allocation_id": "r1",
        "asked": "2 cores",
        "priority": "medium",
        "waited_ms": 0,
    }


def test_the_record_of_a_grant_names_its_gpus(new_scenario):
    scenario = new_scenario(a_node(gpus=2))
    result = scenario.handle(LeaseAsked(a_request("r1", gpus=2)))
    assert result.records[1].data["gpus"] == ["0", "1"]


def test_a_lease_without_a_term_never_ends_by_itself(new_scenario):
    scenario = new_scenario()
    assert scenario.ask(a_request("r1")).ends_at_ms == 0
    scenario.advance(10**8)
    assert "r1" in scenario.ledger.leases


def test_an_ask_that_does_not_fit_waits_and_hears_why(ledger):
    step(ledger, LeaseAsked(a_request("r1", cores=3)), NOW)
    stepped = step(ledger, LeaseAsked(a_request("r2", cores=2)), NOW)
    assert stepped.answer == LeaseAnswer(ledger.leases["r2"], ("gpu1: 1 core free, 2 cores asked",))
    assert stepped.records[-1].type == "queued"
    assert stepped.records[-1].reason == "gpu1: 1 core free, 2 cores asked"


def test_an_ask_that_will_not_wait_is_refused_with_the_reason_of_each_node(new_scenario):
    scenario = new_scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=2))
    scenario.ask(a_request("r1", cores=3, require=["gpu1"]))
    error = refusal(scenario.ledger, a_request("r2", cores=3, wait_s=0))
    assert isinstance(error, Refused)
    assert error.reasons == ("gpu1: 1 core free, 3 cores asked", "gpu2: 2 cores at most, 3 cores asked")
    assert str(error) == "No resource offers available: " + "; ".join(error.reasons)


def test_an_ask_that_can_never_fit_is_refused_at_once_however_long_it_would_wait(ledger):
    error = refusal(ledger, a_request("r1", cores=5, wait_s=10**6))
    assert str(error) == "No node can ever lend 5 cores: gpu1: 4 cores at most, 5 cores asked"


def test_a_grid_without_nodes_has_no_offers():
    error = refusal(Ledger(), a_request("r1"))
    assert str(error).startswith("No resource offers available")


def test_a_node_that_does_not_exist_is_refused_with_those_that_do(new_scenario):
    scenario = new_scenario(a_node("gpu2"), a_node("gpu1"))
    for request in (a_request("r1", require=["gpu9"]), a_request("r1", prefer=["gpu9"])):
        assert str(refusal(scenario.ledger, request)) == ("no node is called gpu9; the nodes are: gpu1, gpu2")
    assert str(refusal(Ledger(), a_request("r1", require=["gpu9"]))).endswith("the nodes are: none")


def test_an_ask_that_makes_no_sense_is_the_callers_fault(ledger):
    error = refusal(ledger, replace(a_request("r1"), ask=Amounts(cpu_milli=-1)))
    assert isinstance(error, BadInput)


def test_asking_for_a_resource_twice_in_one_request_does_not_lend_it_twice(new_scenario):
    scenario = new_scenario(a_node(custom={"fpga": 1}))
    twice = replace(a_request("r1"), ask=Amounts(custom=(("fpga", 1), ("fpga", 1))))
    assert isinstance(refusal(scenario.ledger, twice), BadInput)


def test_the_same_request_id_twice_is_one_grant(ledger):
    request = a_request("r1", cores=2)
    step(ledger, LeaseAsked(request), NOW)
    again = step(ledger, LeaseAsked(request), NOW + 5)
    assert again.changes == []
    assert again.answer == LeaseAnswer(ledger.leases["r1"])


def test_the_same_request_id_for_something_else_is_refused(ledger):
    step(ledger, LeaseAsked(a_request("r1", cores=2)), NOW)
    assert isinstance(refusal(ledger, a_request("r1", cores=1)), Conflict)


def test_a_request_id_a_job_has_is_refused(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("r1"))
    assert isinstance(refusal(scenario.ledger, a_request("r1")), Conflict)


def test_a_lease_given_back_is_free_for_the_next(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1", cores=4))
    scenario.ask(a_request("r2", cores=4))
    result = scenario.release("r1")
    assert ended(result) == [("r1", LeaseEnd.RELEASED)]
    assert result.answer.lease.detail == "by ada"
    assert scenario.ledger.leases["r2"].state is LeaseState.ACTIVE


def test_releasing_twice_is_told_that_nothing_is_there_and_changes_nothing(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1"))
    scenario.release("r1")
    before = scenario.ledger.rows()
    with pytest.raises(NotFound, match=r"^no lease r1 is held$"):
        scenario.release("r1")
    assert scenario.ledger.rows() == before


def test_a_wait_given_up_is_withdrawn(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1", cores=4))
    scenario.ask(a_request("r2", cores=4))
    result = scenario.handle(LeaseReleased("r2", "ada", "changed my mind"))
    assert ended(result) == [("r2", LeaseEnd.WITHDRAWN)]
    assert result.answer.lease.detail == "changed my mind"
    assert result.records[0].type == "withdrawn"


def test_releasing_the_lease_of_a_job_stops_the_job_first(new_scenario):
    scenario = new_scenario()
    scenario.submit(a_request("j1"), starts=True)
    result = scenario.release("j1.1")
    assert result.answer.lease.state is LeaseState.RELEASING
    assert scenario.job("j1").stop.detail == "its lease was released by ada"
    assert scenario.release("j1.1").changes == []
    assert ended(scenario.end("j1")) == [("j1.1", LeaseEnd.RELEASED)]
    assert scenario.ledger.is_empty


def test_releasing_the_lease_a_job_waits_for_ends_the_job(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1", cores=4))
    scenario.submit(a_request("j1"))
    result = scenario.release("j1.1")
    assert ended(result) == [("j1.1", LeaseEnd.WITHDRAWN)]
    assert result.answer.lease.is_over
    assert scenario.ledger.jobs == {}


def test_a_term_that_is_over_ends_the_lease(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1", duration_s=60))
    assert ended(scenario.advance(59.999)) == []
    assert ended(scenario.advance(0.001)) == [("r1", LeaseEnd.EXPIRED)]


def test_many_terms_that_are_over_end_together(new_scenario):
    scenario = new_scenario()
    for number in range(4):
        scenario.ask(a_request(f"r{number}", duration_s=10 + number))
    assert len(ended(scenario.advance(10**6))) == 4
    assert scenario.ledger.is_empty


def test_a_wait_that_is_over_is_withdrawn_with_the_reasons(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1", cores=4))
    scenario.ask(a_request("r2", cores=1, wait_s=5))
    result = scenario.advance(5)
    assert ended(result) == [("r2", LeaseEnd.WITHDRAWN)]
    (over,) = (row for row in result.changes if isinstance(row, Lease))
    assert over.detail == "waited 5 s: gpu1: 0 cores free, 1 core asked"


def test_more_time_moves_the_end_of_the_term(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1", duration_s=60))
    result = scenario.handle(LeaseExtended("r1", "ada", 30_000))
    assert result.answer.lease.ends_at_ms == NOW + 90_000
    assert result.records[0].reason == "30 s more"
    assert ended(scenario.advance(60)) == []
    assert ended(scenario.advance(30)) == [("r1", LeaseEnd.EXPIRED)]


def test_an_extension_that_is_asked_for_twice_counts_once(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1", duration_s=60))
    for _ in range(3):
        told = scenario.handle(LeaseExtended("r1", "ada", 30_000, "e1"))
        assert told.answer.lease.ends_at_ms == NOW + 90_000
    assert told.records == []
    with pytest.raises(Conflict, match="request e1 was used before for another extension"):
        scenario.handle(LeaseExtended("r1", "ada", 30_001, "e1"))
    told = scenario.handle(LeaseExtended("r1", "ada", 30_000, "e2"))
    assert told.answer.lease.ends_at_ms == NOW + 120_000


def test_a_lease_remembers_its_last_extensions_only(new_scenario):
    scenario = new_scenario()
    scenario.ask(a_request("r1", duration_s=60))
    for number in range(MAX_EXTENSIONS + 5):
        told = scenario.handle(LeaseExtended("r1", "ada", 1000, f"e{number}"))
    assert [key for key, _ in told.answer.lease.extensions] == [f"e{n}" for n in range(5, MAX_EXTENSIONS + 5)]


@pytest.mark.parametrize("lease_id", ["endless", "waiting", "nobody"])
def test_only_a_lease_with_an_end_can_be_extended(new_scenario, lease_id):
    scenario = new_scenario()
    scenario.ask(a_request("endless", cores=4))
    scenario.ask(a_request("waiting", cores=4, duration_s=60))
    with pytest.raises(NotFound, match=f"^no lease {lease_id} with an end is held$"):
        scenario.handle(LeaseExtended(lease_id, "ada", 1))


@pytest.mark.parametrize("extra_ms", [0, -1])
def test_no_lease_is_made_shorter(new_scenario, extra_ms):
    scenario = new_scenario()
    scenario.ask(a_request("r1", duration_s=60))
    with pytest.raises(BadInput):
        scenario.handle(LeaseExtended("r1", "ada", extra_ms))


def test_deciding_alone_is_a_dry_run(ledger):
    before = ledger.rows()
    decision = decide(ledger, LeaseAsked(a_request("r1")), NOW)
    assert decision.answer.lease.node == "gpu1"
    assert ledger.rows() == before


def test_a_node_is_not_lent_beyond_its_caps(new_scenario):
    scenario = new_scenario(a_node(cores=8, caps=caps(cores=2)))
    assert scenario.ask(a_request("r1", cores=2)).state is LeaseState.ACTIVE
    assert scenario.ask(a_request("r2", cores=1)).state is LeaseState.ASKED


@pytest.mark.parametrize(
    "changes",
    [{"id": "j1.1"}, {"id": ""}, {"wait_ms": -1}, {"duration_ms": -1}, {"wait_ms": 2**60}, {"duration_ms": 2**60}],
)
def test_a_request_that_makes_no_sense_changes_nothing(ledger, changes):
    assert isinstance(refusal(ledger, replace(a_request("r1", cores=1), **changes)), BadInput)


@pytest.mark.parametrize("field", ["prefer", "require", "labels", "affinity", "anti_affinity"])
def test_a_request_that_names_too_much_is_refused_in_one_line(field):
    ledger = Ledger([a_node("gpu1")])
    names = [(f"n{number}", "") if field == "labels" else f"n{number}" for number in range(MAX_NAMES + 1)]
    request = replace(a_request("r1", cores=1), **{field: tuple(names)})
    with pytest.raises(BadInput, match=f"^{field} may have at most 256 names, and has 257$"):
        decide(ledger, LeaseAsked(request), NOW)


def test_a_request_may_name_as_much_as_the_limit_says(new_scenario):
    scenario = new_scenario(a_node("gpu1"))
    names = tuple(f"job{number}" for number in range(MAX_NAMES))
    lease = scenario.ask(replace(a_request("r1", cores=1), anti_affinity=names))
    assert lease is not None
    assert lease.holds
