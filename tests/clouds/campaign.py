"""Campaign: many schedules over a few processes, and one of them again with its history."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter as Tally
from collections.abc import Iterator
from multiprocessing import get_context

from tests.clouds.schedule import CloudSchedule
from tests.clouds.world import ScheduleReport

COMMAND = "python -m tests.clouds --provider {provider} --seed {seed}"
LAST_LINES = 40


def replay(provider: str, seed: int) -> int:
    """Run one schedule and print its history."""
    report = run_seed((provider, seed))
    print("\n".join([*report.history, str(report)]))
    return int(bool(report.broken))


def run_seed(which: tuple[str, int]) -> ScheduleReport:
    provider, seed = which
    return CloudSchedule(provider, seed).run()


def reports(provider: str, seeds: range, processes: int) -> Iterator[ScheduleReport]:
    """The reports of these seeds, as they come."""
    which = [(provider, seed) for seed in seeds]
    if processes <= 1:
        yield from map(run_seed, which)
        return
    with get_context("spawn").Pool(processes, logging.disable, (logging.WARNING,)) as pool:
        yield from pool.imap_unordered(run_seed, which, chunksize=2)


def run_campaign(provider: str, seeds: range, processes: int) -> int:
    """Run many schedules of one provider and print how it goes; 1 where a promise was broken."""
    counts: Tally[str] = Tally()
    broken, done, began = 0, 0, time.monotonic()
    for report in reports(provider, seeds, processes):
        done += 1
        counts.update(report.counts)
        if report.broken:
            broken += 1
            again = COMMAND.format(provider=provider, seed=report.seed)
            print("\n".join([*report.history[-LAST_LINES:], f"{report}\nagain: {again}"]), flush=True)
        if done % max(1, len(seeds) // 20) == 0:
            print(f"{provider}: {done:5,} of {len(seeds):,}  {time.monotonic() - began:5.0f} s", file=sys.stderr)
    lines = [f"{count:12,}  {name}" for name, count in sorted(counts.items(), key=lambda one: (-one[1], one[0]))]
    print("\n".join([f"{provider}", *lines]))
    print(f"{provider}: {done:,} schedules, {broken} broken; {time.monotonic() - began:.0f} s", flush=True)
    return int(bool(broken))
