"""Usage of a simulated node: what its own work uses of its declared capacity, and the declared use of its owner.

Nothing of the machine it is on shows here: not what others use of it, and not the work of its other nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from distributed_grid.adapters.probes.machine_probe import CpuTimeWindows
from distributed_grid.agent.execution.attempt import AttemptUsage
from distributed_grid.agent.owner.ray_usage import RayLoan, RayWorkers
from distributed_grid.domain.nodes import GpuUsage, Usage
from distributed_grid.domain.resources import Capacity


class OwnerBackground(Struct, frozen=True):
    """What an owner uses all the time, in thousandths of what the node has."""

    cpu_milli: int = 0
    memory_milli: int = 0
    gpu_milli: int = 0


class SimulatedNode(Struct, frozen=True):
    """A node that stands for a machine of its own: what it has, and what its owner uses of it."""

    capacity: Capacity
    background: OwnerBackground = OwnerBackground()


class SimulatedUsageMeter:
    """Measures one simulated node; remembers the CPU time of its attempts that have ended.

    Its GPUs are as busy as its owner makes them: no driver says what jobs do on a declared device.
    """

    def __init__(self, node: SimulatedNode, ray: RayWorkers) -> None:
        self._node = node
        self._ray = ray
        self._ended_cpu_ms = 0
        self._windows = CpuTimeWindows(node.capacity.cpu_milli)

    def set_ray_loan(self, loan: RayLoan) -> None:
        """So much of the node is lent through Ray."""
        self._ray.loan = loan

    def ended(self, cpu_ms: int) -> None:
        """An attempt of the node has ended that used so much in all."""
        self._ended_cpu_ms += cpu_ms

    def usage(self, running: Iterable[AttemptUsage], blocks_bytes: int, at_ms: int, room_bytes: int | None) -> Usage:
        """What is in use, where it is a rate averaged over about ten seconds; `room_bytes` is the machine's."""
        ray_ms, memory = self._ray.measure()
        outside_ms, outside_bytes = self._ray.beyond_loan()  # somebody uses Ray there without the grid
        cpu_ms, memory = self._ended_cpu_ms + ray_ms, memory + blocks_bytes
        for one in running:
            cpu_ms, memory = cpu_ms + one.cpu_ms, memory + one.memory_bytes
        has, owner = self._node.capacity, self._node.background
        window, _ = self._windows.windows(at_ms=at_ms, busy_ms=outside_ms, own_ms=cpu_ms)
        own_milli = ray_milli = 0
        if window is not None:
            there_was_ms = window.ms * max(has.cpu_milli, 1)
            own_milli, ray_milli = (1_000_000 * ms // there_was_ms for ms in (window.ours_ms, window.busy_ms))
        owner_bytes = has.memory_bytes * owner.memory_milli // 1000 + outside_bytes
        return Usage(
            cpu_busy_milli=min(owner.cpu_milli + own_milli + ray_milli, 1000),
            cpu_outside_milli=min(owner.cpu_milli + ray_milli, 1000),
            memory_bytes=owner_bytes + memory,
            memory_outside_bytes=owner_bytes,
            gpus=tuple(
                GpuUsage(
                    gpu.index,
                    owner.gpu_milli,
                    gpu.memory_bytes * owner.gpu_milli // 1000,
                    owner.gpu_milli,
                    gpu.memory_bytes * owner.gpu_milli // 1000,
                )
                for gpu in has.gpus
            ),
            memory_room_bytes=room_bytes,
        )
