"""Size of a pool of workers: the nodes in use of a Microsoft GPU cluster, and how many the rule that ships would keep.

Steps are 10 minutes with the highest number in use; 1 to 14 December 2017 are measured, what was before is learned
from. The pool starts at running + 20. Where more run than the pool has it grows to running + 20, which is a wake-up.
Utilisation is the mean of running / pool. Recomputed for comparison: reactive (the pool is always running + 20, each
rise is a wake-up) and the rule of Helios (Hu et al., SC'21) with the same time of the day before as its forecast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from statistics import fmean

from bench.sizes import Unavailable
from bench.table import Line
from bench.traces import TRACES, lines_of
from distributed_grid.prediction.warm_pool import PoolSizer

STEPS_PER_DAY = 144
HEADROOM = 20
FIRST, LAST = datetime(2017, 12, 1), datetime(2017, 12, 15)  # noqa: DTZ001 - the trace names no zone
REACTIVE = (60.6, 93.3)
DAY_BEFORE = (0.86, 88.8)
"""Wake-ups a day and utilisation %, as they were measured before."""
CLOSE = 0.1

Resize = Callable[[int, int], int]
"""From step and pool to the pool after it."""


def measure() -> list[Line]:
    """The three rules."""
    folder = TRACES / "philly"
    if not folder.is_dir():
        raise Unavailable(f"no cluster at {folder}; see GRID_TRACES")
    running, first, last = read(folder)
    sizer = PoolSizer(STEPS_PER_DAY, HEADROOM)
    for step in range(first):
        if (load := running[step]) is not None:
            sizer.observe(step, load)
    loads = [load or 0 for load in running]  # nothing is missing in what is measured and in the day before

    def shipped(step: int, pool: int) -> int:
        sizer.observe(step, loads[step])
        return sizer.size(pool)

    rules = {
        "reactive": lambda step, _: loads[step] + HEADROOM,
        "day before": helios_rule(loads, first),
        "shipped": shipped,
    }
    results = {name: follow(loads, first, last, rule) for name, rule in rules.items()}
    for name, (wakeups, utilisation) in results.items():
        print(f"  {name:12} {wakeups:6.2f} wake-ups a day, {utilisation:.1f} % utilisation", file=sys.stderr)
    apart = max(
        abs(ours - theirs)
        for name, before in (("reactive", REACTIVE), ("day before", DAY_BEFORE))
        for ours, theirs in zip(results[name], before, strict=True)
    )
    wakeups, utilisation = results["shipped"]
    return [
        Line("pool of workers, wake-ups a day", wakeups, 1, "", True),
        Line("  utilisation", utilisation, 91, "%"),
        Line("  reactive and day before, apart from earlier figures", apart, CLOSE, "", True),
    ]


def read(folder: Path) -> tuple[list[int | None], int, int]:
    """The highest number in use in each step, and the steps that are measured."""
    highest: dict[int, int] = {}
    begin = None
    for line in lines_of(folder / "philly_node_sequence.csv.gz")[1:]:
        minute, active, _ = line.split(",")
        at = datetime.fromisoformat(minute)
        begin = begin or at
        step = (at - begin).total_seconds() * STEPS_PER_DAY // 86_400
        highest[int(step)] = max(highest.get(int(step), 0), int(active))
    assert begin is not None
    first, last = (round((day - begin).total_seconds() * STEPS_PER_DAY / 86_400) for day in (FIRST, LAST))
    return [highest.get(step) for step in range(max(highest) + 1)], first, last


def follow(loads: list[int], first: int, last: int, resize: Resize) -> tuple[float, float]:
    """Wake-ups a day and utilisation % of a rule; every growth of the pool is a wake-up."""
    pool = loads[first] + HEADROOM
    wakeups = 0
    used = []
    for step in range(first, last):
        before, pool = pool, resize(step, pool)
        wakeups += pool > before
        used.append(loads[step] / pool)
    return wakeups * STEPS_PER_DAY / (last - first), 100 * fmean(used)


def helios_rule(loads: list[int], first: int) -> Resize:
    """Shrink when load fell and the forecast of five hours is below it and does not rise; not soon after a wake-up."""
    ahead, pause = 30, 10
    earliest_shrink = first

    def resize(step: int, pool: int) -> int:
        nonlocal earliest_shrink
        load = loads[step]
        if load > pool:
            pool = load + HEADROOM
            earliest_shrink = step + pause
        coming = loads[step + 1 - STEPS_PER_DAY : step + 1 - STEPS_PER_DAY + 2 * ahead]
        fell = step > first and fmean(loads[max(first, step - 2) : step]) > load
        if fell and load >= fmean(coming[:ahead]) >= fmean(coming) and step >= earliest_shrink:
            pool = min(pool, load + HEADROOM)
        return pool

    return resize
