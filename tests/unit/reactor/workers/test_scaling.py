"""Deciders of scaling: starts and drains of an evaluation, resuming, and the end of a drained worker."""

from __future__ import annotations

from distributed_grid.domain.events import (
    BlockAsked,
    OutputsCollected,
    ScalingRequested,
    ScalingRulesSet,
    WorkerDrainRequested,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.states import NodeState, WorkerState
from distributed_grid.reactor.effects import collection_effects
from tests.support.builders import GB, a_node, a_request
from tests.support.scaling import ScalingScenario, rules


def drained(**fields: int) -> tuple[ScalingScenario, str]:
    """A grid with one worker that was needed, is not any more, and drains."""
    scenario = ScalingScenario(a_node("home", cores=2), scaling=rules(down_cooldown_ms=10_000, **fields))
    scenario.ask(a_request("all", cores=2))
    scenario.ask(a_request("task", cores=4))
    scenario.evaluate()
    (worker_id,) = scenario.deliver()
    scenario.release("task")
    assert scenario.evaluate(seconds=100).worker_ids == (worker_id,)
    return scenario, worker_id


def test_many_workers_are_started_over_several_steps_each_with_an_id_of_its_own() -> None:
    scenario = ScalingScenario(a_node("home", cores=1), scaling=rules(max_workers=50))
    scenario.ask(a_request("all", cores=1))
    for number in range(80):
        scenario.ask(a_request(f"r{number}", cores=1))
    plan = scenario.evaluate()
    assert plan.count == 20, "as many as there are ids"
    assert len(scenario.ledger.workers) == 20
    assert {worker.by for worker in scenario.ledger.workers.values()} == {GRID_USER}
    assert {worker.why for worker in scenario.ledger.workers.values()} == {plan.reason}


def test_a_worker_that_drains_takes_nothing_new() -> None:
    scenario, worker_id = drained()
    assert scenario.ledger.workers[worker_id].surplus
    assert scenario.ledger.nodes[worker_id].state is NodeState.DRAINING
    scenario.ask(a_request("later", cores=1))
    assert not scenario.ledger.leases["later"].holds


def test_new_demand_keeps_a_worker_that_drains() -> None:
    scenario, worker_id = drained()
    scenario.ask(a_request("later", cores=4))
    plan = scenario.evaluate(seconds=1)
    assert (plan.action, plan.count, plan.worker_ids) == ("scale_up", 0, (worker_id,))
    worker = scenario.ledger.workers[worker_id]
    assert (worker.state, worker.surplus) == (WorkerState.JOINED, False)
    scenario.heartbeat(worker_id)
    assert scenario.ledger.leases["later"].node == worker_id
    scenario.bring_home()
    assert scenario.ledger.workers[worker_id].state is WorkerState.JOINED


def test_a_worker_that_somebody_else_drains_is_not_kept() -> None:
    scenario, worker_id = drained()
    scenario.ask(a_request("later", cores=4))
    scenario.evaluate(seconds=1)
    scenario.heartbeat(worker_id)
    scenario.release("later")
    scenario.handle(WorkerDrainRequested(worker_id, "ada", "the budget of the day is spent"))
    scenario.ask(a_request("again", cores=4))
    plan = scenario.evaluate(seconds=1)
    assert worker_id not in plan.worker_ids


def test_a_drained_worker_is_terminated_when_its_outputs_are_home() -> None:
    scenario, worker_id = drained()
    assert [effect.worker.id for effect in collection_effects(scenario.ledger)] == [worker_id]
    done = scenario.handle(OutputsCollected(worker_id, scenario.wall_ms, 3, 100, ("r1: too large",)))
    assert scenario.ledger.workers[worker_id].state is WorkerState.TERMINATING
    (kept,) = (record for record in done.records if record.type == "outputs-kept")
    assert kept.reason == "3 files of ended jobs brought home, 1 lost: r1: too large"
    scenario.end_terminating()
    assert worker_id not in scenario.ledger.workers
    assert worker_id not in scenario.ledger.nodes
    scenario.ledger.check()


def test_outputs_that_come_home_twice_or_of_a_worker_that_is_used_end_nothing() -> None:
    scenario, worker_id = drained()
    scenario.ask(a_request("later", cores=4))
    scenario.evaluate(seconds=1)
    assert not scenario.handle(OutputsCollected(worker_id, scenario.wall_ms)).changes
    assert not scenario.handle(OutputsCollected("nobody", scenario.wall_ms)).changes


def test_a_worker_with_blocks_is_not_terminated_before_they_have_moved() -> None:
    scenario, worker_id = drained()
    scenario.ask(a_request("later", cores=4))
    scenario.evaluate(seconds=1)
    scenario.heartbeat(worker_id)
    scenario.release("later")
    scenario.handle(
        BlockAsked(id="block1", user="ada", size_bytes=GB, term_ms=3_600_000, home="home", prefer=worker_id)
    )
    assert scenario.ledger.leases_on[worker_id]
    assert scenario.evaluate(seconds=200).worker_ids == (worker_id,), "blocks can move: they are no lease"
    assert not collection_effects(scenario.ledger)
    assert not scenario.handle(OutputsCollected(worker_id, scenario.wall_ms)).changes


def test_the_rules_and_workers_survive_a_restart_and_the_window_begins_anew() -> None:
    scenario, worker_id = drained()
    again = Ledger(scenario.ledger.rows(durable_only=True))
    assert again.scaling == scenario.ledger.scaling
    assert again.workers[worker_id].surplus
    assert scenario.ledger.utilization.samples
    assert not again.utilization.samples
    assert not scenario.handle(ScalingRulesSet(scenario.ledger.scaling)).changes


def test_an_evaluation_without_ids_starts_nothing() -> None:
    scenario = ScalingScenario(a_node("home", cores=1))
    scenario.ask(a_request("all", cores=1))
    scenario.ask(a_request("task", cores=1))
    scenario.handle(ScalingRequested((), scenario.wall_ms))
    assert not scenario.ledger.workers
