"""Cost of the disk guard: the part of a core that it takes while it counts a tree of many files, and the time of a
pass."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

from bench.sizes import sized
from bench.table import Line
from distributed_grid.agent.execution.attempt import AttemptSpec
from distributed_grid.agent.execution.cpu_control import RunningTree
from distributed_grid.agent.execution.disk_guard import DiskGuard, TreeSize
from distributed_grid.agent.limits import process_tree
from distributed_grid.domain.jobs import Ending

FOLDERS, FILES = sized((400, 500), smoke=(2, 5))
SECONDS = sized(30.0, smoke=0.2)
STEP = 200


class OneAttempt:
    """A host on which one attempt runs, whose files are below `root`."""

    def __init__(self, root: str) -> None:
        self.root = root

    def running_trees(self) -> list[RunningTree]:
        shim = process_tree.read_process(os.getpid())
        assert shim is not None
        spec = AttemptSpec("a", "job", "here", 1, ("true",), max_files_bytes=1 << 60)
        return [RunningTree(spec, 1, shim, False, 0, process_tree.GridProcesses((), list).besides(0))]

    async def stop_attempt(
        self,
        attempt_id: str,
        *,
        ending: Ending,
        detail: str = "",
        grace_ms: int | None = None,
        is_disk_overrun: bool = False,
    ) -> None:
        raise AssertionError(f"{attempt_id} is stopped: {detail}")


class NoPauses:
    """Nothing is paused."""

    def pause_for_node(self, attempt_id: str, fence: int, why: str) -> None:
        raise AssertionError(f"{attempt_id} is paused: {why}")

    def resume(self, attempt_id: str) -> None: ...


def measure() -> list[Line]:
    """CPU of the guard while it counts, and the CPU time of one pass for each file."""
    with tempfile.TemporaryDirectory(prefix="grid-bench-disk-") as root:
        for folder in range(FOLDERS):
            path = Path(root, "a", str(folder))
            path.mkdir(parents=True)
            for file in range(FILES):
                path.joinpath(str(file)).touch()
        tree = TreeSize(f"{root}/a")
        began = time.process_time()
        while not tree.count(STEP):
            pass
        per_file = (time.process_time() - began) / (FOLDERS * (FILES + 1))
        began, cpu = time.perf_counter(), time.process_time()
        asyncio.run(_watch(root))
        part = (time.process_time() - cpu) / (time.perf_counter() - began)
    name = f"{FOLDERS * FILES:,} files" if FOLDERS * FILES > 100 else "some files"
    return [
        Line(f"disk guard while it counts {name}, of a core", 100 * part, 6, "%", lower_is_better=True),
        Line("disk guard, CPU for each file of a pass", 1e6 * per_file, 20, "µs", lower_is_better=True),
    ]


async def _watch(root: str) -> None:
    guard = DiskGuard(OneAttempt(root), NoPauses())

    async def sleep_ms(ms: int) -> None:
        await asyncio.sleep(ms / 1000)

    watching = asyncio.create_task(guard.watch(sleep_ms))
    await asyncio.wait((watching,), timeout=SECONDS)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
