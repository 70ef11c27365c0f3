"""Lists of providers: their proofs about a worker, and places in a queue."""

from __future__ import annotations

import pytest

from distributed_grid.domain.events import HeartbeatReceived, NodeDeclared, WorkersListed
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import WorkerRules
from distributed_grid.scheduling.scaling.budget import HOUR_MS
from tests.support.worker_model import WorkerModel
from tests.unit.reactor.workers.one_worker import MINUTE, a_model, run_for
from tests.unit.reactor.workers.queue_model import QueueModel


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


def test_core_hours_are_spent_from_when_it_runs_and_reserved_before(queue: QueueModel) -> None:
    queue.run_for(3 * HOUR_MS - MINUTE)  # midnight has passed, and so has what was counted before it was in the queue
    assert queue.used_hours < 0.001
    assert queue.day_hours == pytest.approx(2 * (1 + 1 / 60), abs=0.1)
    began_at = queue.now + MINUTE
    queue.run_for(14 * MINUTE)
    assert queue.used_hours == pytest.approx(2 * (queue.now - began_at) / HOUR_MS, abs=0.006)


def test_what_began_and_ended_while_nobody_looked_has_cost_its_whole_lifetime(queue: QueueModel) -> None:
    queue.run_for(3 * HOUR_MS - MINUTE)
    queue.now += 2 * HOUR_MS
    queue.run_for(5 * MINUTE)
    assert queue.worker_id not in queue.ledger.workers
    assert queue.used_hours == pytest.approx(2 * (1 + 1 / 60), abs=0.001)


def test_one_that_joined_between_two_lists_is_charged_since_it_was_last_known_to_wait(queue: QueueModel) -> None:
    queue.run_for(3 * HOUR_MS - MINUTE)
    queue.now += 30 * MINUTE
    node = Node(name=queue.worker_id, capacity=Capacity(2000, 1 << 30), host="joined")
    queue.handle(NodeDeclared(node))
    queue.handle(HeartbeatReceived(name=node.name, usage=Usage()))
    assert queue.worker.state is WorkerState.JOINED
    assert queue.used_hours == pytest.approx(2 * 30 / 60, abs=0.01)
    queue.compare()
    assert queue.used_hours == pytest.approx(2 * 30 / 60, abs=0.01)
    assert 2 * (1 + 1 / 60) <= queue.day_hours <= 2 * (1.5 + 1 / 60) + 0.01, (
        "at most what nobody has seen is counted twice"
    )


def test_what_waits_is_refused_by_the_budget_as_if_it_ran(queue: QueueModel) -> None:
    refused = ""
    for _ in range(5):
        queue.want()
        queue.perform()
        refused = queue.refusals[0] if queue.refusals else refused
    assert "core-hours today" in refused
    assert "providers.slurm.budget_core_hours is 10" in refused
    assert len(queue.ledger.workers) == 4


def test_a_list_may_say_of_an_order_without_an_answer_that_it_waits(queue: QueueModel) -> None:
    queue.stand_in.faults.waiting["create"] = ["lose_after"]
    second = queue.want()
    queue.perform()
    assert queue.ledger.workers[second].state is WorkerState.ASKED
    queue.now += 1000
    queue.compare()
    assert (queue.ledger.workers[second].state, queue.ledger.workers[second].waits) == (WorkerState.BOOTING, True)
    queue.handle(WorkersListed("slurm", queue.now, (), queue.wall_ms))
    assert queue.ledger.workers[second].state is WorkerState.BOOTING, "one list without it proves nothing"
