"""Traces of machines with owners: the jobs there, when owners need how much of them, and urgent requests.

Two traces, one made up of round figures and one out of public data, and one more that shows a limit:

`batch`    30 machines of 16 cores and 64 GB. Jobs of 1, 2, 4 or 8 cores and 4 GB a core, whose run times have a median
           of an hour (lognormal, sigma 1: two thirds between 22 minutes and 2.7 hours). An owner comes three times a
           day for 10 minutes to 2 hours and needs an eighth to three quarters of the memory.
`public`   10 machines of 96 cores and 384 GB, the usual ones of the openb trace. Jobs have the cores, the memory and
           the run times of pods of that trace (median 8 minutes, mean 7 hours). Owners are machines of the PlanetLab
           trace, drawn anew for each seed: one is there while its CPU is busier than the idle threshold of 30 %, and
           needs as large a part of the memory.
`whole`    `batch` with owners who need all of it: everybody has to go, whoever chooses.

In all three half of the jobs mark checkpoints, each at its own rhythm of 10 to 30 minutes; of ten jobs six are `low`,
three `medium` and one `high`; an urgent job comes every ten minutes and takes 10 to 60.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count

from bench.sizes import sized
from bench.traces import TRACES, lines_of
from distributed_grid.domain.resources import Priority

GB = 2**30
MINUTE, HOUR = 60_000, 3_600_000
LONG = sized(24, smoke=12) * HOUR
MACHINES, BIG_MACHINES = sized((30, 10), smoke=(6, 2))
BUSY = 30.0
PODS = TRACES / "openb" / "openb_pod_list_default.csv.gz"
LOADS = TRACES / "planetlab" / "cpu_20110303.csv.gz"


@dataclass(frozen=True, slots=True)
class Work:
    """A job: how large it is, how long it takes in all, and how often it marks a checkpoint (0: never)."""

    uid: str
    cpu_milli: int
    memory_bytes: int
    priority: Priority
    takes_ms: int
    marks_ms: int = 0


Shape = tuple[int, int, int]
"""Thousandths of cores, bytes of memory, and milliseconds."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Machines, what their jobs are like, and when which part of them (0 to 1) is their owners'."""

    name: str
    machines: int
    cpu_milli: int
    memory_bytes: int
    shape: Callable[[random.Random], Shape]
    owner: Callable[[random.Random], Iterator[tuple[int, float]]]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(self.machines))

    def jobs(self, seed: int) -> Iterator[Work]:
        """Work without end."""
        draw = random.Random(f"work {seed}")
        for number in count():
            priority = draw.choices([Priority.LOW, Priority.MEDIUM, Priority.HIGH], [6, 3, 1])[0]
            marks = draw.randint(10 * MINUTE, 30 * MINUTE) if draw.random() < 0.5 else 0
            cpu, memory, takes = self.shape(draw)
            yield Work(f"j{number}", cpu, memory, priority, takes, marks)

    def urgent(self, seed: int) -> Iterator[tuple[int, Work]]:
        """Urgent jobs, as large as the others, and when each comes."""
        draw = random.Random(f"urgent {seed}")
        at = HOUR
        while at < LONG:
            cpu, memory, _ = self.shape(draw)
            yield at, Work(f"u{at}", cpu, memory, Priority.URGENT, draw.randint(10 * MINUTE, 60 * MINUTE))
            at += 1 + round(draw.expovariate(1 / (10 * MINUTE)))

    def owners(self, seed: int) -> Iterator[tuple[str, int, int]]:
        """Whose owner needs from when on how much memory."""
        draw = random.Random(f"owners {seed}")
        for name in self.nodes:
            for at, part in self.owner(draw):
                yield name, at, round(part * self.memory_bytes)


def _batch(draw: random.Random) -> Shape:
    cores = draw.choice([1, 2, 4, 8])
    return 1000 * cores, 4 * cores * GB, round(draw.lognormvariate(0, 1) * HOUR)


def _pod(draw: random.Random) -> Shape:
    return draw.choice(_pods())


@cache
def _pods() -> list[Shape]:
    """The pods of the openb trace that ran and ended; what asks for no memory gets a share of it by its cores."""
    found = []
    for row in csv.DictReader(lines_of(PODS)):
        if row["scheduled_time"] and row["deletion_time"]:
            seconds = int(row["deletion_time"]) - int(row["scheduled_time"])
            cpu, memory = int(row["cpu_milli"]), int(row["memory_mib"]) * 2**20
            if seconds > 0 and 0 < cpu <= 96_000 and memory <= 384 * GB:
                found.append((cpu, memory or 4 * cpu * GB // 1000, 1000 * seconds))
    return found


def _visits(draw: random.Random, low: float = 1 / 8, high: float = 3 / 4) -> Iterator[tuple[int, float]]:
    at = round(draw.expovariate(3 / LONG))
    while at < LONG:
        yield at, draw.uniform(low, high)
        at += draw.randint(10 * MINUTE, 120 * MINUTE)
        yield at, 0.0
        at += 1 + round(draw.expovariate(3 / LONG))


def _visits_needing_all(draw: random.Random) -> Iterator[tuple[int, float]]:
    return _visits(draw, 1.0, 1.0)


def _planetlab(draw: random.Random) -> Iterator[tuple[int, float]]:
    before = 0.0
    for sample, percent in enumerate(draw.choice(_loads())):
        part = percent / 100 if percent > BUSY else 0.0
        if part != before:
            yield 5 * MINUTE * sample + 1, part
        before = part


@cache
def _loads() -> list[list[float]]:
    return [[float(percent) for percent in row[1:]] for row in list(csv.reader(lines_of(LOADS)))[1:]]


BATCH = Trace("batch", MACHINES, 16_000, 64 * GB, _batch, _visits)
PUBLIC = Trace("public", BIG_MACHINES, 96_000, 384 * GB, _pod, _planetlab)
WHOLE = Trace("whole", MACHINES, 16_000, 64 * GB, _batch, _visits_needing_all)
