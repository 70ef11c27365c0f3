"""What the directories say of attempts: those whose end is not acknowledged, and how any of them has ended.

What a dead shim left behind: whether its command may have run, and the end of all that still does.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import msgspec

from distributed_grid.agent.execution.attempt import AttemptExit, AttemptSpec, RunningAttempt, ended_from
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.limits.cgroups import Cgroup
from distributed_grid.posix.boot_clock import boot_id


def left_behind(root: str) -> list[RunningAttempt]:
    """The attempts whose end nobody has acknowledged, oldest first, each as it was ordered."""
    found = []
    for live in tuple(Path(root, job_dir.LIVE).iterdir()):
        try:
            with JobDir(root, live.name) as job:
                spec = job.read(job_dir.SPEC)
        except (FileNotFoundError, NotADirectoryError):
            spec = None
        if spec is None:  # the last agent died before it had written what to run
            live.unlink(missing_ok=True)
        else:
            found.append((spec["launched_boot_ms"], live.name, msgspec.convert(spec, AttemptSpec)))
    found.sort(key=lambda item: item[:2])
    return [RunningAttempt(spec, spec.fence, launched) for launched, _, spec in found]


def recall(attempt: RunningAttempt, job: JobDir) -> None:
    """Remember what happened to it after the order: a newer fence, other cores, that it was to be stopped."""
    attempt.fence = max(attempt.fence, job.read(job_dir.FENCE) or 0)
    attempt.cores = tuple(job.read(job_dir.CORES) or job.read(job_dir.SPEC).get("cores") or ())
    attempt.stopping = job.has(job_dir.STOP)
    attempt.recorded = True


def how_it_ended(root: str, attempt_id: str) -> AttemptExit | None:
    """The recorded end of an attempt; None where there is none, or nothing of it."""
    try:
        with JobDir(root, attempt_id) as job:
            spec, record = job.read(job_dir.SPEC), job.read_end()
            fence = job.read(job_dir.FENCE) or 0
    except (FileNotFoundError, NotADirectoryError):
        return None
    return ended_from(attempt_id, max(fence, spec["fence"]), record) if spec and record else None


CLEAR_LOOKS = 4


def was_begun(job: JobDir) -> bool:
    """Whether a command may have run: a shim first of all writes who it is, and only a power failure undoes it."""
    if job.read(job_dir.LOCK) is not None:
        return True
    return job.has(job_dir.LOCK) and job.read(job_dir.SPEC)["boot"] != boot_id()


async def clear(job: JobDir) -> None:
    """End what a dead shim left behind, control groups included. Where nothing is left this does nothing."""
    shim, started = job.read(job_dir.LOCK), job.read(job_dir.STARTED) or {"pid": 0, "start": 0}
    groups = [Cgroup(version, path) for version, path in job.read(job_dir.GROUPS) or ()]
    if shim is None or shim["boot"] != boot_id():  # another boot: pids mean nothing, all is gone
        return
    beyond: set[process_tree.Proc] = set()
    clear_looks = 0
    while clear_looks < CLEAR_LOOKS:  # one look may miss a tree that forks and exits without end
        work = f"{job.path}/{job_dir.WORK}"
        left = set(process_tree.marked(job.attempt_id, work, started["pid"], started["start"]))
        grouped = [proc for group in groups for proc in map(process_tree.look, group.members()) if proc]
        left.update(proc for proc in grouped if not process_tree.is_exempt(proc))
        left -= beyond
        clear_looks = 0 if left else clear_looks + 1
        beyond.update(process_tree.send_all(left, signal.SIGKILL))
        await asyncio.sleep(0.005)
    for group in groups:
        for pid in group.members():
            group.release(pid)
        group.remove()
