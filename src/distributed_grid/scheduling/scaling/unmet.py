"""Unmet demand: what is left when demand is packed onto what is free and what is on its way, and the workers for it.

Free nodes come first, then workers on their way and nodes that are silent for a moment, then spare workers that drain:
those of them that get something are kept. A gang gets all of its machines or none: it counts only if so many new
workers may be started.

Free capacity is columns (`Bins`), onto which equal requests are packed many at a time: cores, memory and GPUs only, for
what a new worker has of anything else is not known.

Of the types of workers, those whose kind is the bottleneck come first; among them the one that serves most of what
waits, then the one whose workers cost least together. Where a price is not known, the order of the provider counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import NOTHING, WHOLE_GPU, Capacity, ResourceType
from distributed_grid.domain.states import NodeState, WorkerState
from distributed_grid.domain.workers import Worker, WorkerResources
from distributed_grid.scheduling.placement.machine_limits import node_ends, outlived_nodes
from distributed_grid.scheduling.placement.placement import candidate_rows
from distributed_grid.scheduling.scaling.demand import Demand, Size, WaitingShape, fits, size_of, usable

Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]
MAX_GANGS = 32
"""Gangs of one shape that are looked at in one evaluation."""
_SILENT = (NodeState.JOINING, NodeState.SUSPECT)
_ABSENT = (NodeState.LOST, NodeState.DRAINING, NodeState.LEFT)
OfferedType = tuple[Worker, WorkerResources]
"""A worker as it would be started, and what it would lend."""


class Bins:
    """What is free on each of many machines."""

    def __init__(self, free: NDArray[np.int64]) -> None:
        self._free = free

    @classmethod
    def of_nodes(cls, ledger: Ledger) -> Bins:
        """The nodes that take new leases, in the order of their rows."""
        columns = ledger.columns
        free = np.stack([columns.cpu, columns.memory, columns.gpu_left, columns.gpu_whole])
        return cls(np.where(columns.open, np.maximum(free, 0), 0))

    @classmethod
    def of_workers(cls, workers: Iterable[WorkerResources]) -> Bins:
        """Workers that are still empty."""
        return cls(_empty_columns(list(workers)))

    def __len__(self) -> int:
        return int(self._free.shape[1])

    def grow(self, resources: WorkerResources, count: int) -> None:
        """Add so many empty workers."""
        self._free = np.concatenate((self._free, _empty_columns([resources] * count)), axis=1)

    def room(self, size: Size, *, apart: bool, allowed: Mask | None = None) -> Counts:
        """How many requests of a size each machine could take; at most one each where they must be `apart`."""
        found = np.full(len(self), np.iinfo(np.int64).max, dtype=np.int64)
        for row, amount in zip(self._free, size, strict=True):
            if amount:
                np.minimum(found, row // amount, out=found)
        if apart:
            np.minimum(found, 1, out=found)
        return found if allowed is None else np.where(allowed, found, 0)

    def take(self, size: Size, count: int, *, apart: bool = False, allowed: Mask | None = None) -> Counts:
        """Pack up to so many, the first machines first; how many each got."""
        room = np.minimum(self.room(size, apart=apart, allowed=allowed), count)
        before = np.cumsum(room) - room
        taken: Counts = np.clip(count - before, 0, room)
        for row, amount in zip(self._free, size, strict=True):
            if amount:
                row -= taken * amount
        return taken


def _empty_columns(workers: list[WorkerResources]) -> NDArray[np.int64]:
    rows = [(one.cpu_milli, one.memory_bytes, WHOLE_GPU * one.gpu_count, one.gpu_count) for one in workers]
    return np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()


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
        at = (ResourceType.CPU, ResourceType.MEMORY, ResourceType.GPU).index(resource)
        return sum(shape.members * size_of(shape.request.ask)[at] for shape in self.shapes)


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
            unmet.append(WaitingShape(replace(shape.request, gang=1), shape.apart, rest, shape.displaced))
    return UnmetDemand(tuple(unmet), tuple(worker.id for worker, kept in zip(draining, used, strict=True) if kept))


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
