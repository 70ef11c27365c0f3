"""Whether an agent has left anything to stop in its directory, told without loading the agent: most have left nothing.

Imports little: it is asked on every node that is stopped.
"""

from __future__ import annotations

import os

from distributed_grid.agent.files.job_dir import HOST_LOCK, LIVE
from distributed_grid.posix.private_files import try_lock


def has_leftovers(directory: str) -> bool:
    """Whether an attempt, a memory server or an agent may be left in a directory; also where that cannot be told."""
    folder = os.path.abspath(os.path.expanduser(directory))
    try:
        if os.stat(folder).st_uid != os.geteuid() or os.listdir(f"{folder}/jobs/{LIVE}"):
            return True
        if os.path.lexists(f"{folder}/memory/server.lock"):
            return True
        return any(map(_is_locked, (f"{folder}/agent.lock", f"{folder}/jobs/{HOST_LOCK}")))
    except OSError:
        return True


def _is_locked(path: str) -> bool:
    """Whether some process has a file locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)
