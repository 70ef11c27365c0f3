"""Fault campaign: many seeds over a few processes, each with all invariants checked."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter as Tally
from collections.abc import Iterator
from multiprocessing import get_context

from msgspec import Struct, field

from tests.simulation.faults import FaultKind
from tests.simulation.scenario import draw_scenario
from tests.simulation.world import RunReport, World

COMMAND = "python -m tests.simulation --seed"


class Summary(Struct):
    """Results of a campaign so far."""

    seeds: int = 0
    runs: int = 0
    faults: Tally[str] = field(default_factory=Tally)
    steps: int = 0
    checks: Tally[str] = field(default_factory=Tally)
    simulated_ms: int = 0
    broken: list[RunReport] = field(default_factory=list)

    def count(self, report: RunReport) -> None:
        self.seeds += 1
        self.runs += report.runs
        self.faults.update(report.faults)
        self.steps += report.steps
        self.checks.update(report.checks)
        self.simulated_ms += report.simulated_ms
        if report.violated:
            self.broken.append(report)

    def __str__(self) -> str:
        return (
            f"{self.seeds:,} seeds, {len(self.broken)} broken; {self.runs:,} runs of jobs, "
            f"{self.faults.total():,} faults, {self.steps:,} steps, {self.checks.total():,} checks, "
            f"{self.simulated_ms / 3_600_000:,.1f} simulated hours"
        )

    def coverage(self) -> str:
        """How often each kind of fault was injected and each invariant checked; 0 where it never was."""
        faults = {str(kind): self.faults[kind] for kind in FaultKind}
        lines = ["faults injected"]
        lines += [f"{count:14,}  {name}" for name, count in sorted(faults.items(), key=_by_count)]
        lines += ["", "invariants checked"]
        lines += [f"{count:14,}  {name}" for name, count in sorted(self.checks.items(), key=_by_count)]
        return "\n".join(lines)


def _by_count(item: tuple[str, int]) -> tuple[int, str]:
    return (-item[1], item[0])


def run_seed(seed: int) -> RunReport:
    """Run one seed from its beginning to its end."""
    return World(draw_scenario(seed)).run()


def reports(seeds: range, processes: int) -> Iterator[RunReport]:
    """The reports of these seeds, as they come."""
    if processes <= 1:
        yield from map(run_seed, seeds)
        return
    with get_context("spawn").Pool(processes, logging.disable, (logging.WARNING,)) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=4)


def run_campaign(seeds: range, processes: int) -> int:
    """Run a campaign and print how it goes; 1 where an invariant was violated."""
    summary, began = Summary(), time.monotonic()
    for report in reports(seeds, processes):
        summary.count(report)
        if report.violated:
            print(failure_text(report), flush=True)
        if summary.seeds % max(1, len(seeds) // 20) == 0:
            print(
                f"{summary.seeds:6,} of {len(seeds):,}  {time.monotonic() - began:5.0f} s", file=sys.stderr, flush=True
            )
    print(f"{summary.coverage()}\n\n{summary}; {time.monotonic() - began:.0f} s")
    return 1 if summary.broken else 0


def failure_text(report: RunReport) -> str:
    """A violated invariant, with what led to it and the command that shows it again."""
    where = f"seed {report.seed}, step {report.steps}, {report.simulated_ms / 1000:.3f} s"
    lines = [*report.last, f"{where}: {report.violated}: {report.detail}"]
    return "\n".join([*lines, f"again, alone: {COMMAND} {report.seed}", ""])
