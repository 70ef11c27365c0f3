"""Types of the JSON answers that are no structs yet."""

from __future__ import annotations

from typing import TypedDict


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
<<<<<<< HEAD
=======


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
>>>>>>> main
