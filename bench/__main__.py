"""`python -m bench [--smoke] [NAME …]`: run the measurements and print one table.

A measurement that fails does not lose the figures of the others: its error is printed, and the exit code is 1.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback

from bench.sizes import VARIABLE, Unavailable
from bench.table import Line, render

NAMES = (
    "reactor_steps",
    "queue_growth",
    "queue_mix",
    "placement",
    "preemption",
    "process_scan",
    "disk_watch",
    "lost_work",
    "durable_grants",
    "daemon_restart",
    "commands",
    "offload_wrap",
    "event_followers",
    "readers",
    "idle_offers",
    "openb",
    "confidence",
    "dry_run",
    "lease_report",
    "boosts",
    "ray_boosts",
    "memory",
    "jobs",
    "run_recording",
    "agents",
    "agent_transports",
    "idle_agent",
    "simulator",
    "sizing",
    "scaling",
    "worker_steps",
    "auto_offload",
    "cloud_orders",
    "worker_starts",
    "prediction",
    "swf",
    "fairness",
    "owner_return",
    "load_forecast",
    "pool_size",
    "offload_freeze",
)
"""Each is a module of this package with a function `measure`."""
SMOKE_NOTE = "these are tiny sizes, which only show that each measurement runs: the figures mean nothing"


def main(words: list[str]) -> int:
    names = [word for word in words if word != "--smoke"] or list(NAMES)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"no measurement {unknown[0]!r}; there is {', '.join(NAMES)}", file=sys.stderr)
        return 2
    if "--smoke" in words:
        os.environ[VARIABLE] = "1"
    lines: list[Line] = []
    failed: list[str] = []
    for name in names:
        print(f"measuring {name} …", file=sys.stderr)
        try:
            lines += importlib.import_module(f"bench.{name}").measure()
        except Unavailable as missing:
            print(f"{name} is left out: {missing}", file=sys.stderr)
        except Exception as failure:
            traceback.print_exc()
            failed.append(f"{name}: {type(failure).__name__}: {failure}".splitlines()[0])
    print(render(lines))
    if "--smoke" in words:
        print(SMOKE_NOTE)
    for text in failed:
        print(f"failed: {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
