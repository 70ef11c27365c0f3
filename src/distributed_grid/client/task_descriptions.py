"""Fields of requests about tasks and their runs, from the mappings that people write.

A task is a command, or a type with parameters. Several names are one quantity: `memory_mb`, `peak_memory_mb` and
`{"memory": {"used_mb": …}}`. Names that are not listed here are ignored.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from distributed_grid.errors import BadInput

MB = 1024**2
MAX_WORD_CHARS = 128
PARAMETERS = ("parameters", "params", "config")
"""Mappings inside a task whose entries are parameters."""
KNOWN_PARAMETERS = (
    *("batch_size", "sequence_length", "input_length", "image_size", "epochs", "iterations", "samples"),
    *("model", "model_name", "model_type", "model_family", "precision", "dtype", "device", "hardware", "backend"),
)
"""Parameters that may also stand beside the type."""
MEASURED = ("metrics", "resources", "resource_usage", "resources_used", "actual_resources", "usage")
"""Mappings inside an execution whose entries are measurements."""
_TYPE = ("task_type", "type")
_COMMAND = ("command", "argv")
_INPUT = {"input_bytes": 1, "input_size_bytes": 1, "input_size": 1, "input_mb": MB}
_MEMORY = {
    **dict.fromkeys(("memory_bytes", "peak_memory_bytes", "max_memory_bytes", "memory.used_bytes"), 1),
    **dict.fromkeys(("memory_mb", "peak_memory_mb", "max_memory_mb", "memory_used_mb", "memory_usage_mb"), MB),
    **dict.fromkeys(("memory.peak_mb", "memory.used_mb", "memory.mb"), MB),
    **dict.fromkeys(("memory_gb", "peak_memory_gb", "memory.used_gb"), 1024 * MB),
}
_GPU_MEMORY = {
    "gpu_memory_bytes": 1,
    **dict.fromkeys(("gpu_memory_mb", "peak_gpu_memory_mb", "gpu_memory_used_mb"), MB),
    **dict.fromkeys(("gpu.memory_mb", "gpu.used_mb", "gpu.used_memory_mb"), MB),
    "gpu_memory_gb": 1024 * MB,
}
_RUN_TIME = {
    **dict.fromkeys(("run_ms", "duration_ms", "execution_time_ms"), 1),
    **dict.fromkeys(("run_seconds", "duration_seconds", "execution_time_seconds", "runtime_seconds"), 1000),
    **dict.fromkeys(("duration", "execution_time", "runtime", "elapsed_seconds"), 1000),
}
_CPU_TIME = {"cpu_ms": 1, **dict.fromkeys(("cpu_seconds", "cpu_time_seconds", "cpu_time"), 1000)}
_CORES = {"cpu_cores": 1.0, "cpu_cores_used": 1.0, "cpu.cores": 1.0, "cpu.cores_used": 1.0, "cpu.used_cores": 1.0}
_PERCENT = {"cpu_percent": 0.01, "cpu.percent": 0.01}


def task_fields(task: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that describe a task: `argv`, or `task_type` and `parameters`; and `input_bytes`."""
    command = _first(task, _COMMAND)
    fields: dict[str, Any] = {"input_bytes": _quantity(task, _INPUT) or 0}
    if isinstance(command, str) and command:
        try:
            command = shlex.split(command)
        except ValueError as error:
            raise BadInput(f"the command cannot be split into words: {error}") from None
    if command:
        if not isinstance(command, list | tuple) or not all(isinstance(word, str) for word in command):
            raise BadInput("a command is a text or a list of words")
        return {**fields, "argv": list(command)}
    task_type = _first(task, _TYPE)
    if not isinstance(task_type, str) or not task_type.strip():
        raise BadInput("a task needs a task_type or a command")
    return {**fields, "task_type": task_type.strip(), "parameters": _parameters(task)}


def execution_fields(task_id: str, execution: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an ended run: its task, and its measured use."""
    if not isinstance(execution, Mapping):
        raise BadInput(f"an execution is a mapping of names to values, not {type(execution).__name__}")
    inner = [execution[name] for name in ("task", "task_data") if isinstance(execution.get(name), Mapping)]
    task = {**execution, **(inner[0] if inner else {})}
    measured = {**execution}
    for name in MEASURED:
        if isinstance(execution.get(name), Mapping):
            measured.update(execution[name])
    run_ms = _quantity(measured, _RUN_TIME) or 0
    cpu_ms = _quantity(measured, _CPU_TIME)
    if cpu_ms is None:
        cores = _number(measured, _CORES) or _number(measured, _PERCENT)
        cpu_ms = round(cores * run_ms) if cores else 0
    return {
        **task_fields(task),
        "task_id": str(task_id),
        "attempt": int(_number(execution, {"attempt": 1.0}) or 1),
        "memory_bytes": _quantity(measured, _MEMORY) or 0,
        "cpu_ms": cpu_ms,
        "run_ms": run_ms,
        "gpu_memory_bytes": _quantity(measured, _GPU_MEMORY) or 0,
        "cut_short": bool(execution.get("cut_short", False)) or execution.get("success") is False,
    }


def _parameters(task: Mapping[str, Any]) -> dict[str, float | str]:
    parameters: dict[str, Any] = {name: task[name] for name in KNOWN_PARAMETERS if name in task}
    for name in PARAMETERS:
        if isinstance(task.get(name), Mapping):
            parameters.update(task[name])
    return {
        str(name)[:MAX_WORD_CHARS]: value[:MAX_WORD_CHARS] if isinstance(value, str) else float(value)
        for name, value in parameters.items()
        if isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))
    }


def _first(task: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((task[name] for name in names if task.get(name)), None)


def _quantity(fields: Mapping[str, Any], units: Mapping[str, int]) -> int | None:
    """The first of these quantities that is given, in base units."""
    number = _number(fields, {name: float(unit) for name, unit in units.items()})
    return None if number is None else round(number)


def _number(fields: Mapping[str, Any], units: Mapping[str, float]) -> float | None:
    """The first of these that is given, at a plain name or a dotted one."""
    for name, unit in units.items():
        outer, _, inner = name.partition(".")
        value = fields.get(outer)
        if inner:
            value = value.get(inner) if isinstance(value, Mapping) else None
        elif isinstance(value, Mapping):
            value = None
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2**60 / unit:
                raise BadInput(f"{name} must be a number, 0 or more, not {value!r}")
            return value * unit
    return None
