"""Demand: the waiting requests that a new worker would serve, as shapes with their number, and the workers for them.

Not counted is what a new worker cannot help: a request that is pinned to nodes, labels or the place of something else,
that runs within a lease, that only a pull worker can run, that a quota holds, or that is too large or takes too long
for every type of worker. Requests that differ only in their user are one shape; in a queue of many shapes, those that
differ a little are, too. The number of groups and shapes is limited, the first of the queue first.

Demand is packed onto free nodes first, then onto workers on their way and nodes that are silent for a moment, then onto
draining surplus workers: those of them that get something are kept. A gang gets all of its machines or none: it counts
only if enough new workers may be started. Free capacity is columns (`Bins`), onto which equal requests are packed many
at a time: cores, memory and GPUs only, since anything else of a new worker is unknown.

Of the types of workers, those whose kind is the bottleneck come first; among them the one that serves most requests,
then the one whose workers cost least together. Where a price is not known, the order of the provider counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from distributed_grid.domain.leases import NodeKind, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import NOTHING, WHOLE_GPU, Amounts, Capacity, ResourceType
from distributed_grid.domain.states import NodeState, WorkerState
from distributed_grid.domain.workers import Worker, WorkerResources
from distributed_grid.scheduling.placement.machine_limits import (
    longest_lifetime_ms,
    node_ends,
    outlived_nodes,
    outlives_all,
    stated_ms,
)
from distributed_grid.scheduling.placement.placement import candidate_rows
from distributed_grid.scheduling.queue.fairness import Quotas
from distributed_grid.scheduling.scaling.worker_availability import closed_text, closure_of, place_of

MAX_SHAPES = 128  # shapes in one evaluation; what is left is seen in the next one, when these are on their way
MAX_GROUPS = 4096  # groups of equal requests that are read in one evaluation

PINNED, NEAR, INSIDE, HELD, TOO_LARGE, TOO_LONG, LATER, PULLED = (
    "pinned to nodes or labels",
    "has to be near something that runs",
    "runs within a lease",
    "held by a quota",
    "too large, or of a kind that no worker has",
    "takes longer than a worker of any type lives",
    "seen in the next evaluation",
    "a task that only a pull worker can run",
)

MEMORY_KEPT = 8  # one part in so many of a worker's memory is not lent: its system and its reserve have it
Size = tuple[int, int, int, int]  # millicores, bytes of memory, thousandths of GPUs, whole GPUs
ShapeKey = tuple[int, int, int, int, tuple[str, ...], bool]
"""Amounts, gang, what it must not be near to, and whether each needs a machine of its own."""


class WaitingShape(Struct, frozen=True):
    """Equal requests: `count` of them, of `gang` members each; `apart` where each needs a machine of its own.

    `request` is one of them. Those that are `displaced` still run, on a machine that is taken away.
    """

    request: Request
    apart: bool
    count: int
    displaced: bool = False

    @property
    def members(self) -> int:
        return self.count * self.request.gang


class Demand(Struct, frozen=True):
    """The shapes in the order of the queue, and how many requests are not counted, by the reason."""

    shapes: tuple[WaitingShape, ...] = ()
    not_counted: dict[str, int] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return sum(shape.count for shape in self.shapes)


def read_demand(ledger: Ledger, types: Sequence[WorkerResources]) -> Demand:
    """Waiting requests that a worker of one of these types would serve."""
    quotas = Quotas(ledger) if ledger.policy.quotas else None
    counts: dict[ShapeKey, int] = {}
    examples: dict[ShapeKey, Request] = {}
    not_counted: dict[str, int] = {}
    index = ledger.waiting_index
    read = [lease_id for *_, lease_id in index.heads[:MAX_GROUPS]]
    is_wide = len(index.heads) > MAX_SHAPES
    if len(read) < len(index.heads):
        not_counted[LATER] = len(ledger.waiting) - sum(len(index.members[lease_id]) for lease_id in read)
    longest_ms = longest_lifetime_ms(ledger)
    for lease_id in read:
        request = ledger.leases[lease_id].request
        count, ask = len(index.members[lease_id]), request.ask
        reason = _served_elsewhere(request) or ("" if is_served(ask, types) else TOO_LARGE)
        if longest_ms and not reason and stated_ms(request) > longest_ms:
            reason = TOO_LONG
        if not reason:
            memory = ask.memory_bytes
            if is_wide:  # an eighth more at most, so that many requests which differ a little are one shape
                step = 1 << max(memory.bit_length() - 4, 0)
                memory = -(-memory // step) * step
            if memory > ask.memory_bytes and not is_served(ask, types, memory):
                memory = ask.memory_bytes
            shape = (ask.cpu_milli, memory, ask.gpu_milli, request.gang, request.anti_affinity, _must_be_apart(request))
            if shape not in counts and len(counts) == MAX_SHAPES:
                reason = LATER
        if reason:
            not_counted[reason] = not_counted.get(reason, 0) + count
            continue
        admitted = count if quotas is None else quotas.admit(request, count)
        if admitted < count:
            not_counted[HELD] = not_counted.get(HELD, 0) + count - admitted
        if admitted:
            counts[shape] = counts.get(shape, 0) + admitted
            examples.setdefault(shape, request)
    return Demand(tuple(_shape(key, examples[key], count) for key, count in counts.items()), not_counted)


def _shape(key: ShapeKey, request: Request, count: int) -> WaitingShape:
    ask = replace(request.ask, memory_bytes=key[1])
    return WaitingShape(replace(request, ask=ask), _must_be_apart(request), count)


def displaced_demand(ledger: Ledger, types: Sequence[WorkerResources]) -> tuple[WaitingShape, ...]:
    """Work on workers with an announced end that will not finish by then and that a worker of one of these types would
    serve: it will be queued again."""
    counts: dict[ShapeKey, int] = {}
    examples: dict[ShapeKey, Request] = {}
    for worker in ledger.workers.values():
        if not worker.is_leaving or worker.notice is None:
            continue
        for lease in ledger.leases_of(worker.node):
            request, ask = lease.request, lease.request.ask
            job = ledger.jobs.get(lease.job)
            if job is None or not lease.holds or (job.stop is not None and not job.stop.requeue):
                continue
            if 0 < lease.expected_end_ms <= worker.notice.stop_by_ms:
                continue
            if _served_elsewhere(request) or not is_served(ask, types):
                continue
            amounts = (ask.cpu_milli, ask.memory_bytes, ask.gpu_milli)
            shape = (*amounts, request.gang, request.anti_affinity, _must_be_apart(request))
            if shape in counts or len(counts) < MAX_SHAPES:
                counts[shape] = counts.get(shape, 0) + 1
                examples.setdefault(shape, request)
    return tuple(replace(_shape(key, examples[key], count), displaced=True) for key, count in counts.items())


def worker_could_serve(ledger: Ledger, request: Request) -> bool:
    """Whether a worker that scaling may start would serve a request that no node can."""
    rules = ledger.scaling
    if not rules.provider or request.gang > rules.max_workers or _served_elsewhere(request):
        return False
    if not rules.types_known:
        return True
    if outlives_all(ledger, request):
        return False
    return is_served(request.ask, [usable(worker.resources) for worker in rules.types])


def why_no_worker(ledger: Ledger, request: Request, now: int) -> list[str]:
    """Why scaling starts no worker for a request at present: all types that would serve it are closed, and for how
    long; nothing where one is not, or none would."""
    if not worker_could_serve(ledger, request):
        return []
    types = [one for one in ledger.scaling.types if is_served(request.ask, [usable(one.resources)])]
    closed = [(one, closure_of(ledger, place_of(one))) for one in types]
    if any(closure is None for _, closure in closed):
        return []
    return [f"no {one.offer} of {one.provider} can be had: {closed_text(closure, now)}" for one, closure in closed]


def size_of(ask: Amounts) -> Size:
    """Size of one request; a part of a GPU counts as the largest share that as many of its kind fit on a device."""
    gpu = ask.gpu_milli
    if 0 < gpu < WHOLE_GPU:
        gpu = WHOLE_GPU // (WHOLE_GPU // gpu)
    return ask.cpu_milli, ask.memory_bytes, gpu, gpu // WHOLE_GPU if ask.gpu_milli >= WHOLE_GPU else 0


def usable(resources: WorkerResources) -> WorkerResources:
    """Resources that an empty worker would lend."""
    return replace(resources, memory_bytes=resources.memory_bytes - resources.memory_bytes // MEMORY_KEPT)


def fits(size: Size, resources: WorkerResources) -> bool:
    cpu, memory, gpu, _ = size
    return cpu <= resources.cpu_milli and memory <= resources.memory_bytes and gpu <= WHOLE_GPU * resources.gpu_count


def _served_elsewhere(request: Request) -> str:
    """Why no new worker would get this request, whatever it has; empty where one would."""
    if request.use_lease:
        return INSIDE
    if request.runs_on is NodeKind.PULL:
        return PULLED
    if request.require or request.labels:
        return PINNED
    return NEAR if request.affinity else ""


def is_served(ask: Amounts, types: Sequence[WorkerResources], memory_bytes: int | None = None) -> bool:
    """Whether an empty worker of some type has room, also with more memory where that is given; of custom resources and
    models of GPUs nothing is known."""
    if ask.custom or ask.gpu_models or ask.gpu_memory_bytes:
        return False
    cpu, memory, gpu, whole = size_of(ask)
    size = (cpu, memory if memory_bytes is None else memory_bytes, gpu, whole)
    for type_ in types:  # noqa: SIM110 - a generator costs twice as much, and this is called for every group
        if fits(size, type_):
            return True
    return False


def _must_be_apart(request: Request) -> bool:
    return request.gang > 1 or bool(request.group and request.group in request.anti_affinity)


Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]
MAX_GANGS = 32  # gangs of one shape that are looked at in one evaluation
_SILENT = (NodeState.JOINING, NodeState.SUSPECT)
_ABSENT = (NodeState.LOST, NodeState.DRAINING, NodeState.LEFT)
OfferedType = tuple[Worker, WorkerResources]  # a worker as it would be started, and what it would lend


class Bins:
    """Free capacity of many machines."""

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
        return cls(_empty_columns(list(workers)))

    def __len__(self) -> int:
        return int(self._free.shape[1])

    def grow(self, resources: WorkerResources, count: int) -> None:
        """Add `count` empty workers."""
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
        """Pack up to `count` requests, the first machines first; the number on each."""
        room = np.minimum(self.room(size, apart=apart, allowed=allowed), count)
        before = np.cumsum(room) - room
        taken: Counts = np.clip(count - before, 0, room)
        for row, amount in zip(self._free, size, strict=True):
            if amount:
                row -= taken * amount
        return taken


def _empty_columns(workers: list[WorkerResources]) -> NDArray[np.int64]:
    rows = [
        (worker.cpu_milli, worker.memory_bytes, WHOLE_GPU * worker.gpu_count, worker.gpu_count) for worker in workers
    ]
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
        """The part that still runs, on machines that are taken away."""
        return UnmetDemand(tuple(shape for shape in self.shapes if shape.displaced))

    def without_node(self, ledger: Ledger) -> UnmetDemand:
        """The part that no node could serve even if it were empty. A node without a first report could serve
        anything."""
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
        """Requested amount of a resource in all, in base units."""
        at = (ResourceType.CPU, ResourceType.MEMORY, ResourceType.GPU).index(resource)
        return sum(shape.members * size_of(shape.request.ask)[at] for shape in self.shapes)


def lendable(ledger: Ledger, worker: Worker) -> WorkerResources:
    """Resources that an empty worker of this offer lends: as joined ones do, else by its description."""
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
    """The unmet part of the demand; `room_for_new` is the number of workers that may still be started."""
    ends = node_ends(ledger)
    nodes = Bins.of_nodes(ledger)
    on_their_way = [
        usable(worker.resources)
        for worker in ledger.workers.values()
        if (worker.node not in ledger.nodes or ledger.nodes[worker.node].lendable == NOTHING)
        and (worker.is_on_its_way or worker.state is WorkerState.JOINED)
    ]
    silent = []  # resources left on a silent node, if it comes back as it was
    for node in ledger.nodes.values():
        if node.state in _SILENT:
            has, claims = node.lendable, ledger.claims_on(node.name)
            gpus = max(claims.whole_free(has), 0) if has.gpus else 0
            cpu_milli, memory_bytes = has.cpu_milli - claims.cpu_milli, has.memory_bytes - claims.memory_bytes
            silent.append(WorkerResources(max(cpu_milli, 0), max(memory_bytes, 0), gpus))
    coming = Bins.of_workers([*on_their_way, *silent])
    draining = [one for one in ledger.workers.values() if one.state is WorkerState.DRAINING and one.surplus]
    surplus = Bins.of_workers(usable(worker.resources) for worker in draining)
    used = np.zeros(len(draining), dtype=np.bool_)
    unmet: list[WaitingShape] = []
    for shape in demand.shapes:
        outlived = outlived_nodes(shape.request, ends, now)
        size, allowed = size_of(shape.request.ask), candidate_rows(ledger, shape.request, avoid=outlived)
        if shape.request.gang > 1:
            rest, kept = _pack_gangs(shape, size, (nodes, allowed), coming, surplus, room_for_new)
        else:
            count = shape.count
            count -= int(nodes.take(size, count, apart=shape.apart, allowed=allowed).sum())
            count -= int(coming.take(size, count, apart=shape.apart).sum()) if count else 0
            got = surplus.take(size, count, apart=shape.apart) if count else used
            rest, kept = count - int(got.sum()) if count else 0, got > 0
        used |= kept
        if rest:
            unmet.append(WaitingShape(replace(shape.request, gang=1), shape.apart, rest, shape.displaced))
    return UnmetDemand(tuple(unmet), tuple(worker.id for worker, kept in zip(draining, used, strict=True) if kept))


def _pack_gangs(
    shape: WaitingShape, size: Size, nodes: tuple[Bins, Mask], coming: Bins, surplus: Bins, room_for_new: int
) -> tuple[int, Mask]:
    """How many machines are missing for all of these gangs that can be served at all."""
    (here, allowed), missing, kept = nodes, 0, np.zeros(len(surplus), dtype=np.bool_)
    for _ in range(min(shape.count, MAX_GANGS)):
        places = [(here, allowed), (coming, None), (surplus, None)]
        room = sum(int(bins.room(size, apart=True, allowed=mask).sum()) for bins, mask in places)
        lacking = max(shape.request.gang - room, 0)
        if lacking > room_for_new - missing:
            break
        left = shape.request.gang - lacking
        for bins, mask in places:
            got = bins.take(size, left, apart=True, allowed=mask)
            left -= int(got.sum())
            if bins is surplus:
                kept |= got > 0
        missing += lacking
    return missing, kept


def choose_type(
    unmet: UnmetDemand, bottleneck: ResourceType, types: Sequence[OfferedType], limit: int
) -> tuple[Worker, int] | None:
    """The type for the unmet requests and the number of workers, at most `limit`; None if no type serves any."""
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
