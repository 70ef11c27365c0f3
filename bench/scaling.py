"""Steps of scaling in a ledger of 1,000 workers and 10,000 queued tasks: decide and apply, the longest of each kind.

Queues: a few shapes of five users; every task with a memory of its own; users with quotas; gangs. Then all workers idle
at once, so that many are given back. A step is what runs without a pause for anything else; CPU time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from msgspec.structs import replace

from bench.sizes import sized
from bench.table import Line
from distributed_grid.domain.events import (
    Event,
    HeartbeatReceived,
    LeaseAsked,
    NodeDeclared,
    PolicySet,
    ScalingRequested,
    ScalingRulesSet,
    WorkerRulesSet,
)
from distributed_grid.domain.followups import Cause
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.domain.rows import Row
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import ScalingRules, Spending, Worker, WorkerResources, WorkerRules
from distributed_grid.reactor import step
from distributed_grid.scheduling.scaling.evaluation import MAX_STARTS

WORKERS, TASKS = sized((1_000, 10_000), smoke=(10, 20))
GB = 1024**3
BEGIN_MS, WALL_MS = 1_000_000_000, 20_000 * 86_400_000
HAS = WorkerResources(4000, 16 * GB)
TYPES = tuple(
    Worker(
        id="",
        provider="bench",
        worker_type=kind,
        resources=WorkerResources(cores * 1000, 4 * cores * GB, gpus),
        created_at_ms=0,
        offer=f"{kind}-{cores}",
        price_micro=price,
    )
    for kind, cores, gpus, price in (
        ("cpu", 4, 0, 100_000),
        ("cpu", 8, 0, 190_000),
        ("cpu", 16, 0, 370_000),
        ("memory", 4, 0, 150_000),
        ("gpu", 8, 1, 900_000),
        ("gpu", 16, 4, 3_000_000),
    )
)
BAR_MS = 50


def few_shapes(number: int) -> Request:
    return _request(number, cores=1 + number % 4, memory_gb=2)


def own_shapes(number: int) -> Request:
    """No two alike."""
    return replace(_request(number), ask=Amounts(cpu_milli=1000, memory_bytes=GB + number * 4096))


def gangs(number: int) -> Request:
    return replace(_request(number, cores=2), gang=8)


def measure() -> list[Line]:
    """The longest step for each kind of queue, and for giving back."""
    lines = []
    for what, request, policy in (
        ("tasks of a few shapes", few_shapes, SchedulingPolicy()),
        ("tasks of 10,000 shapes", own_shapes, SchedulingPolicy()),
        ("tasks under quotas", few_shapes, SchedulingPolicy(quotas=(Quota(name="u0", cpu_milli=10**9),))),
        ("gangs of eight", gangs, SchedulingPolicy()),
    ):
        grid = ScaledGrid(policy)
        grid.fill()
        grid.queue(request)
        longest, started = grid.evaluate()
        lines.append(
            Line(f"longest step, 10,000 {what}, {started} workers started", longest, BAR_MS, "ms", lower_is_better=True)
        )
    grid = ScaledGrid(SchedulingPolicy())
    longest, given_back = grid.evaluate()
    lines.append(
        Line(f"longest step, 1,000 idle workers, {given_back} given back", longest, BAR_MS, "ms", lower_is_better=True)
    )
    return lines


class ScaledGrid:
    """Workers that have joined long ago, under a budget, and a maximum of twice as many."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.ledger = Ledger()
        self.now = BEGIN_MS
        names = [f"worker-{number}" for number in range(WORKERS)]
        state = WorkerState.JOINED
        rows: list[Row] = [
            Worker(
                id=name,
                provider="bench",
                worker_type="cpu",
                resources=HAS,
                created_at_ms=1,
                offer="cpu-4",
                price_micro=100_000,
                state=state,
                joined_at_ms=1,
            )
            for name in names
        ]
        self.ledger.apply(
            [*rows, Spending(provider="bench", day=WALL_MS // 86_400_000, spent_micro=0, as_of_ms=self.now)]
        )
        for name in names:
            capacity = Capacity(HAS.cpu_milli, HAS.memory_bytes)
            self.handle(NodeDeclared(Node(name=name, capacity=capacity, host="joined", joined=True)))
            self.handle(HeartbeatReceived(name=name, usage=Usage()))
        self.handle(PolicySet(policy))
        self.handle(WorkerRulesSet(WorkerRules(budget_per_hour_micro=10**12, budget_per_day_micro=10**14)))
        self.handle(ScalingRulesSet(ScalingRules(provider="bench", max_workers=2 * WORKERS, types=TYPES)))

    def handle(self, event: Event) -> None:
        step(self.ledger, event, self.now)

    def fill(self) -> None:
        """Lend everything."""
        for number in range(WORKERS):
            self.handle(
                LeaseAsked(Request(id=f"full{number}", user="u9", ask=Amounts(cpu_milli=4000, memory_bytes=15 * GB)))
            )

    def queue(self, request: Callable[[int], Request]) -> None:
        for number in range(TASKS):
            self.handle(LeaseAsked(request(number)))

    def evaluate(self) -> tuple[float, int]:
        """The longest of all steps of an evaluation in milliseconds of CPU time, and how many workers it changed."""
        ids = tuple(f"new-{number}" for number in range(MAX_STARTS))
        before = dict(self.ledger.workers)
        ahead: list[Cause] = [ScalingRequested(ids, WALL_MS)]
        longest = 0.0
        gc.collect()
        gc.freeze()
        while ahead:
            began = time.process_time()
            ahead += step(self.ledger, ahead.pop(0), self.now).later
            longest = max(longest, time.process_time() - began)
        gc.unfreeze()
        changed = sum(before.get(name) != worker for name, worker in self.ledger.workers.items())
        return 1000 * longest, changed


def _request(number: int, cores: int = 1, memory_gb: int = 1) -> Request:
    ask = Amounts(cpu_milli=1000 * cores, memory_bytes=memory_gb * GB)
    return Request(id=f"task{number}", user=f"u{number % 5}", ask=ask, wait_ms=86_400_000)
