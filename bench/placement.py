"""Cost of one placement decision, by strategy, over growing numbers of nodes.

A decision is what the reactor does to find a request its place: filter all nodes, score those that fit, choose one and
work out the exact claim there, with the two that came next (`queue.place_newcomer`, nobody waits). Before each one
something was granted and something given back, so whatever has to follow the ledger's changes is part of it.

Measured is each decision in three runs that are the same, and the fastest counts, as other work may run here.

Every node has 64 cores, 256 GB and eight GPUs of one of two models, and is about half full. Requests are of 36 shapes,
most with GPUs, in whole and in parts.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import suppress
from statistics import fmean, median

from bench.sizes import sized
from bench.table import Line
from distributed_grid.domain.events import HeartbeatReceived, LeaseAsked, LeaseReleased
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity, GpuDevice
from distributed_grid.domain.rows import Row
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.errors import Refused
from distributed_grid.reactor import step
from distributed_grid.scheduling.queue.queue import place_newcomer

GB = 2**30
BARS = sized({100: 100.0, 1_000: 300.0, 10_000: 2_000.0}, smoke={20: 100.0})
SIZES = (10, *BARS)
FIRST, ASKED = sized((500, 500), smoke=(10, 10))
"""So many requests come before it is measured, and so many decisions are."""
RUNS = 3


def measure() -> list[Line]:
    """A line for each size with a bar, about the slowest strategy; the whole table on stderr."""
    print("  µs a decision: median of wall time / of CPU time; mean of CPU time", file=sys.stderr)
    print(f"  {'nodes':22}" + "".join(f"{size:>20,}" for size in SIZES), file=sys.stderr)
    grids = {size: half_full(size) for size in SIZES}
    slowest = dict.fromkeys(SIZES, 0.0)
    for strategy in Strategy:
        cells = []
        for size, rows in grids.items():
            wall, cpu = times(rows, strategy)
            slowest[size] = max(slowest[size], median(wall))
            cells.append(f"{median(wall):.0f} / {median(cpu):.0f}; {fmean(cpu):.0f}")
        print(f"  {strategy:22}" + "".join(f"{cell:>20}" for cell in cells), file=sys.stderr)
    return [
        Line(f"a decision, {size:,} nodes, the slowest strategy's median", slowest[size], bar, "µs", True)
        for size, bar in BARS.items()
    ]


def times(rows: list[Row], strategy: Strategy) -> tuple[list[float], list[float]]:
    """Wall and CPU times of many decisions, in microseconds: of each the fastest of some runs that are all the same."""
    runs = [_run(rows, strategy) for _ in range(RUNS)]
    wall, cpu = ([min(tries) for tries in zip(*kind, strict=True)] for kind in zip(*runs, strict=True))
    return wall, cpu


def _run(rows: list[Row], strategy: Strategy) -> tuple[list[float], list[float]]:
    ledger, draw = Ledger(rows), random.Random("requests")
    names = list(ledger.nodes)
    held: list[str] = []
    wall, cpu = [], []
    for number in range(FIRST + ASKED):
        first = draw.randrange(len(names) - 2)
        require = tuple(names[first : first + 3]) if strategy is Strategy.NODE_SPECIFIC else ()
        request = Request(id=f"r{number}", user="ada", ask=_ask(draw), strategy=strategy, require=require, wait_ms=0)
        lease = Lease(id=request.id, request=request, asked_at_ms=number)
        began_cpu, began = time.thread_time_ns(), time.perf_counter_ns()
        place_newcomer(ledger, lease, number)
        wall.append((time.perf_counter_ns() - began) / 1000)
        cpu.append((time.thread_time_ns() - began_cpu) / 1000)
        _apply_changes(ledger, request, held)
    return wall[FIRST:], cpu[FIRST:]


def _apply_changes(ledger: Ledger, request: Request, held: list[str]) -> None:
    """Grant the request for good where it fits, and take back an older one."""
    with suppress(Refused):
        step(ledger, LeaseAsked(request), 0)
        held.append(request.id)
    if len(held) > min(len(ledger.nodes), 100):
        step(ledger, LeaseReleased(held.pop(0), "ada"), 0)


def half_full(size: int) -> list[Row]:
    """A grid where about half of everything is lent."""
    draw = random.Random(size)
    ledger = Ledger(_node(number) for number in range(size))
    for name in list(ledger.nodes):
        step(ledger, HeartbeatReceived(name=name, usage=Usage()), 0)
    for number in range(5 * size):
        step(ledger, LeaseAsked(Request(id=f"first{number}", user=f"u{number % 7}", ask=_ask(draw))), 0)
    return ledger.rows()


def _node(number: int) -> Node:
    gpus = tuple(GpuDevice(index, 32 * GB, ("A100", "V100")[number % 2]) for index in range(8))
    return Node(name=f"n{number}", capacity=Capacity(64_000, 256 * GB, gpus), speed_milli=500 + 100 * (number % 11))


def _ask(draw: random.Random) -> Amounts:
    """One of 36 shapes."""
    gpu_milli = draw.choice([0, 250, 500, 1000, 2000])
    cpu_milli, memory = draw.choice([(2, 8), (4, 16), (8, 16), (8, 64)])
    models = draw.choice([(), ("A100",)]) if gpu_milli else ()
    return Amounts(cpu_milli * 1000, memory * GB, gpu_milli, gpu_models=models)
