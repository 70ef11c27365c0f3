"""Following a Ray cluster that was attached: its nodes become the grid's as they join, and are let go of as they leave.

Rule 1: what is kept is what the last look at Ray calls for; a child that is new is told all of it again.
Rule 2: a node that Ray has lost is forgotten when its holds have run out, as every lost node's leases end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from distributed_grid.adapters.child_process import Command, Say
from distributed_grid.adapters.node.messages import AgentLinkChanged, DropAgentLink, LinkStates
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.adapters.ray.messages import AttachedNode, KeepAttachedNode, RunOnAttachedNode
from distributed_grid.config import ClusterConfig
from distributed_grid.control.grid import Grid
from distributed_grid.domain.engines import ATTACHED, EngineRow
from distributed_grid.domain.events import NodeDeclared, NodeForgotten
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import NodeState
from distributed_grid.errors import Refused, TimedOut
from distributed_grid.ports import EngineView
from distributed_grid.server.access.agent_websocket import AgentSockets
from distributed_grid.server.ray.node_mapping import RAY_HOST, NodeMapping, newcomer_of, planned
from distributed_grid.server.ray.reconciler import NAME

END_SECONDS = 150.0


class AttachedNodeSync(LinkStates):
    """Keeps an agent on each node of an attached cluster, through the Ray child."""

    def __init__(
        self,
        grid: Grid,
        config: ClusterConfig,
        *,
        engine: RayEngine,
        sockets: AgentSockets,
        grid_id: Callable[[], str],
    ) -> None:
        super().__init__()
        self._grid = grid
        self._config = config
        self._engine = engine
        self._sockets = sockets
        self._grid_id = grid_id
        self._turn = asyncio.Lock()
        self.is_ending = False
        self.kept: dict[str, AttachedNode] = {}

    def desired_state(self) -> list[Command]:
        """What a new child of the engine has to keep."""
        for name in self.kept:
            self.links[name] = AgentLinkChanged(name, "connecting")
        return [KeepAttachedNode(target) for target in self.kept.values()]

    def link_changed(self, link: AgentLinkChanged) -> None:
        """Take in what the child reports of a link."""
        if link.node in self.kept:
            self.record(link)

    async def take_in(self, view: EngineView) -> None:
        """Have an agent on every node that Ray has, and let go of those that it has not any more."""
        row = self._row()
        if row is None or row.mode != ATTACHED or self.is_ending:
            return
        async with self._turn:
            await self._bring_in_line(view, row)

    async def _bring_in_line(self, view: EngineView, row: EngineRow) -> None:
        plans = await self._grid.read(lambda ledger, now: planned(ledger, view.nodes))
        for plan in plans:
            if plan.is_new:
                await self._grid.handle(NodeDeclared(newcomer_of(self._config, plan)))
            if plan.needs_agent:
                await self._keep(plan, row)
        there = {plan.name for plan in plans if plan.needs_agent}
        for name in [name for name in self.kept if name not in there]:
            self._let_go(name)
        for name in await self._grid.read(lambda ledger, now: forgettable(ledger, {plan.name for plan in plans})):
            await self._grid.handle(NodeForgotten(name))
            self._sockets.remove(name)

    async def _keep(self, plan: NodeMapping, row: EngineRow) -> None:
        await self._sockets.add(plan.name)
        socket = str(self._sockets.path_of(plan.name))
        target = AttachedNode(
            name=plan.name,
            grid=self._grid_id(),
            local_socket=socket,
            linger=self._config.hold_seconds,
            ray_node=plan.place.id,
            namespace=row.namespace,
        )
        before = self.kept.get(plan.name)
        if before != target:
            if before is not None and before.ray_node != target.ray_node:
                self._engine.send(RunOnAttachedNode(0, "forget", before))
            self.kept[plan.name] = target
            self.links[plan.name] = AgentLinkChanged(plan.name, "connecting")
            self._engine.send(KeepAttachedNode(target))

    def _let_go(self, name: str) -> None:
        """A node that Ray has lost: its agent, if it lives, waits for the node to come back."""
        target = self.kept.pop(name)
        self.links.pop(name, None)
        self._engine.send(DropAgentLink(name))
        self._engine.send(RunOnAttachedNode(0, "forget", target))

    async def forget(self, name: str) -> None:
        """Let go of a node that has nothing of ours any more; one that only Ray brought is no node from now on."""
        self.kept.pop(name, None)
        self.links.pop(name, None)
        node = await self._grid.read(lambda ledger, now: ledger.nodes.get(name))
        if node is not None and node.host == RAY_HOST:
            await self._grid.handle(NodeForgotten(name))
            self._sockets.remove(name)

    async def run(self, operation: str, target: AttachedNode, say: Say) -> str:
        """Have the child run an operation on a node; what was done. Raises Refused with the reason it failed."""
        try:
            finished = await self._engine.run_on_node(operation, target, seconds=END_SECONDS, say=say)
        except TimeoutError:
            raise TimedOut(f"it did not end within {END_SECONDS:g} s") from None
        if finished.problem:
            if target.name in self.kept:  # what could not be ended is looked after as before
                self._engine.send(KeepAttachedNode(self.kept[target.name]))
            raise Refused(finished.problem)
        return finished.summary

    def _row(self) -> EngineRow | None:
        return self._grid.ledger.engines.get(NAME)


def forgettable(ledger: Ledger, there: set[str]) -> list[str]:
    """The nodes that only Ray brought, that it has not any more, and whose holds have run out."""
    gone = (node for node in ledger.nodes.values() if node.host == RAY_HOST and node.name not in there)
    return [node.name for node in gone if node.state in (NodeState.LOST, NodeState.JOINING) and not node.forgotten]
