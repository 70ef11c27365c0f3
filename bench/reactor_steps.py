"""Reactor steps, decide and apply alone: grant and release pairs a second, over growing numbers of nodes."""

from __future__ import annotations

import time

from bench.sizes import sized
from bench.table import Line
from distributed_grid.domain.events import HeartbeatReceived, LeaseAsked, LeaseReleased
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.reactor import LeaseAnswer, step

PAIRS = sized(5_000, smoke=20)
SMALLEST, MIDDLE, LARGEST = sized((100, 1_000, 10_000), smoke=(10, 20, 40))
HELD = sized(50, smoke=5)
BARS = {SMALLEST: 8_000.0, MIDDLE: 4_000.0}


def measure() -> list[Line]:
    """A line for each size with a bar, and how the cost of a pair grows from 100 to 10,000 nodes."""
    rates = {size: max(_pairs_per_second(size) for _ in range(3)) for size in (SMALLEST, MIDDLE, LARGEST)}
    lines = [Line(f"grant+release pairs, {size:,} nodes", rates[size], bar, "/s") for size, bar in BARS.items()]
    growth = rates[SMALLEST] / rates[LARGEST]
    return [*lines, Line("cost of a pair, 10,000 nodes over 100 nodes", growth, 10, "×", lower_is_better=True)]


def _pairs_per_second(nodes: int) -> float:
    ledger = Ledger(Node(name=f"n{i}", capacity=Capacity(16_000, 2**36)) for i in range(nodes))
    for i in range(nodes):
        step(ledger, HeartbeatReceived(name=f"n{i}", usage=Usage()), 0)
    held: list[str] = []
    began = time.perf_counter()
    for i in range(PAIRS):
        answer = step(ledger, LeaseAsked(Request(id=f"r{i}", user="u", ask=Amounts(1000, 2**30))), i).answer
        assert isinstance(answer, LeaseAnswer)
        held.append(answer.lease.id)
        if len(held) > HELD:
            step(ledger, LeaseReleased(held.pop(0), "u"), i)
    return PAIRS / (time.perf_counter() - began)
