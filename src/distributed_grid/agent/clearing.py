"""What a dead shim left behind: whether its command may have run, and the end of all that still does."""

from __future__ import annotations

import asyncio
import signal

from distributed_grid.agent import jobdir, tree
from distributed_grid.agent.jobdir import JobDir
from distributed_grid.agent.limits.cgroups import Group

CLEAR_LOOKS = 4


def was_begun(job: JobDir) -> bool:
    """Whether a command may have run: a shim first of all writes who it is, and only a power failure undoes it."""
    if job.read(jobdir.LOCK) is not None:
        return True
    return job.has(jobdir.LOCK) and job.read(jobdir.SPEC)["boot"] != tree.boot_id()


async def clear(job: JobDir) -> None:
    """End what a dead shim left behind, control groups included. Where nothing is left this does nothing."""
    shim, started = job.read(jobdir.LOCK), job.read(jobdir.STARTED) or {"pid": 0, "start": 0}
    groups = [Group(version, path) for version, path in job.read(jobdir.GROUPS) or ()]
    if shim is None or shim["boot"] != tree.boot_id():  # another boot: pids mean nothing, all is gone
        return
    beyond: set[tree.Proc] = set()
    clear_looks = 0
    while clear_looks < CLEAR_LOOKS:  # one look may miss a tree that forks and exits without end
        work = f"{job.path}/{jobdir.WORK}"
        left = set(tree.marked(job.attempt_id, work, started["pid"], started["start"]))
        grouped = [proc for group in groups for proc in map(tree.look, group.members()) if proc]
        left.update(proc for proc in grouped if not tree.is_exempt(proc))
        left -= beyond
        clear_looks = 0 if left else clear_looks + 1
        beyond.update(tree.send_all(left, signal.SIGKILL))
        await asyncio.sleep(0.005)
    for group in groups:
        for pid in group.members():
            group.release(pid)
        group.remove()
