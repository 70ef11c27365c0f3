"""What the directories say of attempts: those whose end is not acknowledged, and how any of them has ended."""

from __future__ import annotations

from pathlib import Path

import msgspec

from distributed_grid.agent import jobdir
from distributed_grid.agent.jobdir import JobDir
from distributed_grid.agent.reports import AttemptEnded, AttemptSpec, ended_from
from distributed_grid.agent.running import RunningAttempt


def left_behind(root: str) -> list[RunningAttempt]:
    """The attempts whose end nobody has acknowledged, oldest first, each as it was ordered."""
    found = []
    for live in tuple(Path(root, jobdir.LIVE).iterdir()):
        try:
            with JobDir(root, live.name) as job:
                spec = job.read(jobdir.SPEC)
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
    attempt.fence = max(attempt.fence, job.read(jobdir.FENCE) or 0)
    attempt.cores = tuple(job.read(jobdir.CORES) or job.read(jobdir.SPEC).get("cores") or ())
    attempt.halting = job.has(jobdir.HALT)
    attempt.recorded = True


def how_it_ended(root: str, attempt_id: str) -> AttemptEnded | None:
    """The recorded end of an attempt; None where there is none, or nothing of it."""
    try:
        with JobDir(root, attempt_id) as job:
            spec, record = job.read(jobdir.SPEC), job.read_end()
            fence = job.read(jobdir.FENCE) or 0
    except (FileNotFoundError, NotADirectoryError):
        return None
    return ended_from(attempt_id, max(fence, spec["fence"]), record) if spec and record else None
