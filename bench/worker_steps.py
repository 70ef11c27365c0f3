"""Steps about workers in a ledger with many of them: the longest of each kind, decide and apply, CPU time.

1,000 workers of a provider that are all overdue, all gone, or one more of them is wanted; 200 pull workers that ask for
tasks while 10,000 wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from bench.sizes import sized
from bench.table import Line
from distributed_grid.domain.events import (
    Event,
    JobSubmitted,
    PullWorkerRegistered,
    TaskAsked,
    WallTimePassed,
    WorkerRequested,
    WorkersListed,
)
from distributed_grid.domain.followups import Cause
from distributed_grid.domain.jobs import Command
from distributed_grid.domain.leases import NodeKind, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import PULL_HOST, Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Worker, WorkerResources
from distributed_grid.reactor import step
from distributed_grid.scheduling.scaling.budget import HOUR_MS
from tests.support.worker_model import BEGIN_MS, many_workers

WORKERS, PULL_WORKERS, TASKS = sized((1_000, 200, 10_000), smoke=(10, 4, 20))
GB = 1024**3
LATER_MS = BEGIN_MS + HOUR_MS
BAR_MS = 50


def measure() -> list[Line]:
    """The longest step of each story."""
    new = Worker(
        id="worker-new",
        provider="scripted",
        worker_type="cpu",
        resources=WorkerResources(),
        created_at_ms=0,
        price_micro=1,
    )
    stories: list[tuple[str, Ledger, Iterable[Event]]] = [
        ("all launches are overdue", many_workers(WORKERS, WorkerState.ASKED), [WallTimePassed(LATER_MS)]),
        ("all joins are overdue", many_workers(WORKERS, WorkerState.BOOTING), [WallTimePassed(LATER_MS)]),
        (
            "all are gone",
            many_workers(WORKERS, WorkerState.TERMINATING),
            [WorkersListed("scripted", LATER_MS, (), LATER_MS)],
        ),
        ("one more is wanted", many_workers(WORKERS, WorkerState.JOINED), [WorkerRequested(new, LATER_MS)]),
    ]
    lines = [_line(f"1,000 workers, {what}", longest_ms(ledger, events)) for what, ledger, events in stories]
    asking = [TaskAsked(f"w{number}", "one") for number in range(PULL_WORKERS) for _ in range(2)]
    lines.append(_line("200 pull workers ask, 10,000 tasks wait", longest_ms(pull_workers(), asking)))
    return lines


def _line(what: str, longest: float) -> Line:
    return Line(f"longest step, {what}", longest, BAR_MS, "ms", lower_is_better=True)


def longest_ms(ledger: Ledger, events: Iterable[Event]) -> float:
    """The longest step of these events, and of all that they leave for later."""
    ahead: list[Cause] = [*events]
    longest = 0.0
    for event in ahead:  # it grows
        began = time.process_time()
        ahead += step(ledger, event, LATER_MS).later
        longest = max(longest, time.process_time() - began)
    return 1000 * longest


def pull_workers() -> Ledger:
    """Pull workers that have just been registered, and tasks that wait."""
    ledger = Ledger()
    for number in range(TASKS):
        ask = Amounts(cpu_milli=1000)
        request = Request(id=f"t{number}", user="ana", ask=ask, runs_on=NodeKind.PULL, strategy=Strategy.FITTEST)
        step(
            ledger,
            JobSubmitted(id=f"t{number}", command=Command((), payload='{"type": "probe"}'), request=request),
            LATER_MS,
        )
    for number in range(PULL_WORKERS):
        node = Node(
            name=f"w{number}", capacity=Capacity(4000, 16 * GB), host=PULL_HOST, hold_ms=60_000, incarnation="one"
        )
        step(ledger, PullWorkerRegistered(node, Usage()), LATER_MS)
    return ledger
