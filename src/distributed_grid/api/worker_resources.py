"""Resources of workers and requirements of tasks: from the dictionaries of the guides to integers, and back.

Resources of a worker are nested: `{"cpu": {"cores", "available_cores"}, "memory": {"total_mb", "available_mb"}, "gpu":
{"devices", …}}`. Requirements of a task are nested or flat (`cpu_cores`, `memory_mb`, `gpu_memory_mb`, `gpu_devices`).
An impossible number (negative, not finite, larger than any machine) is refused with one line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from distributed_grid.domain.nodes import MAX_GPUS
from distributed_grid.domain.resources import MAX_AMOUNT, WHOLE_GPU, Amounts, Capacity, GpuDevice
from distributed_grid.errors import BadInput
from distributed_grid.number_text import plain_number

MIB = 1024**2
GROUPS = ("cpu", "memory", "gpu")
Group = Mapping[str, Any]
_ANY_MACHINE = Capacity(MAX_AMOUNT, MAX_AMOUNT, tuple(GpuDevice(index, MAX_AMOUNT) for index in range(MAX_GPUS)))


class ReportedResources(Struct, frozen=True):
    """Resources of a worker, and the part of them that is free, by its own report."""

    has: Capacity
    free: Capacity
    physical_cores: int = 0
    named: frozenset[str] = frozenset()  # groups of the report that say anything


def reported_resources(resources: Mapping[str, Any], registered: Capacity | None = None) -> ReportedResources:
    """The resources that a worker reports; BadInput names the first error in them.

    Missing totals are those of `registered`; resources without a report of their use are free.
    """
    _known(resources, GROUPS, "resources")
    cpu, memory, gpu = (_group(resources, name) for name in GROUPS)
    known = registered or Capacity()
    cores = _number(cpu, "cpu.cores", least=0.001, default=known.cpu_milli / 1000 if registered else None)
    total_mb = _number(memory, "memory.total_mb", default=known.memory_bytes / MIB)
    gpus = _reported_gpus(gpu, known.gpus)
    gpu_mb = sum(device.memory_bytes for device in gpus) / MIB
    has = Capacity(_milli(cores, "cpu.cores"), _bytes(total_mb, "memory.total_mb"), gpus)
    free = Capacity(
        _milli(_number(cpu, "cpu.available_cores", default=cores, most=cores), "cpu.available_cores"),
        _bytes(_number(memory, "memory.available_mb", default=total_mb, most=total_mb), "memory.available_mb"),
        gpus[: _count(gpu, "gpu.available_devices", default=len(gpus), most=len(gpus))],
    )
    _number(gpu, "gpu.available_memory_mb", default=0.0, most=gpu_mb)
    named = frozenset(name for name, group in zip(GROUPS, (cpu, memory, gpu), strict=True) if group)
    return ReportedResources(has, free, _count(cpu, "cpu.physical_cores", most=2**20), named)


def _reported_gpus(gpu: Group, known: tuple[GpuDevice, ...]) -> tuple[GpuDevice, ...]:
    """The devices of a report, without memory sizes those of the registered ones."""
    devices = _count(gpu, "gpu.devices", default=len(known))
    gpu_mb = _number(gpu, "gpu.total_memory_mb", default=0.0)
    if "total_memory_mb" in gpu:
        each = _bytes(gpu_mb / devices, "gpu.total_memory_mb") if devices else 0
        return tuple(GpuDevice(index, each) for index in range(devices))
    more = known[-1].memory_bytes if known else 0
    return known[:devices] + tuple(GpuDevice(index, more) for index in range(len(known), devices))


def check_report(resources: Mapping[str, Any]) -> None:
    """BadInput for a report that is invalid for every worker."""
    reported_resources(resources, _ANY_MACHINE)


_FLAT = ("cpu_cores", "memory_mb", "gpu_memory_mb", "gpu_devices")


def required_amounts(requirements: Mapping[str, Any]) -> Amounts:
    """Requirements of a task: nested, flat or both; one core by default. GPU memory without a number of devices means
    one device."""
    _known(requirements, (*GROUPS, *_FLAT), "requirements")
    cpu, memory, gpu = (_group(requirements, name) for name in GROUPS)
    cores = _either(requirements, "cpu_cores", cpu, ("cpu.cores",))
    memory_mb = _either(requirements, "memory_mb", memory, ("memory.memory_mb", "memory.total_mb"))
    gpu_mb = _either(requirements, "gpu_memory_mb", gpu, ("gpu.memory_mb", "gpu.total_memory_mb"))
    devices = _either(requirements, "gpu_devices", gpu, ("gpu.devices",)) or (1.0 if gpu_mb else 0.0)
    asked = Amounts(
        cpu_milli=_milli(cores, "cpu_cores"),
        memory_bytes=_bytes(memory_mb, "memory_mb"),
        gpu_milli=round(devices * WHOLE_GPU),
        gpu_memory_bytes=_bytes(gpu_mb / max(devices, 1), "gpu_memory_mb"),
    )
    if asked == Amounts():
        return Amounts(cpu_milli=1000)
    problem = asked.problem()
    if problem is not None:
        raise BadInput(f"invalid requirements: {problem}")
    return asked


def requirements_view(ask: Amounts) -> dict[str, float]:
    """Requirements of a task in the flat form, without zeros."""
    flat = {
        "cpu_cores": ask.cpu_milli / 1000,
        "memory_mb": ask.memory_bytes / MIB,
        "gpu_devices": ask.gpu_milli / WHOLE_GPU,
        "gpu_memory_mb": ask.gpu_memory_bytes / MIB,
    }
    return {name: amount for name, amount in flat.items() if amount}


def _known(values: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    unknown = [str(name) for name in values if name not in names]
    if unknown:
        raise BadInput(f"{what} have no {unknown[0]!r}; they have: {', '.join(names)}")


def _group(values: Mapping[str, Any], name: str) -> Group:
    group = values.get(name, {})
    if not isinstance(group, Mapping):
        raise BadInput(f"{name} must be a mapping, not {_shown(group)}")
    return group


def _either(flat: Mapping[str, Any], name: str, group: Group, nested: tuple[str, ...]) -> float:
    """The flat number, or the nested one; both are refused unless they are the same."""
    numbers = [_number(group, path) for path in nested if path.partition(".")[2] in group]
    if name in flat:
        numbers.append(_checked(flat[name], name))
    if len(set(numbers)) > 1:
        raise BadInput(f"{name} is given twice: {plain_number(numbers[0])} and {plain_number(numbers[-1])}")
    return numbers[0] if numbers else 0.0


def _number(
    group: Group, path: str, *, default: float | None = None, least: float = 0.0, most: float | None = None
) -> float:
    key = path.partition(".")[2]
    if key not in group and default is not None:
        return default
    if key not in group:
        raise BadInput(f"{path} is missing")
    return _checked(group[key], path, least=least, most=most)


def _count(group: Group, path: str, *, default: int = 0, most: int = MAX_GPUS) -> int:
    key = path.partition(".")[2]
    if group.get(key) is None:
        return default
    number = _checked(group[key], path, most=most)
    if number != int(number):
        raise BadInput(f"{path} must be a whole number, not {_shown(group[key])}")
    return int(number)


def _checked(value: Any, path: str, *, least: float = 0.0, most: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f"{path} must be a number, not {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadInput(f"{path} must be a finite number, not {_shown(value)}")
    if number < least:
        raise BadInput(f"{path} must be {'more than 0' if least else 'at least 0'}, not {_shown(value)}")
    if most is not None and number > most:
        raise BadInput(f"{path} must be at most {plain_number(most)}, not {_shown(value)}")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"


def _milli(amount: float, path: str) -> int:
    return _bounded(amount * 1000, path)


def _bytes(mebibytes: float, path: str) -> int:
    return _bounded(mebibytes * MIB, path)


def _bounded(amount: float, path: str) -> int:
    if amount > MAX_AMOUNT:
        raise BadInput(f"{path} is larger than any machine")
    return round(amount)
