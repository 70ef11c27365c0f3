"""Types of the JSON answers that are no structs yet, and of the dictionaries that façades return."""

from __future__ import annotations

from typing import Any, TypedDict

from distributed_grid.api.answers.metrics import ClusterSummary, SchedulingFigures
from distributed_grid.domain.rebalancing import SharingPolicy

# As façades return them, with the fields of the answers of these names.
AllocationRow = dict[str, Any]
BatchScaling = dict[str, Any]
BlockRow = dict[str, Any]
BoostRow = dict[str, Any]
BoostStatus = dict[str, Any]
ExecutionRecord = dict[str, Any]
JobRow = dict[str, Any]
MemoryStats = dict[str, Any]
MoveRow = dict[str, Any]
NodeRow = dict[str, Any]
OfferRow = dict[str, Any]
PredictionRow = dict[str, Any]
ProposalRow = dict[str, Any]
RecommendationRow = dict[str, Any]
ScalingDecisionRow = dict[str, Any]
TrainingReport = dict[str, Any]
WorkerOfferRow = dict[str, Any]
WorkerRow = dict[str, Any]


class JoinAnswer(TypedDict):
    """The name under which a node joined."""

    node: str
    joined_at: str | None


class Health(TypedDict):
    status: str


class ErrorBody(TypedDict):
    type: str
    message: str
    reasons: list[str]


class ErrorAnswer(TypedDict):
    """Why a request failed."""

    error: ErrorBody


class ResourceStatus(TypedDict):
    """Answer of `ResourceSharingManager.get_resource_status`."""

    enabled: bool
    mode: str
    policy: SharingPolicy
    offers: list[OfferRow]
    allocations: list[AllocationRow]
    waiting: int


class SchedulingStatus(SchedulingFigures):
    """Answer of `IntelligentScheduler.get_scheduling_status`: figures, allocations and running jobs."""

    strategy: str
    open_nodes: list[str]
    allocations: list[AllocationRow]
    running_jobs: int
    waiting: int


class ClusterStatus(TypedDict):
    """Answer of `ResourceSharingOrchestrator.get_cluster_status`."""

    name: str
    enabled: bool
    mode: str
    policy: SharingPolicy
    nodes: list[NodeRow]
    offers: list[OfferRow]
    allocations: list[AllocationRow]
    jobs: list[JobRow]
    recommendations: list[RecommendationRow]
    waiting: int
    summary: ClusterSummary
    scheduling: SchedulingFigures
