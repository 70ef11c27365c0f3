"""`grid cluster attach|detach`: a Ray cluster that somebody else runs.

What is attached is in the ledger, and the next control plane goes on with it by itself. A wrong address or token
changes nothing: the connection is made before anything is recorded. Detaching leaves nothing of ours, neither in Ray
nor on its nodes; what cannot be ended is reported.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Container
from typing import Any

from msgspec.structs import replace

from distributed_grid.adapters.node.node_messages import AgentLinkChanged, NodeFacts
from distributed_grid.adapters.ray.driver_messages import AUTO, CLIENT_SCHEME, RAY_MISSING, Connect
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.api import requests
from distributed_grid.config import ClusterConfig
from distributed_grid.control.grid import Grid
from distributed_grid.domain.engines import ATTACHED, EngineRow
from distributed_grid.domain.events import EngineRegistered, EngineRemoved, NodeDrained, NodeStopped
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import PULL_HOST, RAY_HOST, Node
from distributed_grid.errors import GridError, Refused, Unreachable
from distributed_grid.posix.private_files import write_private
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.endpoints import ADMIN, endpoint
from distributed_grid.server.purge_guard import PurgeGuard, PurgeRefused
from distributed_grid.server.ray.attached_nodes import AttachedNodeSync
from distributed_grid.server.ray.engine_reconciler import NAME, EngineReconciler
from distributed_grid.server.services.nodes import stopping_message, wait_until_alive, wait_until_drained
from distributed_grid.state_dir import StateDir

CONNECT_SECONDS, ALIVE_SECONDS, POLL_SECONDS = 75.0, 60.0, 0.05
DETACH = "grid cluster detach"
GONE = "Ray does not have it any more"
RISK = "this Ray cluster asks for no token: whoever reaches its ports can run anything on its nodes"
NODE_KEYS = ("address", "session", "authenticated", "risk")
View = dict[str, Any]
Report = Callable[[View], None]
ServeStatus = Callable[[requests.ManageCluster], Awaitable[View]]


class RayAttachment:
    """Attaches the grid to a Ray cluster, tells its status, and detaches from it."""

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
        """Go on with what is attached."""
        row = self.row
        if row is not None:
            self._engine.configure_packages({}, self._wheels)
            self._engine.connect(self._settings(row.address, row.namespace))

    @property
    def row(self) -> EngineRow | None:
        """What is attached; None where nothing is."""
        row = self._grid.ledger.engines.get(NAME)
        return row if row is not None and row.mode == ATTACHED else None

    @property
    def has_token(self) -> bool:
        """Whether the attached cluster is entered with a token."""
        return self._token.exists()

    def environ(self) -> dict[str, str]:
        """The variables with which a Ray program on one of its nodes finds the attached cluster."""
        session = self._engine.connected.session if self._engine.connected is not None else ""
        found = {"RAY_ADDRESS": session.partition("/")[0]} if session else {}
        return found | ({"RAY_AUTH_MODE": "token"} if self.has_token else {})

    # ------------------------------------------------------------------ attaching

    @endpoint(ADMIN)
    async def attach(self, op: requests.AttachRay, caller: Caller, report: Report) -> View:
        """Take the cluster at an address; what became of each of its nodes."""
        async with self._lock:
            self._check(op.address)
            report({"node_id": NAME, "step": f"connecting with {op.address}"})
            self._engine.configure_packages(op.environ, op.environ.get("GRID_WHEELS") or self._wheels)
            address = await self._connect(op)
            row = self.row
            if row is None or row.address != address:
                session = self._engine.connected.session if self._engine.connected is not None else ""
                await self._grid.handle(EngineRegistered(NAME, ATTACHED, address, session=session))
            await self._reconciler.compare(full=True)
            names = sorted(self.nodes.kept)
            results = await asyncio.gather(*(self._wait_for_agent(name, report) for name in names))
            results += await self._grid.read(lambda ledger, now: other_rows(ledger, names))
            return {"results": results, "address": address, "warnings": self._warnings()}

    def _check(self, address: str) -> None:
        row = self._grid.ledger.engines.get(NAME)
        if importlib.util.find_spec("ray") is None:
            raise Refused(RAY_MISSING)
        if row is None:
            return
        if row.mode != ATTACHED:
            raise Refused(f"this grid runs a Ray cluster of its own at {row.address}; first type: grid cluster stop")
        if address not in (row.address, AUTO):
            raise Refused(f"this grid is attached to {row.address}; first type: {DETACH}")

    async def _connect(self, op: requests.AttachRay) -> str:
        """Connect; where that fails everything is as it was. The address at which the cluster is found again."""
        row = self.row
        before = self._token.read_bytes() if self._token.exists() else None
        self._store_token(op.token.encode() or (before if row is not None else None))
        address = row.address if row is not None and op.address == AUTO else op.address
        self._engine.connect(self._settings(address))
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                while self._engine.connected is None:
                    if self._engine.problem:
                        raise Refused(self._engine.problem)
                    await asyncio.sleep(POLL_SECONDS)
        except (Refused, TimeoutError) as failure:
            self._store_token(before)
            if row is None:
                await self._engine.stop()
            why = str(failure) or f"Ray at {op.address} did not answer within {CONNECT_SECONDS:g} s"
            raise Refused(why) from None
        found = self._engine.connected.session.partition("/")[0]
        return found if address == AUTO and found else address

    def _settings(self, address: str, namespace: str = "grid") -> Connect:
        known = self._token.exists()
        environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)} if known else {}
        return Connect(
            address,
            self._grid_id(),
            namespace,
            hold_seconds=self._config.hold_seconds,
            environ=environ or {"RAY_AUTH_MODE": "disabled"},
            wheels=self._wheels,
        )

    def _store_token(self, token: bytes | None) -> None:
        if token:
            write_private(self._token, token)
        else:
            self._token.unlink(missing_ok=True)

    def _warnings(self) -> list[str]:
        connected = self._engine.connected
        if connected is None or connected.authenticated:
            return []
        return [RISK]

    async def _wait_for_agent(self, name: str, report: Report) -> View:
        """What became of the agent of a node."""

        def say(step: str) -> None:
            report({"node_id": name, "step": step})

        try:
            await wait_until_alive(self._grid, name, self.nodes.links, seconds=ALIVE_SECONDS, say=say)
        except GridError as failure:
            return {"node_id": name, "ok": False, "detail": str(failure)}
        version = self.nodes.facts.get(name, NodeFacts()).version
        return {"node_id": name, "ok": True, "detail": f"running, {version}"}

    # ------------------------------------------------------------------ detaching

    @endpoint(ADMIN)
    async def detach(self, op: requests.DetachRay, caller: Caller, report: Report) -> View:
        """Leave the cluster as it was before; what became of each node."""
        async with self._lock:
            row = self._grid.ledger.engines.get(NAME)
            if row is None:
                raise Refused("no Ray cluster is attached")
            if row.mode != ATTACHED:
                raise Refused("this grid started its Ray cluster by SSH; type: grid cluster stop")
            if self._engine.connected is None and not op.force:
                why = self._engine.problem or "not connected yet"
                raise Unreachable(f"Ray at {row.address} is away: {why}; when it is gone for good: {DETACH} --force")
            self.nodes.is_detaching = True
            try:
                return await self._leave(op, report)
            finally:
                self.nodes.is_detaching = False

    async def _leave(self, op: requests.DetachRay, report: Report) -> View:
        names = await self._grid.read(lambda ledger, now: attached_names(ledger, self.nodes.kept))
        if self._engine.connected is not None:  # else nothing can be removed
            checks = await asyncio.gather(*(self._check_purge(name, op, report) for name in names))
            if not all(row["ok"] for row in checks):
                return {"results": checks}
        for name in names:
            await self._grid.handle(NodeDrained(name, "the Ray cluster is being detached"))
        results = await asyncio.gather(*(self._remove_agent(name, op, report) for name in names))
        is_kept = any("results" in result for result in results)
        if is_kept or (not op.force and not all(result["ok"] for result in results)):
            return {"results": results}
        report({"node_id": NAME, "step": "removing what is left in Ray"})
        try:
            if self._engine.connected is not None:
                await self._engine.clear()
            elif not op.force:
                raise Unreachable(self._engine.problem)
        except Unreachable as away:
            if not op.force:
                return {"results": [*results, {"node_id": NAME, "ok": False, "detail": str(away)}]}
        await self._grid.handle(EngineRemoved(NAME, "detached"))
        await self._engine.stop()
        self._token.unlink(missing_ok=True)
        self.nodes.kept, self.nodes.links = {}, {}
        return {"results": results}

    async def _check_purge(self, name: str, op: requests.DetachRay, report: Report) -> View:
        """Whether the files of a node may be removed; nothing is changed."""

        def say(step: str) -> None:
            report({"node_id": name, "step": step})

        try:
            if name in self.nodes.kept:
                await self._guard.check(name, set(), discard=op.discard_results, say=say)
        except PurgeRefused as refusal:
            return {"node_id": name, "ok": False, "detail": str(refusal), "results": refusal.view}
        return {"node_id": name, "ok": True, "detail": "as it was: the cluster stays attached"}

    async def _remove_agent(self, name: str, op: requests.DetachRay, report: Report) -> View:
        """End and remove the agent of one node, when everything lent there has been given back."""

        def say(step: str) -> None:
            report({"node_id": name, "step": step})

        target = self.nodes.kept.get(name)
        if target is None:
            await self.nodes.forget(name)
            return {"node_id": name, "ok": True, "detail": f"{GONE}: its agent, where it still runs, ends by itself"}
        try:
            if not op.force:
                await wait_until_drained(self._grid, name, say, meanwhile=stopping_message(DETACH))
            if self._engine.connected is None:
                raise Unreachable("Ray is away")
            await self._guard.check(name, set(), discard=op.discard_results, say=say)  # again: jobs may have ended
            words = await self.nodes.run("purge", target, say)
        except PurgeRefused as refusal:
            return {"node_id": name, "ok": False, "detail": str(refusal), "results": refusal.view}
        except GridError as failure:
            if op.force:
                await self.nodes.forget(name)
                return {"node_id": name, "ok": False, "detail": f"dropped, its agent ends by itself: {failure}"}
            return {"node_id": name, "ok": False, "detail": str(failure)}
        await self._grid.handle(NodeStopped(name))
        await self.nodes.forget(name)
        return {"node_id": name, "ok": True, "detail": words}

    # ------------------------------------------------------------------ status

    async def status(self, op: requests.ManageCluster, serve: ServeStatus) -> View:
        """What `serve` says of the config's nodes, and with it what is known of those that joined or came with Ray."""
        brought = await self._grid.read(lambda ledger, now: _brought_rows(ledger, now, op.nodes))
        rest = tuple(name for name in op.nodes if all(row["node_id"] != name for row in brought))
        view: View = {"nodes": [], "ray": None} if op.nodes and not rest else await serve(replace(op, nodes=rest))
        if self.row is None:
            return {**view, "nodes": [*view["nodes"], *({**row, "ray": None} for row in brought)]}
        ray = self._cluster_view(self.row)
        states = await self._grid.read(lambda ledger, now: {one.name: _ray_state(one) for one in ledger.nodes.values()})
        rows = [self._with_link(row, ray["problem"]) for row in [*view["nodes"], *brought]]
        for row in rows:
            state = states.get(row["node_id"])
            row["ray"] = {**{key: ray[key] for key in NODE_KEYS}, "state": state} if state else None
        return {"nodes": rows, "ray": {**ray, "nodes": {name: state for name, state in states.items() if state}}}

    def _cluster_view(self, row: EngineRow) -> View:
        connected = self._engine.connected
        is_authenticated = connected.authenticated if connected is not None else self.has_token
        return {
            "mode": row.mode,
            "address": row.address,
            "session": row.session or None,
            "authenticated": is_authenticated,
            "problem": None if connected is not None else self._engine.problem or "connecting",
            "risk": None if is_authenticated else RISK,
            "dashboard": None,
            "client": row.address if row.address.startswith(CLIENT_SCHEME) else None,
            "head": None,
        }

    def _with_link(self, row: View, problem: str | None) -> View:
        """A node's row with what is known of its link."""
        name = row["node_id"]
        if name not in self.nodes.kept:
            return dict(row)
        link, facts = self.nodes.links.get(name), self.nodes.facts.get(name, NodeFacts())
        if problem is not None:
            link = AgentLinkChanged(name, "down", problem)
        return {
            **row,
            "link": link.state if link is not None else None,
            "detail": (link.detail or None) if link is not None else None,
            "version": facts.running or facts.version or None,
            "python": facts.python or None,
        }


def attached_names(ledger: Ledger, kept: Container[str]) -> list[str]:
    """The nodes that go with the cluster: those whose agent is kept through it, and those that only Ray brought."""
    return [node.name for node in ledger.nodes.values() if node.name in kept or node.host == RAY_HOST]


def other_rows(ledger: Ledger, names: list[str]) -> list[View]:
    """The nodes of the cluster whose agents are there in another way."""
    known = (node for node in ledger.nodes.values() if node.engine == NAME and node.name not in names)
    return [
        {
            "node_id": node.name,
            "ok": True,
            "detail": "runs inside the control plane" if node.host == "local" else "its agent is kept by SSH",
        }
        for node in known
    ]


def _brought_rows(ledger: Ledger, now: int, names: tuple[str, ...]) -> list[View]:
    nodes = (node for node in ledger.nodes.values() if node.joined or node.host == RAY_HOST)
    return [_brought_row(node, ledger, now) for node in nodes if not names or node.name in names]


def _ray_state(node: Node) -> str:
    """What Ray has of a node, in a word; nothing where it never had it."""
    return "" if node.engine != NAME else "running" if node.engine_node else "lost"


def _brought_by(node: Node) -> str:
    """How a node came that the config does not name."""
    if node.is_pull:
        return PULL_HOST
    if node.joined:
        return "joined"
    return f"{RAY_HOST}:{node.engine_node[:12]}" if node.engine_node else RAY_HOST


def _brought_row(node: Node, ledger: Ledger, now: int) -> View:
    seen = ledger.observations.get(node.name)
    return {
        "node_id": node.name,
        "address": _brought_by(node),
        "state": str(node.state),
        "cooling": node.cooling,
        "wanted": node.wanted,
        "link": None,
        "detail": None,
        "version": None,
        "python": None,
        "seconds_since_heard": (now - seen.at_ms) / 1000 if seen is not None and seen.at_ms else None,
        "jobs": sum(1 for lease in ledger.leases_of(node.name) if lease.job),
    }
