"""The shapes of what façades return: the same fields that `--json` prints, as types.

`docs/api.md` says what each field means. Rows may have more fields than these; these do not go away.
"""

from __future__ import annotations

from typing import Any, TypedDict

from distributed_grid.domain.rebalancing import SharingPolicy
from distributed_grid.monitoring.scheduling_metrics import SchedulingFigures
from distributed_grid.monitoring.snapshots import ClusterSummary


class NodeRow(TypedDict):
    """A node as it is now."""

    node_id: str
    host: str
    role: str
    state: str
    cooling: bool
    cpu_cores: float
    memory_gb: float
    gpus: int
    custom: dict[str, int]
    cpu_lent: float
    memory_lent_gb: float
    gpus_lent: float
    open: bool
    cpu_free: float
    memory_free_gb: float
    gpus_free: float
    leases: int
    priority: float
    speed: float
    cost_per_hour: float
    labels: dict[str, str]
    tags: list[str]
    keeps: list[str]
    pressure: float | None
    cpu_percent: float | None
    memory_used_gb: float | None
    seconds_since_heard: float | None


class OfferRow(TypedDict):
    """What a node would lend of one kind."""

    node_id: str
    resource_type: str
    amount: float
    generation: int
    expires_at: str | None


class AllocationRow(TypedDict):
    """A lease, alive or ended."""

    allocation_id: str
    request_id: str
    job_id: str | None
    node_id: str | None
    target_node: str | None
    resource_type: str
    amount: float
    resources: dict[str, Any]
    gang_id: str | None
    gang_nodes: list[str]
    user: str
    priority: str
    state: str
    fence: int
    requested_at: str | None
    allocated_at: str | None
    expires_at: str | None
    reason: str | None
    detail: str | None


class BoostRow(TypedDict):
    """What one node lends to another, alive or ended."""

    boost_id: str
    source_node: str | None
    target_node: str
    resource_type: str
    amount: float
    user: str
    priority: str
    state: str
    is_active: bool
    recovered: bool
    allocated_at: str | None
    expires_at: str | None
    enforced_by: str
    placement_group: str | None
    reason: str | None
    detail: str | None


class BoostStatus(TypedDict):
    """What `ResourceBoostManager.get_boost_status` returns."""

    active_boosts: int
    totals: dict[str, float]
    boosts: list[BoostRow]
    persistence_file: str
    warnings: list[str]


class JobRow(TypedDict):
    """A job that is going on."""

    job_id: str
    uid: str
    command: str
    cwd: str | None
    environment_names: list[str]
    user: str
    state: str
    node_id: str | None
    resource_type: str
    amount: float
    resources: dict[str, Any]
    priority: str
    submitted_at: str | None
    ended_at: str | None
    attempts: list[dict[str, Any]]
    retries_left: int
    outcome: str | None
    exit_code: int | None
    signal: int | None
    detail: str | None


class RecommendationRow(TypedDict):
    """Work that should move from one node to another."""

    node_id: str
    job_id: str | None
    source_node: str
    target_node: str
    cause: str
    reason: str
    since: str | None


class ResourceStatus(TypedDict):
    """What `ResourceSharingManager.get_resource_status` returns."""

    enabled: bool
    mode: str
    policy: SharingPolicy
    offers: list[OfferRow]
    allocations: list[AllocationRow]
    waiting: int


class SchedulingStatus(SchedulingFigures):
    """What `IntelligentScheduler.get_scheduling_status` returns: the figures, and what is going on."""

    strategy: str
    open_nodes: list[str]
    allocations: list[AllocationRow]
    running_jobs: int
    waiting: int


class ClusterStatus(TypedDict):
    """What `ResourceSharingOrchestrator.get_cluster_status` returns."""

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


class BlockRow(TypedDict):
    """A block of the memory pool."""

    block_id: str
    name: str
    size: int
    user: str
    state: str
    copies: int
    nodes: list[str]
    on_disk: bool
    generation: int
    created_at: str
    expires_at: str
    term_seconds: float
    session: bool
    meta: str
    detail: str


class LenderRow(TypedDict):
    """What a node lends to the memory pool."""

    node: str
    blocks: int
    bytes: int
    free_bytes: int
    serving: bool
    address: str


class MemoryStats(TypedDict):
    """What `DistributedMemoryPool.stats` returns."""

    blocks: int
    bytes: int
    bytes_on_disk: int
    moving: int
    lost: int
    nodes: list[LenderRow]
    transfers: dict[str, float]
