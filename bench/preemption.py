"""Cost of a preemption search, over growing numbers of nodes that are all full.

Every node has 64 cores, 256 GB and no room; jobs of three priorities hold it, some have marked checkpoints. Three kinds
of nodes: `sized` with the sizes that people ask for (powers of two), `odd` with sizes of any number, `gpus` with eight
GPUs in whole and in parts. What is measured is CPU time, and the fastest of three, as other work may run here; how
long the same try took by the clock stands beside it. The lines are about the slowest request of all kinds, where there
is a bar on several grids.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator

from bench.sizes import sized
from bench.table import Line
from distributed_grid.domain.jobs import Attempt, Command, Job
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, NodeObservation, Offer, Usage
from distributed_grid.domain.resources import Amounts, Capacity, Claim, GpuDevice, GpuShare, Priority
from distributed_grid.domain.rows import Counter, Row
from distributed_grid.domain.states import JobState, LeaseState, NodeState
from distributed_grid.scheduling.placement.placement import find_placement
from distributed_grid.scheduling.preemption.preemption import plan_preemption

GB = 2**30
NOW = 10**9
BARS = sized({100: 10.0, 500: 50.0, 1_000: 150.0}, smoke={20: 10.0})
SIZES = sized((10, 100, 500, 1_000, 10_000), smoke=(10, 20))
KINDS = ("sized", "odd", "gpus")
ASKED = sized(30, smoke=2)
GRIDS = sized(3, smoke=1)
"""So many grids of each kind, where there is a bar."""


def measure() -> list[Line]:
    """A line for each size with a bar; the whole curve on stderr."""
    print("milliseconds a decision: median and slowest", file=sys.stderr)
    print(f"{'nodes':>7} {'kind':>6} {'leases':>8} {'median':>8} {'slowest':>8} {'clock':>8}  victims", file=sys.stderr)
    slowest = {
        size: max(_decide(size, kind, seed) for kind in KINDS for seed in range(GRIDS if size in BARS else 1))
        for size in SIZES
    }
    return [
        Line(
            f"a preemption decision, {size:,} full nodes, slowest of {GRIDS * ASKED * len(KINDS)}",
            slowest[size],
            bar,
            "ms",
            True,
        )
        for size, bar in BARS.items()
    ]


def _decide(size: int, kind: str, seed: int) -> float:
    """The slowest of many decisions, in milliseconds."""
    ledger = Ledger(full_grid(size, kind, seed))
    draw = random.Random(f"{kind} requests {seed}")
    plan_preemption(ledger, Request(id="first", user="ada", ask=Amounts(1000), priority=Priority.URGENT), NOW)
    times, victims = [], []
    for number in range(ASKED):
        request = Request(id=f"vip{number}", user="ada", ask=an_ask(draw, kind), priority=Priority.URGENT)
        assert find_placement(ledger, request) is None, "it would not have to displace anybody"
        tries = []
        for _ in range(3):
            began, clock = time.thread_time(), time.perf_counter()
            way = plan_preemption(ledger, request, NOW)
            tries.append((1000 * (time.thread_time() - began), 1000 * (time.perf_counter() - clock)))
        times.append(min(tries))
        victims.append(len(way.victims) if way is not None else 0)
    span = f"{min(victims)} to {max(victims)}"
    middle = statistics.median(cpu for cpu, _ in times)
    slowest, clock = max(times)
    leases = f"{len(ledger.leases):>8,}"
    print(f"{size:>7,} {kind:>6} {leases} {middle:>8.2f} {slowest:>8.2f} {clock:>8.2f}  {span}", file=sys.stderr)
    return slowest


def an_ask(draw: random.Random, kind: str) -> Amounts:
    """Kinds of urgent requests."""
    if kind == "gpus":
        return Amounts(draw.choice([2, 4, 8]) * 1000, 8 * GB, draw.choice([300, 500, 1000, 2000, 4000, 8000]))
    return Amounts(draw.randint(1, 60) * 1000, draw.randint(1, 200) * GB)


def full_grid(size: int, kind: str, seed: int = 0) -> Iterator[Row]:
    """The rows of a grid in full use."""
    draw = random.Random(f"{kind} {size} {seed}")
    gpus = tuple(GpuDevice(index, 24 * GB) for index in range(8)) if kind == "gpus" else ()
    has = Capacity(64_000, 256 * GB, gpus)
    fence = 0
    for number in range(size):
        name = f"n{number}"
        yield Node(name=name, state=NodeState.ALIVE, capacity=has)
        yield Offer(node=name, generation=1, lends=has, made_at_ms=NOW, expires_at_ms=NOW + 10**6)
        yield NodeObservation(node=name, at_ms=NOW, usage=Usage())
        for claim in _claims(draw, kind):
            fence += 1
            yield from _running(draw, name, claim, fence)
    yield Counter("fence", fence)


def _claims(draw: random.Random, kind: str) -> Iterator[Claim]:
    """What jobs hold of one node until it is full."""
    cores, memory, parts = 64_000, 256 * GB, [1000] * 8
    while cores > 0:
        if kind == "gpus":
            gpus = _devices(draw, parts)
            if gpus is None:
                return
            yield Claim(2_000, 4 * GB, gpus)
            continue
        size = draw.choice([500, 1000, 2000, 4000, 8000]) if kind == "sized" else draw.randint(300, 5_000)
        takes = size * draw.choice([1, 2, 4, 8]) * GB // 1000 if kind == "sized" else draw.randint(1, 12 * 1024) * 2**20
        claim = Claim(min(size, cores), min(takes, memory))
        cores, memory = cores - claim.cpu_milli, memory - claim.memory_bytes
        yield claim


def _devices(draw: random.Random, parts: list[int]) -> tuple[GpuShare, ...] | None:
    """The next job's GPUs, whole ones or a part of one; None when there is nothing left."""
    asked = draw.choice([250, 500, 1000, 1000, 2000])
    while asked and sum(left >= min(asked, 1000) for left in parts) < max(asked // 1000, 1):
        asked = asked // 2 if asked > 250 else 0
    if not asked:
        return None
    milli = min(asked, 1000)
    chosen = [index for index, left in enumerate(parts) if left >= milli][: max(asked // 1000, 1)]
    for index in chosen:
        parts[index] -= milli
    return tuple(GpuShare(index, milli, 24 * GB * milli // 1000) for index in chosen)


def _running(draw: random.Random, node: str, claim: Claim, fence: int) -> Iterator[Row]:
    """A job that has run for up to three hours; half of them mark checkpoints."""
    uid, start = f"j{fence}", NOW - draw.randint(10_000, 10_000_000)
    priority = Priority(draw.choices([0, 1, 2], [5, 3, 2])[0])
    ask = Amounts(claim.cpu_milli, claim.memory_bytes, sum(share.milli for share in claim.gpus))
    request = Request(id=uid, user=f"u{fence % 7}", ask=ask, priority=priority)
    yield Lease(
        id=f"{uid}.1",
        request=request,
        asked_at_ms=start,
        state=LeaseState.ACTIVE,
        job=uid,
        node=node,
        claim=claim,
        fence=fence,
        granted_at_ms=start,
    )
    marked = draw.randint(start, NOW) if draw.random() < 0.5 else 0
    attempt = Attempt(
        number=1,
        lease_id=f"{uid}.1",
        node=node,
        fence=fence,
        assigned_at_ms=start,
        started_at_ms=start,
        pid=1,
        marked_at_ms=marked,
    )
    yield Job(
        uid=uid,
        id=uid,
        command=Command(("true",)),
        request=request,
        submitted_at_ms=start,
        state=JobState.RUNNING,
        attempts=(attempt,),
        retries_left=0,
        lease_id=f"{uid}.1",
    )
