"""What a node is ready to lend, out of what was measured: the owner's part stays with the owner."""

from __future__ import annotations

from distributed_grid.domain.nodes import Node, Thresholds, Usage
from distributed_grid.domain.resources import Capacity, GpuDevice
from distributed_grid.scheduling.reasons import cores, gigabytes


def lending(node: Node, usage: Usage) -> tuple[Capacity, tuple[str, ...]]:
    """What the node lends in all, and why it keeps the rest. Without thresholds everything within the caps."""
    most, limits = node.lendable, node.thresholds
    if limits is None:
        return most, () if node.caps.can_share else ("does not share",)
    keeps: list[str] = []
    cpu = _cpu(node, usage, limits, keeps)
    memory = _memory(node, usage, limits, keeps)
    gpus = tuple(device for device in most.gpus if _gpu_is_idle(device, usage, limits, keeps))
    return Capacity(min(cpu, most.cpu_milli), min(memory, most.memory_bytes), gpus, most.custom), tuple(keeps)


def _cpu(node: Node, usage: Usage, limits: Thresholds, keeps: list[str]) -> int:
    if usage.cpu_outside_milli > limits.cpu_busy_max_milli:
        keeps.append(f"CPU {_percent(usage.cpu_outside_milli)} busy, may be {_percent(limits.cpu_busy_max_milli)}")
        return 0
    free = node.capacity.cpu_milli * (1000 - usage.cpu_outside_milli) // 1000
    if free < limits.cpu_min_milli:
        keeps.append(f"{cores(free)} free, at least {cores(limits.cpu_min_milli)} needed to lend any")
        return 0
    return free


def _memory(node: Node, usage: Usage, limits: Thresholds, keeps: list[str]) -> int:
    total = max(node.capacity.memory_bytes, 1)
    used_milli = 1000 * usage.memory_outside_bytes // total
    if used_milli > limits.memory_used_max_milli:
        keeps.append(f"memory {_percent(used_milli)} used, may be {_percent(limits.memory_used_max_milli)}")
        return 0
    free = max(node.capacity.memory_bytes - usage.memory_outside_bytes, 0)
    if free < limits.memory_min_bytes:
        keeps.append(f"{gigabytes(free)} free, at least {gigabytes(limits.memory_min_bytes)} needed to lend any")
        return 0
    return free


def _gpu_is_idle(device: GpuDevice, usage: Usage, limits: Thresholds, keeps: list[str]) -> bool:
    seen = next((gpu for gpu in usage.gpus if gpu.index == device.index), None)
    if seen is None:
        return True
    if seen.busy_milli > limits.gpu_busy_max_milli:
        keeps.append(
            f"GPU {device.index} {_percent(seen.busy_milli)} busy, may be {_percent(limits.gpu_busy_max_milli)}"
        )
        return False
    free = device.memory_bytes - seen.memory_bytes
    if free < limits.gpu_memory_min_bytes:
        keeps.append(f"GPU {device.index}: {gigabytes(free)} free, {gigabytes(limits.gpu_memory_min_bytes)} needed")
        return False
    return True


def _percent(milli: int) -> str:
    return f"{milli / 10:g} %"
