"""A fault campaign: many seeds over a few processes, with every law held against every one of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context

from msgspec import Struct, field

from distributed_grid.simulation.scenario import drawn
from distributed_grid.simulation.world import Report, World

COMMAND = "python -m distributed_grid.simulation --seed"


class Summary(Struct):
    """What a campaign has seen so far."""

    seeds: int = 0
    runs: int = 0
    faults: int = 0
    steps: int = 0
    checks: int = 0
    simulated_ms: int = 0
    broken: list[Report] = field(default_factory=list)

    def count(self, report: Report) -> None:
        self.seeds += 1
        self.runs += report.runs
        self.faults += report.faults
        self.steps += report.steps
        self.checks += report.checks
        self.simulated_ms += report.simulated_ms
        if report.law:
            self.broken.append(report)

    def __str__(self) -> str:
        return (
            f"{self.seeds:,} seeds, {len(self.broken)} broken; {self.runs:,} runs of jobs, {self.faults:,} faults, "
            f"{self.steps:,} steps, {self.checks:,} checks, {self.simulated_ms / 3_600_000:,.1f} simulated hours"
        )


def lived(seed: int) -> Report:
    """One seed from its beginning to its end."""
    return World(drawn(seed)).run()


def reports(seeds: range, processes: int) -> Iterator[Report]:
    """The reports of these seeds, as they come."""
    if processes <= 1:
        yield from map(lived, seeds)
        return
    with get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(lived, seeds, chunksize=4)


def wage(seeds: range, processes: int) -> int:
    """Run a campaign and tell how it goes; 1 where a law was broken."""
    summary, began = Summary(), time.monotonic()
    for report in reports(seeds, processes):
        summary.count(report)
        if report.law:
            print(told(report), flush=True)
        if summary.seeds % max(1, len(seeds) // 20) == 0:
            print(
                f"{summary.seeds:6,} of {len(seeds):,}  {time.monotonic() - began:5.0f} s", file=sys.stderr, flush=True
            )
    print(f"{summary}; {time.monotonic() - began:.0f} s")
    return 1 if summary.broken else 0


def told(report: Report) -> str:
    """A broken law, with what led to it and the command that shows it again."""
    where = f"seed {report.seed}, step {report.steps}, {report.simulated_ms / 1000:.3f} s"
    lines = [*report.last, f"{where}: {report.law}: {report.detail}"]
    return "\n".join([*lines, f"again, alone: {COMMAND} {report.seed}", ""])
