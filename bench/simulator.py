"""The simulator: a fault-free replay of 10,000 jobs on 1,000 nodes, and the pace of the fault campaign."""

from __future__ import annotations

import time
from random import Random

from bench.sizes import sized
from bench.table import Line
from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import Amounts, Capacity, Priority
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.replay.replay import Replay
from distributed_grid.replay.traces import PATIENT_MS, LoggedJob
from tests.simulation.campaign import run_seed

GB = 1024**3
DAY_MS = 86_400_000
NODES, JOBS = sized((1_000, 10_000), smoke=(10, 20))
SEEDS = sized(20, smoke=1)
BAR_S = 20.0
SEEDS_A_MINUTE = 1000 / 15 / 2
"""1,000 seeds within 15 minutes on two cores."""


def measure() -> list[Line]:
    """The replay's time, with what it shows, and the pace of the campaign on one core."""
    work, nodes = _work(), _nodes()
    began, cpu_began = time.perf_counter(), time.process_time()
    figures = Replay(work, nodes, SchedulingPolicy()).run()
    took, cpu_took = time.perf_counter() - began, time.process_time() - cpu_began
    table = figures.table()
    assert (table.finished, table.waiting) == (JOBS, 0)
    print(
        f"  replay: {table.cpu_utilisation:.0%} of the CPUs used, mean wait {table.mean_wait_s:.0f} s, "
        f"95 % of the jobs started within {table.p95_wait_s:.0f} s; {cpu_took:.1f} s of CPU time"
    )
    began, cpu_began = time.perf_counter(), time.process_time()
    broken = [report for report in map(run_seed, range(SEEDS)) if report.violated]
    pace = 60 * SEEDS / (time.perf_counter() - began)
    print(f"  campaign: {SEEDS} seeds took {time.process_time() - cpu_began:.1f} s of CPU time")
    assert not broken, f"seed {broken[0].seed}: {broken[0].violated}"
    return [
        Line(f"replay of {JOBS:,} jobs on {NODES:,} nodes", took, BAR_S, "s", lower_is_better=True),
        Line("seeds of the fault campaign, one core", pace, SEEDS_A_MINUTE, "/min"),
    ]


def _nodes() -> list[Node]:
    random = Random("nodes")
    sizes = [random.choice((8, 16, 16, 32)) for _ in range(NODES)]
    return [Node(name=f"n{i}", capacity=Capacity(1000 * cores, 4 * cores * GB)) for i, cores in enumerate(sizes)]


def _work() -> list[LoggedJob]:
    """A day's arrivals on nodes that are four fifths full: some of the wide jobs have to wait for a while."""
    random = Random("work")
    work = []
    for number in range(JOBS):
        cores = random.choice((1, 2, 4, 4, 8))
        run_ms = round(random.lognormvariate(10.45, 0.6) * 1000)
        request = Request(
            id=f"job{number}",
            user=f"user{random.randrange(20)}",
            ask=Amounts(1000 * cores, 3 * cores * GB),
            priority=random.choice((Priority.LOW, Priority.MEDIUM, Priority.MEDIUM, Priority.HIGH)),
            wait_ms=PATIENT_MS,
            expects_ms=round(run_ms * random.uniform(1, 5)),
        )
        work.append(LoggedJob(at_ms=random.randrange(DAY_MS), request=request, run_ms=run_ms))
    return sorted(work, key=lambda one: one.at_ms)
