"""Return of an owner: how fast the machine is theirs again, and what borrowed work still gets beside them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from bench.exclusive_cgroup import exclusive_cgroup
from bench.sizes import is_smoke, sized
from bench.table import Line
from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.agent import AsyncioTasks
from distributed_grid.agent.execution.attempt import AttemptSpec
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.owner.borrowed_work import HostedWork
from distributed_grid.agent.owner.guard import OwnerGuard
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.domain.jobs import Ending
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.wire import OwnerRules

RULES = OwnerRules(
    cpu_busy_max_milli=300,
    memory_used_max_milli=1000,
    memory_min_bytes=0,
    gpu_busy_max_milli=1000,
    gpu_memory_min_bytes=0,
    evict=False,
)
STEP_S = 0.05
WINDOW = 5  # steps over which the owner's share is judged
ENOUGH = 0.9
ROUNDS = sized(5, smoke=1)
HALF_BUSY_S = sized(10.0, smoke=0.2)
LENT_S, BUSY_S, WATCHED_S = sized((1.5, 2.0, 4.0), smoke=(0.1, 0.1, 0.5))
SPIN = "while True: pass"


def measure() -> list[Line]:
    """Seconds until the owner has 90 % of what it wants, at worst; and what is done beside a half-busy owner."""
    cgroup: AbstractContextManager[bool] = (
        nullcontext(True) if is_smoke() else exclusive_cgroup(len(os.sched_getaffinity(0)))
    )
    with cgroup as alone:
        if not alone:
            print("no control groups: whatever else runs here counts as the owner's", file=sys.stderr)
        return asyncio.run(_measure())


async def _measure() -> list[Line]:
    cores = len(os.sched_getaffinity(0))
    slowest = 0.0
    for number in range(ROUNDS):
        async with lent_machine(cores):
            await asyncio.sleep(LENT_S + 0.1 * number)
            slowest = max(slowest, await _handing_over(cores))
    async with lent_machine(cores) as host:
        await asyncio.sleep(LENT_S)
        with spinning(max(1, cores // 2)) as owner:
            await asyncio.sleep(BUSY_S)
            before, own_before, began = _ran_s(owner), _own_s(host), time.monotonic()
            await asyncio.sleep(HALF_BUSY_S)
            took = time.monotonic() - began
            owner_share = (_ran_s(owner) - before) / took / len(owner)
            left = cores - len(owner) * owner_share
            done = (_own_s(host) - own_before) / took / max(left, 0.01)
    return [
        Line("owner of a lent machine has 90 % of its CPU, slowest of 5", slowest, 1, "s", lower_is_better=True),
        Line("a half-busy owner's share of what it wants", 100 * owner_share, 90, "%"),
        Line("of what it leaves, used by borrowed work", 100 * done, 50, "%"),
    ]


async def _handing_over(cores: int) -> float:
    """Seconds from the start of the owner's work until it has 90 % of all cores and keeps it for a while."""
    with spinning(cores) as owner:
        began = time.monotonic()
        seen = [(began, _ran_s(owner))]
        while time.monotonic() - began < WATCHED_S:
            await asyncio.sleep(STEP_S)
            seen.append((time.monotonic(), _ran_s(owner)))
    for (then, ran), (now, later) in zip(seen, seen[WINDOW:], strict=False):
        if (later - ran) / (now - then) >= ENOUGH * cores:
            return then - began
    return float("inf")


@contextlib.asynccontextmanager
async def lent_machine(cores: int) -> AsyncIterator[AttemptHost]:
    """A machine on which one attempt keeps every core busy, with a guard over it."""
    folder = Path(tempfile.mkdtemp(prefix="grid-bench-"))
    host = AttemptHost(folder, report=lambda report: None)
    guard = OwnerGuard(HostedWork(host, UsageMeter(MachineProbe())), boot_ms, report_pause=lambda *report: None)
    guard.rules = RULES
    await host.start()
    watching = asyncio.create_task(guard.watch(AsyncioTasks().sleep))
    spin = f"import os\nfor _ in range({cores - 1}):\n    if os.fork() == 0: break\n{SPIN}"
    try:
        argv = (sys.executable, "-S", "-c", spin)
        await host.launch(AttemptSpec("bench.1", "bench", "here", 1, argv, cpu_milli=1000 * cores))
        yield host
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        guard.release()
        await host.stop_attempt("bench.1", ending=Ending.CANCELLED, grace_ms=0)
        while host.running():
            await asyncio.sleep(0.01)
        await host.stop()
        shutil.rmtree(folder)


@contextlib.contextmanager
def spinning(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of somebody else that want a core each."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", SPIN]) for _ in range(count)]
    try:
        yield running
    finally:
        for one in running:
            one.kill()
            one.wait()


def _ran_s(running: list[subprocess.Popen[bytes]]) -> float:
    found = (process_tree.read_process(one.pid) for one in running)
    return sum(proc.own_ticks for proc in found if proc is not None) * process_tree.TICK_MS / 1000


def _own_s(host: AttemptHost) -> float:
    return sum(one.cpu_ms for one in host.usage().values()) / 1000
