"""`grid cluster attach|detach`: a Ray cluster that somebody else runs, and its nodes as nodes of the grid.

The attachment is in the ledger, so the next control plane continues it. A wrong address or token changes nothing: the
connection is made before anything is recorded. Nodes get an agent when they join. A node that Ray has lost is forgotten
when its holds have run out, as every lost node's leases end. Detaching removes everything of ours from Ray and its
nodes, and reports agents that cannot be ended.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Awaitable, Callable, Container, Sequence

from msgspec import UNSET, Struct
from msgspec.structs import replace

from distributed_grid.adapters.child_process import ChildCommand, Say
from distributed_grid.adapters.node.node_messages import AgentLinkChanged, DropAgentLink, LinkStates, NodeFacts
from distributed_grid.adapters.ray.driver_messages import (
    AUTO,
    CLIENT_SCHEME,
    RAY_MISSING,
    AttachedNode,
    Connect,
    KeepAttachedNode,
    RunOnAttachedNode,
)
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.api import requests
from distributed_grid.api.answers.cluster import (
    AttachedRay,
    ClusterMachines,
    ClusterNodeRow,
    NodeResult,
    NodeResults,
    RayStatus,
)
from distributed_grid.api.answers.nodes import NodeStep
from distributed_grid.config import ClusterConfig
from distributed_grid.config_mapping import joined_node
from distributed_grid.control.grid import Grid
from distributed_grid.domain.engines import ATTACHED, EngineRow
from distributed_grid.domain.events import (
    EngineNode,
    EngineRegistered,
    EngineRemoved,
    NodeDeclared,
    NodeDrained,
    NodeForgotten,
    NodeStopped,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import PULL_HOST, RAY_HOST, Caps, Node
from distributed_grid.domain.resources import WHOLE_GPU
from distributed_grid.domain.states import NodeState
from distributed_grid.errors import GridError, Refused, TimedOut, Unreachable
from distributed_grid.ports import EngineView
from distributed_grid.posix.private_files import write_private
from distributed_grid.reactor.engines import match_nodes
from distributed_grid.server.access.agent_sockets import AgentSockets
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.endpoints import ADMIN, endpoint
from distributed_grid.server.purge_guard import PurgeGuard, PurgeRefused
from distributed_grid.server.ray.engine_reconciler import NAME, EngineReconciler
from distributed_grid.server.services.nodes import stopping_message, wait_until_alive, wait_until_drained
from distributed_grid.state_dir import StateDir

CONNECT_SECONDS, ALIVE_SECONDS, POLL_SECONDS = 75.0, 60.0, 0.05
END_SECONDS = 150.0
MAX_NAME_LENGTH, ID_LENGTH = 60, 6
DETACH = "grid cluster detach"
GONE = "Ray does not have it any more"
RISK = "this Ray cluster asks for no token: whoever reaches its ports can run anything on its nodes"


class NodeMapping(Struct, frozen=True):
    name: str
    place: EngineNode
    is_new: bool
    needs_agent: bool


def map_nodes(ledger: Ledger, places: Sequence[EngineNode]) -> list[NodeMapping]:
    """Mapping of each node of the engine, the head first: it is likeliest this very machine. A node whose agent is here
    or comes by SSH needs no other."""
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
        has_agent = node is not None and (node.host == "local" or (node.wanted and node.host != RAY_HOST))
        mappings.append(NodeMapping(name, place, node is None or node.forgotten, needs_agent=not has_agent))
    return mappings


def name_for(place: EngineNode, taken: Container[str]) -> str:
    """Name of a new node: Ray's name unless that is only its address, else its machine's; unique."""
    wanted = place.name if place.name not in ("", place.address) else place.hostname or place.address
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-._")[:MAX_NAME_LENGTH] or RAY_HOST
    return name if name not in taken else f"{name}-{place.id[:ID_LENGTH]}"


def new_node(config: ClusterConfig, mapping: NodeMapping) -> Node:
    """The node before its agent has reported: it lends no more than the engine has there."""
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
        """Commands to a new child of the engine."""
        for name in self.kept:
            self.links[name] = AgentLinkChanged(name, "connecting")
        return [KeepAttachedNode(target) for target in self.kept.values()]

    def link_changed(self, link: AgentLinkChanged) -> None:
        if link.node in self.kept:
            self.record(link)

    async def update(self, view: EngineView) -> None:
        """Keep an agent on every node that Ray has, and drop the others."""
        row = self._grid.ledger.engines.get(NAME)
        if row is None or row.mode != ATTACHED or self.is_detaching:
            return
        async with self._lock:
            mappings = await self._grid.read(lambda ledger, now: map_nodes(ledger, view.nodes))
            for mapping in mappings:
                if mapping.is_new:
                    await self._grid.handle(NodeDeclared(new_node(self._config, mapping)))
                if mapping.needs_agent:
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
            with_agent = {mapping.name for mapping in mappings if mapping.needs_agent}
            for name in [name for name in self.kept if name not in with_agent]:
                target = self.kept.pop(name)  # Ray has lost it: its agent, if it lives, waits for it to come back
                self.links.pop(name, None)
                self._engine.send(DropAgentLink(name))
                self._engine.send(RunOnAttachedNode(0, "forget", target))
            present = {mapping.name for mapping in mappings}
            for name in await self._grid.read(lambda ledger, now: forgettable(ledger, present)):
                await self._grid.handle(NodeForgotten(name))
                self._sockets.remove(name)

    async def forget(self, name: str) -> None:
        """Stop keeping a node that has nothing of ours; one that only Ray brought is a node no longer."""
        self.kept.pop(name, None)
        self.links.pop(name, None)
        node = await self._grid.read(lambda ledger, now: ledger.nodes.get(name))
        if node is not None and node.host == RAY_HOST:
            await self._grid.handle(NodeForgotten(name))
            self._sockets.remove(name)

    async def run(self, operation: str, target: AttachedNode, say: Say) -> str:
        """Run an operation on a node through the child; its summary. Refused with the reason if it failed."""
        try:
            finished = await self._engine.run_on_node(operation, target, seconds=END_SECONDS, say=say)
        except TimeoutError:
            raise TimedOut(f"it did not end within {END_SECONDS:g} s") from None
        if finished.problem:
            if target.name in self.kept:  # its agent could not be ended: it is kept as before
                self._engine.send(KeepAttachedNode(self.kept[target.name]))
            raise Refused(finished.problem)
        return finished.summary


def forgettable(ledger: Ledger, present: set[str]) -> list[str]:
    """Nodes that only Ray brought, that it has lost, and whose holds have run out."""
    gone = (node for node in ledger.nodes.values() if node.host == RAY_HOST and node.name not in present)
    return [node.name for node in gone if node.state in (NodeState.LOST, NodeState.JOINING) and not node.forgotten]


ReportStep = Callable[[NodeStep], None]
"""Sends the progress of a command to its client."""
ShowMachines = Callable[[requests.ManageCluster], Awaitable[ClusterMachines]]


def step_reporter(report: ReportStep, node: str) -> Say:
    return lambda step: report(NodeStep(node, step))


class RayAttachment:
    """Attaches the grid to a Ray cluster, shows its status, and detaches from it."""

    def __init__(
        self,
        grid: Grid,
        config: ClusterConfig,
        state_dir: StateDir,
        *,
        engine: RayEngine,
        reconciler: EngineReconciler,
        nodes: AttachedNodeSync,
        grid_id: Callable[[], str],
        guard: PurgeGuard,
    ) -> None:
        self._grid = grid
        self._config = config
        self._engine = engine
        self._reconciler = reconciler
        self._grid_id = grid_id
        self._guard = guard
        self._wheels = str(state_dir.root / "wheels")
        self._token = state_dir.host_dir / "ray-attached.token"
        self._lock = asyncio.Lock()
        self.nodes = nodes

    def start(self) -> None:
        """Connect with the cluster that an earlier control plane attached."""
        row = self.row
        if row is not None:
            self._engine.configure_packages({}, self._wheels)
            self._engine.connect(self._settings(row.address, row.namespace))

    @property
    def row(self) -> EngineRow | None:
        row = self._grid.ledger.engines.get(NAME)
        return row if row is not None and row.mode == ATTACHED else None

    def environ(self) -> dict[str, str]:
        """Variables with which a Ray program on one of its nodes finds the attached cluster."""
        session = self._engine.connected.session if self._engine.connected is not None else ""
        environ = {"RAY_ADDRESS": session.partition("/")[0]} if session else {}
        return environ | ({"RAY_AUTH_MODE": "token"} if self._token.exists() else {})

    # ------------------------------------------------------------------ attaching

    @endpoint(ADMIN)
    async def attach(self, op: requests.AttachRay, caller: Caller, report: ReportStep) -> AttachedRay:
        """Attach the cluster at an address; the result for each of its nodes."""
        async with self._lock:
            row = self._grid.ledger.engines.get(NAME)
            if importlib.util.find_spec("ray") is None:
                raise Refused(RAY_MISSING)
            if row is not None and row.mode != ATTACHED:
                own = f"this grid runs a Ray cluster of its own at {row.address}"
                raise Refused(f"{own}; first type: grid cluster stop")
            if row is not None and op.address not in (row.address, AUTO):
                raise Refused(f"this grid is attached to {row.address}; first type: {DETACH}")
            report(NodeStep(NAME, f"connecting with {op.address}"))
            self._engine.configure_packages(op.environ, op.environ.get("GRID_WHEELS") or self._wheels)
            token = self._token.read_bytes() if self._token.exists() else None
            self._store_token(op.token.encode() or (token if row is not None else None))
            address = row.address if row is not None and op.address == AUTO else op.address
            self._engine.connect(self._settings(address))
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    while self._engine.connected is None:
                        if self._engine.problem:
                            raise Refused(self._engine.problem)
                        await asyncio.sleep(POLL_SECONDS)
            except (Refused, TimeoutError) as failure:  # everything stays as it was
                self._store_token(token)
                if row is None:
                    await self._engine.stop()
                reason = str(failure) or f"Ray at {op.address} did not answer within {CONNECT_SECONDS:g} s"
                raise Refused(reason) from None
            connected = self._engine.connected
            if address == AUTO:
                address = connected.session.partition("/")[0] or address
            if row is None or row.address != address:
                await self._grid.handle(
                    EngineRegistered(name=NAME, mode=ATTACHED, address=address, session=connected.session)
                )
            await self._reconciler.compare(full=True)
            names = sorted(self.nodes.kept)
            results = await asyncio.gather(*(self._wait_for_agent(name, report) for name in names))
            results += await self._grid.read(lambda ledger, now: other_results(ledger, names))
            return AttachedRay(results=results, address=address, warnings=[] if connected.authenticated else [RISK])

    def _settings(self, address: str, namespace: str = "grid") -> Connect:
        environ = {"RAY_AUTH_MODE": "disabled"}
        if self._token.exists():
            environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}
        return Connect(
            address,
            self._grid_id(),
            namespace,
            hold_seconds=self._config.hold_seconds,
            environ=environ,
            wheels=self._wheels,
        )

    def _store_token(self, token: bytes | None) -> None:
        if token:
            write_private(self._token, token)
        else:
            self._token.unlink(missing_ok=True)

    async def _wait_for_agent(self, name: str, report: ReportStep) -> NodeResult:
        say = step_reporter(report, name)
        try:
            await wait_until_alive(self._grid, name, self.nodes.links, seconds=ALIVE_SECONDS, say=say)
        except GridError as failure:
            return NodeResult(node_id=name, ok=False, detail=str(failure))
        version = self.nodes.facts.get(name, NodeFacts()).version
        return NodeResult(node_id=name, ok=True, detail=f"running, {version}")

    # ------------------------------------------------------------------ detaching

    @endpoint(ADMIN, keeps_config=True)
    async def detach(self, op: requests.DetachRay, caller: Caller, report: ReportStep) -> NodeResults:
        """Leave the cluster as it was before; the result for each node."""
        async with self._lock:
            row = self._grid.ledger.engines.get(NAME)
            if row is None:
                raise Refused("no Ray cluster is attached")
            if row.mode != ATTACHED:
                raise Refused("this grid started its Ray cluster by SSH; type: grid cluster stop")
            if self._engine.connected is None and not op.force:
                reason = self._engine.problem or "not connected yet"
                raise Unreachable(f"Ray at {row.address} is away: {reason}; when it is gone for good: {DETACH} --force")
            self.nodes.is_detaching = True
            try:
                return NodeResults(await self._leave(op, report))
            finally:
                self.nodes.is_detaching = False

    async def _leave(self, op: requests.DetachRay, report: ReportStep) -> list[NodeResult]:
        # the nodes whose agent is kept through the cluster, and those that only Ray brought
        names = await self._grid.read(
            lambda ledger, now: [
                node.name for node in ledger.nodes.values() if node.name in self.nodes.kept or node.host == RAY_HOST
            ]
        )
        if self._engine.connected is not None:  # else nothing can be removed
            checks = await asyncio.gather(*(self._check_purge(name, op, report) for name in names))
            if not all(check.ok for check in checks):
                return checks
        for name in names:
            await self._grid.handle(NodeDrained(name, "the Ray cluster is being detached"))
        results = await asyncio.gather(*(self._remove_agent(name, op, report) for name in names))
        is_kept = any(result.results is not UNSET for result in results)
        if is_kept or (not op.force and not all(result.ok for result in results)):
            return results
        report(NodeStep(NAME, "removing what is left in Ray"))
        try:
            if self._engine.connected is not None:
                await self._engine.clear()
            elif not op.force:
                raise Unreachable(self._engine.problem)
        except Unreachable as away:
            if not op.force:
                return [*results, NodeResult(node_id=NAME, ok=False, detail=str(away))]
        await self._grid.handle(EngineRemoved(NAME, "detached"))
        await self._engine.stop()
        self._token.unlink(missing_ok=True)
        self.nodes.kept, self.nodes.links = {}, {}
        return results

    async def _check_purge(self, name: str, op: requests.DetachRay, report: ReportStep) -> NodeResult:
        """Check that the files of a node may be removed; nothing is changed."""
        try:
            if name in self.nodes.kept:
                say = step_reporter(report, name)
                await self._guard.check(name, set(), discard=op.discard_results, say=say)
        except PurgeRefused as refusal:
            return refusal.result_on(name)
        return NodeResult(node_id=name, ok=True, detail="as it was: the cluster stays attached")

    async def _remove_agent(self, name: str, op: requests.DetachRay, report: ReportStep) -> NodeResult:
        """End and remove the agent of one node, when its leases have been given back."""
        say, target = step_reporter(report, name), self.nodes.kept.get(name)
        if target is None:
            await self.nodes.forget(name)
            detail = f"{GONE}: its agent, where it still runs, ends by itself"
            return NodeResult(node_id=name, ok=True, detail=detail)
        try:
            if not op.force:
                await wait_until_drained(self._grid, name, say, meanwhile=stopping_message(DETACH))
            if self._engine.connected is None:
                raise Unreachable("Ray is away")
            await self._guard.check(name, set(), discard=op.discard_results, say=say)  # again: jobs may have ended
            summary = await self.nodes.run("purge", target, say)
        except PurgeRefused as refusal:
            return refusal.result_on(name)
        except GridError as failure:
            if op.force:
                await self.nodes.forget(name)
                return NodeResult(node_id=name, ok=False, detail=f"dropped, its agent ends by itself: {failure}")
            return NodeResult(node_id=name, ok=False, detail=str(failure))
        await self._grid.handle(NodeStopped(name))
        await self.nodes.forget(name)
        return NodeResult(node_id=name, ok=True, detail=summary)

    # ------------------------------------------------------------------ status

    async def status(self, op: requests.ManageCluster, show_machines: ShowMachines) -> ClusterMachines:
        """The nodes of the config, by `show_machines`, and the nodes that joined or came with Ray."""
        brought = await self._grid.read(lambda ledger, now: _brought_rows(ledger, now, op.nodes))
        rest = tuple(name for name in op.nodes if all(row.node_id != name for row in brought))
        machines = ClusterMachines([], None)
        if rest or not op.nodes:
            machines = await show_machines(replace(op, nodes=rest))
        rows = [*machines.nodes, *brought]
        if self.row is None:
            return ClusterMachines(rows, machines.ray)
        states = await self._grid.read(
            lambda ledger, now: {
                node.name: "running" if node.engine_node else "lost"
                for node in ledger.nodes.values()
                if node.engine == NAME
            }
        )
        connected = self._engine.connected
        is_authenticated = connected.authenticated if connected is not None else self._token.exists()
        ray = RayStatus(
            mode=self.row.mode,
            address=self.row.address,
            session=self.row.session or None,
            authenticated=is_authenticated,
            problem=self._problem,
            nodes=states,
            risk=None if is_authenticated else RISK,
            dashboard=None,
            client=self.row.address if self.row.address.startswith(CLIENT_SCHEME) else None,
            head=None,
        )
        rows = [replace(self._with_link(row), ray=ray.on_node(row.node_id)) for row in rows]
        return ClusterMachines(rows, ray)

    @property
    def _problem(self) -> str | None:
        """The reason why the cluster is not connected."""
        return None if self._engine.connected is not None else self._engine.problem or "connecting"

    def _with_link(self, row: ClusterNodeRow) -> ClusterNodeRow:
        """A node's row with the state of its link."""
        name, problem = row.node_id, self._problem
        if name not in self.nodes.kept:
            return row
        link, facts = self.nodes.links.get(name), self.nodes.facts.get(name, NodeFacts())
        if problem is not None:
            link = AgentLinkChanged(name, "down", problem)
        return replace(
            row,
            link=link.state if link is not None else None,
            detail=(link.detail or None) if link is not None else None,
            version=facts.running or facts.version or None,
            python=facts.python or None,
        )


def other_results(ledger: Ledger, names: list[str]) -> list[NodeResult]:
    """Results for the nodes of the cluster whose agents are kept in another way."""
    others = (node for node in ledger.nodes.values() if node.engine == NAME and node.name not in names)
    here, by_ssh = "runs inside the control plane", "its agent is kept by SSH"
    return [NodeResult(node_id=node.name, ok=True, detail=here if node.host == "local" else by_ssh) for node in others]


def _brought_rows(ledger: Ledger, now: int, names: tuple[str, ...]) -> list[ClusterNodeRow]:
    """Rows of the nodes that the config does not name."""
    rows = []
    for node in ledger.nodes.values():
        if not (node.joined or node.host == RAY_HOST) or (names and node.name not in names):
            continue
        seen = ledger.observations.get(node.name)
        by_ray = f"{RAY_HOST}:{node.engine_node[:12]}" if node.engine_node else RAY_HOST
        rows.append(
            ClusterNodeRow(
                node_id=node.name,
                address=PULL_HOST if node.is_pull else "joined" if node.joined else by_ray,
                state=str(node.state),
                cooling=node.cooling,
                wanted=node.wanted,
                link=None,
                detail=None,
                version=None,
                python=None,
                seconds_since_heard=(now - seen.at_ms) / 1000 if seen is not None and seen.at_ms else None,
                jobs=sum(1 for lease in ledger.leases_of(node.name) if lease.job),
            )
        )
    return rows
