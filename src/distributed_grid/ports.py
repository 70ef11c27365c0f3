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
    """A live value as bytes; `blob=None` in a batch removes it."""

    kind: str
    key: str
    blob: bytes | None


class EndedRow(Struct, frozen=True):
    """A value that has ended; `started_at_ms=0`: it never started and used nothing.

    `target` is the node that it was for, if any.
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


class NumberedRow(Struct, frozen=True):
    """An ended row with its number: the later a row is stored, the higher is its number."""

    number: int
    row: EndedRow


class EventRow(Struct, frozen=True):
    """An event; `reason` is a short code, because summaries are kept per reason."""

    seq: int
    at_ms: int
    type: str
    user: str
    subject: str
    node: str
    reason: str
    blob: bytes


class SummaryRow(Struct, frozen=True):
    """Use of one user on one node on one UTC day, for one kind, one reason and one target.

    `day` counts days since the Unix epoch; `kind` is the kind of the ended row, or `event:<type>`. Totals are
    amount times duration and may exceed 64 bits: a terabyte for a month does.
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
    """Use by one user from one node, for one target; or by all on one day, counted as in summaries. Totals are amount
    times duration, exactly."""

    user: str
    node: str
    target: str
    day: int
    count: int
    cpu_milli_ms: int
    memory_byte_ms: int
    gpu_milli_ms: int


class Batch(Struct):
    """Rows and events that become durable together or not at all."""

    live: list[LiveRow] = []
    ended: list[EndedRow] = []
    events: list[EventRow] = []


class LoadedRows(Struct):
    """All live rows of a store, and the number of its last event."""

    live: list[LiveRow]
    last_event_seq: int
    schema_version: int


class EndedFilters(TypedDict, total=False):
    """Filters of ended rows; None is any, `since_ms` is included."""

    key: str | None
    key_prefix: str | None
    request_id: str | None
    user: str | None
    node: str | None
    since_ms: int | None


class EventFilters(TypedDict, total=False):
    """Filters of events; None and no types are any, `since_ms` is included."""

    after_seq: int
    since_ms: int | None
    subject: str | None
    types: Sequence[str]


class Store(Protocol):
    """Keeps live rows and history; knows rows, not their meaning.

    One thread writes (`commit`, `fill_reserve`, `summarise`, `close`); any thread may read meanwhile, and sees
    whole batches only. A read that begins after a `commit` has returned sees it.
    """

    def load(self) -> LoadedRows:
        """All live rows, by kind and key, from one moment; loading changes nothing."""

    def commit(self, batch: Batch) -> None:
        """Make the batch durable, all of it or nothing.

        The last `LiveRow` of a (kind, key) wins; removing a missing row is not an error. Events must
        carry growing numbers above all stored ones, else `Conflict`: so a batch with events is never
        stored twice. `StoreFailed` (disk full, I/O error) leaves the store as it was, usable again
        when the cause is gone.
        """

    def has_room(self) -> bool:
        """True if new work may be stored; False while there is only the reserve, which is for ends, stops and cancels,
        or not even all of that. Cheap."""

    def fill_reserve(self) -> None:
        """Fill the reserve if it was used and there is room for it; a full one stays."""

    def ended(self, kind: str, *, limit: int = 100, **filters: Unpack[EndedFilters]) -> list[EndedRow]:
        """Ended rows that match all arguments, newest first. A key may have been used several times."""

    def last_ended_number(self) -> int:
        """Number of the ended row that was stored last, of any kind; 0 where none is kept."""

    def ended_after(self, kind: str, number: int, *, limit: int, user: str | None = None) -> list[NumberedRow]:
        """Rows of a kind with higher numbers, the lowest first."""

    def ended_before(
        self,
        kind: str,
        last_number: int,
        *,
        limit: int,
        place: tuple[int, int] | None = None,
        user: str | None = None,
    ) -> list[NumberedRow]:
        """Rows of a kind up to a number, newest first by end and number; with a place only those before that end and
        number."""

    def count_ended(self, kind: str, *, user: str | None = None) -> int:
        """Number of ended rows of a kind that are kept, of one user or of all."""

    def events(self, *, limit: int = 1000, newest: bool = False, **filters: Unpack[EventFilters]) -> list[EventRow]:
        """Events in order; when there are more than `limit`, the first, or the newest."""

    def begin_of_newest(self, count: int, **filters: Unpack[EventFilters]) -> int:
        """Number after which the newest `count` events begin: a reader of many pages begins there."""

    def summarise(self, *, before_ms: int, limit: int = 5000) -> int:
        """Fold at most `limit` ended rows and events older than that into summaries; the number of folded ones.

        Done in short transactions, so that commits come between; 0 means that nothing is left to fold.
        """

    def summaries(self) -> list[SummaryRow]:
        """All folded rows, by day, kind, user, node, reason and target; exact, and only ever added to."""

    def lent(self, *, since_ms: int, by_day: bool = False) -> list[LentRow]:
        """Use by leases that ended since then, from then on, by user, node and target; or only by the day they ended.

        Leases that were never granted do not count. Folded leases have no times any more: they count in full,
        on the day they ended, when all of that day is since then.
        """

    def close(self) -> None:
        """Give back files and locks. Closing twice is not an error."""


class EngineGroup(Struct, frozen=True):
    """A group to reserve in an engine under a name, on the node that it calls `place`.

    `left_seconds` is the remaining time of its lease (0: without end).
    """

    name: str
    place: str
    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_milli: int = 0
    custom: tuple[tuple[str, int], ...] = ()
    left_seconds: float = 0.0


class EngineView(Struct, frozen=True):
    """State of an engine: its present life, its nodes, and our groups, each with its place.

    `groups` is None if not asked for. `in_use` are those of automatic leases that something runs in, or was about
    to since the last view.
    """

    session: str
    nodes: tuple[EngineNode, ...]
    groups: tuple[tuple[str, str], ...] | None = None
    in_use: tuple[str, ...] = ()


class Engine(Protocol):
    """Reserves lent resources in a system that schedules work of its own.

    Every method raises `Unreachable` while the engine is away: then the result is unknown, and the same call may be
    made again.
    """

    async def reserve(self, group: EngineGroup, *, seconds: float) -> None:
        """Have this group, within this time; an existing one is not made twice.

        Raises `Refused` with the reason if it cannot be had, and then nothing of it is left.
        """

    async def free(self, name: str) -> None:
        """Remove the group of this name; returns when it is gone. Freeing a group that is gone is not an error."""

    async def observe(self, *, full: bool) -> EngineView:
        """Nodes of the engine; `full` with the groups. Changes nothing."""

    async def extend_hold(self, seconds: float, terms: Mapping[str, float]) -> Collection[str]:
        """Extend the hold of the engine's groups.

        Groups end that are not held again within `seconds`, and those of `terms` after their seconds; a term
        that ends before the known one changes nothing. Returns when the engine knows it: those of `terms` that
        it has no group of.
        """

    async def clear(self) -> None:
        """Remove all our groups. Clearing twice is not an error."""


class WorkerOffer(Struct, frozen=True):
    """A kind of machine that a provider can start."""

    id: str  # the provider's own name of it, with zone and market
    worker_type: str
    resources: WorkerResources
    price_micro: int | None = None  # of an hour, in millionths of a dollar; None: unknown
    zone: str = ""
    market: str = ""
    on_this_machine: bool = False  # its resources come out of the control plane's machine
    unavailable: str = ""  # reason not to try it at all, such as a quota of zero
    lifetime_seconds: float = 0.0  # after it the provider itself ends the machine; 0: never
    queue_seconds: float = 0.0  # longest wait in a queue of the provider's; 0: it has no queue


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
        """Identity of this order among orders for the same worker; contains nothing secret."""
        has = self.resources
        text = repr((self.worker_id, self.grid_id, self.offer.id, has.cpu_milli, has.memory_bytes, has.gpu_count))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


InstanceState = Literal["starting", "running", "stopping", "gone"]


class WorkerInstance(Struct, frozen=True):
    """A machine as its provider sees it."""

    worker_id: str
    grid_id: str
    instance: str
    state: InstanceState  # `gone` is proven: not billed, and never will be again
    age_seconds: float = 0.0
    detail: str = ""
    ends_in_seconds: float | None = None  # the provider itself ends it then, even without the control plane
    waits: bool = False  # in a queue of the provider's (`detail` has the reason): it costs nothing


class CloudProviderBase(ABC):
    """Starts and ends machines. Methods block; the grid calls them in a thread, with a deadline.

    `Unreachable` means that the result is unknown: the identical call is made again. `Throttled` means that nothing
    was done, and that it may be tried later; `NoCapacity` that this offer cannot be had now; `Refused` that it
    never will, and that nothing exists. A provider keeps only its connection between calls. While a call about a
    machine is pending, no other is made about it.
    """

    name: ClassVar[str]
    is_on_this_host: bool = False  # its machines reach the loopback addresses of the control plane's
    is_consistent: ClassVar[bool] = False  # an unknown machine that was ended is gone
    notice_source: ClassVar[str] = ""  # the service where its machines read their notices (`aws`, `gcp`)

    @abstractmethod
    def create(self, order: WorkerOrder) -> WorkerInstance:
        """Start this machine, with its tags; the identical order again returns the existing machine."""

    @abstractmethod
    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        """Every machine with this grid's tag that is not gone; one that was just created may still be missing."""

    @abstractmethod
    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        """That machine, even a gone one if the provider remembers it; None if unknown."""

    @abstractmethod
    def terminate(self, worker_id: str, grid_id: str) -> None:
        """End it; returns when the provider has accepted that. Ending a machine that is gone is not an error."""

    @abstractmethod
    def offers(self) -> Sequence[WorkerOffer]:
        """Machines that can be started, the preferred ones first; asks the provider, changes nothing."""

    def check(self) -> Sequence[str]:
        """Findings of calls that change nothing, one per line; raises the first lack, such as credentials or a
        permission."""
        return [f"{len(self.offers())} offers"]
