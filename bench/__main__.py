"""`python -m bench [name …]`: run the measurements and print one table."""

from __future__ import annotations

import sys

from bench import (
    agents,
    auto_offload,
    boosts,
    cloud_orders,
    commands,
    confidence,
    daemon_restart,
    dry_run,
    durable_grants,
    event_followers,
    fairness,
    idle_agent,
    idle_offers,
    jobs,
    lease_report,
    load_forecast,
    lost_work,
    memory,
    offload_freeze,
    offload_wrap,
    openb,
    owner_return,
    placement,
    pool_size,
    prediction,
    preemption,
    process_scan,
    queue_growth,
    ray_boosts,
    reactor_steps,
    run_recording,
    scaling,
    simulator,
    sizing,
    swf,
    worker_starts,
    worker_steps,
)
from bench.table import render

ALL = {
    "reactor_steps": reactor_steps,
    "queue_growth": queue_growth,
    "placement": placement,
    "preemption": preemption,
    "process_scan": process_scan,
    "lost_work": lost_work,
    "durable_grants": durable_grants,
    "daemon_restart": daemon_restart,
    "commands": commands,
    "offload_wrap": offload_wrap,
    "event_followers": event_followers,
    "idle_offers": idle_offers,
    "openb": openb,
    "confidence": confidence,
    "dry_run": dry_run,
    "lease_report": lease_report,
    "boosts": boosts,
    "ray_boosts": ray_boosts,
    "memory": memory,
    "jobs": jobs,
    "run_recording": run_recording,
    "agents": agents,
    "idle_agent": idle_agent,
    "simulator": simulator,
    "sizing": sizing,
    "scaling": scaling,
    "worker_steps": worker_steps,
    "auto_offload": auto_offload,
    "cloud_orders": cloud_orders,
    "worker_starts": worker_starts,
    "prediction": prediction,
    "swf": swf,
    "fairness": fairness,
    "owner_return": owner_return,
    "load_forecast": load_forecast,
    "pool_size": pool_size,
    "offload_freeze": offload_freeze,
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
