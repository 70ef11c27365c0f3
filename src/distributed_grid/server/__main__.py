"""`python -m distributed_grid.server`: the daemon process; people type `grid daemon start`.

The lock is acquired before anything heavy is imported: of many daemons that start at once, all but one exit after a few
milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import sys
from collections.abc import Iterator

from distributed_grid.errors import GridError
from distributed_grid.posix.environment import take_variables
from distributed_grid.server.instance_lock import AlreadyRunning, InstanceLock, StartupReport
from distributed_grid.state_dir import StateDir

IMPORT_VARIABLES = {"OPENBLAS_NUM_THREADS": "1"}
"""One thread for linear algebra, since the cores are lent to others."""


def main() -> int:
    """Run the control plane until stopped or idle; the exit code of the process."""
    parser = argparse.ArgumentParser(prog="grid-daemon")
    parser.add_argument("--state-dir", required=True)
    parser.add_argument("--config")
    parser.add_argument("--explicit", action="store_true", help="the user named this config")
    parser.add_argument("--report", type=int, help="descriptor for the startup report")
    parser.add_argument("--variables", type=int, help="descriptor of a file with the shell's variables for the config")
    parser.add_argument("--stay", action="store_true", help="do not exit when idle")
    parser.add_argument("--idle-seconds", type=float, default=900.0)
    options = parser.parse_args()
    startup = StartupReport(options.report)
    if options.variables is not None:
        take_variables(options.variables)
    state_dir = StateDir(options.state_dir)
    instance_lock = InstanceLock(state_dir)
    try:
        state_dir.create()
        instance_lock.acquire()
    except AlreadyRunning:
        startup.send("taken")
        return 0
    except GridError as failure:
        startup.send("failed", message=str(failure))
        return 1
    try:
        # Use all cores, however the starting command was pinned, and as many descriptors as allowed.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with _quick_imports():
            from distributed_grid.server.daemon import serve
        return serve(state_dir, instance_lock, options, startup)
    finally:
        instance_lock.release()


@contextlib.contextmanager
def _quick_imports() -> Iterator[None]:
    """Import without collecting garbage, of which there is none, and with `IMPORT_VARIABLES` in the environment.

    Imported modules stay: the collector does not visit them later, either. Processes that are started later do not
    inherit the variables.
    """
    given = dict(os.environ)
    os.environ.update(IMPORT_VARIABLES)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in IMPORT_VARIABLES:
            del os.environ[name]
        os.environ.update(given)


if __name__ == "__main__":
    sys.exit(main())
