"""`python -m tests.fuzz`: the fuzz campaign (docs/internals/fuzzing.md)."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.campaign import Campaign, progress


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="how many frames in all (default: 1,000,000)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="what the mutations are drawn from")
    parser.add_argument("--target", default="", help="only targets with this in their name")
    parser.add_argument("--verbose", action="store_true", help="a line for each batch")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.frames:,} frames", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="grid-fuzz-") as folder, Campaign(Path(folder), options.seed) as campaign:
        try:
            for line in campaign.run(options.frames, options.target):
                print(line, flush=True) if options.verbose else progress(line)
        except AssertionError as failure:
            print(f"\nBROKEN: {failure}", flush=True)
            return 1
        finally:
            print(f"\n{campaign.table()}\n{time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
