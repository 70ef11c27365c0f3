"""Lists of providers: what of them is this grid's, what the ledger hears of it, and which machines are strays.

A stray carries this grid's id and no worker stands for it. It is ended only when it is older than a provider's list may
lag: the ledger is read after the list, so a worker that was asked for meanwhile is known.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from distributed_grid.domain.events import ListedInstance, WorkersListed
from distributed_grid.domain.workers import WorkerRules
from distributed_grid.ports import WorkerInstance
from distributed_grid.server.workers.call_outcomes import ends_in_ms

STRAYS_AT_ONCE = 100


def of_this_grid(listed: Sequence[WorkerInstance], grid_id: str) -> list[WorkerInstance]:
    """The machines of this grid, whatever else the provider lists."""
    return [one for one in listed if one.grid_id == grid_id]


def listed(provider: str, asked_at_ms: int, ours: Sequence[WorkerInstance], wall_ms: int) -> WorkersListed:
    """A list as the ledger hears of it, as of when it was asked for."""
    instances = tuple(
        ListedInstance(one.worker_id, one.instance, one.state, one.detail, ends_in_ms(one), one.waits) for one in ours
    )
    return WorkersListed(provider, asked_at_ms, instances, wall_ms)


def strays(ours: Sequence[WorkerInstance], known: Collection[str], rules: WorkerRules) -> list[WorkerInstance]:
    """The machines to end because no worker stands for them, so many at once; `known` are the workers that there are,
    read after the list has been handled."""
    found = [one for one in ours if one.worker_id not in known and one.state != "gone"]
    return [one for one in found if 1000 * one.age_seconds >= rules.consistency_ms][:STRAYS_AT_ONCE]
