"""The Standard Workload Format: one job a line in 18 numbers, comments after a semicolon.

Processors are taken for cores of one machine, as wide as the header's MaxProcs: the format does not say which
processors belong together. The requested time is what the user expected; nothing is stopped when it is over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.errors import BadInput
from distributed_grid.simulation.traces.trace import PATIENT_MS, LoggedJob, Trace, a_trace

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
    return a_trace(name, work, [machine], {"that never ran": never} if never else {})


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
