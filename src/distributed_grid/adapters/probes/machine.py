"""What this machine can give, and how much of it is in use by whom.

Rule 1. Only what this process may use counts: its allowed cores, its control groups' limits.
Rule 2. CPU use is an average over about ten seconds; without such a window the sample says `warm=False`.
Rule 3. Outside use is all use minus the grid's jobs and this process; it is never negative.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distributed_grid.adapters.probes.cgroups import Cgroups, Fence

WINDOW_MS = 10_000
SHORTEST_WINDOW_MS = 200
TICK_MS = 1000 // os.sysconf("SC_CLK_TCK")
BUSY_COLUMNS = (1, 2, 3, 6, 7, 8)  # user nice system, not idle iowait, irq softirq steal


@dataclass(frozen=True, slots=True)
class MachineCapacity:
    """What there is to use; `cpu_cores` are the numbers of the cores."""

    cpu_cores: tuple[int, ...]
    memory_bytes: int
    swap_bytes: int
    hostname: str


@dataclass(frozen=True, slots=True)
class UsageSample:
    """How busy the machine is: ratios are of all usable cores, 0 idle to 1 full."""

    at_boot_ms: int
    cpu_ratio_total: float
    cpu_ratio_outside: float
    memory_used_bytes: int
    memory_outside_bytes: int
    load1: float
    cores: int
    warm: bool


@dataclass(frozen=True, slots=True)
class _Counters:
    at_ms: int
    busy_ms: int
    own_ms: int
    self_ms: int


def boottime_ms() -> int:
    """The age of this boot, sleep included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class MachineProbe:
    """Measures one machine; what it may use is looked up once, when it is made."""

    def __init__(self, root: Path = Path("/"), *, boottime: Callable[[], int] = boottime_ms) -> None:
        """Read from below `root`; `boottime` is milliseconds since boot."""
        import psutil  # slow to import, and only this needs it

        self._stat = root / "proc/stat"
        self._boottime = boottime
        self._memory = psutil.virtual_memory
        self._swap = psutil.swap_memory
        self._process = psutil.Process()
        self._groups = Cgroups(root)
        allowed = sorted(os.sched_getaffinity(0))
        self._cpu_fence = _binding(self._groups.cpu(), 1000 * len(allowed))
        self._memory_fence = _binding(self._groups.memory(), psutil.virtual_memory().total)
        self._cores = _usable_cores(allowed, self._cpu_fence)
        self._ring: deque[_Counters] = deque()

    def capacity(self) -> MachineCapacity:
        """What there is to use; the smallest limit holds."""
        memory = self._memory_fence.limit if self._memory_fence else self._memory().total
        swap, allowed = self._swap().total, self._groups.swap_bytes()
        return MachineCapacity(
            cpu_cores=self._cores,
            memory_bytes=memory,
            swap_bytes=swap if allowed is None else min(swap, allowed),
            hostname=socket.gethostname(),
        )

    def sample(self, own_cpu_ms: int, own_memory_bytes: int) -> UsageSample:
        """How busy the machine is now.

        `own_cpu_ms` is all CPU time the grid's jobs ever used, ended ones included, so that it only grows;
        `own_memory_bytes` is what they hold now. A second call shortly after gives nearly the same.
        """
        now = _Counters(self._boottime(), self._busy_ms(), own_cpu_ms, int(time.process_time() * 1000))
        before = self._window_start(now)
        used = self._memory_used_bytes()
        total, outside = _ratios(before, now, len(self._cores))
        return UsageSample(
            at_boot_ms=now.at_ms,
            cpu_ratio_total=total,
            cpu_ratio_outside=outside,
            memory_used_bytes=used,
            memory_outside_bytes=max(0, used - own_memory_bytes - self._process.memory_info().rss),
            load1=os.getloadavg()[0],
            cores=len(self._cores),
            warm=before is not None,
        )

    def _window_start(self, now: _Counters) -> _Counters | None:
        """The oldest counters of the last ten seconds, or the last ones before when there was a pause."""
        ring = self._ring
        while len(ring) > 1 and now.at_ms - ring[0].at_ms > WINDOW_MS:
            ring.popleft()
        start = ring[0] if ring and now.at_ms - ring[0].at_ms >= SHORTEST_WINDOW_MS else None
        if not ring or now.at_ms - ring[-1].at_ms >= SHORTEST_WINDOW_MS:
            ring.append(now)
        return start

    def _busy_ms(self) -> int:
        """CPU time spent so far, on the usable cores or under the quota, by anybody."""
        if self._cpu_fence:
            used = self._groups.cpu_used_ms(self._cpu_fence.group)
            if used is not None:
                return used
        mine = {f"cpu{core}" for core in self._cores}
        ticks = 0
        with self._stat.open() as stat:
            for line in stat:
                if not line.startswith("cpu"):
                    break
                columns = line.split()
                if columns[0] in mine:
                    ticks += sum(int(columns[at]) for at in BUSY_COLUMNS)
        return ticks * TICK_MS

    def _memory_used_bytes(self) -> int:
        """All that cannot be had without taking it from somebody, here or under the limit."""
        machine = self._memory()
        if not self._memory_fence:
            return int(machine.total - machine.available)
        limit = self._memory_fence.limit
        held = self._groups.memory_used_bytes(self._memory_fence.group) or 0
        return int(limit - max(0, min(limit - held, machine.available)))


def _binding(fence: Fence | None, there_is: int) -> Fence | None:
    """The fence, when it allows less than there is anyway."""
    return fence if fence and fence.limit < there_is else None


def _usable_cores(allowed: list[int], fence: Fence | None) -> tuple[int, ...]:
    """The allowed cores, as many of them as the quota pays for in full, at least one."""
    return tuple(allowed if fence is None else allowed[: max(1, fence.limit // 1000)])


def _ratios(before: _Counters | None, now: _Counters, cores: int) -> tuple[float, float]:
    """Total and outside CPU use over the window; zeros when there is none."""
    if before is None:
        return 0.0, 0.0
    room_ms = (now.at_ms - before.at_ms) * cores
    busy_ms = max(0, now.busy_ms - before.busy_ms)
    ours_ms = max(0, now.own_ms - before.own_ms) + max(0, now.self_ms - before.self_ms)
    return min(1.0, busy_ms / room_ms), min(1.0, max(0, busy_ms - ours_ms) / room_ms)
