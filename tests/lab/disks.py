"""The disk under the homes of a host: small, its own, and full on demand."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ATTEMPTS = 20


class Disk:
    """A tmpfs of a certain size, outside of the host, so that it outlives its restarts."""

    def __init__(self, place: Path, size_bytes: int) -> None:
        self._place = place
        self._size_bytes = size_bytes
        self._full = False

    def make(self) -> None:
        """Mount it; it goes with its lab."""
        mount_tmpfs(self._place, self._size_bytes, "0755")

    def fill(self, leave_bytes: int = 0) -> None:
        """Shrink it to what is on it: the next byte does not fit. Costs no memory, as ballast would."""
        self._full = True
        for _ in range(ATTEMPTS):
            disk = os.statvfs(self._place)
            used = disk.f_blocks - disk.f_bfree + -(-leave_bytes // disk.f_frsize)
            if self._resize(f"nr_blocks={max(1, used)}"):  # 0 would mean: no limit
                return
        raise RuntimeError(f"{self._place} was written to faster than it could be filled")

    def free(self) -> None:
        """It has its size again; one that was not filled may be freed."""
        if self._full and not self._resize(f"size={self._size_bytes}"):
            raise RuntimeError(f"{self._place} could not be given its size back")
        self._full = False

    def _resize(self, option: str) -> bool:
        words = ["mount", "-o", f"remount,{option}", str(self._place)]
        return subprocess.run(words, check=False, capture_output=True).returncode == 0


def mount_tmpfs(place: Path, size_bytes: int, mode: str) -> None:
    """An empty file system of this size."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode={mode}", "gridlab", str(place)]
    subprocess.run(words, check=True, capture_output=True)
