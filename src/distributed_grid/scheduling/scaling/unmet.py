"""Unmet demand: what is left of the demand when it is packed onto what is free and what is on its way.

Free nodes come first, then workers on their way, then workers that drain: those of them that get something are to be
kept. A gang gets all of its machines or none: it counts only if so many new workers may be started.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.states import NodeState, WorkerState
from distributed_grid.domain.workers import Worker, WorkerResources
from distributed_grid.scheduling.placement.placement import candidate_rows
from distributed_grid.scheduling.scaling.bins import Bins, Mask, Size, size_of
from distributed_grid.scheduling.scaling.demand import Demand, WaitingShape

MEMORY_KEPT = 8
"""One part in so many of a worker's memory is not lent: its system and its reserve have it."""
MAX_GANGS = 32
"""Gangs of one shape that are looked at in one evaluation."""


class UnmetDemand(Struct, frozen=True):
    """The shapes that only new workers would serve, and the draining workers that are needed after all."""

    shapes: tuple[WaitingShape, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        return sum(shape.count for shape in self.shapes)

    def total(self, resource: ResourceType) -> int:
        """How much of a resource they ask for together, in base units."""
        return sum(shape.members * amount_of(shape, resource) for shape in self.shapes)


def amount_of(shape: WaitingShape, resource: ResourceType) -> int:
    cpu, memory, gpu, _ = size_of(shape.request.ask)
    return {ResourceType.CPU: cpu, ResourceType.MEMORY: memory, ResourceType.GPU: gpu}[resource]


def usable(resources: WorkerResources) -> WorkerResources:
    """What an empty worker would lend of what it has."""
    return replace(resources, memory_bytes=resources.memory_bytes - resources.memory_bytes // MEMORY_KEPT)


def lendable(ledger: Ledger, worker: Worker) -> WorkerResources:
    """What a worker of this offer lends when it is empty: as those that have joined do, else by its description."""
    found = usable(worker.resources)
    for other in ledger.workers.values():
        node = ledger.nodes.get(other.node)
        if other.offer == worker.offer and other.provider == worker.provider and node is not None:
            has = node.lendable
            if has.cpu_milli:
                found = WorkerResources(has.cpu_milli, min(found.memory_bytes, has.memory_bytes), len(has.gpus))
                break
    return found


def pack(ledger: Ledger, demand: Demand, room_for_new: int) -> UnmetDemand:
    """What of the demand is not met; `room_for_new` is how many workers may still be started."""
    nodes = Bins.of_nodes(ledger)
    coming = Bins.of_workers(usable(worker.resources) for worker in _coming(ledger))
    draining = [worker for worker in ledger.workers.values() if worker.state is WorkerState.DRAINING]
    spare = Bins.of_workers(usable(worker.resources) for worker in draining)
    used = np.zeros(len(draining), dtype=np.bool_)
    unmet: list[WaitingShape] = []
    for shape in demand.shapes:
        size, allowed = size_of(shape.request.ask), candidate_rows(ledger, shape.request)
        if shape.request.gang > 1:
            rest, kept = _pack_gangs(shape, size, (nodes, allowed), coming, spare, room_for_new)
        else:
            count = shape.count
            count -= int(nodes.take(size, count, apart=shape.apart, allowed=allowed).sum())
            count -= int(coming.take(size, count, apart=shape.apart).sum()) if count else 0
            got = spare.take(size, count, apart=shape.apart) if count else used
            rest, kept = count - int(got.sum()) if count else 0, got > 0
        used |= kept
        if rest:
            unmet.append(_remaining(shape, rest))
    return UnmetDemand(tuple(unmet), tuple(worker.id for worker, kept in zip(draining, used, strict=True) if kept))


def _remaining(shape: WaitingShape, members: int) -> WaitingShape:
    """Single requests for so many machines that are missing."""
    return WaitingShape(replace(shape.request, gang=1), shape.apart, members)


def _pack_gangs(
    shape: WaitingShape, size: Size, nodes: tuple[Bins, Mask], coming: Bins, spare: Bins, room_for_new: int
) -> tuple[int, Mask]:
    """How many machines are missing for all of these gangs that can be served at all."""
    (here, allowed), missing, kept = nodes, 0, np.zeros(len(spare), dtype=np.bool_)
    for _ in range(min(shape.count, MAX_GANGS)):
        places = [(here, allowed), (coming, None), (spare, None)]
        room = sum(int(bins.room(size, apart=True, allowed=mask).sum()) for bins, mask in places)
        lacking = max(shape.request.gang - room, 0)
        if lacking > room_for_new - missing:
            break
        left = shape.request.gang - lacking
        for bins, mask in places:
            got = bins.take(size, left, apart=True, allowed=mask)
            left -= int(got.sum())
            if bins is spare:
                kept |= got > 0
        missing += lacking
    return missing, kept


def _coming(ledger: Ledger) -> list[Worker]:
    """The workers that will take leases soon: on their way, or joined and not heard yet."""
    return [worker for worker in ledger.workers.values() if _is_coming(ledger, worker)]


def _is_coming(ledger: Ledger, worker: Worker) -> bool:
    if worker.state in (WorkerState.WANTED, WorkerState.ASKED, WorkerState.BOOTING):
        return True
    node = ledger.nodes.get(worker.node)
    silent = node is None or (node.state in _SILENT and not ledger.leases_on.get(worker.node))
    return worker.state is WorkerState.JOINED and silent


_SILENT = (NodeState.JOINING, NodeState.SUSPECT)
