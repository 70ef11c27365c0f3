"""How the `metrics` message is answered: out of the monitor."""

from __future__ import annotations

from typing import Any

from distributed_grid.api.requests import GetMetrics
from distributed_grid.errors import BadInput
from distributed_grid.monitoring.monitor import Monitor


async def measured(monitor: Monitor, op: GetMetrics) -> dict[str, Any]:
    """The answer to a `metrics` message; what it lacks is refused."""
    if op.kind == "snapshots":
        return {"snapshots": await monitor.snapshots()}
    if op.kind == "summary":
        return {"summary": await monitor.summary()}
    if op.kind == "rebalancing":
        return {"rebalancing": await monitor.rebalancing()}
    if op.kind == "scheduling":
        return {"scheduling": await monitor.scheduling()}
    if op.kind == "prometheus":
        return {"text": (await monitor.prometheus()).decode()}
    if not op.node:
        raise BadInput(f"metrics of kind {op.kind} are about one node: name it")
    if op.kind == "trend":
        if not op.resource_type:
            raise BadInput("a trend is about one resource: cpu, memory or gpu")
        return {"trend": await monitor.trend(op.node, op.resource_type, op.window)}
    return {"history": await monitor.history(op.node, 60 if op.window is None else op.window)}
