"""Utilization of the grid at one moment: what is taken and what waits, of all that is there or on its way."""

from __future__ import annotations

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, ResourceType
from distributed_grid.domain.scaling import MAX_LEVEL, UtilizationSample
from distributed_grid.scheduling.scaling.bins import usable
from distributed_grid.scheduling.scaling.unmet import UnmetDemand


def sample_utilization(ledger: Ledger, unmet: UnmetDemand, now: int) -> UtilizationSample:
    """How much of what the grid lends at most is taken or waited for; workers on their way are part of it.

    What an owner uses of a node counts as taken: it cannot be lent.
    """
    columns = ledger.columns
    coming = [usable(worker.resources) for worker in ledger.workers.values() if worker.is_on_its_way]
    levels: dict[str, int] = {}
    for resource, has, free, comes in (
        (ResourceType.CPU, columns.lends_cpu, columns.cpu, sum(one.cpu_milli for one in coming)),
        (ResourceType.MEMORY, columns.lends_memory, columns.memory, sum(one.memory_bytes for one in coming)),
        (
            ResourceType.GPU,
            WHOLE_GPU * columns.lends_gpus,
            columns.gpu_left,
            WHOLE_GPU * sum(one.gpu_count for one in coming),
        ),
    ):
        here = has[columns.open]
        taken = int((here - free[columns.open]).clip(0, here).sum())
        total = int(here.sum()) + comes
        asked = taken + unmet.total(resource)
        levels[str(resource)] = min(1000 * asked // total, MAX_LEVEL) if total else MAX_LEVEL if asked else 0
    return UtilizationSample(now, **levels)
