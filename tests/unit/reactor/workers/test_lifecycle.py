"""Deciders of workers: their life under each answer of a provider, closed offers, budgets, and bounded steps."""

from __future__ import annotations

import pytest

from distributed_grid.domain.events import (
    LeaseAsked,
    WallTimePassed,
    WorkerDrainRequested,
    WorkerRequested,
    WorkersListed,
    WorkerTerminationRequested,
)
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Worker, WorkerResources, WorkerRules
from distributed_grid.errors import Conflict, Refused
from distributed_grid.reactor import step
from distributed_grid.reactor.workers.lifecycle import MAX_WORKERS_PER_STEP, pause_ms
from distributed_grid.scheduling.scaling.budget import HOUR_MS, budget_state
from tests.support.builders import a_request
from tests.support.clouds.scripted import GIB
from tests.support.worker_model import BEGIN_MS, WorkerModel, many_workers
from tests.unit.reactor.workers.one_worker import MINUTE, a_model, records, run_for


def test_a_creation_without_an_answer_is_asked_for_again_and_makes_one_machine() -> None:
    model, worker_id = a_model("lose_after", "lose_after")
    run_for(model, 20_000, joins=False)
    assert model.states() == {worker_id: WorkerState.BOOTING}
    assert len(model.cloud.rows) == 1


def test_a_definite_refusal_ends_the_worker_at_once() -> None:
    model, worker_id = a_model("refuse")
    assert worker_id not in model.ledger.workers
    assert records(model, "worker-gone") == ["create: not allowed"]


def test_a_refusal_after_a_lost_answer_proves_nothing_so_it_is_terminated() -> None:
    model, worker_id = a_model("lose_after", "refuse")
    model.pass_time(2_000)
    model.perform()
    assert model.states() == {worker_id: WorkerState.TERMINATING}
    run_for(model, 3 * MINUTE)
    assert not model.cloud.existing()
    assert not model.ledger.workers


@pytest.mark.parametrize("fault", ["", "throttle", "refuse", "no_capacity"])
def test_an_answer_that_comes_after_the_termination_was_asked_for_counts(fault: str) -> None:
    model = WorkerModel(WorkerRules())
    model.cloud.faults.waiting["create"] = [fault]
    worker_id = model.want()
    model.perform(during_call=lambda: model.terminate(worker_id))
    run_for(model, 5_000)
    assert worker_id not in model.ledger.workers or fault == "throttle"
    assert all(not worker.unanswered for worker in model.ledger.workers.values())
    assert worker_id not in {one["worker_id"] for one in model.cloud.existing()}


def test_an_offer_without_capacity_is_closed_for_three_minutes_and_another_is_wanted_under_a_new_id() -> None:
    model, worker_id = a_model("no_capacity")
    (other,) = model.ledger.workers.values()
    assert other.id != worker_id
    assert (other.offer, other.why) == ("small-b", f"instead of {worker_id}")
    assert "scripted/offer:small-a" in model.ledger.offer_closures
    model.pass_time(3 * MINUTE + 1_000)
    assert not model.ledger.offer_closures


def test_a_zone_without_capacity_closes_its_other_offers_too() -> None:
    model, _ = a_model("no_capacity:zone:zone-a")
    assert model.want("gpu") == ""
    assert model.want("cpu")


def test_throttling_closes_nothing_and_is_asked_again_after_a_growing_pause() -> None:
    model, worker_id = a_model("throttle")
    worker = model.ledger.workers[worker_id]
    assert (worker.state, worker.unanswered) == (WorkerState.ASKED, 0)
    assert not model.ledger.offer_closures
    assert worker.next_call_at_ms > model.now
    run_for(model, 10_000)
    assert model.states() == {worker_id: WorkerState.BOOTING}


def test_pauses_grow_to_a_minute_and_differ_between_workers() -> None:
    pauses = [pause_ms("worker-1", tries) for tries in range(1, 20)]
    assert all(500 <= pause <= 60_000 for pause in pauses)
    assert min(pauses[8:]) >= 30_000
    assert len({pause_ms(f"worker-{number}", 9) for number in range(20)}) > 15


def test_a_termination_that_fails_is_never_given_up_and_its_row_stays() -> None:
    model, worker_id = a_model()
    model.terminate(worker_id)
    model.cloud.faults.waiting["terminate"] = ["fail"] * 10_000
    run_for(model, 2 * HOUR_MS, every=MINUTE)
    worker = model.ledger.workers[worker_id]
    assert "cannot be terminated" in worker.problem
    assert budget_state(model.ledger, model.now, model.wall_ms).rate_micro == 100_000
    before = len(model.cloud.faults.calls)
    run_for(model, 5 * MINUTE)
    assert any(call.startswith("terminate") for call in model.cloud.faults.calls[before:])
    model.cloud.faults.clear()
    run_for(model, 3 * MINUTE)
    assert not model.ledger.workers


def test_the_same_id_for_another_worker_is_a_conflict() -> None:
    model, worker_id = a_model()
    other = Worker(id=worker_id, provider="elsewhere", worker_type="cpu", resources=WorkerResources(), created_at_ms=0)
    with pytest.raises(Conflict):
        model.handle(WorkerRequested(other, model.wall_ms))


def test_a_worker_with_a_lease_is_neither_drained_nor_terminated_unless_forced() -> None:
    model, worker_id = a_model()
    model.join()
    model.handle(LeaseAsked(a_request("lease-1", cores=1, user="ada")))
    assert model.ledger.leases_on[worker_id]
    with pytest.raises(Refused, match="has 1 leases"):
        model.handle(WorkerDrainRequested(worker_id, "ada", "idle"))
    with pytest.raises(Refused, match="has 1 leases"):
        model.handle(WorkerTerminationRequested(worker_id, "ada", "idle", model.wall_ms))
    model.handle(WorkerTerminationRequested(worker_id, "ada", "now", model.wall_ms, force=True))
    run_for(model, MINUTE)
    assert worker_id not in model.ledger.nodes
    assert not model.ledger.leases


def test_a_budget_refuses_what_costs_nobody_knows_how_much() -> None:
    model = WorkerModel(WorkerRules(budget_per_hour_micro=1_000_000))
    unpriced = Worker(
        id="worker-x",
        provider="scripted",
        worker_type="cpu",
        resources=WorkerResources(1000, GIB),
        created_at_ms=0,
        offer="mystery",
    )
    with pytest.raises(Refused, match="costs is not known"):
        model.handle(WorkerRequested(unpriced, model.wall_ms))


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (WorkerState.ASKED, WallTimePassed(BEGIN_MS + HOUR_MS)),
        (WorkerState.BOOTING, WallTimePassed(BEGIN_MS + HOUR_MS)),
        (WorkerState.TERMINATING, WorkersListed("scripted", BEGIN_MS + HOUR_MS, (), BEGIN_MS + HOUR_MS)),
        (
            WorkerState.JOINED,
            WorkerRequested(
                Worker(
                    id="worker-new",
                    provider="scripted",
                    worker_type="cpu",
                    resources=WorkerResources(),
                    created_at_ms=0,
                    price_micro=1,
                ),
                BEGIN_MS + HOUR_MS,
            ),
        ),
    ],
    ids=["launches overdue", "joins overdue", "all gone", "one more"],
)
def test_a_step_with_many_workers_changes_so_many_rows_at_most(state: WorkerState, event: object) -> None:
    """How long the steps take is measured by `bench/worker_steps.py`."""
    ledger, most, waiting = many_workers(500, state), 0, [event]
    while waiting:
        stepped = step(ledger, waiting.pop(0), BEGIN_MS + HOUR_MS)  # type: ignore[arg-type]
        waiting += stepped.later
        most = max(most, len(stepped.changes))
    assert 0 < most <= 6 * MAX_WORKERS_PER_STEP  # with its node, offer and leases
    ledger.check()
