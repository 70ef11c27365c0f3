"""`ResourceSharingOrchestrator`: metrics collector, sharing manager and scheduler as one object.

Each part is only a client of the control plane, so it may be used beside any of them, and beside other programs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from distributed_grid.api.answers.metrics import ClusterSummary, SchedulingFigures
from distributed_grid.client.async_client import GridSession
from distributed_grid.client.conversation import JsonObject, as_objects, required
from distributed_grid.client.pages import whole_status_async
from distributed_grid.config import ClusterConfig
from distributed_grid.domain.rebalancing import SharingPolicy
from distributed_grid.domain.resources import Priority, ResourceType
from distributed_grid.monitoring.resource_metrics import ControlPlaneMetrics, ResourceMetricsCollector, ResourceSnapshot
from distributed_grid.orchestration.intelligent_scheduler import IntelligentScheduler
from distributed_grid.orchestration.resource_sharing_manager import ResourceSharingManager

if TYPE_CHECKING:
    from distributed_grid.quantities import Span


class ClusterStatus(TypedDict):
    """Settings of sharing, rows of the grid, metrics, and the number of waiting requests."""

    name: str
    enabled: bool
    mode: str
    policy: SharingPolicy
    nodes: list[JsonObject]
    offers: list[JsonObject]
    allocations: list[JsonObject]
    jobs: list[JsonObject]
    recommendations: list[JsonObject]
    waiting: int
    summary: ClusterSummary
    scheduling: SchedulingFigures


class ResourceSharingOrchestrator(GridSession):
    """Starts, asks and stops the parts of resource sharing."""

    def __init__(
        self,
        cluster_config: ClusterConfig | None = None,
        ssh_manager: object | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(cluster_config, ssh_manager, state_dir=state_dir)
        self.metrics = ResourceMetricsCollector(source=ControlPlaneMetrics(self._state_dir, self._client_config))
        self.sharing = ResourceSharingManager(cluster_config, state_dir=state_dir)
        self.scheduler = IntelligentScheduler(cluster_config, state_dir=state_dir)

    async def initialize(self) -> None:
        """Attach to a control plane with the config, starting one where none runs. Safe to call twice."""
        await self._client.start()

    async def start(self) -> None:
        """Attach all parts, with `initialize` first. Safe to call twice."""
        await self.initialize()
        await self.metrics.start()
        await self.sharing.start()
        await self.scheduler.start()

    async def stop(self) -> None:
        """Detach from the grid; a later call attaches again. Safe to call twice."""
        await self.scheduler.stop()
        await self.sharing.stop()
        await self.metrics.stop()

    async def get_cluster_status(self) -> ClusterStatus:
        """Everything at a glance: nodes, offers, allocations, jobs, the queue, and scheduling figures."""
        status = await whole_status_async(self._client)
        config = (await self._client.get_config()).config
        sharing = config["resource_sharing"]
        return {
            "name": config["name"],
            "enabled": sharing["enabled"],
            "mode": sharing["mode"],
            "policy": SharingPolicy(sharing["policy"]),
            "nodes": as_objects(status.nodes),
            "offers": as_objects(status.offers),
            "allocations": as_objects(status.allocations),
            "jobs": as_objects(status.jobs),
            "recommendations": as_objects(status.recommendations),
            "waiting": status.waiting,
            "summary": required((await self._client.get_metrics(kind="summary")).summary),
            "scheduling": required((await self._client.get_metrics(kind="scheduling")).scheduling),
        }

    async def request_resources(
        self,
        node_id: str,
        resource_type: ResourceType | str,
        amount: float,
        priority: Priority | str = Priority.MEDIUM,
        duration: Span | None = None,
        *,
        duration_minutes: float | None = None,
        source: str | Sequence[str] = (),
        only: bool = False,
        wait_seconds: float = 300.0,
    ) -> str:
        """Borrow for a node from the others; the id of the lease, for `release_resources`. As the manager's
        `request_resource`."""
        return await self.sharing.request_resource(
            node_id,
            resource_type,
            amount,
            priority,
            duration,
            duration_minutes=duration_minutes,
            source=source,
            only=only,
            wait_seconds=wait_seconds,
        )

    async def release_resources(self, allocation_id: str) -> JsonObject:
        """Release an allocation; its last state. A second time is harmless."""
        return await self.sharing.release_resource(allocation_id)

    def get_node_resource_snapshots(self) -> dict[str, ResourceSnapshot]:
        """Measurements of every node at this moment, by its name; a plain method, safe inside a running event loop."""
        return self.metrics.get_all_latest_snapshots()
