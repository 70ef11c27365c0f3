"""Deciders of workers: their life under each answer of a provider, proofs, deadlines, budgets, and bounded steps."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_grid.domain.events import (
    LeaseAsked,
    WorkerDrainRequested,
    WorkerRequested,
    WorkersChecked,
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

MINUTE = 60_000


def a_model(*faults: str, **rules: Any) -> tuple[WorkerModel, str]:
    """A worker that was asked for, with these faults of the creation."""
    model = WorkerModel(WorkerRules(**rules))
    model.cloud.faults.waiting["create"] = list(faults)
    worker_id = model.want()
    model.perform()
    return model, worker_id


def run_for(model: WorkerModel, ms: int, *, joins: bool = False, every: int = 5_000) -> None:
    """What the control plane does in so long, with a list of the cloud `every` so often."""
    end = model.now + ms
    while model.now < end:
        model.perform()
        model.compare()
        if joins:
            model.join()
        model.pass_time(min(every, end - model.now))


def records(model: WorkerModel, kind: str) -> list[str]:
    return [record.reason for record in model.records if record.type == kind]


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


def test_what_is_not_launched_in_time_is_terminated() -> None:
    model, worker_id = a_model(*["lose_before"] * 99)
    run_for(model, 6 * MINUTE)
    assert model.states().get(worker_id) in (None, WorkerState.TERMINATING)
    assert any("not launched within 300 s" in why for why in records(model, "worker-terminating"))


def test_a_type_that_never_joined_is_set_aside() -> None:
    model, worker_id = a_model()
    run_for(model, 16 * MINUTE)
    assert worker_id not in model.ledger.workers
    assert not model.cloud.existing()
    assert "did not join within 900 s" in model.ledger.offer_closures["scripted/offer:small-a"].why
    model.want()
    assert {worker.offer for worker in model.ledger.workers.values()} == {"small-b"}


def test_a_machine_that_vanished_is_terminated_and_then_gone() -> None:
    model, worker_id = a_model()
    model.cloud.rows.clear()
    run_for(model, 3 * MINUTE)
    assert worker_id not in model.ledger.workers


def test_a_worker_whose_node_is_heard_is_there_whatever_a_list_says() -> None:
    model, worker_id = a_model()
    model.join()
    model.cloud.visible_after = 10**9
    run_for(model, 5 * MINUTE)
    assert model.states() == {worker_id: WorkerState.JOINED}


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


def listed_at(model: WorkerModel, *seconds: int) -> list[bool]:
    """Whether the worker is still there after lists at these seconds from now."""
    began, there = model.now, []
    for second in seconds:
        model.now = began + 1000 * second
        model.compare()
        there.append(bool(model.ledger.workers))
    return there


def test_two_lists_without_it_later_than_a_list_may_lag_prove_it_gone() -> None:
    model = WorkerModel(WorkerRules(), forgets=True)
    worker_id = model.want()
    model.perform()
    model.terminate(worker_id)
    model.perform()
    assert model.ledger.workers[worker_id].accepted_at_ms
    assert listed_at(model, 5, 28, 29, 31, 32) == [True, True, True, True, False]


def test_where_a_creation_had_no_answer_they_count_only_when_it_cannot_take_effect_any_more() -> None:
    model = WorkerModel(WorkerRules(), forgets=True)
    model.cloud.faults.waiting["create"] = ["late"]
    worker_id = model.want()
    model.perform()
    model.restart()
    model.terminate(worker_id)
    model.perform()
    assert listed_at(model, 31, 40, 61, 89, 91, 92) == [True, True, True, True, True, False]


def test_lists_prove_nothing_while_the_termination_was_not_accepted() -> None:
    model, worker_id = a_model()
    model.cloud.rows.clear()
    model.terminate(worker_id)
    model.cloud.faults.waiting["terminate"] = ["fail"] * 99
    model.perform()
    assert all(listed_at(model, 100, 200, 300, 400))


def test_a_new_day_has_cost_what_was_spent_since_midnight() -> None:
    model = WorkerModel(WorkerRules(budget_per_day_micro=10**9))
    model.want()
    run_for(model, 2 * HOUR_MS + 30 * MINUTE, joins=True, every=MINUTE)
    assert budget_state(model.ledger, model.now, model.wall_ms).spent_micro == pytest.approx(50_000, abs=500)


def test_the_same_id_for_another_worker_is_a_conflict() -> None:
    model, worker_id = a_model()
    other = Worker(worker_id, "elsewhere", "cpu", WorkerResources(), 0)
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


def test_workers_that_run_past_midnight_end_before_the_money_of_the_new_day_is_spent() -> None:
    model = WorkerModel(WorkerRules(budget_per_day_micro=1_000_000))
    for _ in range(3):
        model.want()
    run_for(model, 2 * HOUR_MS + 30 * MINUTE, joins=True, every=MINUTE)
    assert len(model.ledger.workers) == 3
    run_for(model, 8 * HOUR_MS, joins=True, every=MINUTE)
    state = budget_state(model.ledger, model.now, model.wall_ms)
    assert not model.cloud.existing()
    assert 900_000 < state.spent_micro <= 1_000_000
    assert not records(model, "budget-exceeded")
    assert model.want()
    assert "by midnight UTC" in model.refusals[-1]


def test_an_overrun_by_a_termination_without_an_answer_raises_an_alarm_once() -> None:
    model = WorkerModel(WorkerRules(budget_per_day_micro=1_000_000))
    for _ in range(3):
        model.want()
    run_for(model, 2 * HOUR_MS, joins=True, every=MINUTE)
    model.cloud.faults.waiting["terminate"] = ["fail"] * 10_000
    run_for(model, 9 * HOUR_MS, every=MINUTE)
    assert len(records(model, "budget-exceeded")) == 1


def test_a_budget_refuses_what_costs_nobody_knows_how_much() -> None:
    model = WorkerModel(WorkerRules(budget_per_hour_micro=1_000_000))
    unpriced = Worker("worker-x", "scripted", "cpu", WorkerResources(1000, GIB), 0, offer="mystery")
    with pytest.raises(Refused, match="costs is not known"):
        model.handle(WorkerRequested(unpriced, model.wall_ms))


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (WorkerState.ASKED, WorkersChecked(BEGIN_MS + HOUR_MS)),
        (WorkerState.BOOTING, WorkersChecked(BEGIN_MS + HOUR_MS)),
        (WorkerState.TERMINATING, WorkersListed("scripted", BEGIN_MS + HOUR_MS, (), BEGIN_MS + HOUR_MS)),
        (
            WorkerState.JOINED,
            WorkerRequested(
                Worker("worker-new", "scripted", "cpu", WorkerResources(), 0, price_micro=1), BEGIN_MS + HOUR_MS
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
