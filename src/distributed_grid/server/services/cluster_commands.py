"""`grid cluster install|start|stop|status|env`: nodes by SSH, nodes that joined, and nodes that came with Ray."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import to_builtins

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.nodes import NodeRow
from distributed_grid.control.agents import AgentGateway
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View
from distributed_grid.domain.ledger import Ledger
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.cluster import ClusterService
from distributed_grid.server.endpoints import ADMIN, endpoint
from distributed_grid.server.ray.attachment import RayAttachment
from distributed_grid.server.services.nodes import Report

RESOURCE_FIELDS = (
    *("cpu_cores", "cpu_free", "cpu_lent", "memory_gb", "memory_free_gb", "memory_lent_gb"),
    *("gpus", "gpus_free", "gpus_lent", "keeps", "stopped"),
)
"""The fields of `grid cluster status` about a node's resources, as in `grid status`."""


class ClusterCommandService:
    """Answers the requests about the machines of the cluster."""

    def __init__(
        self,
        grid: Grid,
        viewer: Callable[[], Viewer],
        cluster: ClusterService,
        attachment: RayAttachment,
        agents: AgentGateway,
    ) -> None:
        self._grid = grid
        self._viewer = viewer
        self._cluster = cluster
        self._attachment = attachment
        self._agents = agents

    @endpoint(ADMIN)
    async def manage(self, op: requests.ManageCluster, caller: Caller, report: Report) -> View:
        """Install, start, stop or show the agents of nodes; the answer says what became of each."""

        async def serve(asked: requests.ManageCluster) -> View:
            return await self._cluster.serve(asked, report)

        if op.verb != "status":
            return await serve(op)
        view = await self._attachment.status(op, serve)
        resources = await self._grid.read(self._node_resources)
        rows = [{**self._with_versions(row), **resources.get(row["node_id"], {})} for row in view["nodes"]]
        return {**view, "nodes": rows}

    def _node_resources(self, ledger: Ledger, now: int) -> dict[str, View]:
        """What each node has, has free and has lent, and why it does not lend more."""
        found = {node.name: to_builtins(NodeRow.of(ledger, node, now)) for node in ledger.nodes.values()}
        return {name: {field: view[field] for field in RESOURCE_FIELDS} for name, view in found.items()}

    def _with_versions(self, row: View) -> View:
        """A node's row with the versions that its agent has said, and of a node that joined whether it is connected."""
        name = row["node_id"]
        version, python = self._agents.versions_on(name)
        shown = {**row, "version": version or row["version"], "python": python or row["python"]}
        is_joined = row["address"] == "joined"
        return {**shown, "link": "up" if self._agents.is_connected(name) else "down"} if is_joined else shown
