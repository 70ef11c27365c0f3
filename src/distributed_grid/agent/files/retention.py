"""Clearing away: the directories of attempts that ended long ago, so that logs do not fill the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from distributed_grid.agent.files.job_dir import EXIT, LIVE, is_safe_name

KEEP_SECONDS = 30 * 86_400.0


def sweep(root: Path, *, now: float, keep_seconds: float = KEEP_SECONDS) -> int:
    """Remove what ended longer ago than it is kept, and nothing that is alive or not acknowledged; how many."""
    removed = 0
    for folder in list(root.iterdir()) if root.is_dir() else []:
        if not is_safe_name(folder.name) or (root / LIVE / folder.name).exists():
            continue
        try:
            ended = (folder / EXIT).stat().st_mtime
        except OSError:
            continue
        if now - ended > keep_seconds:
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
    return removed
