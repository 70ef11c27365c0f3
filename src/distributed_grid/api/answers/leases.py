"""Leases, the decisions where they are placed, and boosts: leases of one node for another."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, UnsetType

from distributed_grid.api.answers.common import Answer, HeldResources, PageAnswer, Viewer, headline
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import claimed_amount, is_automatic, resource_of
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.states import LeaseState
from distributed_grid.scheduling.placement.explanation import Choice, reasoning, runners_up, scores
from distributed_grid.scheduling.pressure.loans import amounts_of, used_amount
from distributed_grid.scheduling.pressure.scan import is_in_use


def held_amounts(lease: Lease) -> Amounts:
    """The amounts of a lease as they were requested, or the rest of an automatic one."""
    if lease.claim is None or not is_automatic(lease.request):
        return lease.request.ask
    resource = resource_of(lease.request.ask)
    return amounts_of(resource, claimed_amount(lease, resource))


class AllocationRow(Answer, frozen=True, kw_only=True):
    """A lease, alive or ended."""

    allocation_id: str
    request_id: str
    job_id: str | None
    node_id: str | None
    target_node: str | None
    resource_type: str
    amount: float
    resources: HeldResources
    gang_id: str | None
    gang_nodes: list[str]
    user: str
    priority: str
    state: str
    fence: int
    requested_at: str | None
    allocated_at: str | None
    expires_at: str | None
    carved_from: list[str]  # the automatic leases of its node that gave some of it
    reason: str | None
    detail: str | None

    @classmethod
    def of(cls, viewer: Viewer, lease: Lease, job: Job | None = None) -> AllocationRow:
        kind, amount = headline(held_amounts(lease))
        return cls(
            allocation_id=lease.id,
            request_id=lease.request.id,
            job_id=job.id if job is not None else None,
            node_id=lease.node or None,
            target_node=lease.request.target or None,
            resource_type=kind,
            amount=amount,
            resources=HeldResources.of(lease.claim, lease.request.ask),
            gang_id=lease.gang or None,
            gang_nodes=list(lease.gang_nodes),
            user=lease.request.user,
            priority=lease.request.priority.name.lower(),
            state=str(lease.state),
            fence=lease.fence,
            requested_at=viewer.time(lease.asked_at_ms),
            allocated_at=viewer.time(lease.granted_at_ms),
            expires_at=viewer.time(lease.ends_at_ms),
            carved_from=list(lease.carved_from),
            reason=str(lease.end) if lease.end is not None else None,
            detail=lease.detail or None if viewer.shows(lease.request.user) else None,
        )


class DecisionAlternative(Answer, frozen=True):
    """A node that could have been chosen."""

    node_id: str
    score: int
    why: str


class DecisionScore(Answer, frozen=True):
    """The parts of a node's score: the strategy's criterion, then room and priority as parts of a node."""

    node_id: str
    score: int
    criterion: str | None
    room: float
    priority: float


class DecisionRow(Answer, frozen=True, kw_only=True):
    """The node that a request is placed on, or none yet, and the reasons."""

    node_id: str | None
    strategy: str
    confidence: float  # the probability that the choice is right until its term ends
    reasoning: list[str]
    alternatives: list[DecisionAlternative]
    scores: list[DecisionScore]
    estimated_start: str | None

    @classmethod
    def of(cls, choice: Choice, starts: str | None) -> DecisionRow:
        return cls(
            node_id=choice.node,
            strategy=str(choice.strategy),
            confidence=choice.confidence / 1000,
            reasoning=list(reasoning(choice)),
            alternatives=[DecisionAlternative(second.node, second.score, second.why) for second in runners_up(choice)],
            scores=[
                DecisionScore(score.node, score.score, score.criterion or None, score.room, score.priority)
                for score in scores(choice)
            ],
            estimated_start=starts,
        )

    @classmethod
    def undecided(cls, strategy: str, reasons: Iterable[str], starts: str | None) -> DecisionRow:
        return cls(
            node_id=None,
            strategy=strategy,
            confidence=0.0,
            reasoning=list(reasons),
            alternatives=[],
            scores=[],
            estimated_start=starts,
        )


class AllocationList(PageAnswer, frozen=True, kw_only=True):
    allocations: list[AllocationRow]
    total: int  # in all pages


class AllocationDetail(Answer, frozen=True, kw_only=True):
    """One lease; when it is requested also why it waits, node by node, and the decision about it."""

    allocation: AllocationRow
    reasons: list[str] | UnsetType = UNSET
    decision: DecisionRow | UnsetType = UNSET
    already_ended_at: str | UnsetType | None = UNSET


class BoostRow(Answer, frozen=True, kw_only=True):
    """A loan of one node to another, alive or ended."""

    boost_id: str
    source_node: str | None
    target_node: str
    resource_type: str
    amount: float  # of an automatic one: the rest of it
    user: str
    priority: str
    state: str
    is_active: bool
    recovered: bool  # known only from a file, a claim until its node reports
    allocated_at: str | None
    expires_at: str | None
    enforced_by: str  # `ray`, or `grid` alone
    placement_group: str | None
    automatic: bool  # rebalancing asked for it
    used_amount: float | None  # of a living automatic one
    reason: str | None
    detail: str | None

    @classmethod
    def of(cls, viewer: Viewer, ledger: Ledger, lease: Lease) -> BoostRow:
        (kind, amount), asked = headline(held_amounts(lease)), lease.request.ask
        binding = ledger.binding_of(lease)
        used: float | None = None
        if is_automatic(lease.request) and not lease.is_over:
            # all of it while a command runs with it, else the part that was carved out of it
            part = asked if is_in_use(ledger, lease) else amounts_of(resource_of(asked), used_amount(lease))
            used = headline(part)[1]
        return cls(
            boost_id=lease.id,
            source_node=lease.node or None,
            target_node=lease.request.target,
            resource_type=kind,
            amount=amount,
            user=lease.request.user,
            priority=lease.request.priority.name.lower(),
            state=str(lease.state),
            is_active=lease.state is LeaseState.ACTIVE,
            recovered=lease.recovered,
            allocated_at=viewer.time(lease.granted_at_ms),
            expires_at=viewer.time(lease.ends_at_ms),
            enforced_by=lease.engine or "grid",
            placement_group=binding.group if binding is not None else None,
            automatic=is_automatic(lease.request),
            used_amount=used,
            reason=str(lease.end) if lease.end is not None else None,
            detail=lease.detail or None if viewer.shows(lease.request.user) else None,
        )


class BoostStatus(Answer, frozen=True, kw_only=True):
    """A page of the boosts that hold something, and totals of all."""

    active_boosts: int
    totals: dict[str, float]  # of the active ones, by type: cores, GPUs, GB
    boosts: list[BoostRow]
    total: int  # in all pages
    more: bool  # there is a next page
    next: str | None
    persistence_file: str
    warnings: list[str]


class BoostDetail(Answer, frozen=True, kw_only=True):
    """One boost; None for a dry run. A new one comes with its lease and the decision about it."""

    boost: BoostRow | None
    note: str | UnsetType | None = UNSET  # why the preferred source does not lend it
    allocation: AllocationRow | UnsetType = UNSET
    reasons: list[str] | UnsetType = UNSET
    decision: DecisionRow | UnsetType = UNSET
    already_ended_at: str | UnsetType | None = UNSET
