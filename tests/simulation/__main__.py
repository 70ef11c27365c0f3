"""`python -m tests.simulation`: the fault campaign, or one seed of it alone."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from tests.simulation.campaign import run_campaign
from tests.simulation.scenario import draw_scenario
from tests.simulation.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many at once")
    parser.add_argument("--seed", type=int, help="only this one, with its whole history")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # agents that refuse orders are what this is about
    if options.seed is None:
        return run_campaign(range(options.first, options.first + options.seeds), options.processes)
    world = World(draw_scenario(options.seed), keep_all=True)
    report = world.run()
    print("\n".join(report.last))
    print(
        f"seed {report.seed}: {report.violated or 'every invariant held'}{': ' * bool(report.violated)}{report.detail}"
    )
    print(
        f"{report.accepted} accepted, {report.refused} refused, {report.runs} runs, "
        f"{sum(report.faults.values())} faults, {report.steps} steps, {sum(report.checks.values())} checks, "
        f"{report.simulated_ms} ms, fingerprint {report.fingerprint}"
    )
    return 1 if report.violated else 0


if __name__ == "__main__":
    sys.exit(main())
