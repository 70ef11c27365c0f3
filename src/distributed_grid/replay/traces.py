"""Traces: logged work as requests that can be made again, read from the Standard Workload Format and from openb lists.

What a format does not say (users, priorities, waiting times) is not made up: such work has one user, medium priority
and waits for as long as it takes. In SWF (one job a line in 18 numbers, comments after a semicolon) processors are
taken for cores of one machine, as wide as the header's MaxProcs: the format does not say which processors belong
together. The requested time is what the user expected; nothing is stopped when it is over. The openb GPU cluster
traces are CSV files: a list of pods, and beside it the list of nodes they ran on.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable

from msgspec import Struct

from distributed_grid.domain.leases import FOREVER_MS, Request
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Capacity, GpuDevice, Priority
from distributed_grid.errors import BadInput

PATIENT_MS = FOREVER_MS
"""How long work waits whose log does not say."""


class LoggedJob(Struct, frozen=True):
    """One request as it was made, and how long what it was for took; without a command it is a plain lease."""

    at_ms: int
    request: Request
    run_ms: int
    retries: int = 0
    is_job: bool = True
    deadline_in_ms: int = 0


class Trace(Struct, frozen=True):
    """All that a log says, in the order of its requests; `left_out` counts what cannot be replayed, and why."""

    name: str
    work: tuple[LoggedJob, ...]
    nodes: tuple[Node, ...] = ()
    left_out: tuple[tuple[str, int], ...] = ()

    def first(self, limit: int | None) -> Trace:
        """The same with only so many requests."""
        return self if limit is None else Trace(self.name, self.work[:limit], self.nodes, self.left_out)


def make_trace(name: str, work: Iterable[LoggedJob], nodes: Iterable[Node], left_out: dict[str, int]) -> Trace:
    """A trace in order; refused where nothing of it can be replayed."""
    ordered = tuple(sorted(work, key=lambda one: one.at_ms))
    if not ordered:
        why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise BadInput(f"{name}: nothing in it can be replayed" + (f": {why}" if why else ""))
    return Trace(name, ordered, tuple(nodes), tuple(left_out.items()))


FIELDS = 18
SUBMIT, RUN, USED, WANTED, EXPECTED, USER, GROUP = 1, 3, 4, 7, 8, 11, 12
_HEADER = re.compile(r";\s*MaxProcs:\s*(\d+)")


def read_swf(name: str, lines: Iterable[str]) -> Trace:
    """The jobs that ran, with the processors they asked for (or got, where that was not logged)."""
    work: list[LoggedJob] = []
    never = widest = declared = 0
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if header := _HEADER.match(text):
            declared = int(header.group(1))
        if not text or text.startswith(";"):
            continue
        fields = _numbers(name, number, text)
        width = fields[WANTED] if fields[WANTED] > 0 else fields[USED]
        if fields[RUN] <= 0 or width <= 0:
            never += 1
            continue
        widest = max(widest, width)
        request = Request(
            f"job{fields[0]}",
            f"user{fields[USER]}",
            Amounts(cpu_milli=1000 * width),
            wait_ms=PATIENT_MS,
            team=f"group{fields[GROUP]}" if fields[GROUP] >= 0 else "",
            expects_ms=1000 * max(fields[EXPECTED], 0),
        )
        work.append(LoggedJob(1000 * fields[SUBMIT], request, 1000 * fields[RUN]))
    _make_sure_ids_differ(name, work)
    machine = Node("machine", capacity=Capacity(1000 * (declared or widest), 2**40))
    return make_trace(name, work, [machine], {"that never ran": never} if never else {})


def _numbers(name: str, number: int, text: str) -> list[int]:
    fields = text.split()
    if len(fields) != FIELDS:
        raise BadInput(f"{name}, line {number}: {FIELDS} numbers make a job, here are {len(fields)}")
    try:
        found = [int(field) if field.lstrip("-").isdecimal() else int(float(field)) for field in fields]
    except (ValueError, OverflowError):
        wrong = next(field for field in fields if not _is_number(field))
        raise BadInput(f"{name}, line {number}: {wrong[:40]!r} is not a number") from None
    if found[SUBMIT] < 0 or max(found) > 10**12:
        raise BadInput(f"{name}, line {number}: no job was submitted then or is that large")
    return found


def _is_number(field: str) -> bool:
    try:
        int(float(field))
    except (ValueError, OverflowError):
        return False
    return True


def _make_sure_ids_differ(name: str, work: list[LoggedJob]) -> None:
    seen: set[str] = set()
    for one in work:
        if one.request.id in seen:
            raise BadInput(f"{name}: {one.request.id} is there twice")
        seen.add(one.request.id)


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
    return make_trace(name, work, nodes, {"that never ran": never} if never else {})


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
