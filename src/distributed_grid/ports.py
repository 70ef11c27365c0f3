"""Ports of the store, of execution engines and of providers of workers, with the values that cross them.

A port has few methods, and each says what a second call does. The values are frozen and know nothing of the technology
behind the port. Every adapter passes the contract suite of its port (`tests/contract`). The port between control plane
and agents (`AgentSide`, `ControlSide`) is in `wire.py`, with its messages.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal, Protocol, TypedDict, Unpack

from msgspec import Struct

from distributed_grid.domain.events import EngineNode
from distributed_grid.domain.workers import WorkerResources


class LiveRow(Struct, frozen=True):
    """Something alive, as bytes; `blob=None` in a batch means it is alive no more."""

    kind: str
    key: str
    blob: bytes | None


class EndedRow(Struct, frozen=True):
    """Something that ended, for good; `started_at_ms=0` means it never started and used nothing.

    `target` is the node it was for, where it was for one.
    """

    kind: str
    key: str
    request_id: str
    user: str
    node: str
    ended_at_ms: int
    started_at_ms: int
    reason: str
    cpu_milli: int
    memory_bytes: int
    gpu_milli: int
    blob: bytes
    target: str = ""


class EventRow(Struct, frozen=True):
    """Something that happened; `reason` is a short code, for summaries are kept per reason."""

    seq: int
    at_ms: int
    type: str
    user: str
    subject: str
    node: str
    reason: str
    blob: bytes


class SummaryRow(Struct, frozen=True):
    """What one user did on one node on one UTC day, for one kind, one reason and one target.

    `day` counts days since the Unix epoch; `kind` is the kind of what ended, or `event:<type>`.
    Totals are amount times duration and may exceed 64 bits: a terabyte for a month does.
    """

    day: int
    kind: str
    user: str
    node: str
    reason: str
    count: int
    cpu_milli_ms: int
    memory_byte_ms: int
    gpu_milli_ms: int
    target: str = ""


class LentRow(Struct, frozen=True):
    """What one user had from one node, for one target; or what all had of all on one day, counted as in summaries.

    Totals are amount times duration, exactly.
    """

    user: str
    node: str
    target: str
    day: int
    count: int
    cpu_milli_ms: int
    memory_byte_ms: int
    gpu_milli_ms: int


class Batch(Struct):
    """What becomes durable together or not at all."""

    live: list[LiveRow] = []
    ended: list[EndedRow] = []
    events: list[EventRow] = []


class LoadedRows(Struct):
    """Everything alive in a store, and where its events stopped."""

    live: list[LiveRow]
    last_event_seq: int
    schema_version: int


class EndedFilters(TypedDict, total=False):
    """Which ended rows; None is any, `since_ms` is included."""

    key: str | None
    key_prefix: str | None
    request_id: str | None
    user: str | None
    node: str | None
    since_ms: int | None


class EventFilters(TypedDict, total=False):
    """Which events; None and no types are any, `since_ms` is included."""

    after_seq: int
    since_ms: int | None
    subject: str | None
    types: Sequence[str]


class Store(Protocol):
    """Keeps what is alive and what has been; knows rows, not their meaning.

    One thread writes (`commit`, `fill_reserve`, `summarise`, `close`); any thread may read meanwhile, and sees whole
    batches only. What `commit` returned from is seen by every read that begins afterwards.
    """

    def load(self) -> LoadedRows:
        """Everything alive, by kind and key, from one moment; loading changes nothing."""

    def commit(self, batch: Batch) -> None:
        """Make the batch durable, all of it or nothing.

        The last `LiveRow` of a (kind, key) wins; removing what is not there is not an error. Events must
        carry growing numbers above all stored ones, else `Conflict`: so a batch with events is never
        stored twice. `StoreFailed` (disk full, I/O error) leaves the store as it was, usable again
        when the cause is gone.
        """

    def has_room(self) -> bool:
        """Whether new work may be stored; False while there is only the reserve, which is for ends, stops and cancels,
        or not even all of that. Cheap."""

    def fill_reserve(self) -> None:
        """Fill the reserve where it was used and there is room for it; a full one is left as it is."""

    def ended(self, kind: str, *, limit: int = 100, **filters: Unpack[EndedFilters]) -> list[EndedRow]:
        """What ended and fits all that is given, newest first. A key may have been used several times."""

    def count_ended(self, kind: str, *, user: str | None = None) -> int:
        """How many rows of a kind have ended and are kept, of one user or of all."""

    def events(self, *, limit: int = 1000, newest: bool = False, **filters: Unpack[EventFilters]) -> list[EventRow]:
        """What happened, in the order it did; when there is more than `limit`, the first, or the newest."""

    def begin_of_newest(self, count: int, **filters: Unpack[EventFilters]) -> int:
        """The number after which the newest so many events begin: who reads many pages of them begins there."""

    def summarise(self, *, before_ms: int, limit: int = 5000) -> int:
        """Fold at most `limit` ended rows and events older than that into summaries; how many were folded.

        Done in short transactions, so that commits come between; 0 means that nothing is left to fold.
        """

    def summaries(self) -> list[SummaryRow]:
        """All that was folded, by day, kind, user, node, reason and target; exact, and only ever added to."""

    def lent(self, *, since_ms: int, by_day: bool = False) -> list[LentRow]:
        """What leases that ended since then had, from then on, by user, node and target; or only by the day they ended.

        Leases that were never granted do not count. What was folded has no times any more: it counts in full, on
        the day it ended, when all of that day is since then.
        """

    def close(self) -> None:
        """Give back files and locks. Closing twice is not an error."""


class EngineGroup(Struct, frozen=True):
    """What an engine is to reserve under a name, on the node that it calls `place`.

    `left_seconds` is how long its lease has still to go (0: without end).
    """

    name: str
    place: str
    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_milli: int = 0
    custom: tuple[tuple[str, int], ...] = ()
    left_seconds: float = 0.0


class EngineView(Struct, frozen=True):
    """What an engine has: its present life, its nodes, and our groups, each with the place it is on.

    `groups` is None where they were not asked for. `in_use` are those of automatic leases that something runs in, or
    was about to since the last view.
    """

    session: str
    nodes: tuple[EngineNode, ...]
    groups: tuple[tuple[str, str], ...] | None = None
    in_use: tuple[str, ...] = ()


class Engine(Protocol):
    """Reserves what the grid lends, in a system that lends by itself, too.

    Every method raises `Unreachable` where the engine is away: then nobody knows what was done, and the same call may
    be made again.
    """

    async def reserve(self, group: EngineGroup, *, seconds: float) -> None:
        """Have this group, within so many seconds; one that is there already is not made twice.

        Raises `Refused` with the reason where it cannot be had, and then nothing of it is left.
        """

    async def free(self, name: str) -> None:
        """Have no group of this name; returns when it is gone. Freeing what is gone already is not an error."""

    async def observe(self, *, full: bool) -> EngineView:
        """What is there; `full` with the groups. Changes nothing."""

    async def extend_hold(self, seconds: float, terms: Mapping[str, float]) -> Collection[str]:
        """Say that the grid is there. Groups that are not held again within so many seconds go by themselves, and
        those of `terms` when so many seconds are over; a term that ends before the known one changes nothing.

        Returns when the engine knows it: those of `terms` that it has no group of.
        """

    async def clear(self) -> None:
        """Have nothing of ours any more. Clearing twice is not an error."""


class WorkerOffer(Struct, frozen=True):
    """A kind of machine that a provider can start; `id` is the provider's own name of it, with zone and market.

    `price_micro` is what an hour costs in millionths of a dollar; None: not known. `on_this_machine`: what it has comes
    out of the control plane's machine. `unavailable` says why it cannot be had at all, such as a quota of zero: it is
    not tried. `lifetime_seconds`: the provider itself ends such a machine after so long; 0: never. `queue_seconds`: an
    order may wait so long in a queue of the provider's before it is given up; 0: it has no queue.
    """

    id: str
    worker_type: str
    resources: WorkerResources
    price_micro: int | None = None
    zone: str = ""
    market: str = ""
    on_this_machine: bool = False
    unavailable: str = ""
    lifetime_seconds: float = 0.0
    queue_seconds: float = 0.0


JOIN_VARIABLE = "GRID_JOIN_TOKEN"
"""In the environment of an order: the token with which the agent joins."""


class WorkerOrder(Struct, frozen=True):
    """A machine to start. `worker_id` is the idempotency key, the name and a tag of it; `grid_id` is a tag, too.

    `environ` is for the agent on it, which joins with the token there: it must not be shown or logged.
    """

    worker_id: str
    grid_id: str
    offer: WorkerOffer
    resources: WorkerResources
    environ: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"WorkerOrder({self.worker_id!r}, {self.offer.id!r})"

    @property
    def digest(self) -> str:
        """What tells it from another order for the same worker; nothing secret goes into it."""
        has = self.resources
        text = repr((self.worker_id, self.grid_id, self.offer.id, has.cpu_milli, has.memory_bytes, has.gpu_count))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class WorkerInstance(Struct, frozen=True):
    """A machine as its provider sees it. `gone` is proven: it does not run, is not billed, and never will be again.

    `ends_in_seconds`: the provider itself ends it then, whatever happens to the control plane; None: it does not.
    `waits`: the order waits in a queue of the provider's (`detail` says for what): it does not run and costs nothing.
    """

    worker_id: str
    grid_id: str
    instance: str
    state: Literal["starting", "running", "stopping", "gone"]
    age_seconds: float = 0.0
    detail: str = ""
    ends_in_seconds: float | None = None
    waits: bool = False


class CloudProviderBase(ABC):
    """Starts and ends machines. Methods block; the grid calls them in a thread, with a deadline.

    `Unreachable` means that nobody knows whether it was done: the identical call is made again. `Throttled` means that
    it was not, and that it may be tried later; `NoCapacity` that this offer cannot be had now; `Refused` that it never
    will, and that nothing exists. What a provider keeps between calls is only its connection. No call lasts for ever:
    while one does, no other is made about the same machine.

    `is_on_this_host`: its machines reach the loopback addresses of the control plane's.
    `is_consistent`: what it was asked to end and does not know is gone.
    `notice_source`: where its machines read that they are taken away (`aws`, `gcp`); empty: nowhere.
    """

    name: ClassVar[str]
    is_on_this_host: bool = False
    is_consistent: ClassVar[bool] = False
    notice_source: ClassVar[str] = ""

    @abstractmethod
    def create(self, order: WorkerOrder) -> WorkerInstance:
        """Start this machine, with its tags; the identical order again returns the machine that there is."""

    @abstractmethod
    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        """Every machine with this grid's tag that is not gone; one that was just created may still be missing."""

    @abstractmethod
    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        """That machine, gone ones included where the provider remembers them; None where it knows none."""

    @abstractmethod
    def terminate(self, worker_id: str, grid_id: str) -> None:
        """Have it ended; returns when the provider has accepted that. Ending what is gone is not an error."""

    @abstractmethod
    def offers(self) -> Sequence[WorkerOffer]:
        """What can be started, the preferred ones first; asks the provider, changes nothing."""

    def check(self) -> Sequence[str]:
        """Lines that say what works, found by calls that change nothing; raises what is missing, such as credentials
        or a permission."""
        return [f"{len(self.offers())} offers"]
