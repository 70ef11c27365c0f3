"""The CSV files of the openb GPU cluster traces: a list of pods, and beside it the list of nodes they ran on."""

from __future__ import annotations

import csv
from collections.abc import Iterable

from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Capacity, GpuDevice, Priority
from distributed_grid.errors import BadInput
from distributed_grid.simulation.traces.trace import PATIENT_MS, LoggedJob, Trace, a_trace

MB = 1024**2
POD = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
TIMES = ("creation_time", "deletion_time", "scheduled_time")
NODE = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
PRIORITIES = {"LS": Priority.HIGH, "BE": Priority.LOW}
"""Latency-sensitive pods are more, best-effort ones less urgent than the others."""


def read_pods(name: str, lines: Iterable[str], nodes: Iterable[Node]) -> Trace:
    """The pods that were scheduled, each for as long as it was there."""
    work, never = [], 0
    for number, row in _rows(name, lines, (*POD, *TIMES)):
        if not row["scheduled_time"]:
            never += 1
            continue
        began, ended = _number(name, number, row["scheduled_time"]), _number(name, number, row["deletion_time"])
        if ended <= began:
            never += 1
            continue
        request = Request(
            row["name"],
            "openb",
            _ask(name, number, row),
            PRIORITIES.get(row.get("qos", ""), Priority.MEDIUM),
            wait_ms=PATIENT_MS,
        )
        work.append(LoggedJob(1000 * _number(name, number, row["creation_time"]), request, 1000 * (ended - began)))
    return a_trace(name, work, nodes, {"that never ran": never} if never else {})


def read_asks(name: str, lines: Iterable[str]) -> list[Amounts]:
    """What the pods of a list ask for, whether or not they ever ran."""
    return [_ask(name, number, row) for number, row in _rows(name, lines, POD)]


def _ask(name: str, number: int, row: dict[str, str]) -> Amounts:
    count = _number(name, number, row["num_gpu"])
    share = _number(name, number, row["gpu_milli"]) if count == 1 else WHOLE_GPU * count
    ask = Amounts(
        cpu_milli=_number(name, number, row["cpu_milli"]),
        memory_bytes=_number(name, number, row["memory_mib"]) * MB,
        gpu_milli=share,
        gpu_models=tuple(sorted(set(row.get("gpu_spec", "").split("|")) - {""})) if count else (),
    )
    if (problem := ask.problem()) is not None:
        raise BadInput(f"{name}, line {number}: {problem}")
    return ask


def read_nodes(name: str, lines: Iterable[str]) -> list[Node]:
    """The machines of a node list."""
    nodes = []
    for number, row in _rows(name, lines, NODE):
        gpus = tuple(GpuDevice(index, name=row["model"]) for index in range(_number(name, number, row["gpu"])))
        memory = _number(name, number, row["memory_mib"]) * MB
        nodes.append(Node(row["sn"], capacity=Capacity(_number(name, number, row["cpu_milli"]), memory, gpus)))
    return nodes


def _rows(name: str, lines: Iterable[str], columns: tuple[str, ...]) -> Iterable[tuple[int, dict[str, str]]]:
    """The rows with their line numbers; every column must be there."""
    reader = csv.DictReader(lines)
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        hint = ": without times it cannot be replayed" if set(missing) <= set(TIMES) else ""
        raise BadInput(f"{name}, line 1: the column {missing[0]} is missing{hint}")
    for row in reader:
        if None in row or None in row.values():
            raise BadInput(f"{name}, line {reader.line_num}: {len(reader.fieldnames or ())} columns make a row")
        yield reader.line_num, row


def _number(name: str, number: int, text: str) -> int:
    try:
        found = int(float(text))
    except (ValueError, OverflowError):
        raise BadInput(f"{name}, line {number}: {text[:40]!r} is not a number") from None
    if not 0 <= found <= 10**12:
        raise BadInput(f"{name}, line {number}: {found} is out of range")
    return found
