"""A CPU control group of its own for a measurement, so that other work on the machine does not disturb it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PERIOD_US = 100_000
MAX_SHARES = 262_144


@contextlib.contextmanager
def exclusive_cpu_cgroup(cores: int) -> Iterator[bool]:
    """Be alone on so many cores, as far as a probe can see and the scheduler can arrange.

    Needs control groups of version 1 and the right to make some; False where that is not to be had. Whatever is
    started inside must have ended before the group is left.
    """
    before = _own_groups()
    groups = {name: path / f"grid-bench-{os.getpid()}" for name, path in before.items()}
    made: list[Path] = []
    try:
        try:
            if len(groups) < 2:
                raise FileNotFoundError("no control groups of version 1")
            for group in dict.fromkeys(groups.values()):
                group.mkdir()
                made.append(group)
            (groups["cpu"] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (groups["cpu"] / "cpu.cfs_quota_us").write_text(str(cores * PERIOD_US))
            (groups["cpu"] / "cpu.shares").write_text(str(MAX_SHARES))
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
            group.rmdir()


def _own_groups() -> dict[str, Path]:
    """Where this process is in the hierarchies of cpu and cpuacct."""
    places: dict[str, tuple[str, str]] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup":
            places.update((name, tuple(before.split()[3:5])) for name in options.split(","))
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in {"cpu", "cpuacct"} & set(names.split(",")) & set(places):
            root, place = places[name]
            found[name] = Path(place) / path.removeprefix(root).strip("/")
    return found
