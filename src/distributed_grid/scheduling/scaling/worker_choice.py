"""Choice of the type of worker for unmet demand, and how many of it.

Types whose kind is the bottleneck come first; among them the one that serves most of what waits, then the one whose
workers cost least together. Where a price is not known, the order of the provider counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.workers import Worker, WorkerResources
from distributed_grid.scheduling.scaling.bins import Bins, fits, size_of
from distributed_grid.scheduling.scaling.unmet import UnmetDemand

OfferedType = tuple[Worker, WorkerResources]
"""A worker as it would be started, and what it would lend."""


def choose_type(
    unmet: UnmetDemand, bottleneck: ResourceType, types: Sequence[OfferedType], limit: int
) -> tuple[Worker, int] | None:
    """The type for the unmet requests and how many workers of it, at most so many; None where none serves any."""
    best: tuple[tuple[bool, int, bool, int, int], Worker, int] | None = None
    for place, (worker, resources) in enumerate(types):
        count, served = workers_for(unmet, resources, limit)
        if not served:
            continue
        cost = count * (worker.price_micro or 0)
        key = (worker.worker_type != bottleneck, -served, worker.price_micro is None, cost, place)
        if best is None or key < best[0]:
            best = key, worker, count
    return None if best is None else (best[1], best[2])


def workers_for(unmet: UnmetDemand, resources: WorkerResources, limit: int) -> tuple[int, int]:
    """How many workers of these resources the unmet requests fill, and how many requests those serve."""
    bins, served = Bins.of_workers(()), 0
    for shape in unmet.shapes:
        size, left = size_of(shape.request.ask), shape.count
        if not fits(size, resources):
            continue
        left -= int(bins.take(size, left, apart=shape.apart).sum())
        if left and len(bins) < limit:
            each = int(Bins.of_workers([resources]).room(size, apart=shape.apart)[0])
            bins.grow(resources, min(-(-left // each), limit - len(bins)))
            left -= int(bins.take(size, left, apart=shape.apart).sum())
        served += shape.count - left
    return len(bins), served
