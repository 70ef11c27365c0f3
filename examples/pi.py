"""Compute pi by throwing darts, and say how it goes while it goes.

    ./grid run-shared --resource-type cpu --amount 1 python examples/pi.py
    python examples/pi.py --samples 20000000 --seed 7

Standard library only, so that it runs wherever a job lands.
"""

from __future__ import annotations

import argparse
import math
import random
import time

STEPS = 10


def darts_inside(throws: int, dice: random.Random) -> int:
    """How many of `throws` random points of the unit square lie in the quarter circle."""
    throw = dice.random
    return sum(throw() ** 2 + throw() ** 2 <= 1.0 for _ in range(throws))


def main() -> None:
    """Print ten estimates, each better than the last (usually), then the result."""
    parser = argparse.ArgumentParser(description="Compute pi by throwing darts.")
    parser.add_argument("--samples", type=int, default=5_000_000, help="darts to throw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=314, help="the same seed gives the same answer")
    parser.add_argument("--digits", type=int, default=6, choices=range(1, 16), metavar="1..15", help="digits shown")
    options = parser.parse_args()
    if options.samples < STEPS:
        parser.error(f"--samples must be at least {STEPS}")

    dice = random.Random(options.seed)
    started = time.monotonic()
    thrown = inside = 0
    for step in range(1, STEPS + 1):
        throws = options.samples * step // STEPS - thrown
        inside += darts_inside(throws, dice)
        thrown += throws
        estimate = 4 * inside / thrown
        print(f"{step * 100 // STEPS:3d} %  pi is about {estimate:.{options.digits}f}", flush=True)
    seconds = time.monotonic() - started
    print(
        f"{thrown:,} darts in {seconds:.1f} s, off by {abs(estimate - math.pi):.{options.digits}f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
