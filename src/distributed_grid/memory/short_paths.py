"""Names for sockets that fit the kernel's 108 bytes, however deep their folder is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

LONGEST = 100


@contextlib.contextmanager
def short_path(path: str | Path) -> Iterator[str]:
    """A name for this path that a socket can be bound or connected to, while it is used."""
    if len(os.fsencode(path)) < LONGEST:
        yield str(path)
        return
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)
