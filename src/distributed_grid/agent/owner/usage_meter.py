"""What is in use on this machine, and which part of it is the owner's: everything but the grid's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from msgspec import Struct

from distributed_grid.adapters.probes.machine import SHORT_WINDOW_MS, MachineCapacity, MachineProbe
from distributed_grid.adapters.probes.nvml import GpuProbe
from distributed_grid.agent.execution.attempt import AttemptUsage
from distributed_grid.agent.owner.eviction import OwnerOnGpu
from distributed_grid.agent.owner.ray_usage import RayLoan, RayWorkers
from distributed_grid.domain.nodes import GpuUsage, Usage
from distributed_grid.posix.boot_clock import boot_ms


class UsageSnapshot(Struct, frozen=True):
    """Who uses what right now: thousandths of cores, and bytes."""

    machine_milli: int
    outside_milli: int
    own_milli: int
    memory_bytes: int
    memory_available_bytes: int
    memory_outside_bytes: int


class UsageMeter:
    """Measures this machine; remembers the CPU time of attempts that have ended, so that it is never the owner's."""

    def __init__(self, probe: MachineProbe, gpus: GpuProbe | None = None) -> None:
        self.probe = probe
        self._gpus = gpus
        self._on_gpus: tuple[GpuUsage, ...] = ()
        self._ended_cpu_ms = 0
        self._capacity: MachineCapacity | None = None
        self._last: tuple[int, int] | None = None  # when, and own CPU time until then
        self._ray = RayWorkers()
        self._lent_memory_bytes: Callable[[], int] = lambda: 0

    def set_ray_loan(self, loan: RayLoan) -> None:
        """So much is lent through Ray on this machine: what Ray's workers use of it is not the owner's."""
        self._ray.loan = loan

    def count_lent_memory(self, measure: Callable[[], int]) -> None:
        """The copies of memory blocks that are held here use so much: that is not the owner's either."""
        self._lent_memory_bytes = measure

    def ended(self, cpu_ms: int) -> None:
        """An attempt has ended that used so much in all."""
        self._ended_cpu_ms += cpu_ms

    def look_at_gpus(self, own_pids: Collection[int]) -> None:
        """Measure the GPUs for the next `usage`. A driver may hang: call it from a thread."""
        if self._gpus is not None:
            own = {*own_pids, *self._ray.pids()}
            self._on_gpus = tuple(one.outside for one in self._gpus.sample(own))

    def usage(self, own: Mapping[str, AttemptUsage]) -> Usage:
        """What is in use, averaged over about ten seconds where it is a rate; of the GPUs, as last looked at."""
        sample = self.probe.sample(*self._own(own.values()))
        return Usage(
            cpu_busy_milli=round(1000 * sample.cpu_ratio_total),
            cpu_outside_milli=round(1000 * sample.cpu_ratio_outside),
            memory_bytes=sample.memory_used_bytes,
            memory_outside_bytes=sample.memory_outside_bytes,
            gpus=self._on_gpus,
        )

    def now(self, own: Mapping[str, AttemptUsage]) -> UsageSnapshot:
        """Who uses what at this moment; rates over the time since the last call, and no less than 200 ms."""
        if self._capacity is None:
            self._capacity = self.probe.capacity()
        there_is, at_ms = self._capacity, boot_ms()
        own_cpu_ms, own_memory_bytes = self._own(own.values())
        outside_milli = self.probe.outside_now(own_cpu_ms)
        sample = self.probe.sample(own_cpu_ms, own_memory_bytes)
        before_ms, before_cpu_ms = self._last or (at_ms, own_cpu_ms)
        self._last = at_ms, own_cpu_ms
        own_milli = 1000 * max(0, own_cpu_ms - before_cpu_ms) // max(at_ms - before_ms, SHORT_WINDOW_MS)
        return UsageSnapshot(
            machine_milli=there_is.cpu_milli,
            outside_milli=outside_milli,
            own_milli=min(own_milli, there_is.cpu_milli - outside_milli),
            memory_bytes=there_is.memory_bytes,
            memory_available_bytes=there_is.memory_bytes - sample.memory_used_bytes,
            memory_outside_bytes=sample.memory_outside_bytes,
        )

    def memory(self, own: Mapping[str, AttemptUsage]) -> tuple[int, int, int]:
        """Bytes now: all there is, what is used of it, and by others than the grid."""
        used = self.probe.memory_used_bytes()
        _, own_bytes = self._own(own.values())
        return self.probe.memory_bytes, used, max(0, used - own_bytes)

    def owner_on_gpus(self, own_pids: Collection[int]) -> tuple[OwnerOnGpu, ...]:
        """What others use of the GPUs that can be measured. A driver may hang: call it from a thread."""
        if self._gpus is None:
            return ()
        size = {gpu.index: gpu.memory_bytes for gpu in self._gpus.devices()}
        return tuple(
            OwnerOnGpu(one.index, one.outside_busy_milli, size[one.index] - one.outside_memory_bytes)
            for one in self._gpus.sample({*own_pids, *self._ray.pids()})
            if one.measured and one.index in size
        )

    def _own(self, running: Collection[AttemptUsage]) -> tuple[int, int]:
        """The CPU time of the grid's own, in all, and its memory: of attempts, and of what is lent through Ray."""
        ray_ms, ray_bytes = self._ray.look()
        cpu_ms = self._ended_cpu_ms + sum(one.cpu_ms for one in running) + ray_ms
        return cpu_ms, sum(one.memory_bytes for one in running) + ray_bytes + self._lent_memory_bytes()
