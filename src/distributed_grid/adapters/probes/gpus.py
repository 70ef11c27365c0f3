"""GPU usage, divided between the grid and everybody else. Pure.

What cannot be told apart is somebody else's, unless every process on the device is the grid's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from distributed_grid.domain.nodes import GpuUsage
from distributed_grid.domain.resources import GpuDevice

FULL_MILLI = 1000


class Gpu(Struct, frozen=True):
    """A device as NVML describes it; `mig` is split into instances, `prohibited` runs no computations."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    exclusive: bool = False
    mig: bool = False
    prohibited: bool = False

    @property
    def device(self) -> GpuDevice:
        """The device for the ledger; one split into instances is lent only as a whole."""
        return GpuDevice(self.index, self.memory_bytes, self.name, exclusive=self.exclusive or self.mig)


class GpuSample(Struct, frozen=True):
    """How busy a device is: in all, and with work outside the grid. One that is not measured counts as full."""

    index: int
    busy_milli: int
    memory_bytes: int
    outside_busy_milli: int
    outside_memory_bytes: int
    measured: bool = True

    @property
    def outside(self) -> GpuUsage:
        return GpuUsage(
            self.index, self.outside_busy_milli, self.outside_memory_bytes, self.busy_milli, self.memory_bytes
        )


class GpuObservation(Struct, frozen=True):
    """Raw counters of a device; None where the driver does not report one."""

    memory_bytes: int
    busy_milli: int | None
    processes: Mapping[int, int | None] | None
    """Bytes held, by pid."""
    busy_by_pid: Mapping[int, int]
    """Thousandths of the device, by pid; empty when the driver does not report it."""


def split_usage(index: int, seen: GpuObservation, own_pids: Collection[int]) -> GpuSample:
    """Divide a device's use between the grid and everybody else."""
    running = seen.processes or {}
    ours = {pid: held for pid, held in running.items() if pid in own_pids}
    others = {pid: held for pid, held in running.items() if pid not in own_pids}
    busy = seen.busy_milli
    if busy is None:  # unknown: busy when anything runs, or might run unseen
        busy = FULL_MILLI if running or seen.processes is None else 0
    return GpuSample(
        index,
        busy,
        seen.memory_bytes,
        _outside_busy(busy, ours, others, seen.busy_by_pid),
        min(seen.memory_bytes, max(0, _outside_memory(seen.memory_bytes, ours, others))),
    )


def unmeasured_sample(gpu: Gpu) -> GpuSample:
    """A known device that cannot be measured: counted as full of outside work, so that it lends nothing."""
    return GpuSample(gpu.index, FULL_MILLI, gpu.memory_bytes, FULL_MILLI, gpu.memory_bytes, measured=False)


def _outside_busy(
    busy: int, ours: Mapping[int, int | None], others: Mapping[int, int | None], by_pid: Mapping[int, int]
) -> int:
    if not ours:
        return busy
    if not others:
        return 0
    measured = {pid: milli for pid, milli in by_pid.items() if pid in ours or pid in others}
    if not measured:
        return busy
    return min(busy, sum(milli for pid, milli in measured.items() if pid in others))


def _outside_memory(used: int, ours: Mapping[int, int | None], others: Mapping[int, int | None]) -> int:
    """All memory in use minus what the grid holds: the driver's own share counts as outside."""
    unknown = any(held is None for held in ours.values())
    if unknown and all(held is not None for held in others.values()):
        return sum(held or 0 for held in others.values())
    return used - sum(held or 0 for held in ours.values())
