"""Advisory locks (`flock`) that are tried, never waited for."""

from __future__ import annotations

import fcntl


def try_lock(fd: int, *, exclusive: bool = True) -> bool:
    """Lock the open file without waiting; False when somebody else has it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
