"""Views of automatic offloading: how it stands, and what its last look at each node decided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed_grid.control.views import Viewer
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import OffloadRules, OffloadWatch
from distributed_grid.reactor.offloading.auto_offload import is_enabled

if TYPE_CHECKING:
    from distributed_grid.control.view_types import AutoOffloadLook, AutoOffloadView

NOT_SHARED = "resource_sharing.enabled is false: nothing is lent, so nothing can move"


def auto_offload_view(viewer: Viewer, ledger: Ledger, rules: OffloadRules, *, shares: bool) -> AutoOffloadView:
    """Whether work moves by itself, by whose word, and what became of it."""
    state = ledger.auto_offload
    stopped = state.stopped_why or ("" if shares else NOT_SHARED)
    return {
        "enabled": is_enabled(ledger, rules) and not stopped,
        "configured": rules.enabled,
        "set_by": state.set_by or None,
        "set_at": viewer.time(state.set_at_ms),
        "stopped": stopped or None,
        "failures": state.failures,
        "last_move_at": viewer.time(state.moved_at_ms),
        "thresholds": {
            "cpu": rules.cpu_high / 1000,
            "memory": rules.memory_high / 1000,
            "gpu": rules.gpu_high / 1000,
        },
        "check_interval_seconds": rules.interval_ms / 1000,
        "cooldown_seconds": rules.cooldown_ms / 1000,
        "degraded": {row.node: row.why for row in ledger.degraded.values()},
        "nodes": [
            look_view(viewer, ledger, watch)
            for watch in sorted(ledger.offload_watches.values(), key=lambda one: one.node)
            if is_enabled(ledger, rules)
        ],
    }


def look_view(viewer: Viewer, ledger: Ledger, watch: OffloadWatch) -> AutoOffloadLook:
    """What the last look at a node decided, and why."""
    jobs = ((one, ledger.jobs.get(one.job)) for one in watch.considered)
    return {
        "node_id": watch.node,
        "at": viewer.time(watch.looked_at_ms),
        "reason": watch.reason or "below its thresholds",
        "jobs": [{"job_id": job.id, "reason": one.reason} for one, job in jobs if job is not None],
    }
