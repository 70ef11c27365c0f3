"""`python -m distributed_grid.server`: what `starting` runs; people type `grid daemon start`.

The seat is taken before anything heavy is imported: of many candidates that start at once, all but one
step back after a few milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import sys

from distributed_grid.errors import GridError
from distributed_grid.server.instance_lock import AlreadyRunning, InstanceLock, StartupReport
from distributed_grid.state_dir import StateDir


def main() -> int:
    """Be the control plane until told to stop or idle; the exit code of the process."""
    options = _options()
    starter = StartupReport(options.report)
    places = StateDir(options.state_dir)
    seat = InstanceLock(places)
    try:
        places.create()
        seat.take()
    except AlreadyRunning:
        starter.tell("taken")
        return 0
    except GridError as failure:
        starter.tell("failed", str(failure))
        return 1
    try:
        _take_what_the_machine_gives()
        from distributed_grid.server.daemon import serve

        return serve(places, seat, options, starter)
    finally:
        seat.leave()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="grid-daemon")
    parser.add_argument("--state-dir", required=True)
    parser.add_argument("--config")
    parser.add_argument("--explicit", action="store_true", help="the user named this config")
    parser.add_argument("--report", type=int, help="descriptor that hears of readiness or failure")
    parser.add_argument("--stay", action="store_true", help="do not go away when idle")
    parser.add_argument("--idle-seconds", type=float, default=900.0)
    return parser.parse_args()


def _take_what_the_machine_gives() -> None:
    """All cores, whoever pinned the command that started us, and as many descriptors as allowed."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
