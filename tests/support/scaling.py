"""Builders of scaling: types of workers, workers in every state, and a scenario whose provider always delivers."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from distributed_grid.domain.events import (
    HeartbeatReceived,
    NodeDeclared,
    OutputsCollected,
    ScalingRequested,
    ScalingRulesSet,
    WorkerAsked,
    WorkerBooted,
    WorkerGone,
    WorkerTerminationAccepted,
)
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import ScalingPlan, ScalingRules, Worker, WorkerResources
from distributed_grid.reactor.decision import ScalingAnswer
from tests.support.builders import GB, Scenario, a_node, a_request

PROVIDER = "scripted"
MIDDAY_MS = 20_000 * 86_400_000 + 43_200_000
DOLLAR = 1_000_000


def a_type(
    worker_type: str = "cpu",
    *,
    cores: float = 4,
    memory_gb: float = 16,
    gpus: int = 0,
    price: float | None = 0.1,
    offer: str = "",
) -> Worker:
    """A worker as a provider would start it; the price is in dollars an hour."""
    resources = WorkerResources(round(1000 * cores), round(memory_gb * GB), gpus)
    micro = None if price is None else round(price * DOLLAR)
    return Worker(
        id="",
        provider=PROVIDER,
        worker_type=worker_type,
        resources=resources,
        created_at_ms=0,
        offer=offer or f"{worker_type}-{cores:g}",
        price_micro=micro,
    )


def rules(*types: Worker, **fields: Any) -> ScalingRules:
    """Scaling by a provider of these types, one of 4 cores where none is named, over a window of 100 seconds."""
    usual = {"window_ms": 100_000, "up_cooldown_ms": 60_000, "down_cooldown_ms": 120_000}
    return ScalingRules(provider=PROVIDER, types=types or (a_type(),), **{**usual, **fields})


class ScalingScenario(Scenario):
    """A grid that scales. Its provider starts and ends what it is asked to, when the test says so."""

    def __init__(self, *nodes: Node, scaling: ScalingRules | None = None) -> None:
        super().__init__(*nodes)
        self.started = 0
        self.handle(ScalingRulesSet(scaling or rules()))

    def evaluate(self, *, seconds: float = 0, warm: int = 0) -> ScalingPlan:
        """The evaluation after so many seconds without a joined worker."""
        if seconds:
            self.advance(seconds)
        ids = tuple(f"w-{self.started + number}" for number in range(20))
        self.started += len(ids)
        found = self.handle(ScalingRequested(ids, self.wall_ms, warm)).answer
        assert isinstance(found, ScalingAnswer)
        self.ledger.check()
        return found.plan

    @property
    def wall_ms(self) -> int:
        return MIDDAY_MS + self.now

    def in_state(self, *states: WorkerState) -> list[str]:
        return [worker.id for worker in self.ledger.workers.values() if worker.state in states]

    def deliver(self) -> list[str]:
        """The provider starts all that is wanted, and the agents join."""
        joined = self.in_state(WorkerState.WANTED, WorkerState.ASKED, WorkerState.BOOTING)
        for worker_id in joined:
            worker = self.ledger.workers[worker_id]
            if worker.state is WorkerState.WANTED:
                self.handle(WorkerAsked(worker_id))
                self.handle(WorkerBooted(worker_id, f"i-{worker_id}"))
            self.join(worker)
        return joined

    def join(self, worker: Worker) -> None:
        has = worker.resources
        node = a_node(worker.id, cores=has.cpu_milli / 1000, memory_gb=has.memory_bytes / GB, gpus=has.gpu_count)
        self.handle(NodeDeclared(replace(node, host="joined", joined=True, hold_ms=60_000)))
        self.handle(HeartbeatReceived(name=worker.id, usage=Usage()))

    def bring_home(self, *, lost: tuple[str, ...] = ()) -> None:
        """Everything that draining workers have is copied."""
        for worker_id in self.in_state(WorkerState.DRAINING):
            self.handle(OutputsCollected(worker_id, self.wall_ms, 1, 10, lost))

    def end_terminating(self) -> list[str]:
        """The provider ends all that is to end."""
        ending = self.in_state(WorkerState.TERMINATING)
        for worker_id in ending:
            self.handle(WorkerTerminationAccepted(worker_id))
            self.handle(WorkerGone(worker_id, "it is gone", self.wall_ms))
        return ending


def a_busy_grid(cores: float = 2, **fields: int) -> ScalingScenario:
    """A grid that scales and whose only node is full."""
    scenario = ScalingScenario(a_node("home", cores=cores), scaling=rules(**fields))
    scenario.ask(a_request("all", cores=cores))
    return scenario
