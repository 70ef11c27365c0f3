"""What this machine can give, and how much of it is in use by whom.

Rule 1. Only what this process may use counts: its allowed cores, its control groups' limits.
Rule 2. Under a limit as large as the machine or smaller, use is what the limited group uses, so that neighbours in
        other groups do not show; a limit above what there is limits nothing.
Rule 3. CPU use in a sample is an average over about ten seconds; without such a window it says `warm=False`.
Rule 4. Outside use is all use minus the grid's jobs and this process; it is never negative.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distributed_grid.adapters.probes import procfs
from distributed_grid.adapters.probes.cgroup_limits import CgroupLimit, Cgroups
from distributed_grid.adapters.probes.cpu_time import CpuTimes, CpuTimeSpan
from distributed_grid.posix.boot_clock import boot_ms


@dataclass(frozen=True, slots=True)
class MachineCapacity:
    """What there is to use.

    `cpu_cores` are the numbers of the cores, as many as the quota pays for in full and at least one; `cpu_milli` is
    exact: 1500 under a quota of one and a half cores.
    """

    cpu_cores: tuple[int, ...]
    cpu_milli: int
    memory_bytes: int
    swap_bytes: int
    hostname: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What control groups allow, where they allow no more than there is; None is "no limit"."""

    cpu_milli: int | None
    memory_bytes: int | None
    swap_bytes: int | None


@dataclass(frozen=True, slots=True)
class UsageSample:
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
        there_is = procfs.memory(root)
        self._cpu_fence = _binding(self._groups.cpu(), 1000 * len(allowed))
        self._memory_fence = _binding(self._groups.memory(), there_is.total_bytes)
        self._memory_bytes = self._memory_fence.limit if self._memory_fence else there_is.total_bytes
        self._cpu_milli = max(1, self._cpu_fence.limit) if self._cpu_fence else 1000 * len(allowed)
        self._cores = tuple(allowed[: max(1, self._cpu_milli // 1000)])
        self._core_names = frozenset(b"cpu%d" % core for core in self._cores)
        self._times, self._total_times = CpuTimes(self._cpu_milli), CpuTimes(self._cpu_milli)

    @property
    def memory_bytes(self) -> int:
        """How much memory there is to use."""
        return self._memory_bytes

    @property
    def sees_whole_machine(self) -> bool:
        """Whether all of the machine's cores may be used; only then does its load average mean anything here."""
        return self._cpu_fence is None and len(self._cores) == os.cpu_count()

    def capacity(self) -> MachineCapacity:
        """What there is to use; the smallest limit holds."""
        swap, allowed = procfs.memory(self.root).swap_total_bytes, self._groups.swap_bytes()
        return MachineCapacity(
            cpu_cores=self._cores,
            cpu_milli=self._cpu_milli,
            memory_bytes=self._memory_bytes,
            swap_bytes=swap if allowed is None else min(swap, allowed),
            hostname=socket.gethostname(),
        )

    def limits(self) -> Limits:
        """What control groups limit, of all that `capacity` says."""
        return Limits(
            cpu_milli=self._cpu_fence.limit if self._cpu_fence else None,
            memory_bytes=self._memory_fence.limit if self._memory_fence else None,
            swap_bytes=self._groups.swap_bytes(),
        )

    def sample(self, own_cpu_ms: int, own_memory_bytes: int) -> UsageSample:
        """How busy the machine is now.

        `own_cpu_ms` is all CPU time the grid's jobs ever used, ended ones included, so that it only grows;
        `own_memory_bytes` is what they hold now. A second call shortly after gives nearly the same.
        """
        return self._sample(self._times, own_cpu_ms, own_memory_bytes)

    def totals(self) -> UsageSample:
        """Like `sample`, for those who do not know the grid's part: it counts as outside.

        Its history is its own, so that it can be asked beside `sample` and `outside_now` without spoiling theirs.
        """
        return self._sample(self._total_times, 0, 0)

    def outside_now(self, own_cpu_ms: int) -> int:
        """Thousandths of a core that others used over the last 200 ms or a little more; 0 before there is a window.

        `own_cpu_ms` as for `sample`, read just before; the two share one history, so either warms up the other.
        The noise is one tick (10 ms) for every core and every process of the grid's: in 200 ms, 50 thousandths each.
        """
        _, spell = self._spells(self._times, self._boottime(), own_cpu_ms)
        return min(self._cpu_milli, 1000 * spell.outside_ms // spell.ms) if spell else 0

    def _sample(self, times: CpuTimes, own_cpu_ms: int, own_memory_bytes: int) -> UsageSample:
        at_ms = self._boottime()
        spell, _ = self._spells(times, at_ms, own_cpu_ms)
        used = self.memory_used_bytes()
        return UsageSample(
            at_boot_ms=at_ms,
            cpu_ratio_total=self._ratio(spell.busy_ms, spell) if spell else 0.0,
            cpu_ratio_outside=self._ratio(spell.outside_ms, spell) if spell else 0.0,
            memory_used_bytes=used,
            memory_outside_bytes=max(0, used - own_memory_bytes - procfs.resident_bytes()),
            load1=os.getloadavg()[0],
            cores=len(self._cores),
            warm=spell is not None,
        )

    def _spells(self, times: CpuTimes, at_ms: int, own_cpu_ms: int) -> tuple[CpuTimeSpan | None, CpuTimeSpan | None]:
        own_ms = own_cpu_ms + int(time.process_time() * 1000)
        return times.spells(at_ms=at_ms, busy_ms=self._busy_ms(), own_ms=own_ms)

    def _ratio(self, cpu_ms: int, spell: CpuTimeSpan) -> float:
        return min(1.0, 1000 * cpu_ms / (spell.ms * self._cpu_milli))

    def _busy_ms(self) -> int:
        """CPU time spent so far, on the usable cores or under the quota, by anybody."""
        if self._cpu_fence:
            used = self._groups.cpu_used_ms(self._cpu_fence.group)
            if used is not None:
                return used
        return procfs.busy_ms(self.root, self._core_names)

    def memory_used_bytes(self) -> int:
        """All that cannot be had without taking it from somebody, here or under the limit."""
        available = procfs.memory(self.root).available_bytes
        if self._memory_fence:
            held = self._groups.memory_used_bytes(self._memory_fence.group) or 0
            available = max(0, min(self._memory_bytes - held, available))
        return self._memory_bytes - available


def _binding(fence: CgroupLimit | None, there_is: int) -> CgroupLimit | None:
    """The fence, unless it allows more than there is anyway."""
    return fence if fence and fence.limit <= there_is else None
