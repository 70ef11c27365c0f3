"""Names of resource sharing under the import path of the guide, and `ResourceSharingProtocol`, which manages nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from distributed_grid.client.async_client import AsyncClient, locate_grid
from distributed_grid.client.conversation import JsonObject, as_objects, present, required
from distributed_grid.client.pages import every_page_async
from distributed_grid.config import ClusterConfig
from distributed_grid.domain.resources import Priority as AllocationPriority
from distributed_grid.domain.resources import ResourceType
from distributed_grid.orchestration.resource_sharing_manager import ResourceRequest, ResourceSharingManager

if TYPE_CHECKING:
    from distributed_grid.api.answers.cluster import ClusterMachines, NodeResults
    from distributed_grid.api.answers.nodes import NodeStep

__all__ = [
    "AllocationPriority",
    "ResourceOffer",
    "ResourceRequest",
    "ResourceSharingManager",
    "ResourceSharingProtocol",
    "ResourceType",
    "WorkerResult",
]


@dataclass(frozen=True, slots=True)
class ResourceOffer:
    """Amount of one resource that a node offers, in GB, cores or GPUs; nothing new is lent of a paused offer."""

    node_id: str
    resource_type: str
    amount: float
    expires_at: datetime
    generation: int
    state: str = "open"


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """Result of installing, starting or stopping the agent of one node."""

    node_id: str
    ok: bool
    detail: str
    results: tuple[dict[str, Any], ...] = ()
    """Results that keep a node from being purged: `job_id`, `files`, `bytes`."""


class ResourceSharingProtocol:
    """Workers of a grid: installs, starts and stops their agents over SSH, and returns their offers and their state."""

    def __init__(
        self,
        config: ClusterConfig | None = None,
        ssh_manager: object | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """`ssh_manager` may be left out: the control plane holds the SSH connections."""
        self._client = AsyncClient(*locate_grid(config, state_dir))

    async def get_offers(self) -> list[ResourceOffer]:
        """The offers, node by node."""
        return [
            ResourceOffer(
                node_id=row.node_id,
                resource_type=row.resource_type,
                amount=row.amount,
                expires_at=datetime.fromisoformat(required(row.expires_at)),
                generation=row.generation,
                state=row.state,
            )
            async for page in every_page_async(self._client.list_offers)
            for row in page.offers
        ]

    async def get_workers(self) -> list[JsonObject]:
        """Each node with its state and its link; the rows of `grid cluster status --json`."""
        machines = await self._client.manage_cluster(lambda step: None, verb="status")
        return as_objects(cast("ClusterMachines", machines).nodes)

    async def install(self, *nodes: str, progress: Callable[[str, str], None] | None = None) -> list[WorkerResult]:
        """Put the package on nodes (all that are reached by SSH, where none is named)."""
        return await self._manage("install", nodes, progress)

    async def start(self, *nodes: str, progress: Callable[[str, str], None] | None = None) -> list[WorkerResult]:
        """Start the agents; a node that lacks the package gets it first."""
        return await self._manage("start", nodes, progress)

    async def stop(
        self,
        *nodes: str,
        force: bool = False,
        purge: bool = False,
        discard_results: bool = False,
        progress: Callable[[str, str], None] | None = None,
    ) -> list[WorkerResult]:
        """Stop the agents; jobs get notice and wait for another place. With `purge` their files are removed, but not
        those of a node with results that were never fetched, unless `discard_results`."""
        options: _StopOptions = {"force": force, "purge": purge, "discard_results": discard_results}
        return await self._manage("stop", nodes, progress, options)

    async def _manage(
        self,
        verb: Literal["install", "start", "stop"],
        nodes: Sequence[str],
        progress: Callable[[str, str], None] | None,
        options: _StopOptions | None = None,
    ) -> list[WorkerResult]:
        def report(step: NodeStep) -> None:
            if progress is not None:
                progress(step.node_id, step.step)

        answer = await self._client.manage_cluster(
            report, verb=verb, nodes=list(nodes), auth_sock=os.environ.get("SSH_AUTH_SOCK", ""), **(options or {})
        )
        return [
            WorkerResult(row.node_id, row.ok, row.detail, tuple(as_objects(present(row.results) or ())))
            for row in cast("NodeResults", answer).results
        ]


class _StopOptions(TypedDict, total=False):
    force: bool
    purge: bool
    discard_results: bool
