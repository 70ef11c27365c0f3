"""Scan of a node with 500 processes: how long the agent looks, what that costs, and how long proposals take."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time

from bench.sizes import sized
from bench.table import Line
from distributed_grid.agent.offloading.process_inventory import ProcessInventory, pages_of
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.rebalancing import (
    SHARING_POLICIES,
    PressureReading,
    RebalanceRules,
    SharingMode,
    Watermarks,
)
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.states import NodeState
from distributed_grid.scheduling.offloading.proposals import propose
from distributed_grid.scheduling.pressure.scan import PressureScan, scan_pressure

SLEEPERS, INTERPRETERS = sized((440, 60), smoke=(5, 2))
LOOKS = sized(15, smoke=2)
PAUSE_SECONDS, SETTLE_SECONDS = sized((0.6, 2.0), smoke=(0.05, 0.1))
# Their parent ends at once, so each is a piece of work of its own; the interpreters have many files mapped.
START = """
i=0; while [ $i -lt "$1" ]; do sleep 1000 & i=$((i + 1)); done
i=0; while [ $i -lt "$2" ]; do "$3" -I -c 'import asyncio, json, time; time.sleep(1000)' & i=$((i + 1)); done
"""


def measure() -> list[Line]:
    """Wall time and CPU of a look, its cost for each process, and the time for proposals about all of them."""
    arguments = ["sh", "-c", START, "sh", str(SLEEPERS), str(INTERPRETERS), sys.executable]
    null = subprocess.DEVNULL
    shell = subprocess.Popen(arguments, start_new_session=True, cwd="/var/tmp", stdin=null, stdout=null, stderr=null)
    shell.wait()
    try:
        inventory = ProcessInventory()
        while len(inventory.scan()) < SLEEPERS + INTERPRETERS:
            time.sleep(0.2)
        time.sleep(SETTLE_SECONDS)  # the interpreters import what they do
        walls, cpus = [], []
        for _ in range(LOOKS):
            time.sleep(PAUSE_SECONDS)
            began, cpu = time.perf_counter(), time.process_time()
            found = inventory.scan()
            pages = list(pages_of(found))
            walls.append(time.perf_counter() - began)
            cpus.append(time.process_time() - cpu)
        scan = _scan()
        began = time.perf_counter()
        proposals = propose(scan, "here", found, {})
        proposing = time.perf_counter() - began
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
    cpu = statistics.median(cpus)
    assert len(proposals) == len(found) == sum(map(len, pages))
    return [
        Line(f"scan of {len(found)} processes, fastest of {LOOKS}", 1000 * min(walls), 300, "ms", lower_is_better=True),
        Line("median of them", 1000 * statistics.median(walls), 0, "ms", lower_is_better=True),
        Line("CPU time, median", 1000 * cpu, 0, "ms", lower_is_better=True),
        Line("CPU time for each process", 1e6 * cpu / len(found), 0, "µs", lower_is_better=True),
        Line("proposals about all of them", 1000 * proposing, 0, "ms", lower_is_better=True),
    ]


def _scan() -> PressureScan:
    """A pressed node, and two others with room."""
    names = ("here", "gpu1", "gpu2")
    nodes = [Node(name=name, state=NodeState.ALIVE, capacity=Capacity(16_000, 64 << 30), host=name) for name in names]
    marks = Watermarks(800, 300)
    rules = RebalanceRules(
        mode=SharingMode.DYNAMIC_BALANCING,
        policy=SHARING_POLICIES["balanced"],
        interval_ms=30_000,
        memory=marks,
        cpu=marks,
        gpu=marks,
        excess_milli=200,
    )
    levels = {"here": 900, "gpu1": 100, "gpu2": 100}
    readings = [PressureReading(node=name, score=level, memory=level, cpu=level) for name, level in levels.items()]
    return scan_pressure(Ledger(nodes), readings, rules, 1_000_000)
