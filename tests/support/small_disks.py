"""Small disks that a test fills up and frees again: real file systems, mounted over a folder of the test's own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.shell import wait_until

SMALL_BYTES = 8 << 20


class SmallDisk:
    """A tmpfs over a folder, which hides the folder's content while it lasts."""

    def __init__(self, place: Path, size_bytes: int = SMALL_BYTES) -> None:
        self.place = place
        place.mkdir(mode=0o700, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(place)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            reason = f"{' '.join(words)}: {done.stderr.strip()}"
            pytest.skip(reason)

    def fill(self) -> None:
        """Not a byte fits any more."""
        with open(self.place / "ballast", "ab", buffering=0) as ballast:
            for size in (1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        ballast.write(bytes(size))
        assert os.statvfs(self.place).f_bavail == 0

    def allow_no_more_files(self) -> None:
        """No file can be made any more, though there is room for bytes."""
        found = os.statvfs(self.place)
        limit = f"remount,nr_inodes={found.f_files - found.f_ffree}"
        subprocess.run(["mount", "-o", limit, str(self.place)], check=True, capture_output=True)

    def free(self) -> None:
        """There is room again. Safe twice."""
        (self.place / "ballast").unlink(missing_ok=True)

    def unmount(self) -> None:
        wait_until(lambda: subprocess.run(["umount", str(self.place)], capture_output=True).returncode == 0)


@pytest.fixture
def small_disk() -> Iterator[Callable[..., SmallDisk]]:
    """Mounts small disks; they go with the test."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    made: list[SmallDisk] = []

    def make(place: Path, size_bytes: int = SMALL_BYTES) -> SmallDisk:
        made.append(SmallDisk(place, size_bytes))
        return made[-1]

    yield make
    for disk in reversed(made):
        disk.free()
        disk.unmount()
