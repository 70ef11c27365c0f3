"""`python -m bench [name …]`: run the measurements and print one table."""

from __future__ import annotations

import sys

from bench import (
    agents,
    boosts,
    commands,
    confidence,
    deciding,
    dry_run,
    fairness,
    granting,
    jobs,
    lending,
    lent,
    lost_work,
    memory,
    openb,
    placing,
    preempting,
    ray_boosts,
    restarting,
    resting,
    simulating,
    swf,
    yielding,
)
from bench.table import render

ALL = {
    "deciding": deciding,
    "placing": placing,
    "preempting": preempting,
    "lost_work": lost_work,
    "granting": granting,
    "restarting": restarting,
    "commands": commands,
    "lending": lending,
    "openb": openb,
    "confidence": confidence,
    "dry_run": dry_run,
    "lent": lent,
    "boosts": boosts,
    "ray_boosts": ray_boosts,
    "memory": memory,
    "jobs": jobs,
    "agents": agents,
    "resting": resting,
    "simulating": simulating,
    "swf": swf,
    "fairness": fairness,
    "yielding": yielding,
}


def main() -> int:
    names = sys.argv[1:] or list(ALL)
    unknown = [name for name in names if name not in ALL]
    if unknown:
        print(f"no measurement {unknown[0]!r}; there is {', '.join(ALL)}", file=sys.stderr)
        return 2
    lines = []
    for name in names:
        print(f"measuring {name} …", file=sys.stderr)
        lines += ALL[name].measure()
    print(render(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
