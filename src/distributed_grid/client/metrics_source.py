"""The control plane's metrics as a source for `ResourceMetricsCollector`, over its socket."""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from distributed_grid.client.client import Client, ClientConfig
from distributed_grid.client.session import way_to
from distributed_grid.config import ClusterConfig
from distributed_grid.monitoring.history import MinuteRow
from distributed_grid.monitoring.snapshots import ResourceSnapshot
from distributed_grid.monitoring.summary import ClusterSummary
from distributed_grid.monitoring.trends import ResourceTrend
from distributed_grid.state_dir import StateDir


class DaemonMetrics:
    """Asks the control plane, one call at a time; several threads may share one."""

    def __init__(self, places: StateDir, config: ClientConfig | None = None) -> None:
        self._client = Client(places, config)
        self._turn = threading.Lock()

    @classmethod
    def for_config(cls, config: ClusterConfig | None) -> DaemonMetrics:
        """The control plane of the default state directory; with a config, the one that runs it."""
        return cls(*way_to(config, None))

    def open(self) -> None:
        with self._turn:
            self._client.call("get_daemon_info")

    def close(self) -> None:
        with self._turn:
            self._client.close()

    def snapshots(self) -> list[ResourceSnapshot]:
        return msgspec.convert(self._ask("snapshots")["snapshots"], list[ResourceSnapshot])

    def trend(self, node: str, resource: str) -> ResourceTrend:
        return msgspec.convert(self._ask("trend", node=node, resource_type=resource)["trend"], ResourceTrend)

    def summary(self) -> ClusterSummary:
        return msgspec.convert(self._ask("summary")["summary"], ClusterSummary)

    def history(self, node: str, minutes: int) -> list[MinuteRow]:
        return msgspec.convert(self._ask("history", node=node, window=minutes)["history"], list[MinuteRow])

    def _ask(self, kind: str, **arguments: Any) -> dict[str, Any]:
        with self._turn:
            return self._client.call("get_metrics", kind=kind, **arguments)
