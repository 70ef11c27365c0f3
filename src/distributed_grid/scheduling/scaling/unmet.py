"""Unmet demand: what is left of the demand when it is packed onto what is free and what is on its way.

Free nodes come first, then workers on their way and nodes that are silent for a moment, then spare workers that drain:
those of them that get something are kept. A gang gets all of its machines or none: it counts only if so many new
workers may be started.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import NOTHING, Capacity, ResourceType
from distributed_grid.domain.states import NodeState, WorkerState
from distributed_grid.domain.workers import Worker, WorkerResources
from distributed_grid.scheduling.placement.machine_lifetime import node_ends, outlived_nodes
from distributed_grid.scheduling.placement.placement import candidate_rows
from distributed_grid.scheduling.scaling.bins import Bins, Mask, Size, size_of, usable
from distributed_grid.scheduling.scaling.demand import Demand, WaitingShape

MAX_GANGS = 32
"""Gangs of one shape that are looked at in one evaluation."""


class UnmetDemand(Struct, frozen=True):
    """The shapes that only new workers would serve, and the draining workers that are needed after all."""

    shapes: tuple[WaitingShape, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        return sum(shape.count for shape in self.shapes)

    @property
    def displaced(self) -> UnmetDemand:
        """What of it still runs, on machines that are taken away."""
        return UnmetDemand(tuple(shape for shape in self.shapes if shape.displaced))

    def without_node(self, ledger: Ledger) -> UnmetDemand:
        """What of it no node could serve even if it were empty. A node that was never heard could serve anything."""
        nodes = [node for node in ledger.nodes.values() if node.state not in _ABSENT]
        if any(node.caps.can_share and node.capacity == Capacity() for node in nodes):
            return UnmetDemand()
        has = Bins.of_workers(
            WorkerResources(node.lendable.cpu_milli, node.lendable.memory_bytes, len(node.lendable.gpus))
            for node in nodes
        )
        return UnmetDemand(
            tuple(shape for shape in self.shapes if not has.room(size_of(shape.request.ask), apart=False).any())
        )

    def total(self, resource: ResourceType) -> int:
        """How much of a resource they ask for together, in base units."""
        return sum(shape.members * amount_of(shape, resource) for shape in self.shapes)


def amount_of(shape: WaitingShape, resource: ResourceType) -> int:
    cpu, memory, gpu, _ = size_of(shape.request.ask)
    return {ResourceType.CPU: cpu, ResourceType.MEMORY: memory, ResourceType.GPU: gpu}[resource]


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


def pack(ledger: Ledger, demand: Demand, room_for_new: int, now: int) -> UnmetDemand:
    """What of the demand is not met; `room_for_new` is how many workers may still be started."""
    ends = node_ends(ledger)
    nodes = Bins.of_nodes(ledger)
    coming = Bins.of_workers(_coming(ledger))
    draining = [one for one in ledger.workers.values() if one.state is WorkerState.DRAINING and one.spare]
    spare = Bins.of_workers(usable(worker.resources) for worker in draining)
    used = np.zeros(len(draining), dtype=np.bool_)
    unmet: list[WaitingShape] = []
    for shape in demand.shapes:
        outlived = outlived_nodes(shape.request, ends, now)
        size, allowed = size_of(shape.request.ask), candidate_rows(ledger, shape.request, avoid=outlived)
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
    return WaitingShape(replace(shape.request, gang=1), shape.apart, members, shape.displaced)


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


def _coming(ledger: Ledger) -> list[WorkerResources]:
    """What will take leases soon: workers on their way, and nodes that are silent and not lost yet."""
    workers = [usable(one.resources) for one in ledger.workers.values() if _is_unheard(ledger, one)]
    return [*workers, *(_left_on(ledger, node) for node in ledger.nodes.values() if node.state in _SILENT)]


def _is_unheard(ledger: Ledger, worker: Worker) -> bool:
    """Whether a worker is on its way and not a node yet, or one of which nothing is known."""
    if worker.node in ledger.nodes and ledger.nodes[worker.node].lendable != NOTHING:
        return False
    return worker.is_on_its_way or worker.state is WorkerState.JOINED


def _left_on(ledger: Ledger, node: Node) -> WorkerResources:
    """What a node has left, if it comes back as it was."""
    has, claims = node.lendable, ledger.claims_on(node.name)
    gpus = max(claims.whole_free(has), 0) if has.gpus else 0
    return WorkerResources(
        max(has.cpu_milli - claims.cpu_milli, 0), max(has.memory_bytes - claims.memory_bytes, 0), gpus
    )


_SILENT = (NodeState.JOINING, NodeState.SUSPECT)
_ABSENT = (NodeState.LOST, NodeState.DRAINING, NodeState.LEFT)
