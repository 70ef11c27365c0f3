"""Metrics: nodes at one moment, sums over the cluster, histories, trends, and figures of scheduling.

Sums are dictionaries, as Python programs get them.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from msgspec import UNSET, UnsetType

from distributed_grid.api.answers.common import Answer

Direction = Literal["rising", "falling", "steady"]


class ResourceSnapshot(Answer, frozen=True, kw_only=True):
    """One node at one moment; measurements are None unless the node is known."""

    node_id: str
    state: str
    known: bool
    timestamp: str | None
    seconds_since_heard: float | None
    cpu_cores: float
    memory_gb: float
    gpus: int
    cpu_percent: float | None
    cpu_outside_percent: float | None
    memory_percent: float | None
    memory_used_gb: float | None
    memory_outside_gb: float | None
    gpu_percent: float | None
    gpu_memory_used_gb: float | None
    pressure: float | None
    cpu_lent: float
    memory_lent_gb: float
    gpus_lent: float


class ResourceSum(TypedDict):
    """One resource of the whole cluster, in cores, GB or GPUs."""

    total: float
    used: float
    idle: float
    unknown: float
    lent: float


class UnknownNode(TypedDict):
    """A node without a recent heartbeat."""

    node_id: str
    state: str
    seconds_since_heard: float | None  # None without a heartbeat since the start


class PressureSummary(TypedDict):
    """Over the known nodes."""

    mean: float
    max: float
    max_node: str


class NodeCounts(TypedDict):
    """The number of nodes, by state, too."""

    total: int
    known: int
    unknown: int
    by_state: dict[str, int]


class ClusterSummary(TypedDict):
    """Sums over all nodes: total = used + idle + unknown for each resource."""

    nodes: NodeCounts
    cpu: ResourceSum
    memory_gb: ResourceSum
    gpu: ResourceSum
    pressure: PressureSummary | None
    unknown_nodes: list[UnknownNode]


class SchedulingFigures(TypedDict):
    """Figures of the requests of the last day; None if there is no data for one.

    Task times are the run times of the last 1,000 ended jobs, in all their attempts. The success rate is
    `granted / (granted + refused + withdrawn)`, users' requests alone.
    """

    jobs_measured: int
    task_time_mean_seconds: float | None
    task_time_p95_seconds: float | None
    resource_efficiency: float | None  # CPU time that those jobs used, as a part of the core time they held
    granted: int
    refused: int
    withdrawn: int
    allocation_success_rate: float | None
    rebalances_per_hour: int  # automatic leases that were requested or given back in the last hour


class RebalancingSummary(TypedDict):
    """Counts of automatic leases since the start of this control plane; those of the last hour are complete."""

    rebalances_per_hour: int
    asked: int
    refused: int
    used: int
    given_back: int
    automatic_leases: int
    recommendations: int


class Trend(Answer, frozen=True, kw_only=True):
    """The trend over one window; values are parts of the whole, 0 to 1."""

    window_minutes: int
    slope_per_minute: float
    direction: Direction
    horizon_minutes: float
    forecast: float
    low: float
    high: float
    samples: int


class ResourceTrend(Answer, frozen=True):
    """The trends of one resource of one node; None with too few samples, or of an unknown node."""

    node_id: str
    resource_type: str
    current: float | None = None
    five_minutes: Trend | None = None
    fifteen_minutes: Trend | None = None
    one_hour: Trend | None = None

    @property
    def windows(self) -> tuple[Trend, ...]:
        """The trends there are, the shortest window first."""
        windows = (self.five_minutes, self.fifteen_minutes, self.one_hour)
        return tuple(trend for trend in windows if trend is not None)


class MinuteRow(Answer, frozen=True, kw_only=True):
    """One minute of a node: means, and the highest value of each; None where nothing was measured."""

    time: str
    samples: int
    cpu_percent: float
    cpu_percent_max: float
    cpu_outside_percent: float
    memory_used_gb: float
    memory_used_gb_max: float
    memory_outside_gb: float
    gpu_percent: float | None
    gpu_percent_max: float | None
    gpu_memory_used_gb: float | None


class MetricsAnswer(Answer, frozen=True, kw_only=True):
    """The metrics of the requested kind."""

    snapshots: list[ResourceSnapshot] | UnsetType = UNSET
    levels: dict[str, dict[str, float]] | UnsetType = UNSET
    """The mean use of each resource of each node over the last minute, as parts of the whole."""
    summary: ClusterSummary | UnsetType = UNSET
    rebalancing: RebalancingSummary | UnsetType = UNSET
    scheduling: SchedulingFigures | UnsetType = UNSET
    text: str | UnsetType = UNSET
    trend: ResourceTrend | UnsetType = UNSET
    history: list[MinuteRow] | UnsetType = UNSET
