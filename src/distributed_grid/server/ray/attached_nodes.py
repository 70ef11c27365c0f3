"""The nodes of an attached Ray cluster as nodes of the grid: they get an agent when they join, and go when they leave.

What is kept is what the last view of Ray calls for. A node that Ray has lost is forgotten when its holds have run out,
as every lost node's leases end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Container, Sequence

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.adapters.child_process import ChildCommand, Say
from distributed_grid.adapters.node.node_messages import AgentLinkChanged, DropAgentLink, LinkStates
from distributed_grid.adapters.ray.driver_messages import AttachedNode, KeepAttachedNode, RunOnAttachedNode
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.config import ClusterConfig
from distributed_grid.config_mapping import joined_node
from distributed_grid.control.grid import Grid
from distributed_grid.domain.engines import ATTACHED, EngineRow
from distributed_grid.domain.events import EngineNode, NodeDeclared, NodeForgotten
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import RAY_HOST, Caps, Node
from distributed_grid.domain.resources import WHOLE_GPU
from distributed_grid.domain.states import NodeState
from distributed_grid.errors import Refused, TimedOut
from distributed_grid.ports import EngineView
from distributed_grid.reactor.engines import match_nodes
from distributed_grid.server.access.agent_sockets import AgentSockets
from distributed_grid.server.ray.engine_reconciler import NAME

END_SECONDS = 150.0
MAX_NAME_LENGTH, ID_LENGTH = 60, 6


class NodeMapping(Struct, frozen=True):
    """A node of the engine, the name it has in the grid, and what is to be done about it."""

    name: str
    place: EngineNode
    is_new: bool
    needs_agent: bool


def map_nodes(ledger: Ledger, places: Sequence[EngineNode]) -> list[NodeMapping]:
    """What each node of the engine is for the grid. The head comes first: it is likeliest this very machine.

    A node whose agent is here or comes by SSH needs no other.
    """
    ordered = tuple(sorted(places, key=lambda place: (not place.head, place.name, place.id)))
    known = {place.id: name for name, place in match_nodes(ledger, ordered).items()}
    mappings: list[NodeMapping] = []
    taken = set(ledger.nodes)
    for place in ordered:
        name = known.get(place.id)
        if name is None:
            name = name_for(place, taken)
            taken.add(name)
        node = ledger.nodes.get(name)
        cared_for = node is not None and (node.host == "local" or (node.wanted and node.host != RAY_HOST))
        mappings.append(NodeMapping(name, place, node is None or node.forgotten, not cared_for))
    return mappings


def name_for(place: EngineNode, taken: Container[str]) -> str:
    """What a new node is called: as Ray calls it unless that is only its address, else as its machine; never twice."""
    wanted = place.name if place.name not in ("", place.address) else place.hostname or place.address
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-._")[:MAX_NAME_LENGTH] or RAY_HOST
    return name if name not in taken else f"{name}-{place.id[:ID_LENGTH]}"


def new_node(config: ClusterConfig, mapping: NodeMapping) -> Node:
    """The node as the grid begins with it: it lends no more than the engine has there; the rest says its agent."""
    has = mapping.place.has
    return replace(
        joined_node(config, mapping.name),
        host=RAY_HOST,
        role="head" if mapping.place.head else "worker",
        engine="ray",
        engine_node=mapping.place.id,
        caps=Caps(cpu_milli=has.cpu_milli, memory_bytes=has.memory_bytes, gpu_count=has.gpu_milli // WHOLE_GPU),
    )


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
        self._lock = asyncio.Lock()
        self.is_detaching = False
        self.kept: dict[str, AttachedNode] = {}

    def desired_state(self) -> list[ChildCommand]:
        """What a new child of the engine has to keep."""
        for name in self.kept:
            self.links[name] = AgentLinkChanged(name, "connecting")
        return [KeepAttachedNode(target) for target in self.kept.values()]

    def link_changed(self, link: AgentLinkChanged) -> None:
        """Take in what the child reports of a link."""
        if link.node in self.kept:
            self.record(link)

    async def update(self, view: EngineView) -> None:
        """Have an agent on every node that Ray has, and drop those that it has not any more."""
        row = self._row()
        if row is None or row.mode != ATTACHED or self.is_detaching:
            return
        async with self._lock:
            await self._apply(view, row)

    async def _apply(self, view: EngineView, row: EngineRow) -> None:
        mappings = await self._grid.read(lambda ledger, now: map_nodes(ledger, view.nodes))
        for mapping in mappings:
            if mapping.is_new:
                await self._grid.handle(NodeDeclared(new_node(self._config, mapping)))
            if mapping.needs_agent:
                await self._keep(mapping, row)
        there = {mapping.name for mapping in mappings if mapping.needs_agent}
        for name in [name for name in self.kept if name not in there]:
            self._drop(name)
        for name in await self._grid.read(
            lambda ledger, now: forgettable(ledger, {mapping.name for mapping in mappings})
        ):
            await self._grid.handle(NodeForgotten(name))
            self._sockets.remove(name)

    async def _keep(self, mapping: NodeMapping, row: EngineRow) -> None:
        await self._sockets.add(mapping.name)
        socket = str(self._sockets.path_of(mapping.name))
        target = AttachedNode(
            name=mapping.name,
            grid=self._grid_id(),
            local_socket=socket,
            linger=self._config.hold_seconds,
            ray_node=mapping.place.id,
            namespace=row.namespace,
        )
        before = self.kept.get(mapping.name)
        if before != target:
            if before is not None and before.ray_node != target.ray_node:
                self._engine.send(RunOnAttachedNode(0, "forget", before))
            self.kept[mapping.name] = target
            self.links[mapping.name] = AgentLinkChanged(mapping.name, "connecting")
            self._engine.send(KeepAttachedNode(target))

    def _drop(self, name: str) -> None:
        """A node that Ray has lost: its agent, if it lives, waits for the node to come back."""
        target = self.kept.pop(name)
        self.links.pop(name, None)
        self._engine.send(DropAgentLink(name))
        self._engine.send(RunOnAttachedNode(0, "forget", target))

    async def forget(self, name: str) -> None:
        """Keep a node no longer that has nothing of ours; one that only Ray brought is no node from now on."""
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
            if target.name in self.kept:  # what could not be ended is kept as before
                self._engine.send(KeepAttachedNode(self.kept[target.name]))
            raise Refused(finished.problem)
        return finished.summary

    def _row(self) -> EngineRow | None:
        return self._grid.ledger.engines.get(NAME)


def forgettable(ledger: Ledger, there: set[str]) -> list[str]:
    """The nodes that only Ray brought, that it has not any more, and whose holds have run out."""
    gone = (node for node in ledger.nodes.values() if node.host == RAY_HOST and node.name not in there)
    return [node.name for node in gone if node.state in (NodeState.LOST, NodeState.JOINING) and not node.forgotten]
