"""`python -m tests.clouds`: the fault campaign of rented machines (docs/internals/cloud-campaign.md)."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from tests.clouds.campaign import replay, run_campaign
from tests.clouds.stand_ins import STAND_INS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clouds", description=__doc__)
    parser.add_argument("--provider", choices=sorted(STAND_INS), help="only this one (default: all)")
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds of each (default: 500)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many at once")
    parser.add_argument("--seed", type=int, help="only this one, with its whole history")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    providers = [options.provider] if options.provider else sorted(STAND_INS)
    if options.seed is not None:
        return max(replay(provider, options.seed) for provider in providers)
    seeds = range(options.first, options.first + options.seeds)
    return max(run_campaign(provider, seeds, options.processes) for provider in providers)


if __name__ == "__main__":
    sys.exit(main())
