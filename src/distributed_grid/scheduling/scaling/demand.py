"""Demand: the waiting requests that a new worker would serve, as shapes with their number.

Not counted is what a new worker cannot help: a request that is pinned to nodes, labels or the place of something else,
that runs within a lease, that only a pull worker can run, that a quota holds, or that is too large for every type of
worker. Requests that differ only in who asks are one shape; so many shapes are looked at, the first of the queue first.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from distributed_grid.domain.leases import Request, WorkerKind
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.scheduling.queue.fairness import Quotas
from distributed_grid.scheduling.scaling.bins import fits, usable

MAX_SHAPES = 256
"""Shapes in one evaluation; what is left is seen in the next one, when these are on their way."""

PINNED, NEAR, INSIDE, HELD, TOO_LARGE, LATER, PULLED = (
    "pinned to nodes or labels",
    "has to be near something that runs",
    "runs within a lease",
    "held by a quota",
    "too large, or of a kind that no worker has",
    "seen in the next evaluation",
    "a task that only a pull worker can run",
)


class WaitingShape(Struct, frozen=True):
    """Equal requests: `count` of them, of `gang` members each; `apart` where each needs a machine of its own.

    `request` is one of them.
    """

    request: Request
    apart: bool
    count: int

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
    counts: dict[tuple[Amounts, int, tuple[str, ...], bool], int] = {}
    examples: dict[tuple[Amounts, int, tuple[str, ...], bool], Request] = {}
    not_counted: dict[str, int] = {}
    served: dict[Amounts, bool] = {}

    def leave_out(why: str, count: int) -> None:
        not_counted[why] = not_counted.get(why, 0) + count

    groups = sorted(ledger.queue_groups.items(), key=_queue_position)
    for (request, _), members in groups:
        why = _served_elsewhere(request) or ("" if _is_served(request.ask, types, served) else TOO_LARGE)
        if why:
            leave_out(why, len(members))
            continue
        shape = (request.ask, request.gang, request.anti_affinity, _must_be_apart(request))
        if shape not in counts and len(counts) == MAX_SHAPES:
            leave_out(LATER, len(members))
            continue
        count = len(members) if quotas is None else quotas.admit(request, len(members))
        if count < len(members):
            leave_out(HELD, len(members) - count)
        if count:
            counts[shape] = counts.get(shape, 0) + count
            examples.setdefault(shape, request)
    shapes = (WaitingShape(examples[shape], shape[3], count) for shape, count in counts.items())
    return Demand(tuple(shapes), not_counted)


def worker_could_serve(ledger: Ledger, request: Request) -> bool:
    """Whether a worker that scaling may start would serve a request that no node can."""
    rules = ledger.scaling
    if not rules.provider or request.gang > rules.max_workers or _served_elsewhere(request):
        return False
    return _is_served(request.ask, [usable(worker.resources) for worker in rules.types], {})


def _queue_position(group: tuple[tuple[Request, bool], list[tuple[int, str]]]) -> tuple[int, int, str]:
    (request, _), members = group
    return (-int(request.priority), *members[0])


def _served_elsewhere(request: Request) -> str:
    """Why no new worker would get this request, whatever it has; empty where one would."""
    if request.within:
        return INSIDE
    if request.runs_on is WorkerKind.PULL:
        return PULLED
    if request.require or request.labels:
        return PINNED
    return NEAR if request.affinity else ""


def _is_served(ask: Amounts, types: Sequence[WorkerResources], known: dict[Amounts, bool]) -> bool:
    """Whether an empty worker of some type has room; of custom resources and models of GPUs nothing is known."""
    found = known.get(ask)
    if found is None:
        unknown = bool(ask.custom or ask.gpu_models or ask.gpu_memory_bytes)
        found = known[ask] = not unknown and any(fits(ask, one) for one in types)
    return found


def _must_be_apart(request: Request) -> bool:
    return request.gang > 1 or bool(request.group and request.group in request.anti_affinity)
