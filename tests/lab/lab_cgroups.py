"""The control groups of a host: its limits and its usage counters (version 1 hierarchies)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WANTED = frozenset(("cpu", "cpuacct", "memory"))
PERIOD_US = 100_000


@dataclass(frozen=True)
class Hierarchy:
    """A mounted hierarchy with controllers we want, and the group in it that this process is in."""

    controllers: str
    """As the kernel writes them, such as `cpu,cpuacct`."""
    own: Path


def hierarchies() -> list[Hierarchy]:
    """Those that have our controllers; empty where the machine has none of version 1."""
    mounted: dict[frozenset[str], tuple[str, str]] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        controllers = WANTED & set(options.split(","))
        if kind == "cgroup" and controllers:
            root, place = before.split()[3:5]
            mounted.setdefault(frozenset(controllers), (root, place))
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        root, place = mounted.get(frozenset(WANTED & set(names.split(","))), ("", ""))
        if place:
            found.append(Hierarchy(names, Path(place) / path.removeprefix(root).strip("/")))
    return found


class Groups:
    """One host's group in every hierarchy, below the group of whoever makes the lab: its limits hold as well."""

    def __init__(self, name: str) -> None:
        self._hierarchies = hierarchies()
        self.paths = {hierarchy.controllers: hierarchy.own / name for hierarchy in self._hierarchies}

    def path_of(self, controller: str) -> Path:
        """The host's group for a controller, as the test sees it."""
        return next(path for names, path in self.paths.items() if controller in names.split(","))

    def make(self, *, cores: float, memory_bytes: int) -> None:
        """Make them, with their limits."""
        for path in self.paths.values():
            path.mkdir(exist_ok=True)  # an empty one that its last lab could not remove in time is as good
        cpu, memory = self.path_of("cpu"), self.path_of("memory")
        (cpu / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (cpu / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD_US)))
        (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))

    @property
    def doors(self) -> list[str]:
        """The files through which a process enters."""
        return [str(path / "cgroup.procs") for path in self.paths.values()]

    def cpu_seconds(self) -> float:
        """CPU time used by the host's processes."""
        return int((self.path_of("cpuacct") / "cpuacct.usage").read_text()) / 1e9
