"""Reports: the status of the grid, events of the audit trail, and lending."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from distributed_grid.api.answers.common import Answer
from distributed_grid.api.answers.jobs import JobRow
from distributed_grid.api.answers.leases import AllocationRow
from distributed_grid.api.answers.nodes import NodeRow, OfferRow, RecommendationRow


class GridStatus(Answer, frozen=True, kw_only=True):
    """The grid as it is now."""

    nodes: list[NodeRow]
    offers: list[OfferRow]
    recommendations: list[RecommendationRow]
    allocations: list[AllocationRow]
    jobs: list[JobRow]
    waiting: int
    jobs_total: int
    job_states: dict[str, int]
    omitted: dict[str, int]  # rows of each list that are left out for length


class EventRecord(Answer, frozen=True, kw_only=True):
    """One event of the audit trail."""

    seq: int
    time: str | None
    type: str
    user: str | None
    subject: str
    job_id: str | None
    node_id: str | None
    reason: str | None
    data: dict[str, Any]


class LentTotals(Answer, frozen=True, kw_only=True):
    """Amounts that were lent, and the part of them that is still held."""

    leases: int
    core_hours: float
    gb_hours: float
    gpu_hours: float
    held_leases: int
    held_cores: float
    held_gb: float
    held_gpus: float


class LendingRow(LentTotals, frozen=True, kw_only=True):
    """Totals of one lender, borrower, pair of them, or day."""

    node_id: str | UnsetType = UNSET
    user: str | UnsetType = UNSET
    target_node: str | UnsetType | None = UNSET
    day: str | UnsetType = UNSET


class LendingReport(Answer, frozen=True, kw_only=True):
    """Amounts that were lent, by lender and borrower."""

    since: str | None
    until: str | None
    by: str | None
    rows: list[LendingRow]
    lenders: list[LendingRow]
    borrowers: list[LendingRow]
    total: LentTotals
