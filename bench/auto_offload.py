"""Automatic offloading: CPU of a look with 1,000 jobs, and the time from pressure to relief by policy and by mode.

A look is what the control plane does every 60 seconds: read the pressure of all nodes, track them, relieve those above
a threshold. CPU time of the slowest of several looks, as a part of a core at that interval. Relief is in simulated time
through the reactor: one of four nodes is suddenly at 90 % of its memory, two fifths of that by three jobs that mark
checkpoints, so that one move is enough; the rebalancer runs every 30 seconds, a stopped job runs elsewhere 5 seconds
later.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from msgspec.structs import replace

from bench.sizes import sized
from bench.table import Line
from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptMarked,
    AttemptStarted,
    Event,
    HeartbeatReceived,
    JobSubmitted,
    NodeDeclared,
    OffloadPressureRead,
    PressureRead,
    TimePassed,
)
from distributed_grid.domain.jobs import Command, Ending, JobEstimate, Outcome
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import OffloadRules
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.rebalancing import SHARING_POLICIES, PressureReading, RebalanceRules, SharingMode
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.monitoring.snapshots import pressure_readings
from distributed_grid.reactor.dispatch import step_through

GB = 1024**3
JOBS, NODES = sized((1_000, 100), smoke=(20, 10))
BEGIN_MS = 1_000_000_000
OFFLOAD = OffloadRules(enabled=True)
LOOKS = sized(5, smoke=1)
ROUND_MS, TICK_MS, RESTART_MS = 30_000, 5_000, 5_000
GIVES_UP_MS = 3_600_000


def measure() -> list[Line]:
    """CPU of a look, then the time to relief."""
    calm = _cpu(lambda node: 300)
    some = _cpu(lambda node: 900 if node < 10 else 300)
    stuck = _cpu(lambda node: 900)
    one = _cpu(lambda node: 900 if node == 0 else 300, nodes=4)
    lines = [
        Line(f"automatic offloading, {JOBS:,} jobs on {NODES} nodes, all calm", calm, 0.2, "% of a core", True),
        Line("the same, 10 nodes above a threshold", some, 0.2, "% of a core", True),
        Line("the same, all of them above one", stuck, 0.2, "% of a core", True),
        Line(f"the same, {JOBS:,} jobs on 4 nodes, one above", one, 0.2, "% of a core", True),
    ]
    for policy in SHARING_POLICIES:
        seconds = _relief("offload_only", policy)
        lines.append(Line(f"from pressure to relief, {policy}", seconds, 0, "s", True))
    return lines + [
        Line(f"from pressure to relief, balanced, {mode}", _relief(mode, "balanced"), 0, "s", True)
        for mode in SharingMode
    ]


class World:
    """A ledger with a clock."""

    def __init__(self, nodes: int, cores: int, memory_gb: int) -> None:
        self.now, self.ledger = BEGIN_MS, Ledger()
        self.names = [f"n{number:03}" for number in range(nodes)]
        capacity = Capacity(1000 * cores, memory_gb * GB)
        for name in self.names:
            self.handle(NodeDeclared(Node(name=name, capacity=capacity, host=name)))
        self.beat()

    def handle(self, event: Event) -> None:
        step_through(self.ledger, event, self.now)

    def beat(self) -> None:
        for name in self.names:
            self.handle(HeartbeatReceived(name=name, usage=Usage(memory_bytes=GB)))

    def run_job(self, uid: str, node: str, ask: Amounts, *, marks: bool) -> None:
        request = Request(id=uid, user="ada", ask=ask, require=(node,), wait_ms=0)
        known = JobEstimate(run_ms=6 * 3_600_000)
        self.handle(
            JobSubmitted(
                id=uid, command=Command(("true",)), request=request, retries=0, estimate=known, restartable=marks
            )
        )
        self.start(uid)
        if marks:
            self.handle(AttemptMarked(uid, 1, self.ledger.jobs[uid].attempts[-1].fence, 0))
        self.ledger.apply([replace(self.ledger.jobs[uid], request=replace(request, require=()))])

    def start(self, uid: str) -> None:
        attempt = self.ledger.jobs[uid].attempt
        assert attempt is not None
        self.handle(AttemptStarted(uid=uid, number=attempt.number, fence=attempt.fence, pid=7))

    def end(self, uid: str) -> None:
        attempt = self.ledger.jobs[uid].attempt
        assert attempt is not None
        self.handle(AttemptEnded(uid=uid, number=attempt.number, fence=attempt.fence, outcome=Outcome(Ending.MOVED)))


def _rules(mode: str, policy: str) -> RebalanceRules:
    return RebalanceRules(mode=SharingMode(mode), policy=SHARING_POLICIES[policy], interval_ms=ROUND_MS)


def _cpu(level: Callable[[int], int], nodes: int = NODES) -> float:
    """The slowest look, in percent of a core."""
    each = JOBS // nodes
    world = World(nodes, cores=2 * each, memory_gb=4 * each)
    for number in range(JOBS):
        node = world.names[number % nodes]
        world.run_job(f"j{number}", node, Amounts(cpu_milli=500, memory_bytes=GB), marks=number % 2 == 0)
    rules, slowest = _rules("dynamic_balancing", "balanced"), 0.0
    readings = tuple(
        PressureReading(node=name, score=level(at), memory=level(at), cpu=level(at))
        for at, name in enumerate(world.names)
    )
    for look in range(LOOKS):
        world.now += OFFLOAD.interval_ms
        world.beat()
        ids = tuple(f"move-{look}-{number}" for number in range(16))
        gc.collect()
        gc.freeze()
        began = time.process_time()
        pressure_readings(world.ledger, world.now)
        world.handle(OffloadPressureRead(readings, rules, OFFLOAD, ids))
        slowest = max(slowest, time.process_time() - began)
        gc.unfreeze()
    return 100_000 * slowest / OFFLOAD.interval_ms


def _relief(mode: str, policy: str) -> float:
    """Seconds from the moment a node is short of memory until it is below its threshold again."""
    world, rules = World(4, cores=16, memory_gb=32), _rules(mode, policy)
    pressed = world.names[0]
    for number in range(3):
        world.run_job(f"j{number}", pressed, Amounts(cpu_milli=1000, memory_bytes=4 * GB), marks=True)
    owner = round(0.9 * 32 * GB) - 12 * GB
    began, due = world.now, dict[str, int]()
    while world.now - began < GIVES_UP_MS:
        world.beat()
        held = sum(lease.claim.memory_bytes for lease in world.ledger.leases_of(pressed) if lease.job and lease.claim)
        level = 1000 * (owner + held) // (32 * GB)
        if level <= OFFLOAD.memory_high and not world.ledger.moves:
            return (world.now - began) / 1000
        readings = tuple(
            PressureReading(
                node=name, score=level // 2 if name == pressed else 50, memory=level if name == pressed else 100, cpu=0
            )
            for name in world.names
        )
        passed = world.now - began
        if passed % ROUND_MS == ROUND_MS // 2:
            world.handle(PressureRead(readings, rules))
        if passed % OFFLOAD.interval_ms == TICK_MS:
            world.handle(OffloadPressureRead(readings, rules, OFFLOAD, (f"move-{passed}",)))
        for move in list(world.ledger.moves.values()):
            due.setdefault(move.job, world.now + RESTART_MS)
            if world.now >= due[move.job]:
                world.end(move.job)
                world.start(move.job)
        world.now += TICK_MS
        world.handle(TimePassed())
    return float("inf")


if __name__ == "__main__":
    from bench.table import render

    print(render(measure()))
