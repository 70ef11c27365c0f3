"""Rebalancing: policies, watermarks, readings, and what is remembered of each node between two rounds.

Levels are thousandths of what a node has. The times of a policy are counted in rounds.
"""

from __future__ import annotations

import enum
from typing import ClassVar

from msgspec import Struct

from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.resources import Amounts, Priority, ResourceType
from distributed_grid.domain.rows import Row

GRID_USER = "grid"
"""User of the grid's own requests."""
AUTOMATIC_PREFIX = "auto-"
"""Prefix of the ids of automatic requests."""
WATCHED_RESOURCES = (ResourceType.MEMORY, ResourceType.CPU, ResourceType.GPU)
"""In the order in which they are relieved."""
ASKED, REFUSED, USED, GIVEN_BACK = "asked", "refused", "used", "given_back"
ACTIONS = (ASKED, REFUSED, USED, GIVEN_BACK)
"""Actions of a `rebalanced` record."""
SPREAD = "spread"
"""Cause of a recommendation that evens nodes out."""


class SharingMode(enum.StrEnum):
    """Permission of rebalancing: to advise, to borrow for nodes under pressure, to even out."""

    OFFLOAD_ONLY = "offload_only"
    SHARE_AND_OFFLOAD = "share_and_offload"
    DYNAMIC_BALANCING = "dynamic_balancing"


class RebalancePolicy(Struct, frozen=True, kw_only=True):
    """Parameters of a policy; `SHARING_POLICIES` has the table. Times are in rounds."""

    act_after: int  # beyond a mark, before it acts
    portion_milli: int  # part of the excess that is borrowed at once
    leases_max: int  # for one node
    term: int  # of a lease
    renew_at: int  # rounds left when a lease is renewed
    unused_after: int  # without use, until a lease is returned
    cool_down: int  # after an action
    ahead: int  # of a forecast
    sure_milli: int  # certainty from which a forecast counts
    spread_milli: int  # difference from which nodes are evened out
    priority: Priority
    shares: bool
    evens_out: bool


class Watermarks(Struct, frozen=True):
    """A node borrows above `high` and returns below `low`; in between nothing changes."""

    high: int = 800
    low: int = 300

    @property
    def middle(self) -> int:
        """The target of borrowing: far from both watermarks, so that reaching it changes nothing."""
        return (self.high + self.low) // 2


class RebalanceRules(Struct, frozen=True, kw_only=True):
    """Rebalancing settings of the config."""

    mode: SharingMode
    policy: RebalancePolicy
    interval_ms: int
    memory: Watermarks = Watermarks()
    cpu: Watermarks = Watermarks()
    gpu: Watermarks = Watermarks()
    excess_milli: int = 200  # part of a node that stays free, whatever it lends

    def watermarks(self, resource: ResourceType) -> Watermarks:
        if resource is ResourceType.MEMORY:
            return self.memory
        return self.cpu if resource is ResourceType.CPU else self.gpu

    @property
    def shares(self) -> bool:
        return self.mode is not SharingMode.OFFLOAD_ONLY and self.policy.shares

    @property
    def evens_out(self) -> bool:
        """Whether nodes that differ much are evened out though none is under pressure."""
        return self.mode is SharingMode.DYNAMIC_BALANCING and self.policy.evens_out


class Forecast(Struct, frozen=True):
    """Expected level; nine of ten later measurements should lie within `reach` of it."""

    level: int
    reach: int = 0


class PressureReading(Struct, frozen=True, kw_only=True):
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
    """Rest of a round, so that its facts are computed once."""

    nodes: tuple[str, ...]  # in the order of their turns; an empty name is the queue
    with_headroom: tuple[str, ...] = ()  # possible lenders, the least loaded first
    contested: frozenset[str] = frozenset()  # resources that users wait for


class PressureWatch(Struct, frozen=True, kw_only=True):
    """State of one resource of a node between two readings."""

    above_since_ms: int | None = None
    below_since_ms: int | None = None
    acted_at_ms: int | None = None
    refused: bool = False  # no node could help, and the audit trail says so
    used_at_ms: int | None = None  # last use or arrival of a borrowed share
    unused_amount: int = 0  # returned because it was unused for `unused_ms`; borrowed again when work arrives
    unused_ms: int = 0


class Advice(Struct, frozen=True):
    """Recommendation to move work to another node."""

    cause: str
    job: str  # empty: the processes there that belong to no job
    to: str
    reason: str
    since_ms: int


class RebalanceState(Row, frozen=True, kw_only=True):
    """State of a node between rounds. Never stored: the leases themselves last."""

    kind: ClassVar[str] = "rebalance_state"
    is_volatile: ClassVar[bool] = True

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

    def watch(self, cause: str) -> PressureWatch:
        return {"memory": self.memory, "cpu": self.cpu, "gpu": self.gpu, SPREAD: self.spread}[cause]


def is_automatic(request: Request) -> bool:
    """Whether the grid itself requested this for one of its nodes."""
    return request.user == GRID_USER and bool(request.target) and request.id.startswith(AUTOMATIC_PREFIX)


def is_boost(lease: Lease) -> bool:
    """Whether a user or the grid holds this lease of one node for another node."""
    request = lease.request
    return bool(request.target) and request.target in request.anti_affinity and request.gang == 1 and not lease.job


def owner_of(request: Request) -> tuple[str, ...]:
    """The node of origin: its target, or, where it names no node, the one on which it was typed."""
    owner = request.target or (request.origin if not (request.require or request.prefer) else "")
    return (owner,) if owner else ()


def belongs_to(request: Request) -> tuple[str, ...]:
    """Nodes whose queue a waiting request belongs to: its target or origin, and those that it names."""
    owner = request.target or request.origin
    return (*((owner,) if owner else ()), *request.require, *request.prefer)


def resource_of(ask: Amounts) -> ResourceType:
    """The one resource of an automatic request."""
    if ask.memory_bytes:
        return ResourceType.MEMORY
    return ResourceType.CPU if ask.cpu_milli else ResourceType.GPU


def claimed_amount(lease: Lease, resource: ResourceType) -> int:
    """Amount of a resource that a lease holds, in its base unit."""
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
