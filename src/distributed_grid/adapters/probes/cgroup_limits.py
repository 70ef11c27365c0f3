"""Control group limits of this process, v1 or v2, and what is used under them.

A limit anywhere up the hierarchy counts: the smallest one applies, and use is measured where it is set. What cannot be
read is no limit: a missing file is normal at the root and in containers.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from msgspec import Struct

from distributed_grid.adapters.probes import procfs

_UNLIMITED_BYTES = 1 << 60  # v1 says "no limit" with a number near 2**63


class CgroupLimit(Struct, frozen=True):
    """A limit, and the control group that sets it."""

    value: int
    group: Path


class _Mount(Struct, frozen=True):
    """Where a controller's hierarchy ("" is v2) is mounted, and which group of it is at the root of the mount."""

    controller: str
    path: Path
    top: PurePosixPath


class Cgroups:
    """The control groups of one process; `root` is where the file system begins, for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        # For each controller ("" is v2) the process's group and its visible ancestors.
        mounts = list(_mounts(root))
        groups: dict[str, list[Path]] = {}
        for line in _text(root / "proc/self/cgroup").splitlines():
            _, controllers, name = line.split(":", 2)
            path = PurePosixPath(name)
            for controller in controllers.split(","):
                mounted = [mount for mount in mounts if mount.controller == controller]
                fitting = [mount for mount in mounted if path.is_relative_to(mount.top)]
                if mounted:
                    groups[controller] = list(_upwards((fitting or mounted)[-1], path))
        self._groups = groups

    def cpu(self) -> CgroupLimit | None:
        """The tightest CPU quota, in thousandths of a core."""
        return self._tightest("cpu", _v2_quota, _v1_quota)

    def memory(self) -> CgroupLimit | None:
        """The tightest memory limit, in bytes."""
        return self._tightest("memory", _bytes_in("memory.max"), _bytes_in("memory.limit_in_bytes"))

    def swap_bytes(self) -> int | None:
        """How much swap may be used; None when nothing limits it."""
        limit = self._tightest("memory", _bytes_in("memory.swap.max"), _v1_swap)
        return limit.value if limit else None

    def cpu_used_ms(self, group: Path) -> int | None:
        """CPU time used so far in a group that `cpu` named, or None when it is not counted."""
        usec = _field(group / "cpu.stat", "usage_usec")
        if usec is not None:
            return usec // 1000
        nsec = _number(self._counter_of(group) / "cpuacct.usage")
        return None if nsec is None else nsec // 1_000_000

    def memory_used_bytes(self, group: Path) -> int | None:
        """Memory in use in a group that `memory` named, without file pages the kernel can drop at once."""
        for used, droppable in (
            ("memory.current", "inactive_file"),
            ("memory.usage_in_bytes", "total_inactive_file"),
        ):
            total = _number(group / used)
            if total is not None:
                return max(0, total - (_field(group / "memory.stat", droppable) or 0))
        return None

    def _counter_of(self, group: Path) -> Path:
        """The group of the cpuacct controller that matches one of the cpu controller, mounted together or not."""
        above = self._groups.get("cpu", [])
        beside = self._groups.get("cpuacct", [])
        if group not in above or not beside:
            return group
        namesake = beside[-1] / group.relative_to(above[-1])  # the last ones are where the hierarchies are mounted
        if namesake in beside:
            return namesake
        return beside[above.index(group)] if len(above) == len(beside) else group

    def _tightest(
        self, controller: str, read_v2: Callable[[Path], int | None], read_v1: Callable[[Path], int | None]
    ) -> CgroupLimit | None:
        read, groups = read_v1, self._groups.get(controller)
        if groups is None:
            read, groups = read_v2, self._groups.get("", [])
        limits = [CgroupLimit(value, group) for group in groups if (value := read(group)) is not None]
        return min(limits, key=lambda limit: limit.value, default=None)


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, *_, options = after.split(" ")
        if kind not in ("cgroup", "cgroup2"):
            continue
        top, path = (_unescape(field) for field in before.split(" ")[3:5])
        for controller in options.split(",") if kind == "cgroup" else [""]:
            yield _Mount(controller, root / path.lstrip("/"), PurePosixPath(top))


def _upwards(mount: _Mount, path: PurePosixPath) -> Iterator[Path]:
    """The group and those above it, up to the top of the mount."""
    base, top = mount.path, mount.top
    inside = path.relative_to(top if path.is_relative_to(top) else "/")
    group = base.joinpath(*inside.parts)
    if ".." in inside.parts or not group.is_dir():  # seen from another namespace
        group = base
    while group != base:
        yield group
        group = group.parent
    yield base


def _v2_quota(group: Path) -> int | None:
    match _text(group / "cpu.max").split():
        case [quota, period] if quota.isdigit() and int(period) > 0:
            return int(quota) * 1000 // int(period)
    return None


def _v1_quota(group: Path) -> int | None:
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota * 1000 // period if quota and quota > 0 and period else None


def _v1_swap(group: Path) -> int | None:
    both, memory = _bytes_in("memory.memsw.limit_in_bytes")(group), _bytes_in("memory.limit_in_bytes")(group)
    return None if both is None or memory is None else max(0, both - memory)


def _bytes_in(name: str) -> Callable[[Path], int | None]:
    def read(group: Path) -> int | None:
        number = _number(group / name)
        return number if number is not None and number < _UNLIMITED_BYTES else None

    return read


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else None


def _field(file: Path, name: str) -> int | None:
    """The number beside a name in a file of `name number` lines."""
    _, found, rest = f"\n{_text(file)}".partition(f"\n{name} ")
    return int(rest.partition("\n")[0]) if found else None


def _text(file: Path) -> str:
    try:
        return procfs.read_kernel_file(file).decode(errors="surrogateescape")
    except OSError:
        return ""


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)
