"""A GPU, and who uses it: the part of a device's use that is not the grid's. Pure.

Rule 1. What cannot be told apart is somebody else's, unless every process on the device is ours.
Rule 2. The outside part is never more than the whole, and never negative.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from distributed_grid.domain.nodes import GpuUsage
from distributed_grid.domain.resources import GpuDevice

FULL = 1000


class Gpu(Struct, frozen=True):
    """A device as NVML describes it; `mig` is cut into instances, `prohibited` runs nobody's computations."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    exclusive: bool = False
    mig: bool = False
    prohibited: bool = False

    @property
    def device(self) -> GpuDevice:
        """The same for the ledger; one cut into instances is only lent whole, too."""
        return GpuDevice(self.index, self.memory_bytes, self.name, exclusive=self.exclusive or self.mig)


class GpuSample(Struct, frozen=True):
    """How busy a device is: in all, and with work that is not the grid's. Not measured means full."""

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
    """What was read off a device; None is "the driver does not say"."""

    memory_bytes: int
    busy_milli: int | None
    processes: Mapping[int, int | None] | None
    """Bytes held, by pid."""
    busy_by_pid: Mapping[int, int]
    """Thousandths of the device, by pid; empty when the driver does not say."""


def divided(index: int, seen: GpuObservation, own_pids: Collection[int]) -> GpuSample:
    """Divide a device's use between the grid and everybody else."""
    running = seen.processes or {}
    ours = {pid: held for pid, held in running.items() if pid in own_pids}
    others = {pid: held for pid, held in running.items() if pid not in own_pids}
    busy = seen.busy_milli
    if busy is None:  # nobody says: busy when anything runs, or might run unseen
        busy = FULL if running or seen.processes is None else 0
    return GpuSample(
        index,
        busy,
        seen.memory_bytes,
        _outside_busy(busy, ours, others, seen.busy_by_pid),
        min(seen.memory_bytes, max(0, _outside_memory(seen.memory_bytes, ours, others))),
    )


def unmeasured(gpu: Gpu) -> GpuSample:
    """A device that was there and cannot be asked: full of somebody else's work, so that it lends nothing."""
    return GpuSample(gpu.index, FULL, gpu.memory_bytes, FULL, gpu.memory_bytes, measured=False)


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
    """All that is used minus what ours hold: the driver's own share stays with the owner."""
    unsaid = any(held is None for held in ours.values())
    if unsaid and all(held is not None for held in others.values()):
        return sum(held or 0 for held in others.values())
    return used - sum(held or 0 for held in ours.values())
