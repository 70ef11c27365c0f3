"""Workers whose provider has a queue: an order that waits there is late only after the queue's own limit, and costs
nothing until it has left it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import HeartbeatReceived, NodeDeclared, WorkersListed
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Worker, WorkerRules
from distributed_grid.reactor.workers.lifecycle import QUEUED
from distributed_grid.scheduling.scaling.budget import HOUR_MS, budget_state
from tests.support.clouds.slurm_commands import SlurmCommands
from tests.support.worker_model import ControlPlaneModel

MINUTE = 60_000
RULES = WorkerRules(core_hour_budgets={"slurm": 10_000})


class QueueModel(ControlPlaneModel):
    """A control plane with a Slurm cluster whose queue is so long."""

    def __init__(self, wait_seconds: float, rules: WorkerRules = RULES) -> None:
        super().__init__(
            rules, lambda clock: SlurmCommands(clock, queue_seconds=lambda: wait_seconds, stops_in=1), "slurm"
        )
        self.worker_id = self.want()
        self.perform()

    @property
    def worker(self) -> Worker:
        return self.ledger.workers[self.worker_id]

    def run_for(self, ms: int, *, every: int = 10_000) -> None:
        end = self.now + ms
        while self.now < end:
            self.now = min(self.now + every, end)
            self.check()
            self.perform()
            self.compare()

    @property
    def used_hours(self) -> float:
        (cores,) = budget_state(self.ledger, self.now, self.wall_ms).cores
        return cores.used_ms / HOUR_MS

    @property
    def day_hours(self) -> float:
        (cores,) = budget_state(self.ledger, self.now, self.wall_ms).cores
        return cores.day_ms / HOUR_MS


@pytest.fixture
def make() -> Iterator[Callable[[float], QueueModel]]:
    models: list[QueueModel] = []

    def made(wait_seconds: float) -> QueueModel:
        models.append(QueueModel(wait_seconds))
        return models[-1]

    yield made
    for model in models:
        model.stand_in.close()


@pytest.fixture
def model(make: Callable[[float], QueueModel]) -> QueueModel:
    """A queue of three hours; a worker has two cores for an hour."""
    return make(3 * 3600)


def test_an_order_that_waits_is_not_late_and_says_for_what_it_waits(model: QueueModel) -> None:
    assert (model.worker.state, model.worker.waits, model.worker.why) == (WorkerState.BOOTING, True, QUEUED)
    model.run_for(2 * HOUR_MS)
    assert (model.worker.state, model.worker.waits) == (WorkerState.BOOTING, True)
    assert model.worker.why == "it waits in Slurm's queue (Priority), and costs nothing yet"
    assert not model.ledger.offer_closures


def test_the_time_to_join_counts_from_when_it_has_left_the_queue(model: QueueModel) -> None:
    model.run_for(3 * HOUR_MS + MINUTE)
    assert not model.worker.waits
    booted_at = model.worker.booted_at_ms
    assert 0 <= model.now - booted_at <= MINUTE
    model.run_for(13 * MINUTE)
    assert model.worker.state is WorkerState.BOOTING
    model.run_for(3 * MINUTE)
    assert [one.reason for one in model.records if one.type == "worker-terminating"] == ["did not join within 900 s"]


def test_a_queue_that_is_too_long_is_given_up(make: Callable[[float], QueueModel]) -> None:
    model = make(30 * 3600)
    model.run_for(24 * HOUR_MS - MINUTE, every=MINUTE)
    assert model.worker.waits
    model.run_for(5 * MINUTE)
    assert model.worker_id not in model.ledger.workers
    assert not [one for one in model.stand_in.machines() if one.ended_at is None]
    (why,) = [one.reason for one in model.records if one.type == "worker-terminating"]
    assert why == "still waited in the queue of its provider after 86400 s"


def test_one_that_is_put_back_again_and_again_is_given_up_all_the_same(model: QueueModel) -> None:
    model.run_for(3 * HOUR_MS + MINUTE)
    model.ledger.apply([replace(model.worker, waits=True, booted_at_ms=model.now + 20 * HOUR_MS)])
    model.now += 22 * HOUR_MS
    model.check()
    assert model.worker.state is WorkerState.TERMINATING


def test_core_hours_are_spent_from_when_it_runs_and_reserved_before(model: QueueModel) -> None:
    model.run_for(3 * HOUR_MS - MINUTE)  # midnight has passed, and so has what was counted before it was in the queue
    assert model.used_hours < 0.001
    assert model.day_hours == pytest.approx(2 * (1 + 1 / 60), abs=0.1)
    began_at = model.now + MINUTE
    model.run_for(14 * MINUTE)
    assert model.used_hours == pytest.approx(2 * (model.now - began_at) / HOUR_MS, abs=0.006)


def test_what_began_and_ended_while_nobody_looked_has_cost_its_whole_lifetime(model: QueueModel) -> None:
    model.run_for(3 * HOUR_MS - MINUTE)
    model.now += 2 * HOUR_MS
    model.run_for(5 * MINUTE)
    assert model.worker_id not in model.ledger.workers
    assert model.used_hours == pytest.approx(2 * (1 + 1 / 60), abs=0.001)


def test_one_that_joined_between_two_lists_is_charged_since_it_was_last_known_to_wait(model: QueueModel) -> None:
    model.run_for(3 * HOUR_MS - MINUTE)
    model.now += 30 * MINUTE
    node = Node(model.worker_id, capacity=Capacity(2000, 1 << 30), host="joined")
    model.handle(NodeDeclared(node))
    model.handle(HeartbeatReceived(node.name, Usage()))
    assert model.worker.state is WorkerState.JOINED
    assert model.used_hours == pytest.approx(2 * 30 / 60, abs=0.01)
    model.compare()
    assert model.used_hours == pytest.approx(2 * 30 / 60, abs=0.01)
    assert 2 * (1 + 1 / 60) <= model.day_hours <= 2 * (1.5 + 1 / 60) + 0.01, (
        "at most what nobody has seen is counted twice"
    )


def test_what_waits_is_refused_by_the_budget_as_if_it_ran(model: QueueModel) -> None:
    refused = ""
    for _ in range(5):
        model.want()
        model.perform()
        refused = model.refusals[0] if model.refusals else refused
    assert "core-hours today" in refused
    assert "providers.slurm.budget_core_hours is 10" in refused
    assert len(model.ledger.workers) == 4


def test_a_list_may_say_of_an_order_without_an_answer_that_it_waits(model: QueueModel) -> None:
    model.stand_in.faults.waiting["create"] = ["lose_after"]
    second = model.want()
    model.perform()
    assert model.ledger.workers[second].state is WorkerState.ASKED
    model.now += 1000
    model.compare()
    assert (model.ledger.workers[second].state, model.ledger.workers[second].waits) == (WorkerState.BOOTING, True)
    model.handle(WorkersListed("slurm", model.now, (), model.wall_ms))
    assert model.ledger.workers[second].state is WorkerState.BOOTING, "one list without it proves nothing"
