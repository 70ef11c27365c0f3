"""Requests and leases; and fences, which order the grants of a lease.

A fence is the epoch of the control plane that gave it, and a number that grows with every grant, so that an agent
refuses an order older than one it has seen. Epochs grow by one with each start, so every fence is far below 2**61. What
an agent, a boost file or an engine says of fences and epochs never raises the counters of the grid: it raises the epoch
of the node it is about (`Node.epoch`), and only where it is plausible.
"""

from __future__ import annotations

import enum
from typing import ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import Amounts, Claim, Priority
from distributed_grid.domain.rows import HistoryEntry, Row
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.domain.states import LeaseEnd, LeaseState

MAX_DURATION_MS = 200 * 365 * 86_400_000
FOREVER_MS = MAX_DURATION_MS // 2
"""Wait of a request that stays queued until it is granted or withdrawn; a longer wait means the same."""
MAX_GANG_SIZE = 1_000
MAX_NAMES = 256
"""Nodes, labels or jobs that each list of a new request may name."""
FENCE_NUMBER_BITS = 32
MAX_EPOCH = 2**29 - 1
MAX_FENCE = (MAX_EPOCH + 1 << FENCE_NUMBER_BITS) - 1
MAX_EPOCH_LEAD = 1_000_000
"""Starts of a control plane that a restored backup or a deleted database can have forgotten."""


class NodeKind(enum.StrEnum):
    """Where a request may be served: on nodes with an agent, on pull workers, or on both."""

    AGENT = "agent"
    PULL = "pull"
    ANY = "any"


class Request(Struct, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """Request for resources: user, amounts, urgency, time, place.

    `require`, `labels`, `affinity` and `anti_affinity` are constraints, `prefer` is a wish; affinities name nodes,
    jobs or groups of requests.
    """

    id: str
    user: str
    ask: Amounts
    priority: Priority = Priority.MEDIUM
    prefer: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    wait_ms: int = 300_000
    duration_ms: int = 0
    target: str = ""  # node that it is for
    team: str = ""
    strategy: Strategy | None = None
    labels: tuple[tuple[str, str], ...] = ()
    affinity: tuple[str, ...] = ()
    anti_affinity: tuple[str, ...] = ()
    group: str = ""
    gang: int = 1  # number of leases on as many nodes, all or none
    expects_ms: int = 0  # stated length; 0: unknown
    deadline_ms: int = 0  # moment by which it must be over; 0: none
    use_lease: str = field(default="", name="within")  # held lease that is used instead of new resources
    block: str = ""  # block that a copy in memory is for
    origin: str = ""  # node on which it was typed, where that is known
    limits_memory: bool = False  # its memory is the limit of a job, which really uses it
    runs_on: NodeKind = NodeKind.AGENT
    task: str = ""  # of a reservation without a job, which is renewed while its node is heard
    worker: str = ""  # worker that runs in these resources, on the node's machine
    closed: tuple[tuple[str, int], ...] = ()  # nodes that have evicted the job, each with the end of its closure

    @property
    def starts_without_cores(self) -> bool:
        """Whether it is for a command that has asked for no cores. It needs a little CPU all the same."""
        return self.limits_memory and not self.ask.cpu_milli

    @property
    def reopens_at_ms(self) -> int:
        """The moment at which the next closed node may serve this again; 0: none is closed."""
        return min((until_ms for _, until_ms in self.closed), default=0)

    def problem(self) -> str | None:
        """Why nobody can ask for this, or None. A dot in an id would make it look like a job's lease."""
        if "." in self.id or not self.id:
            return f"a request id must not be empty or have a dot: {self.id!r}"
        if not (0 <= self.wait_ms <= MAX_DURATION_MS and 0 <= self.duration_ms <= MAX_DURATION_MS):
            return "a wait or a duration must not be negative or longer than 200 years"
        if not 0 <= self.expects_ms <= MAX_DURATION_MS or self.deadline_ms < 0:
            return "an expected time or a deadline must not be negative or longer than 200 years"
        if not 1 <= self.gang <= MAX_GANG_SIZE:
            return f"a gang must have 1 to {MAX_GANG_SIZE} members"
        if self.strategy is Strategy.NODE_SPECIFIC and not self.require:
            return "the strategy node_specific needs a node"
        if self.use_lease:
            return None if self.ask == Amounts() else "a request within a lease must not name resources"
        return self.ask.problem()

    def naming_problem(self) -> str | None:
        """The list of this request that is too long, or None. It holds for new requests: accepted ones, and those of
        the grid itself, may name more."""
        lists = {
            "prefer": self.prefer,
            "require": self.require,
            "labels": self.labels,
            "affinity": self.affinity,
            "anti_affinity": self.anti_affinity,
            "gpu_models": self.ask.gpu_models,
            "resources": self.ask.custom,
        }
        for name, names in lists.items():
            if len(names) > MAX_NAMES:
                return f"{name} may have at most {MAX_NAMES} names, and has {len(names):,}"
        return None

    @property
    def waits_forever(self) -> bool:
        """True if only a grant, a cancellation or its deadline ends the wait of this request."""
        return self.wait_ms >= FOREVER_MS

    @property
    def latest_start_ms(self) -> int:
        """The last moment at which this can start and be over by its deadline; 0 without one."""
        return max(self.deadline_ms - self.expects_ms, 1) if self.deadline_ms else 0


class Lease(Row, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """A request and its grant; the claim is set from the grant on."""

    kind: ClassVar[str] = "lease"

    id: str
    request: Request
    asked_at_ms: int
    state: LeaseState = LeaseState.ASKED
    job: str = ""
    node: str = ""
    claim: Claim | None = None
    fence: int = 0
    granted_at_ms: int = 0
    ends_at_ms: int = 0
    generation: int = 0
    awaits: tuple[str, ...] = ()  # leases that must end before this preemptor may start
    preempted_by: str = ""  # preemptor that this victim makes room for
    end: LeaseEnd | None = None
    detail: str = ""
    ended_at_ms: int = 0
    gang: str = ""  # request whose members are held together: when one of them ends, all do
    gang_nodes: tuple[str, ...] = ()
    engine: str = ""  # scheduler (`ray`) that has to reserve it before it is active
    recovered: bool = False
    """The ledger found it elsewhere: a claim, which the limits of its node do not check before that node was heard."""
    extensions: tuple[tuple[str, int], ...] = ()  # last requests for more time, with their milliseconds
    carved_from: tuple[str, ...] = ()  # automatic leases that gave it its claim, or a part of that
    work: int = 0  # expected length in microseconds, if it had the whole grid
    turn: int = 0  # work that starts before this request, in order of age (`QueueProgress.started`)

    @property
    def key(self) -> str:
        return self.id

    @property
    def is_over(self) -> bool:
        return self.state is LeaseState.ENDED

    def ended(self) -> HistoryEntry:
        ask = self.request.ask
        return HistoryEntry(
            key=self.id,
            request_id=self.request.id,
            user=self.request.user,
            node=self.node,
            ended_at_ms=self.ended_at_ms,
            reason=str(self.end),
            started_at_ms=self.granted_at_ms,
            cpu_milli=ask.cpu_milli,
            memory_bytes=ask.memory_bytes,
            gpu_milli=ask.gpu_milli,
            target=self.request.target,
        )

    @property
    def expected_end_ms(self) -> int:
        """The end of this lease, by its term or its stated length; 0: unknown."""
        stated = self.granted_at_ms + self.request.expects_ms if self.request.expects_ms else 0
        return min(stated, self.ends_at_ms) if stated and self.ends_at_ms else stated or self.ends_at_ms

    @property
    def holds(self) -> bool:
        """Whether this lease counts against its node."""
        return self.state in _HOLDING

    @property
    def wait_until_ms(self) -> int:
        """The end of the wait: stated, or when it could not be over by its deadline any more; 0: never."""
        gives_up = 0 if self.request.waits_forever else self.asked_at_ms + self.request.wait_ms
        latest = self.request.latest_start_ms
        return min(gives_up, latest) if gives_up and latest else gives_up or latest

    @property
    def deadline_ms(self) -> int:
        """The moment at which time alone changes this lease; 0: never."""
        if self.state is LeaseState.ASKED:
            reopens, gives_up = self.request.reopens_at_ms, self.wait_until_ms
            return min(reopens, gives_up) if reopens and gives_up else reopens or gives_up
        return self.ends_at_ms if self.state in _TERMED else 0

    @property
    def queue_key(self) -> tuple[int, int, str]:
        """The order of `Ledger.waiting`: priority, then age."""
        return (-int(self.request.priority), self.asked_at_ms, self.id)

    @property
    def age_key(self) -> tuple[int, str]:
        """The order by age within a group of `Ledger.queue_groups`."""
        return (self.asked_at_ms, self.id)

    @property
    def queue_group(self) -> tuple[Request, bool]:
        """Key of requests that differ only in id, wait and age, of jobs or of others."""
        return replace(self.request, id="", wait_ms=0), bool(self.job)


_HOLDING = frozenset({LeaseState.RESERVING, LeaseState.ACTIVE, LeaseState.RELEASING})
_TERMED = frozenset({LeaseState.RESERVING, LeaseState.ACTIVE})


def first_fence(epoch: int) -> int:
    """The fence below all those of an epoch."""
    return epoch << FENCE_NUMBER_BITS


def epoch_of(fence: int) -> int:
    """The epoch in which a fence was given."""
    return fence >> FENCE_NUMBER_BITS


def is_plausible_epoch(epoch: int, own: int) -> bool:
    """Whether a control plane of this grid, which has come to its `own` epoch, can ever have had this one."""
    return 0 <= epoch <= min(own + MAX_EPOCH_LEAD, MAX_EPOCH - 1)


def fence_on(node: Node, number: int) -> int:
    """The next of the grid's fences as it is given on a node: above all that were ever given there."""
    return max(number, first_fence(node.epoch) | number & (1 << FENCE_NUMBER_BITS) - 1)


def node_above_fence(node: Node, fence: int, number: int) -> Node:
    """The node, with an epoch of its own where a fence that was found there is not below the grid's next one."""
    return node if fence_on(node, number) > fence else replace(node, epoch=epoch_of(fence) + 1)
