"""Machine probe: usable CPU and memory, and how much of it is used by the grid and by others.

- Only what this process may use counts: its allowed cores, its control groups' limits.
- Under a limit as large as the machine or smaller, use is what the limited group uses, so that neighbours in other
  groups do not show; a limit above the capacity limits nothing.
- CPU use in a sample is an average over about ten seconds; without such a window it says `warm=False`.
- Outside use is all use minus the grid's jobs and this process; it is never negative.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from distributed_grid.adapters.probes import procfs
from distributed_grid.adapters.probes.cgroup_limits import CgroupLimit, Cgroups
from distributed_grid.posix.boot_clock import boot_ms

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
    """What there is to use.

    `cpu_cores` are the numbers of the cores, as many as the quota pays for in full and at least one; `cpu_milli` is
    exact: 1500 under a quota of one and a half cores.
    """

    cpu_cores: tuple[int, ...]
    cpu_milli: int
    memory_bytes: int
    swap_bytes: int
    hostname: str


class MachineLimits(Struct, frozen=True):
    """What control groups allow, where they allow no more than there is; None is "no limit"."""

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
    """Measures one machine; what it may use is looked up once, when it is made."""

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
        """How much memory there is to use."""
        return self._memory_bytes

    @property
    def sees_whole_machine(self) -> bool:
        """Whether all of the machine's cores may be used; only then does its load average mean anything here."""
        return self._cpu_limit is None and len(self._cores) == os.cpu_count()

    def capacity(self) -> MachineCapacity:
        """What there is to use; the smallest limit holds."""
        swap, allowed = procfs.read_memory(self.root).swap_total_bytes, self._groups.swap_bytes()
        return MachineCapacity(
            cpu_cores=self._cores,
            cpu_milli=self._cpu_milli,
            memory_bytes=self._memory_bytes,
            swap_bytes=swap if allowed is None else min(swap, allowed),
            hostname=socket.gethostname(),
        )

    def limits(self) -> MachineLimits:
        """What control groups limit, of what `capacity` returns."""
        return MachineLimits(
            cpu_milli=self._cpu_limit.value if self._cpu_limit else None,
            memory_bytes=self._memory_limit.value if self._memory_limit else None,
            swap_bytes=self._groups.swap_bytes(),
        )

    def sample(self, own_cpu_ms: int, own_memory_bytes: int) -> MachineSample:
        """How busy the machine is now.

        `own_cpu_ms` is all CPU time the grid's jobs ever used, ended ones included, so that it only grows;
        `own_memory_bytes` is what they hold now. A second call shortly after gives nearly the same.
        """
        return self._sample(self._times, own_cpu_ms, own_memory_bytes)

    def totals(self) -> MachineSample:
        """Like `sample`, for those who do not know the grid's part: it counts as outside.

        Its history is its own, so that it can be asked beside `sample` and `outside_now` without spoiling theirs.
        """
        return self._sample(self._total_times, 0, 0)

    def outside_now(self, own_cpu_ms: int) -> int:
        """Thousandths of a core that others used over the last 200 ms or a little more; 0 before there is a window.

        `own_cpu_ms` as for `sample`, read just before; the two share one history, so either warms up the other.
        The noise is one tick (10 ms) for every core and every process of the grid's: in 200 ms, 50 thousandths each.
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
        return times.windows(at_ms=at_ms, busy_ms=self._busy_ms(), own_ms=own_ms)

    def _ratio(self, cpu_ms: int, window: CpuTimeSpan) -> float:
        return min(1.0, 1000 * cpu_ms / (window.ms * self._cpu_milli))

    def _busy_ms(self) -> int:
        """CPU time spent so far, on the usable cores or under the quota, by anybody."""
        if self._cpu_limit:
            used = self._groups.cpu_used_ms(self._cpu_limit.group)
            if used is not None:
                return used
        return procfs.read_busy_ms(self.root, self._core_names)

    def memory_used_bytes(self) -> int:
        """Memory in use: what is not available without swapping, on the machine or under the limit."""
        available = procfs.read_memory(self.root).available_bytes
        if self._memory_limit:
            held = self._groups.memory_used_bytes(self._memory_limit.group) or 0
            available = max(0, min(self._memory_bytes - held, available))
        return self._memory_bytes - available


def _effective_limit(limit: CgroupLimit | None, capacity: int) -> CgroupLimit | None:
    """The limit, unless it allows more than there is anyway."""
    return limit if limit and limit.value <= capacity else None
