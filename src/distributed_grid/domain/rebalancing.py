"""Rebalancing: policies, watermarks, readings, and what is remembered of each node between two rounds.

Levels are thousandths of what a node has. The times of a policy are counted in rounds.
"""

from __future__ import annotations

import enum
from typing import ClassVar

from msgspec import Struct

from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.resources import Amounts, Priority, ResourceType

GRID_USER = "grid"
"""In whose name the grid asks for its nodes."""
AUTOMATIC_PREFIX = "auto-"
"""How the ids of such requests begin."""
WATCHED_RESOURCES = (ResourceType.MEMORY, ResourceType.CPU, ResourceType.GPU)
"""Looked at in this order: memory first."""
ASKED, REFUSED, USED, GIVEN_BACK = "asked", "refused", "used", "given_back"
ACTIONS = (ASKED, REFUSED, USED, GIVEN_BACK)
"""What a `rebalanced` line can be about."""
SPREAD = "spread"
"""The cause of a recommendation that evens nodes out."""


class SharingMode(enum.StrEnum):
    """What rebalancing may do: advise, borrow for nodes under pressure, even out."""

    OFFLOAD_ONLY = "offload_only"
    SHARE_AND_OFFLOAD = "share_and_offload"
    DYNAMIC_BALANCING = "dynamic_balancing"


class RebalancePolicy(Struct, frozen=True):
    """The numbers by which one policy differs from another; `domain/rebalancing.py` has the table.

    After `act_after` rounds beyond a mark it acts, and then rests for `cool_down`. It asks for `portion_milli` of the
    excess at once and holds up to `leases_max` leases for a node, each for `term` rounds, renewed when `renew_at` are
    left. One that nothing has used for `unused_after` rounds goes back. It believes a forecast for `ahead` rounds from
    now that is `sure_milli` certain. Nodes that differ by more than `spread_milli` are evened out.
    """

    act_after: int
    portion_milli: int
    leases_max: int
    term: int
    renew_at: int
    unused_after: int
    cool_down: int
    ahead: int
    sure_milli: int
    spread_milli: int
    priority: Priority
    shares: bool
    evens_out: bool


class Watermarks(Struct, frozen=True):
    """Above `high` a node needs more, below `low` it does not any more; in between nothing changes."""

    high: int = 800
    low: int = 300

    @property
    def middle(self) -> int:
        """The target of borrowing: far from both watermarks, so that reaching it changes nothing."""
        return (self.high + self.low) // 2


class RebalanceRules(Struct, frozen=True):
    """Rebalancing settings of the config. A node lends only what it has free above `excess_milli`."""

    mode: SharingMode
    policy: RebalancePolicy
    interval_ms: int
    memory: Watermarks = Watermarks()
    cpu: Watermarks = Watermarks()
    gpu: Watermarks = Watermarks()
    excess_milli: int = 200

    def watermarks(self, resource: ResourceType) -> Watermarks:
        if resource is ResourceType.MEMORY:
            return self.memory
        return self.cpu if resource is ResourceType.CPU else self.gpu

    @property
    def shares(self) -> bool:
        """Whether nodes under pressure get leases."""
        return self.mode is not SharingMode.OFFLOAD_ONLY and self.policy.shares

    @property
    def evens_out(self) -> bool:
        """Whether nodes that differ much are evened out though none is under pressure."""
        return self.mode is SharingMode.DYNAMIC_BALANCING and self.policy.evens_out


class Forecast(Struct, frozen=True):
    """Where a level will be; nine of ten later measurements should lie within `reach` of it."""

    level: int
    reach: int = 0


class PressureReading(Struct, frozen=True):
    """Levels of a node at one moment; None where unknown. `score` combines them."""

    node: str
    score: int | None = None
    memory: int | None = None
    cpu: int | None = None
    gpu: int | None = None
    memory_ahead: Forecast | None = None
    cpu_ahead: Forecast | None = None
    gpu_ahead: Forecast | None = None

    def level(self, resource: ResourceType) -> int | None:
        if resource is ResourceType.MEMORY:
            return self.memory
        return self.cpu if resource is ResourceType.CPU else self.gpu

    def ahead(self, resource: ResourceType) -> Forecast | None:
        if resource is ResourceType.MEMORY:
            return self.memory_ahead
        return self.cpu_ahead if resource is ResourceType.CPU else self.gpu_ahead


class RebalanceSchedule(Struct, frozen=True):
    """What is left to look at in a round, so that it is found out once: the nodes in their order (an empty name is
    those who wait), the nodes that could help, least loaded first, and the resources that users wait for."""

    nodes: tuple[str, ...]
    with_headroom: tuple[str, ...] = ()
    contested: frozenset[str] = frozenset()


class PressureWatch(Struct, frozen=True):
    """One resource of a node between two readings: since when it is beyond a mark, and when something was done.

    `refused` says that nobody could help and that this was told. `used_at_ms` is when something of what is held was
    last used or came. `unused_amount` went back after `unused_ms` because nothing had used it (0: nothing did); it is
    asked for again when work of the node arrives or waits.
    """

    above_since_ms: int | None = None
    below_since_ms: int | None = None
    acted_at_ms: int | None = None
    refused: bool = False
    used_at_ms: int | None = None
    unused_amount: int = 0
    unused_ms: int = 0


class Advice(Struct, frozen=True):
    """Work that should move, and why. Without a job it is about whatever else runs there."""

    cause: str
    job: str
    to: str
    reason: str
    since_ms: int


class RebalanceState(Struct, frozen=True):
    """What is remembered of a node between rounds. Never stored: the leases themselves are what lasts."""

    kind: ClassVar[str] = "rebalance_state"

    node: str
    memory: PressureWatch = PressureWatch()
    cpu: PressureWatch = PressureWatch()
    gpu: PressureWatch = PressureWatch()
    spread: PressureWatch = PressureWatch()
    advice: Advice | None = None
    advised_at_ms: int | None = None

    @property
    def key(self) -> str:
        return self.node

    @property
    def is_over(self) -> bool:
        return False

    def watch(self, cause: str) -> PressureWatch:
        """The watch over a resource, or over the distance to the least loaded node."""
        return {"memory": self.memory, "cpu": self.cpu, "gpu": self.gpu, SPREAD: self.spread}[cause]


def is_automatic(request: Request) -> bool:
    """Whether the grid itself asked for this, for one of its nodes."""
    return request.user == GRID_USER and bool(request.target) and request.id.startswith(AUTOMATIC_PREFIX)


def is_boost(lease: Lease) -> bool:
    """Whether this is held for a node, from another one, by a user or by the grid itself."""
    request = lease.request
    return bool(request.target) and request.target in request.anti_affinity and request.gang == 1 and not lease.job


def owner_of(request: Request) -> tuple[str, ...]:
    """The node whose work this is: the one it is for, or, where it names no node, the one on which it was typed."""
    owner = request.target or (request.origin if not (request.require or request.prefer) else "")
    return (owner,) if owner else ()


def belongs_to(request: Request) -> tuple[str, ...]:
    """The nodes whose work this is while it waits: the one it is for or was typed on, and those that it names."""
    owner = request.target or request.origin
    return (*((owner,) if owner else ()), *request.require, *request.prefer)


def resource_of(ask: Amounts) -> ResourceType:
    """The one resource that an automatic request is about."""
    if ask.memory_bytes:
        return ResourceType.MEMORY
    return ResourceType.CPU if ask.cpu_milli else ResourceType.GPU


def claimed_amount(lease: Lease, resource: ResourceType) -> int:
    """How much of a resource a lease holds, in its base unit."""
    claim = lease.claim
    if claim is None:
        return 0
    if resource is ResourceType.MEMORY:
        return claim.memory_bytes
    return claim.cpu_milli if resource is ResourceType.CPU else sum(share.milli for share in claim.gpus)


class SharingPolicy(enum.StrEnum):
    """`policy:` in the config; `domain/rebalancing.py` has the numbers behind each."""

    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"
    PREDICTIVE = "predictive"

    @classmethod
    def _missing_(cls, value: object) -> SharingPolicy | None:
        folded = str(value).lower()
        return next((policy for policy in cls if policy.value == folded), None)


SHARING_POLICIES: dict[str, RebalancePolicy] = {
    "conservative": RebalancePolicy(
        act_after=10,
        portion_milli=250,
        leases_max=2,
        term=20,
        renew_at=10,
        unused_after=20,
        cool_down=20,
        ahead=0,
        sure_milli=0,
        spread_milli=0,
        priority=Priority.LOW,
        shares=True,
        evens_out=False,
    ),
    "balanced": RebalancePolicy(
        act_after=2,
        portion_milli=500,
        leases_max=3,
        term=20,
        renew_at=10,
        unused_after=20,
        cool_down=4,
        ahead=0,
        sure_milli=0,
        spread_milli=400,
        priority=Priority.LOW,
        shares=True,
        evens_out=True,
    ),
    "aggressive": RebalancePolicy(
        act_after=0,
        portion_milli=1000,
        leases_max=6,
        term=40,
        renew_at=20,
        unused_after=40,
        cool_down=1,
        ahead=0,
        sure_milli=0,
        spread_milli=200,
        priority=Priority.MEDIUM,
        shares=True,
        evens_out=True,
    ),
    "predictive": RebalancePolicy(
        act_after=2,
        portion_milli=500,
        leases_max=4,
        term=20,
        renew_at=10,
        unused_after=20,
        cool_down=4,
        ahead=10,
        sure_milli=800,
        spread_milli=300,
        priority=Priority.LOW,
        shares=True,
        evens_out=True,
    ),
}
