"""The pressure score: one number for how hard a node works."""

from __future__ import annotations

from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.resources import Capacity

CPU_WEIGHT, MEMORY_WEIGHT, GPU_WEIGHT = 3, 3, 4


def pressure(capacity: Capacity, usage: Usage) -> float:
    """How hard a node works, 0 idle to 1 full: CPU 30 %, memory 30 %, GPU 40 %, renormalised without GPUs."""
    total = CPU_WEIGHT * cpu_part(usage) + MEMORY_WEIGHT * memory_part(capacity, usage)
    weight = CPU_WEIGHT + MEMORY_WEIGHT
    gpu = gpu_part(usage)
    if gpu is not None:
        total += GPU_WEIGHT * gpu
        weight += GPU_WEIGHT
    return round(total / weight, 3)


def cpu_part(usage: Usage) -> float:
    """How much of its cores a node uses, 0 to 1."""
    return _part(usage.cpu_busy_milli, 1000)


def memory_part(capacity: Capacity, usage: Usage) -> float:
    """How much of its memory a node uses, 0 to 1; a node that has none to speak of is full as soon as it uses any."""
    return _part(usage.memory_bytes, max(capacity.memory_bytes, 1))


def gpu_part(usage: Usage) -> float | None:
    """How busy its GPUs are on average, 0 to 1; None where none was measured."""
    if not usage.gpus:
        return None
    return _part(sum(gpu.in_use_milli for gpu in usage.gpus), 1000 * len(usage.gpus))


def _part(some: int, whole: int) -> float:
    return min(max(some / whole, 0.0), 1.0)
