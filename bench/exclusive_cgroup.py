"""A control group of its own for a measurement, so that other work on the machine neither disturbs it nor shows."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

PERIOD_US = 100_000
MAX_SHARES = 262_144
EXIT_SECONDS = 10.0


@contextlib.contextmanager
def exclusive_cgroup(cores: int, memory_bytes: int = 0) -> Iterator[bool]:
    """Be alone on so many cores, as far as a probe can see and the scheduler can arrange; with `memory_bytes`, see only
    what this process and its children hold of so much memory, too.

    Needs control groups of version 1 and the right to make some; False where that is not to be had. Whatever is
    started inside must have ended before the group is left.
    """
    before = _own_groups({"cpu", "cpuacct"} | ({"memory"} if memory_bytes else set()))
    groups = {name: path / f"grid-bench-{os.getpid()}" for name, path in before.items()}
    made: list[Path] = []
    try:
        try:
            if len(groups) < (3 if memory_bytes else 2):
                raise FileNotFoundError("no control groups of version 1")
            for group in dict.fromkeys(groups.values()):
                group.mkdir()
                made.append(group)
            (groups["cpu"] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (groups["cpu"] / "cpu.cfs_quota_us").write_text(str(cores * PERIOD_US))
            (groups["cpu"] / "cpu.shares").write_text(str(MAX_SHARES))
            if memory_bytes:
                (groups["memory"] / "memory.limit_in_bytes").write_text(str(memory_bytes))
            for group in made:
                (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            yield False
        else:
            yield True
    finally:
        for path in dict.fromkeys(before.values()) if made else ():
            (path / "cgroup.procs").write_text(str(os.getpid()))
        for group in made:
            _remove(group)


def _remove(group: Path) -> None:
    """Remove a group; one whose last process is just exiting cannot be removed yet."""
    deadline = time.monotonic() + EXIT_SECONDS
    while True:
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _own_groups(controllers: set[str]) -> dict[str, Path]:
    """Where this process is in the hierarchies of these controllers."""
    places: dict[str, tuple[str, str]] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup":
            places.update((name, tuple(before.split()[3:5])) for name in options.split(","))
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in controllers & set(names.split(",")) & set(places):
            root, place = places[name]
            found[name] = Path(place) / path.removeprefix(root).strip("/")
    return found
