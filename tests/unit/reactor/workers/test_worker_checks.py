"""Check of workers: launches and joins that take too long, queues that are too long, and budgets of a day."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import WorkerRules
from distributed_grid.reactor.workers.lifecycle import QUEUED
from distributed_grid.scheduling.scaling.budget import HOUR_MS, budget_state
from tests.support.worker_model import WorkerModel
from tests.unit.reactor.workers.one_worker import MINUTE, a_model, records, run_for
from tests.unit.reactor.workers.queue_model import QueueModel


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


def test_a_new_day_has_cost_what_was_spent_since_midnight() -> None:
    model = WorkerModel(WorkerRules(budget_per_day_micro=10**9))
    model.want()
    run_for(model, 2 * HOUR_MS + 30 * MINUTE, joins=True, every=MINUTE)
    assert budget_state(model.ledger, model.now, model.wall_ms).spent_micro == pytest.approx(50_000, abs=500)


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


def test_an_order_that_waits_is_not_late_and_says_for_what_it_waits(queue: QueueModel) -> None:
    assert (queue.worker.state, queue.worker.waits, queue.worker.why) == (WorkerState.BOOTING, True, QUEUED)
    queue.run_for(2 * HOUR_MS)
    assert (queue.worker.state, queue.worker.waits) == (WorkerState.BOOTING, True)
    assert queue.worker.why == "it waits in Slurm's queue (Priority), and costs nothing yet"
    assert not queue.ledger.offer_closures


def test_the_time_to_join_counts_from_when_it_has_left_the_queue(queue: QueueModel) -> None:
    queue.run_for(3 * HOUR_MS + MINUTE)
    assert not queue.worker.waits
    booted_at = queue.worker.booted_at_ms
    assert 0 <= queue.now - booted_at <= MINUTE
    queue.run_for(13 * MINUTE)
    assert queue.worker.state is WorkerState.BOOTING
    queue.run_for(3 * MINUTE)
    assert [one.reason for one in queue.records if one.type == "worker-terminating"] == ["did not join within 900 s"]


def test_a_queue_that_is_too_long_is_given_up(make_queue: Callable[[float], QueueModel]) -> None:
    queue = make_queue(30 * 3600)
    queue.run_for(24 * HOUR_MS - MINUTE, every=MINUTE)
    assert queue.worker.waits
    queue.run_for(5 * MINUTE)
    assert queue.worker_id not in queue.ledger.workers
    assert not [one for one in queue.stand_in.machines() if one.ended_at is None]
    (why,) = [one.reason for one in queue.records if one.type == "worker-terminating"]
    assert why == "still waited in the queue of its provider after 86400 s"


def test_one_that_is_put_back_again_and_again_is_given_up_all_the_same(queue: QueueModel) -> None:
    queue.run_for(3 * HOUR_MS + MINUTE)
    queue.ledger.apply([replace(queue.worker, waits=True, booted_at_ms=queue.now + 20 * HOUR_MS)])
    queue.now += 22 * HOUR_MS
    queue.check()
    assert queue.worker.state is WorkerState.TERMINATING
