"""Small real file systems to break things on; given back after the test."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Mount = Callable[..., None]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Run `mount` with these arguments, the place last; unmounted in reverse order."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    places: list[str] = []

    def run(*arguments: str) -> None:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"may not mount here: {done.stderr.strip()}")
        if "remount" not in " ".join(arguments):
            places.append(arguments[-1])

    yield run
    for place in reversed(places):
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def small_disk(mount: Mount, tmp_path: Path) -> Path:
    """A directory on a disk of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount("-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(place))
    return place
