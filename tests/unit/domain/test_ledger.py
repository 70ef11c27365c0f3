"""The ledger: rows, and indexes that say the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import NOTHING, Claim
from distributed_grid.domain.rows import Counter
from distributed_grid.domain.states import LeaseState, NodeState
from tests.support.builders import NOW, Scenario, a_command, a_ledger, a_node, a_request


def a_lease(lease_id="r1", *, cores=1, state=LeaseState.ACTIVE, node="gpu1", fence=1, **more) -> Lease:
    claim = Claim(cpu_milli=cores * 1000) if state not in (LeaseState.ASKED, LeaseState.ENDED) else None
    request = a_request(lease_id, cores=cores)
    return Lease(
        id=lease_id,
        request=request,
        asked_at_ms=NOW,
        state=state,
        node=node if claim else "",
        claim=claim,
        fence=fence,
        **more,
    )


def a_full_ledger() -> Ledger:
    """A bit of everything: running, stopping, waiting, awaiting."""
    scenario = Scenario(a_node("gpu1", cores=4, memory_gb=16), a_node("gpu2", cores=2, gpus=1))
    scenario.submit(a_request("j1", cores=4, priority="low"), starts=True)
    scenario.ask(a_request("r1", gpus=0.5, duration_s=60))
    scenario.advance(2)
    scenario.submit(a_request("j2", cores=3, priority="urgent"))
    scenario.ask(a_request("r2", cores=4, wait_s=90))
    return scenario.ledger


def test_a_new_ledger_is_empty_and_whole():
    ledger = Ledger()
    ledger.check()
    assert ledger.is_empty
    assert ledger.rows() == []
    assert ledger.next_due_ms() is None
    assert ledger.lends("nobody") == NOTHING
    assert ledger.claims_on("nobody") == NodeClaims()


def test_of_its_rows_the_ledger_can_be_built_anew():
    ledger = a_full_ledger()
    again = Ledger(ledger.rows())
    assert again.rows() == ledger.rows()
    assert again.columns.equals(ledger.columns)
    again.check()


@given(st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(random):
    ledger = a_full_ledger()
    rows = ledger.rows()
    random.shuffle(rows)
    again = Ledger(rows)
    again.check()
    assert (again.waiting, again.due, again.by_request) == (ledger.waiting, ledger.due, ledger.by_request)
    assert again.columns.equals(ledger.columns)


def test_durable_rows_leave_out_what_was_only_measured():
    ledger = a_full_ledger()
    assert {row.kind for row in ledger.rows(durable_only=True)} == {
        "counter",
        "account",
        "request_shapes",
        "node",
        "lease",
        "job",
    }
    assert {row.kind for row in ledger.rows()} >= {"observation", "offer"}


def test_what_is_over_leaves_with_all_its_traces():
    ledger = a_ledger(a_node("gpu1"))
    ledger.apply([Counter("fence", 1), a_lease(ends_at_ms=NOW + 5)])
    assert ledger.due_by(NOW + 5, 9) == ["r1"]
    ledger.apply([a_lease(state=LeaseState.ENDED)])
    ledger.check()
    assert ledger.is_empty
    assert (ledger.due, ledger.by_request, ledger.claims_on("gpu1")) == ([], {}, NodeClaims())


def test_ending_what_was_never_there_is_harmless():
    ledger = a_ledger(a_node("gpu1"))
    ledger.apply([a_lease(state=LeaseState.ENDED)])
    ledger.check()


def test_a_claim_that_changes_is_counted_once():
    ledger = a_ledger(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    ledger.apply([Counter("fence", 1), a_lease(cores=1)])
    ledger.apply([a_lease(cores=3)])
    assert ledger.claims_on("gpu1").cpu_milli == 3000
    ledger.apply([a_lease(cores=3, node="gpu2")])
    assert (ledger.claims_on("gpu1").cpu_milli, ledger.claims_on("gpu2").cpu_milli) == (0, 3000)
    assert [lease.id for lease in ledger.leases_of("gpu2")] == ["r1"]
    ledger.check()


def test_due_are_those_whose_time_has_come_earliest_first():
    ledger = a_ledger(a_node("gpu1", cores=4))
    ledger.apply([Counter("fence", 3)])
    ledger.apply(a_lease(f"r{n}", fence=n, ends_at_ms=NOW + at) for n, at in ((1, 30), (2, 10), (3, 20)))
    assert ledger.due_by(NOW + 20, 9) == ["r2", "r3"]
    assert ledger.due_by(NOW + 20, 1) == ["r2"]
    assert ledger.due_by(NOW + 9, 9) == []
    assert ledger.next_due_ms() == NOW + 10


def test_a_node_that_left_takes_its_offer_along_and_its_row_stays_closed():
    ledger = a_ledger(a_node("gpu1"), a_node("gpu2"))
    ledger.apply([replace(ledger.nodes["gpu1"], state=NodeState.LEFT)])
    ledger.check()
    assert set(ledger.nodes) == set(ledger.offers) == set(ledger.observations) == {"gpu2"}
    assert not ledger.columns.open[ledger.columns.rows["gpu1"]]


def test_an_offer_that_is_withdrawn_closes_its_node():
    ledger = a_ledger(a_node("gpu1"))
    ledger.apply([replace(ledger.offers["gpu1"], withdrawn=True)])
    assert ledger.lends("gpu1") == NOTHING
    assert not ledger.columns.open[0]
    ledger.check()


def spoil_waiting(ledger: Ledger) -> None:
    ledger.waiting.clear()


def spoil_the_claims(ledger: Ledger) -> None:
    ledger.node_claims["gpu1"].add(Claim(cpu_milli=1))


def spoil_a_column(ledger: Ledger) -> None:
    ledger.columns.cpu[0] += 1


def leave_a_column_open(ledger: Ledger) -> None:
    row = ledger.columns.row_of("ghost")
    ledger.columns.open[row] = True


def lend_too_much(ledger: Ledger) -> None:
    ledger.apply([a_lease("x", cores=5)])


def lend_an_unknown_node(ledger: Ledger) -> None:
    ledger.apply([a_lease("x", node="nowhere")])


def hold_without_a_claim(ledger: Ledger) -> None:
    ledger.apply([replace(a_lease("x"), claim=None)])


def fence_from_the_future(ledger: Ledger) -> None:
    ledger.apply([a_lease("x", cores=0, node="gpu2", fence=10**9)])


def start_while_awaiting(ledger: Ledger) -> None:
    ledger.apply([a_lease("x", awaits=("j1.1",))])


def await_the_dead(ledger: Ledger) -> None:
    ledger.apply([a_lease("x", state=LeaseState.RESERVING, awaits=("nobody",))])


def outlive_the_job(ledger: Ledger) -> None:
    ledger.apply([a_lease("x", state=LeaseState.ASKED, job="gone")])


def run_without_a_lease(ledger: Ledger) -> None:
    ledger.apply(
        [Job(uid="x", id="x", command=a_command(), request=a_request("x"), submitted_at_ms=NOW, lease_id="none")]
    )


def run_under_another_lease(ledger: Ledger) -> None:
    ledger.apply(
        [Job(uid="x", id="x", command=a_command(), request=a_request("x"), submitted_at_ms=NOW, lease_id="j1.1")]
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_waiting, "index waiting is not what the rows say"),
        (spoil_the_claims, "claims differ from the leases"),
        (spoil_a_column, "columns differ from the rows"),
        (leave_a_column_open, "ghost is gone, its column is open"),
        (lend_too_much, "gpu1: 9000 of 4000 millicores lent"),
        (lend_an_unknown_node, "nowhere lends, but is not a node"),
        (hold_without_a_claim, "lease x is active, claim None"),
        (fence_from_the_future, "lease x has a fence from the future"),
        (start_while_awaiting, "x waits, but has started"),
        (await_the_dead, "x waits for what is over"),
        (outlive_the_job, "lease x outlived its job"),
        (run_without_a_lease, "job x has no lease"),
        (run_under_another_lease, "job x has somebody else's lease"),
    ],
)
def test_check_finds_what_is_broken(spoil, words):
    ledger = a_full_ledger()
    spoil(ledger)
    with pytest.raises(AssertionError) as found:
        ledger.check()
    assert str(found.value).splitlines()[0] == words


def test_check_finds_an_exclusive_gpu_that_is_shared():
    scenario = Scenario(a_node("gpu1", gpus=1))
    scenario.ask(a_request("r1", gpus=0.5))
    ledger = scenario.ledger
    ledger.apply([a_node("gpu1", gpus=1, exclusive=True, state=NodeState.ALIVE)])
    with pytest.raises(AssertionError, match="GPU 0 lent in parts, though exclusive"):
        ledger.check()
