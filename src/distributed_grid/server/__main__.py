"""`python -m distributed_grid.server`: what `starting` runs; people type `grid daemon start`."""

from __future__ import annotations

import argparse
import sys

from distributed_grid.server.daemon import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="grid-daemon")
    parser.add_argument("--state-dir", required=True)
    parser.add_argument("--config")
    parser.add_argument("--explicit", action="store_true", help="the user named this config")
    parser.add_argument("--report", type=int, help="descriptor that hears of readiness or failure")
    parser.add_argument("--stay", action="store_true", help="do not go away when idle")
    parser.add_argument("--idle-seconds", type=float, default=900.0)
    return serve(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
