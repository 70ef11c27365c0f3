"""Size of a pool of workers: the nodes in use of a Microsoft GPU cluster, and how many the autoscaler that ships keeps.

Steps are 10 minutes with the highest number in use; 1 to 14 December 2017 are measured, what was before is learned
from. The pool starts with its headroom, a sixteenth of what runs. A growth of the pool in a step is a wake-up.
Utilisation is the mean of running / pool, where the pool is all workers that are not proven gone.

The autoscaler is the daemon's: a ledger with a lease of a whole worker for each node in use, `read_load` and
`size_pool` on it, and then `ScalingRequested` through the reactor, with the rules that a config has by default.
Machines that are asked for join at once, and those that are given back are gone at once. The sizer is also measured
alone.

Recomputed for comparison, with a headroom of 20: reactive (the pool is always running + 20, each rise is a wake-up) and
the rule of Helios (Hu et al., SC'21) with the same time of the day before as its forecast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from bench.sizes import Unavailable, sized
from bench.table import Line
from bench.traces import TRACES, lines_of
from distributed_grid.domain.events import (
    Event,
    HeartbeatReceived,
    LeaseAsked,
    LeaseReleased,
    NodeDeclared,
    OutputsCollected,
    ScalingRequested,
    ScalingRulesSet,
    WorkerAsked,
    WorkerBooted,
    WorkerGone,
    WorkerRequested,
    WorkerTerminationAccepted,
)
from distributed_grid.domain.followups import Cause
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import ScalingRules, Worker, WorkerResources
from distributed_grid.prediction.warm_pool import (
    HEADROOM_DIVISOR,
    HEADROOM_WORKERS,
    SLOT_MS,
    SLOTS_PER_POOL_STEP,
    LoadSlot,
    PoolSizer,
    WarmPool,
)
from distributed_grid.reactor import step
from distributed_grid.scheduling.scaling.evaluation import MAX_STARTS
from distributed_grid.server.workers.autoscaler import read_load, size_pool

STEPS_PER_DAY = 144
HEADROOM = 20
FIRST, LAST = datetime(2017, 12, 1), datetime(2017, 12, 15)  # noqa: DTZ001 - the trace names no zone
REACTIVE = (60.6, 93.3)
DAY_BEFORE = (0.86, 88.8)
"""Wake-ups a day and utilisation %, as they were measured before."""
CLOSE = 0.1
DAYS = sized(14, smoke=1)
STEP_MS = SLOT_MS * SLOTS_PER_POOL_STEP
EVALUATIONS_MS = (0, 60_000, 120_000, SLOT_MS, SLOT_MS + 60_000, SLOT_MS + 120_000)
"""Moments of a step at which the autoscaler evaluates."""
GB = 1024**3
HAS = WorkerResources(4000, 16 * GB)
TYPE = Worker(
    id="", provider="bench", worker_type="cpu", resources=HAS, created_at_ms=0, offer="cpu-4", price_micro=100_000
)
MAX_WORKERS = 1_000

Resize = Callable[[int, int], int]
"""From step and pool to the pool after it."""


def measure() -> list[Line]:
    """The three rules."""
    folder = TRACES / "philly"
    if not folder.is_dir():
        raise Unavailable(f"no cluster at {folder}; see GRID_TRACES")
    running, first, last = read(folder)
    last = min(last, first + DAYS * STEPS_PER_DAY)
    sizer = PoolSizer(STEPS_PER_DAY, HEADROOM_WORKERS)
    for number in range(first):
        if (load := running[number]) is not None:
            sizer.observe(number, load)
    loads = [load or 0 for load in running]  # nothing is missing in what is measured and in the day before

    def sized_alone(number: int, pool: int) -> int:
        sizer.observe(number, loads[number])
        return sizer.size(pool)

    cluster = ScaledCluster(running, first)
    rules: dict[str, tuple[Resize, int]] = {
        "reactive": (lambda number, _: loads[number] + HEADROOM, HEADROOM),
        "day before": (helios_rule(loads, first), HEADROOM),
        "sizer": (sized_alone, _shipped_headroom(loads[first])),
        "shipped": (cluster.resize, _shipped_headroom(loads[first])),
    }
    results = {name: follow(loads, first, last, rule, spare) for name, (rule, spare) in rules.items()}
    for name, (wakeups, utilisation) in results.items():
        print(f"  {name:12} {wakeups:6.2f} wake-ups a day, {utilisation:.1f} % utilisation", file=sys.stderr)
    apart = max(
        abs(ours - theirs)
        for name, before in (("reactive", REACTIVE), ("day before", DAY_BEFORE))
        for ours, theirs in zip(results[name], before, strict=True)
    )
    wakeups, utilisation = results["shipped"]
    named = f"headroom 1/{HEADROOM_DIVISOR}"
    return [
        Line(f"pool of the shipped autoscaler, {named}, wake-ups a day", wakeups, 1, "", True),
        Line("  utilisation", utilisation, 91, "%"),
        Line("  steps in which something waited, a day", cluster.waited / DAYS, 0, "", True),
        Line("  its sizer alone, wake-ups a day", results["sizer"][0], 0, "", True),
        Line("  utilisation of the sizer alone", results["sizer"][1], 0, "%"),
        Line("  reactive and day before, apart from earlier figures", apart, CLOSE, "", True),
    ]


def _shipped_headroom(running: int) -> int:
    return max(HEADROOM_WORKERS, -(-running // HEADROOM_DIVISOR))


class ScaledCluster:
    """A ledger whose workers run the trace: as many leases of a whole worker as there were nodes in use."""

    def __init__(self, running: list[int | None], first: int) -> None:
        """Learn the load before the first step; then that many workers and their headroom are there."""
        self._running = running
        self._pool = WarmPool()
        for number, load in enumerate(running[:first]):
            if load is not None:
                for slot in range(number * SLOTS_PER_POOL_STEP, (number + 1) * SLOTS_PER_POOL_STEP):
                    self._pool.learn(LoadSlot(slot, 1000 * load, 1, load))
        self._ledger = Ledger()
        self._now = first * STEP_MS
        self._names = 0
        self._leases: list[str] = []
        self.waited = 0
        self._handle(ScalingRulesSet(ScalingRules(provider="bench", max_workers=MAX_WORKERS, types=(TYPE,))))
        load = running[first] or 0
        for _ in range(load + _shipped_headroom(load)):
            self._handle(WorkerRequested(replace(TYPE, id=self._name("worker")), self._now))
        self._deliver()

    def resize(self, number: int, pool: int) -> int:
        """The pool after a step of the trace."""
        self._now = number * STEP_MS
        self._set_load(self._running[number] or 0)
        self.waited += any(self._ledger.leases[name].claim is None for name in self._leases)
        for after_ms in EVALUATIONS_MS:
            self._now = number * STEP_MS + after_ms
            warm, _ = size_pool(self._pool, read_load(self._ledger), self._ledger.scaling, self._now)
            ids = tuple(self._name("worker") for _ in range(MAX_STARTS))
            self._handle(ScalingRequested(ids, self._now, warm))
            self._deliver()
        return len(self._ledger.workers)

    def _set_load(self, running: int) -> None:
        while len(self._leases) > running:
            self._handle(LeaseReleased(self._leases.pop(0), "user"))
        while len(self._leases) < running:
            name = self._name("lease")
            ask = Amounts(cpu_milli=HAS.cpu_milli, memory_bytes=GB)
            self._handle(LeaseAsked(Request(id=name, user="user", ask=ask, wait_ms=86_400_000)))
            self._leases.append(name)

    def _deliver(self) -> None:
        """Machines that are wanted join, and those that drain are gone."""
        for worker in list(self._ledger.workers.values()):
            if worker.state is WorkerState.WANTED:
                self._handle(WorkerAsked(worker.id))
                self._handle(WorkerBooted(worker.id, f"i-{worker.id}"))
                capacity = Capacity(HAS.cpu_milli, HAS.memory_bytes)
                self._handle(NodeDeclared(Node(name=worker.id, capacity=capacity, host="joined", joined=True)))
                self._handle(HeartbeatReceived(name=worker.id, usage=Usage()))
            elif worker.state is WorkerState.DRAINING:
                self._handle(OutputsCollected(worker.id, self._now, 0, 0, ()))
                self._handle(WorkerTerminationAccepted(worker.id))
                self._handle(WorkerGone(worker.id, "", self._now))

    def _handle(self, event: Event) -> None:
        ahead: list[Cause] = [event]
        while ahead:
            ahead += step(self._ledger, ahead.pop(0), self._now).later

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}-{self._names}"


def read(folder: Path) -> tuple[list[int | None], int, int]:
    """The highest number in use in each step, and the steps that are measured."""
    highest: dict[int, int] = {}
    begin = None
    for line in lines_of(folder / "philly_node_sequence.csv.gz")[1:]:
        minute, active, _ = line.split(",")
        at = datetime.fromisoformat(minute)
        begin = begin or at
        step = (at - begin).total_seconds() * STEPS_PER_DAY // 86_400
        highest[int(step)] = max(highest.get(int(step), 0), int(active))
    assert begin is not None
    first, last = (round((day - begin).total_seconds() * STEPS_PER_DAY / 86_400) for day in (FIRST, LAST))
    return [highest.get(step) for step in range(max(highest) + 1)], first, last


def follow(loads: list[int], first: int, last: int, resize: Resize, headroom: int) -> tuple[float, float]:
    """Wake-ups a day and utilisation % of a rule; every growth of the pool is a wake-up."""
    pool = loads[first] + headroom
    wakeups = 0
    used = []
    for number in range(first, last):
        before, pool = pool, resize(number, pool)
        wakeups += pool > before
        used.append(loads[number] / pool)
    return wakeups * STEPS_PER_DAY / (last - first), 100 * fmean(used)


def helios_rule(loads: list[int], first: int) -> Resize:
    """Shrink when load fell and the forecast of five hours is below it and does not rise; not soon after a wake-up."""
    ahead, pause = 30, 10
    earliest_shrink = first

    def resize(step: int, pool: int) -> int:
        nonlocal earliest_shrink
        load = loads[step]
        if load > pool:
            pool = load + HEADROOM
            earliest_shrink = step + pause
        coming = loads[step + 1 - STEPS_PER_DAY : step + 1 - STEPS_PER_DAY + 2 * ahead]
        fell = step > first and fmean(loads[max(first, step - 2) : step]) > load
        if fell and load >= fmean(coming[:ahead]) >= fmean(coming) and step >= earliest_shrink:
            pool = min(pool, load + HEADROOM)
        return pool

    return resize
