"""Resource sharing under the import path of the guide, and `ResourceSharingProtocol`, which manages the workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from distributed_grid.api.framing import JSON
from distributed_grid.client.async_client import AsyncClient, locate_grid
from distributed_grid.client.pages import every_page_async
from distributed_grid.config import ClusterConfig
from distributed_grid.domain.resources import Priority as AllocationPriority
from distributed_grid.domain.resources import ResourceType
from distributed_grid.errors import GridError
from distributed_grid.orchestration.resource_sharing_manager import ResourceRequest, ResourceSharingManager

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
    """What a node offers of one kind of resource, in GB, cores or GPUs; nothing new is lent of one that is paused."""

    node_id: str
    resource_type: str
    amount: float
    expires_at: datetime
    generation: int
    state: str = "open"


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """What became of one worker when agents were installed, started or stopped."""

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
        """What is offered, node by node."""
        return [
            ResourceOffer(
                row["node_id"],
                row["resource_type"],
                row["amount"],
                datetime.fromisoformat(row["expires_at"]),
                row["generation"],
                row["state"],
            )
            async for page in every_page_async(partial(self._client.call, "list_offers"))
            for row in page["offers"]
        ]

    async def get_workers(self) -> list[dict[str, Any]]:
        """Each node with its state and its link; the rows of `grid cluster status --json`."""
        rows: list[dict[str, Any]] = (await self._manage("status", ()))["nodes"]
        return rows

    async def install(self, *nodes: str, progress: Callable[[str, str], None] | None = None) -> list[WorkerResult]:
        """Put the package on nodes (all that are reached by SSH, where none is named)."""
        return _results(await self._manage("install", nodes, progress))

    async def start(self, *nodes: str, progress: Callable[[str, str], None] | None = None) -> list[WorkerResult]:
        """Have the agents running; a node that lacks the package gets it first."""
        return _results(await self._manage("start", nodes, progress))

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
        options = {"force": force, "purge": purge, "discard_results": discard_results}
        return _results(await self._manage("stop", nodes, progress, **options))

    async def _manage(
        self, verb: str, nodes: Sequence[str], progress: Callable[[str, str], None] | None = None, **options: bool
    ) -> dict[str, Any]:
        asked = {"verb": verb, "nodes": list(nodes), "auth_sock": os.environ.get("SSH_AUTH_SOCK", ""), **options}
        async for kind, part in self._client.stream("manage_cluster", **asked):
            if kind != JSON:
                continue
            assert isinstance(part, dict)
            if part.get("done"):
                return part
            if progress is not None and "step" in part:
                progress(part["node_id"], part["step"])
        raise GridError("the control plane did not say what became of the nodes")


def _results(done: dict[str, Any]) -> list[WorkerResult]:
    return [
        WorkerResult(row["node_id"], row["ok"], row["detail"], tuple(row.get("results", ()))) for row in done["results"]
    ]
