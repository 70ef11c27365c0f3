"""`ResourceMetricsCollector`: the metrics of a grid for Python programs.

It measures nothing itself: agents measure, and the control plane keeps the history. Two programs and a terminal always
see the same numbers. This module is a façade under the import path of the guides, so it may use the client; the rest of
the package may not.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol

import msgspec

from distributed_grid.api.answers.metrics import ClusterSummary, MinuteRow, ResourceSnapshot, ResourceTrend, Trend
from distributed_grid.client.async_client import locate_grid
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import ClientConfig, required
from distributed_grid.config import ClusterConfig
from distributed_grid.domain.resources import ResourceType
from distributed_grid.state_dir import StateDir

__all__ = [
    "ClusterSummary",
    "ControlPlaneMetrics",
    "MetricsSource",
    "MinuteRow",
    "ResourceMetricsCollector",
    "ResourceSnapshot",
    "ResourceTrend",
    "Trend",
]


class MetricsSource(Protocol):
    """Source of a collector's measurements. Every method blocks, for milliseconds."""

    def open(self) -> None:
        """Connect; opening twice is harmless, and the other methods do it where needed."""

    def close(self) -> None:
        """Disconnect; closing twice is harmless."""

    def snapshots(self) -> list[ResourceSnapshot]:
        """Every node at this moment."""

    def trend(self, node: str, resource: str) -> ResourceTrend:
        """Trend of a resource of a node; NotFound for an unknown node."""

    def summary(self) -> ClusterSummary:
        """The cluster as one."""

    def history(self, node: str, minutes: int) -> list[MinuteRow]:
        """The last minutes of a node; NotFound for an unknown node."""


class ControlPlaneMetrics:
    """The control plane as a metrics source: one call at a time, so several threads may share one."""

    def __init__(self, state_dir: StateDir, config: ClientConfig | None = None) -> None:
        self._client = Client(state_dir, config)
        self._lock = threading.Lock()

    def open(self) -> None:
        with self._lock:
            self._client.get_daemon_info()

    def close(self) -> None:
        with self._lock:
            self._client.close()

    def snapshots(self) -> list[ResourceSnapshot]:
        with self._lock:
            answer = self._client.get_metrics(kind="snapshots")
        return msgspec.convert(answer.snapshots, list[ResourceSnapshot])

    def trend(self, node: str, resource: str) -> ResourceTrend:
        with self._lock:
            answer = self._client.get_metrics(kind="trend", node=node, resource_type=resource)
        return msgspec.convert(answer.trend, ResourceTrend)

    def summary(self) -> ClusterSummary:
        with self._lock:
            return required(self._client.get_metrics(kind="summary").summary)

    def history(self, node: str, minutes: int) -> list[MinuteRow]:
        with self._lock:
            answer = self._client.get_metrics(kind="history", node=node, window=minutes)
        return msgspec.convert(answer.history, list[MinuteRow])


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
        self._source = source if source is not None else ControlPlaneMetrics(*locate_grid(cluster_config, None))

    async def start(self) -> None:
        """Attach to the control plane, starting one where none runs. Safe to call twice."""
        await asyncio.to_thread(self._source.open)

    async def stop(self) -> None:
        """Disconnect; a later call attaches again. Safe to call twice."""
        await asyncio.to_thread(self._source.close)

    def get_all_latest_snapshots(self) -> dict[str, ResourceSnapshot]:
        """Measurements of every node at this moment, by its name."""
        return {snapshot.node_id: snapshot for snapshot in self._source.snapshots()}

    def get_resource_trend(self, node_id: str, resource_type: ResourceType | str) -> ResourceTrend:
        """Trend of `cpu`, `memory` or `gpu` of a node over 5, 15 and 60 minutes."""
        return self._source.trend(node_id, str(resource_type))

    def get_cluster_summary(self) -> ClusterSummary:
        """Totals; used, idle and lent amounts; pressure; and the nodes without a recent heartbeat."""
        return self._source.summary()

    def get_history(self, node_id: str, minutes: int = 60) -> list[MinuteRow]:
        """The last minutes of a node, at most a day of them."""
        return self._source.history(node_id, minutes)
