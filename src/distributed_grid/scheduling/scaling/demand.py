"""Demand: the waiting requests that a new worker would serve, as shapes with their number, and what has to leave a
machine that is taken away.

Not counted is what a new worker cannot help: a request that is pinned to nodes, labels or the place of something else,
that runs within a lease, that only a pull worker can run, that a quota holds, or that is too large or takes too long
for every type of worker. Requests that differ only in who asks are one shape; in a queue of many shapes, those that
differ a little are, too. So many groups and shapes are looked at, the first of the queue first.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from distributed_grid.domain.leases import Lease, Request, WorkerKind
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Amounts
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.scheduling.placement.machine_limits import longest_lifetime_ms, outlives_all, stated_ms
from distributed_grid.scheduling.queue.fairness import Quotas
from distributed_grid.scheduling.scaling.worker_availability import closed_text, closure_of, place_of

MAX_SHAPES = 128
"""Shapes in one evaluation; what is left is seen in the next one, when these are on their way."""
MAX_GROUPS = 4096
"""Groups of equal requests that are read in one evaluation."""

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

MEMORY_KEPT = 8
"""One part in so many of a worker's memory is not lent: its system and its reserve have it."""
Size = tuple[int, int, int, int]
"""Millicores, bytes of memory, thousandths of GPUs, whole GPUs."""
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
    """What waits and would be served by a worker of one of these types."""
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
        why = _served_elsewhere(request) or ("" if is_served(ask, types) else TOO_LARGE)
        if longest_ms and not why and stated_ms(request) > longest_ms:
            why = TOO_LONG
        if not why:
            memory = _rounded(ask.memory_bytes) if is_wide else ask.memory_bytes
            if memory > ask.memory_bytes and not is_served(ask, types, memory):
                memory = ask.memory_bytes
            shape = (ask.cpu_milli, memory, ask.gpu_milli, request.gang, request.anti_affinity, _must_be_apart(request))
            if shape not in counts and len(counts) == MAX_SHAPES:
                why = LATER
        if why:
            not_counted[why] = not_counted.get(why, 0) + count
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
    """What runs on workers whose end is announced, will not be over by then, and would be served by a worker of one of
    these types: it will be queued again."""
    counts: dict[ShapeKey, int] = {}
    examples: dict[ShapeKey, Request] = {}
    for worker in ledger.workers.values():
        if not worker.is_leaving or worker.notice is None:
            continue
        for lease in ledger.leases_of(worker.node):
            request, ask = lease.request, lease.request.ask
            if not _is_displaced(ledger, lease, worker.notice.stop_by_ms):
                continue
            if _served_elsewhere(request) or not is_served(ask, types):
                continue
            amounts = (ask.cpu_milli, ask.memory_bytes, ask.gpu_milli)
            shape = (*amounts, request.gang, request.anti_affinity, _must_be_apart(request))
            if shape in counts or len(counts) < MAX_SHAPES:
                counts[shape] = counts.get(shape, 0) + 1
                examples.setdefault(shape, request)
    return tuple(replace(_shape(key, examples[key], count), displaced=True) for key, count in counts.items())


def _is_displaced(ledger: Ledger, lease: Lease, stop_by_ms: int) -> bool:
    """Whether the job of a lease will be stopped by then, and queued again."""
    job = ledger.jobs.get(lease.job)
    if job is None or not lease.holds or (job.stop is not None and not job.stop.requeue):
        return False
    return not 0 < lease.expected_end_ms <= stop_by_ms


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
    """What one request takes; a part of a GPU takes the share of a device that as many as possible of its size get."""
    gpu = ask.gpu_milli
    if 0 < gpu < WHOLE_GPU:
        gpu = WHOLE_GPU // (WHOLE_GPU // gpu)
    return ask.cpu_milli, ask.memory_bytes, gpu, gpu // WHOLE_GPU if ask.gpu_milli >= WHOLE_GPU else 0


def usable(resources: WorkerResources) -> WorkerResources:
    """What an empty worker would lend of what it has."""
    return replace(resources, memory_bytes=resources.memory_bytes - resources.memory_bytes // MEMORY_KEPT)


def fits(size: Size, resources: WorkerResources) -> bool:
    """Whether an empty worker could serve one request of this size."""
    cpu, memory, gpu, _ = size
    return cpu <= resources.cpu_milli and memory <= resources.memory_bytes and gpu <= WHOLE_GPU * resources.gpu_count


def _served_elsewhere(request: Request) -> str:
    """Why no new worker would get this request, whatever it has; empty where one would."""
    if request.within:
        return INSIDE
    if request.runs_on is WorkerKind.PULL:
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
    for one in types:  # noqa: SIM110 - a generator costs twice as much, and this is called for every group
        if fits(size, one):
            return True
    return False


def _rounded(memory_bytes: int) -> int:
    """An eighth more at most, so that many requests which differ a little are one shape."""
    step = 1 << max(memory_bytes.bit_length() - 4, 0)
    return -(-memory_bytes // step) * step


def _must_be_apart(request: Request) -> bool:
    return request.gang > 1 or bool(request.group and request.group in request.anti_affinity)
