"""What the audit trail tells of a request and of a node: enough to ask the same again in a simulation."""

from __future__ import annotations

from distributed_grid.domain.leases import Request
from distributed_grid.domain.resources import Capacity

Data = dict[str, str | int | list[str]]


def told_of_request(request: Request, now: int, *, retries: int = 0) -> Data:
    """The request in numbers; what is not asked for, or is as usual, is left out."""
    ask = request.ask
    data: Data = {
        "cpu_milli": ask.cpu_milli,
        "memory_bytes": ask.memory_bytes,
        "gpu_milli": ask.gpu_milli,
        "gpu_memory_bytes": ask.gpu_memory_bytes,
        "gpu_models": [*ask.gpu_models],
        "custom": _pairs(ask.custom),
        "duration_ms": request.duration_ms,
        "expects_ms": request.expects_ms,
        "deadline_in_ms": max(request.deadline_ms - now, 0),
        "strategy": str(request.strategy or ""),
        "team": request.team,
        "target": request.target,
        "prefer": [*request.prefer],
        "require": [*request.require],
        "labels": [f"{key}={value}" for key, value in request.labels],
        "affinity": [*request.affinity],
        "anti_affinity": [*request.anti_affinity],
        "group": request.group,
        "gang": request.gang if request.gang > 1 else 0,
        "retries": retries,
    }
    usual = {name: value for name, value in data.items() if value}
    return {**usual, "priority": request.priority.name.lower(), "wait_ms": request.wait_ms}


def told_of_capacity(capacity: Capacity) -> Data:
    """What a node has, in numbers."""
    data: Data = {
        "cpu_milli": capacity.cpu_milli,
        "memory_bytes": capacity.memory_bytes,
        "gpus": [device.name for device in capacity.gpus],
        "gpu_memory_bytes": max((device.memory_bytes for device in capacity.gpus), default=0),
        "custom": _pairs(capacity.custom),
    }
    return {name: value for name, value in data.items() if value}


def _pairs(custom: tuple[tuple[str, int], ...]) -> list[str]:
    return [f"{name}={count}" for name, count in custom]
