"""The notice that a job gets before it is stopped: a file that says why and when, at $GRID_NOTICE."""

from __future__ import annotations

import logging
import time

from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir

log = logging.getLogger(__name__)


def give(root: str, attempt_id: str, why: str, in_ms: int) -> int:
    """Warn an attempt that it will be stopped; how many milliseconds it has. Who was warned before has no longer."""
    now = time.time()
    try:
        with JobDir(root, attempt_id) as job:
            before = job.read(job_dir.NOTICE)
            if isinstance(before, dict) and isinstance(before.get("deadline"), float):
                in_ms = min(in_ms, max(round(1000 * (before["deadline"] - now)), 0))
            job.write(job_dir.NOTICE, {"reason": why, "deadline": round(now + in_ms / 1000, 3)})
    except OSError as error:  # a full disk: it learns of it by SIGTERM
        log.warning("%s could not be warned: %s", attempt_id, error.strerror)
    return in_ms


def take_back(root: str, attempt_id: str) -> None:
    """It may go on after all. Safe twice."""
    try:
        with JobDir(root, attempt_id) as job:
            job.remove(job_dir.NOTICE)
    except FileNotFoundError:
        pass
