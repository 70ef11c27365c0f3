"""`ResourceMetricsCollector`: the metrics of a grid for Python programs.

It measures nothing itself: agents measure, and the control plane remembers. The collector shows that, so two programs
and a terminal always see the same numbers.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Protocol

from distributed_grid.config import ClusterConfig
from distributed_grid.domain.resources import ResourceType
from distributed_grid.monitoring.history import MinuteRow
from distributed_grid.monitoring.snapshots import ResourceSnapshot
from distributed_grid.monitoring.summary import ClusterSummary
from distributed_grid.monitoring.trends import ResourceTrend, Trend

__all__ = [
    "ClusterSummary",
    "MetricsSource",
    "MinuteRow",
    "ResourceMetricsCollector",
    "ResourceSnapshot",
    "ResourceTrend",
    "Trend",
]


class MetricsSource(Protocol):
    """Where a collector's numbers come from. All of it blocks, for milliseconds."""

    def open(self) -> None:
        """Attach to where the numbers are; opening twice is harmless, and the other methods do it where needed."""

    def close(self) -> None:
        """Let go; closing twice is harmless."""

    def snapshots(self) -> list[ResourceSnapshot]:
        """Every node at this moment."""

    def trend(self, node: str, resource: str) -> ResourceTrend:
        """Where a resource of a node is going; NotFound where there is no such node."""

    def summary(self) -> ClusterSummary:
        """The cluster as one."""

    def history(self, node: str, minutes: int) -> list[MinuteRow]:
        """The last so many minutes of a node; NotFound where there is no such node."""


class ResourceMetricsCollector:
    """Snapshots, trends and the summary of a grid; plain methods are safe inside a running event loop."""

    def __init__(
        self,
        cluster_config: ClusterConfig | None = None,
        ssh_manager: object | None = None,
        *,
        source: MetricsSource | None = None,
    ) -> None:
        """Without a source, ask the control plane that runs (or is started) for the config.

        `ssh_manager` is taken because the guides pass one; the control plane has its own way to the nodes.
        """
        self._source = source if source is not None else _control_plane(cluster_config)

    async def start(self) -> None:
        """Attach to the control plane, starting one where none runs. Safe to call twice."""
        await asyncio.to_thread(self._source.open)

    async def stop(self) -> None:
        """Let go of the control plane, which goes on measuring; a later call attaches again. Safe to call twice."""
        await asyncio.to_thread(self._source.close)

    def get_all_latest_snapshots(self) -> dict[str, ResourceSnapshot]:
        """What every node does at this moment, by its name."""
        return {snapshot.node_id: snapshot for snapshot in self._source.snapshots()}

    def get_resource_trend(self, node_id: str, resource_type: ResourceType | str) -> ResourceTrend:
        """Where `cpu`, `memory` or `gpu` of a node is going over 5, 15 and 60 minutes."""
        return self._source.trend(node_id, str(resource_type))

    def get_cluster_summary(self) -> ClusterSummary:
        """Totals, what is used, idle and lent, pressure, and the nodes nobody has heard of late."""
        return self._source.summary()

    def get_history(self, node_id: str, minutes: int = 60) -> list[MinuteRow]:
        """The last so many minutes of a node, at most a day of them."""
        return self._source.history(node_id, minutes)


def _control_plane(config: ClusterConfig | None) -> MetricsSource:
    """The source that asks the control plane.

    The one upward look of this package: the client lives in `orchestration`, whose parts are built on this one. It is
    found by name when a program makes a collector without a source, and only then.
    """
    there = importlib.import_module("distributed_grid.client.metrics_source")
    source: MetricsSource = there.DaemonMetrics.for_config(config)
    return source
