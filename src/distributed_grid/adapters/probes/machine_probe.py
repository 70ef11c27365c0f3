"""Machine probe: usable CPU and memory, and how much of it is used by the grid and by others.

- Only what this process may use counts: its allowed cores, its control groups' limits.
- Under a limit as large as the machine or smaller, use is what the limited group uses, so that neighbours in other
  groups do not show; a limit above the capacity limits nothing.
- CPU use in a sample is an average over about ten seconds; without such a window it says `warm=False`.
- Outside use is all use minus the grid's jobs and this process; it is never negative.

Control group limits of this process, v1 or v2: a limit anywhere up the hierarchy counts. The smallest one applies, and
use is measured where it is set. A file that cannot be read is no limit: it is normal at the root and in containers.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from msgspec import Struct

from distributed_grid.adapters.probes import procfs
from distributed_grid.posix.boot_clock import boot_ms

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
        return self._tightest("cpu", _v2_quota, _v1_quota)

    def memory(self) -> CgroupLimit | None:
        return self._tightest("memory", _bytes_in("memory.max"), _bytes_in("memory.limit_in_bytes"))

    def swap_bytes(self) -> int | None:
        """Limit of swap; None without a limit."""
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
        fields = before.split(" ")[3:5]
        top, path = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field) for field in fields)
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
    """Number beside a name in a file of `name number` lines."""
    _, name_found, rest = f"\n{_text(file)}".partition(f"\n{name} ")
    return int(rest.partition("\n")[0]) if name_found else None


def _text(file: Path) -> str:
    try:
        return procfs.read_kernel_file(file).decode(errors="surrogateescape")
    except OSError:
        return ""


LONG_WINDOW_MS = 10_000
SHORT_WINDOW_MS = 200
STEP_MS = 50
NOISE_MS = 100


class CpuTimeSpan(Struct, frozen=True):
    """A time window, and the CPU time used in it: in all, and by the grid."""

    ms: int
    busy_ms: int
    ours_ms: int

    @property
    def outside_ms(self) -> int:
        return max(0, self.busy_ms - self.ours_ms)


class _CpuReading(Struct, frozen=True):
    at_ms: int
    busy_ms: int
    reported_ms: int
    ours_ms: int


class CpuTimeWindows:
    """CPU time counters of the last ten seconds, at most one reading every 50 ms.

    The long window is about ten seconds, the short one the shortest of at least 200 ms; after a pause both begin where
    the pause began. The grid's own time is not trusted blindly: a step back counts as none, and a step larger than the
    cores allow as the most they allow, so a process missed once spoils one step, not the window.

    The kernel counts most CPU time in ticks (10 ms). Total time is off by at most a tick per core, own time by a tick
    per process of the grid; over 200 ms a tick is 50 thousandths of a core. A control group's counter has no such
    noise.
    """

    def __init__(self, cpu_milli: int) -> None:
        self._milli = cpu_milli
        self._readings: deque[_CpuReading] = deque()

    def windows(self, *, at_ms: int, busy_ms: int, own_ms: int) -> tuple[CpuTimeSpan | None, CpuTimeSpan | None]:
        """Record the counters, which only grow; the long and the short window that end now, if any."""
        readings = self._readings
        if not self._readings:
            now = _CpuReading(at_ms, busy_ms, own_ms, 0)
        else:
            last = self._readings[-1]
            max_step_ms = (at_ms - last.at_ms) * self._milli // 1000 + NOISE_MS
            step_ms = min(max(0, own_ms - last.reported_ms), max_step_ms)
            now = _CpuReading(at_ms, busy_ms, own_ms, last.ours_ms + step_ms)
        while len(readings) > 1 and at_ms - readings[0].at_ms > LONG_WINDOW_MS:
            readings.popleft()
        long = readings[0] if readings and at_ms - readings[0].at_ms >= SHORT_WINDOW_MS else None
        short = next((reading for reading in reversed(readings) if at_ms - reading.at_ms >= SHORT_WINDOW_MS), None)
        if not readings or at_ms - readings[-1].at_ms >= STEP_MS:
            readings.append(now)
        return _between(long, now), _between(short, now)


def _between(start: _CpuReading | None, end: _CpuReading) -> CpuTimeSpan | None:
    if start is None:
        return None
    return CpuTimeSpan(end.at_ms - start.at_ms, max(0, end.busy_ms - start.busy_ms), end.ours_ms - start.ours_ms)


class MachineCapacity(Struct, frozen=True):
    """Usable cores and memory."""

    cpu_cores: tuple[int, ...]
    cpu_milli: int
    memory_bytes: int
    swap_bytes: int
    hostname: str


class MachineLimits(Struct, frozen=True):
    """Limits of control groups below the capacity; None is "no limit"."""

    cpu_milli: int | None
    memory_bytes: int | None
    swap_bytes: int | None


class MachineSample(Struct, frozen=True):
    """How busy the machine is: ratios are of all CPU that may be used, 0 idle to 1 full."""

    at_boot_ms: int
    cpu_ratio_total: float
    cpu_ratio_outside: float
    memory_used_bytes: int
    memory_outside_bytes: int
    load1: float
    cores: int
    warm: bool


class MachineProbe:
    """Measures one machine; its capacity is read once, at the start."""

    def __init__(self, root: Path = Path("/"), *, boottime: Callable[[], int] = boot_ms) -> None:
        """Read from below `root`; `boottime` is milliseconds since boot."""
        self.root = root
        self._boottime = boottime
        self._groups = Cgroups(root)
        allowed = sorted(os.sched_getaffinity(0))
        capacity = procfs.read_memory(root)
        self._cpu_limit = _effective_limit(self._groups.cpu(), 1000 * len(allowed))
        self._memory_limit = _effective_limit(self._groups.memory(), capacity.total_bytes)
        self._memory_bytes = self._memory_limit.value if self._memory_limit else capacity.total_bytes
        self._cpu_milli = max(1, self._cpu_limit.value) if self._cpu_limit else 1000 * len(allowed)
        self._cores = tuple(allowed[: max(1, self._cpu_milli // 1000)])
        self._core_names = frozenset(b"cpu%d" % core for core in self._cores)
        self._times, self._total_times = CpuTimeWindows(self._cpu_milli), CpuTimeWindows(self._cpu_milli)

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    @property
    def sees_whole_machine(self) -> bool:
        """True if all cores of the machine may be used; only then its load average means anything here."""
        return self._cpu_limit is None and len(self._cores) == os.cpu_count()

    def capacity(self) -> MachineCapacity:
        """Cores and memory within the smallest limit."""
        swap, allowed = procfs.read_memory(self.root).swap_total_bytes, self._groups.swap_bytes()
        return MachineCapacity(
            cpu_cores=self._cores,
            cpu_milli=self._cpu_milli,
            memory_bytes=self._memory_bytes,
            swap_bytes=swap if allowed is None else min(swap, allowed),
            hostname=socket.gethostname(),
        )

    def limits(self) -> MachineLimits:
        """Control group limits below `capacity`."""
        return MachineLimits(
            cpu_milli=self._cpu_limit.value if self._cpu_limit else None,
            memory_bytes=self._memory_limit.value if self._memory_limit else None,
            swap_bytes=self._groups.swap_bytes(),
        )

    def sample(self, own_cpu_ms: int, own_memory_bytes: int) -> MachineSample:
        """Use of the machine now. `own_cpu_ms` is all CPU time the grid's jobs ever used, ended ones included, so that
        it only grows; `own_memory_bytes` is their memory now. A second call shortly after gives nearly the same."""
        return self._sample(self._times, own_cpu_ms, own_memory_bytes)

    def totals(self) -> MachineSample:
        """Sample for callers without figures of the grid's jobs, which count as outside use. It has a history of its
        own, so that `sample` and `outside_now` keep theirs."""
        return self._sample(self._total_times, 0, 0)

    def outside_now(self, own_cpu_ms: int) -> int:
        """Thousandths of a core that others used over the last 200 ms or a little more; 0 before there is a window.

        `own_cpu_ms` as for `sample`, read just before; the two share one history, so either warms up the other.
        The noise is one tick (10 ms) for every core and every process of the grid's: in 200 ms, 50 thousandths
        each.
        """
        _, window = self._windows(self._times, self._boottime(), own_cpu_ms)
        return min(self._cpu_milli, 1000 * window.outside_ms // window.ms) if window else 0

    def _sample(self, times: CpuTimeWindows, own_cpu_ms: int, own_memory_bytes: int) -> MachineSample:
        at_ms = self._boottime()
        window, _ = self._windows(times, at_ms, own_cpu_ms)
        used = self.memory_used_bytes()
        return MachineSample(
            at_boot_ms=at_ms,
            cpu_ratio_total=self._ratio(window.busy_ms, window) if window else 0.0,
            cpu_ratio_outside=self._ratio(window.outside_ms, window) if window else 0.0,
            memory_used_bytes=used,
            memory_outside_bytes=max(0, used - own_memory_bytes - procfs.resident_bytes()),
            load1=os.getloadavg()[0],
            cores=len(self._cores),
            warm=window is not None,
        )

    def _windows(
        self, times: CpuTimeWindows, at_ms: int, own_cpu_ms: int
    ) -> tuple[CpuTimeSpan | None, CpuTimeSpan | None]:
        own_ms = own_cpu_ms + int(time.process_time() * 1000)
        busy_ms = self._groups.cpu_used_ms(self._cpu_limit.group) if self._cpu_limit else None
        if busy_ms is None:
            busy_ms = procfs.read_busy_ms(self.root, self._core_names)
        return times.windows(at_ms=at_ms, busy_ms=busy_ms, own_ms=own_ms)

    def _ratio(self, cpu_ms: int, window: CpuTimeSpan) -> float:
        return min(1.0, 1000 * cpu_ms / (window.ms * self._cpu_milli))

    def memory_used_bytes(self) -> int:
        """Memory in use: all but the part available without swapping, on the machine or under the limit."""
        available = procfs.read_memory(self.root).available_bytes
        if self._memory_limit:
            held = self._groups.memory_used_bytes(self._memory_limit.group) or 0
            available = max(0, min(self._memory_bytes - held, available))
        return self._memory_bytes - available


def _effective_limit(limit: CgroupLimit | None, capacity: int) -> CgroupLimit | None:
    """Limit, unless it is above the capacity."""
    return limit if limit and limit.value <= capacity else None
