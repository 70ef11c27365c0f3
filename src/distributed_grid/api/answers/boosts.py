"""Boosts: leases of one node for another."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from distributed_grid.api.answers.common import Answer, Viewer, headline
from distributed_grid.api.answers.leases import AllocationRow, DecisionRow, held_amounts
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import is_automatic, resource_of
from distributed_grid.domain.states import LeaseState
from distributed_grid.scheduling.pressure.loans import amounts_of, used_amount
from distributed_grid.scheduling.pressure.scan import is_in_use


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
