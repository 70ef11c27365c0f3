"""`grid cluster attach|detach`: a Ray cluster that somebody else runs.

Rule 1: what is attached is in the ledger; the next control plane goes on with it by itself.
Rule 2: a wrong address or token changes nothing: Ray has let us in before anything is noted.
Rule 3: detaching leaves nothing of ours, neither in Ray nor on its nodes; what cannot be ended is said.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Container
from typing import Any

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.node.messages import NodeFacts
from distributed_grid.adapters.ray.connection import AUTO, RAY_MISSING
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.adapters.ray.messages import Connect
from distributed_grid.api import requests
from distributed_grid.config import ClusterConfig
from distributed_grid.control.grid import Grid
from distributed_grid.domain.engines import ATTACHED, EngineRow
from distributed_grid.domain.events import EngineGivenUp, EngineWanted, NodeDrained, NodeStopped
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import NodeState
from distributed_grid.errors import GridError, Refused, TimedOut, Unreachable
from distributed_grid.posix.private_files import write_private
from distributed_grid.server.ray.attached_node_sync import AttachedNodeSync
from distributed_grid.server.ray.node_mapping import RAY_HOST
from distributed_grid.server.ray.reconciler import NAME, EngineReconciler
from distributed_grid.state_dir import StateDir

CONNECT_SECONDS, ALIVE_SECONDS, DRAIN_SECONDS = 75.0, 60.0, 60.0
LOOK_SECONDS = 0.2
DETACH = "grid cluster detach"
GONE = "Ray does not have it any more"
RISK = "this Ray cluster asks for no token: whoever reaches its ports can run anything on its nodes"
View = dict[str, Any]
Tell = Callable[[View], None]


class RayAttachment:
    """Takes a cluster, and leaves it."""

    def __init__(
        self,
        grid: Grid,
        config: ClusterConfig,
        places: StateDir,
        *,
        engine: RayEngine,
        desk: EngineReconciler,
        following: AttachedNodeSync,
        grid_id: Callable[[], str],
    ) -> None:
        self._grid = grid
        self._config = config
        self._engine = engine
        self._desk = desk
        self._grid_id = grid_id
        self._wheels = str(places.root / "wheels")
        self._token = places.host_dir / "ray-attached.token"
        self._turn = asyncio.Lock()
        self.following = following
        desk.before = following.take_in

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

    async def attach(self, op: requests.AttachRay, tell: Tell) -> View:
        """Take the cluster at an address; what became of each of its nodes."""
        async with self._turn:
            self._check(op.address)
            tell({"node_id": NAME, "step": f"connecting with {op.address}"})
            self._engine.configure_packages(op.environ, op.environ.get("GRID_WHEELS") or self._wheels)
            address = await self._connected(op)
            row = self.row
            if row is None or row.address != address:
                session = self._engine.connected.session if self._engine.connected is not None else ""
                await self._grid.handle(EngineWanted(NAME, ATTACHED, address, session=session))
            await self._desk.compare(full=True)
            names = sorted(self.following.kept)
            results = await asyncio.gather(*(self._until_alive(name, tell) for name in names))
            results += await self._grid.read(lambda ledger, now: others(ledger, names))
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

    async def _connected(self, op: requests.AttachRay) -> str:
        """Be let in; where that fails everything is as it was. The address under which the cluster is found again."""
        row = self.row
        before = self._token.read_bytes() if self._token.exists() else None
        self._keep_token(op.token.encode() or (before if row is not None else None))
        address = row.address if row is not None and op.address == AUTO else op.address
        self._engine.connect(self._settings(address))
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                while self._engine.connected is None:
                    if self._engine.problem:
                        raise Refused(self._engine.problem)
                    await asyncio.sleep(LOOK_SECONDS / 4)
        except (Refused, TimeoutError) as failure:
            self._keep_token(before)
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

    def _keep_token(self, token: bytes | None) -> None:
        if token:
            write_private(self._token, token)
        else:
            self._token.unlink(missing_ok=True)

    def _warnings(self) -> list[str]:
        connected = self._engine.connected
        if connected is None or connected.authenticated:
            return []
        return [RISK]

    async def _until_alive(self, name: str, tell: Tell) -> View:
        """What became of the agent of a node."""

        def is_alive(ledger: Ledger, now: int) -> bool:
            node = ledger.nodes.get(name)
            return node is not None and (node.state is NodeState.ALIVE or node.cooling)

        said = ""
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                while not await self._grid.read(is_alive):
                    link = self.following.links.get(name)
                    if link is not None and link.final:
                        return {"node_id": name, "ok": False, "detail": link.detail}
                    if link is not None and link.detail != said:
                        said = link.detail
                        tell({"node_id": name, "step": said or link.state})
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            why = f"its agent was not heard from within {ALIVE_SECONDS:g} s{f': {said}' if said else ''}; still trying"
            return {"node_id": name, "ok": False, "detail": why}
        return {
            "node_id": name,
            "ok": True,
            "detail": f"running, {self.following.facts.get(name, NodeFacts()).version}",
        }

    # ------------------------------------------------------------------ detaching

    async def detach(self, op: requests.DetachRay, tell: Tell) -> View:
        """Leave the cluster as it was before; what became of each node."""
        async with self._turn:
            row = self._grid.ledger.engines.get(NAME)
            if row is None:
                raise Refused("no Ray cluster is attached")
            if row.mode != ATTACHED:
                raise Refused("this grid started its Ray cluster by SSH; type: grid cluster stop")
            if self._engine.connected is None and not op.force:
                why = self._engine.problem or "not connected yet"
                raise Unreachable(f"Ray at {row.address} is away: {why}; when it is gone for good: {DETACH} --force")
            self.following.is_ending = True
            try:
                return await self._left(op, tell)
            finally:
                self.following.is_ending = False

    async def _left(self, op: requests.DetachRay, tell: Tell) -> View:
        names = await self._grid.read(lambda ledger, now: attached(ledger, self.following.kept))
        for name in names:
            await self._grid.handle(NodeDrained(name, "the Ray cluster is being detached"))
        results = await asyncio.gather(*(self._ended(name, op, tell) for name in names))
        if not op.force and not all(result["ok"] for result in results):
            return {"results": results}
        tell({"node_id": NAME, "step": "removing what is left in Ray"})
        try:
            if self._engine.connected is not None:
                await self._engine.clear()
            elif not op.force:
                raise Unreachable(self._engine.problem)
        except Unreachable as away:
            if not op.force:
                return {"results": [*results, {"node_id": NAME, "ok": False, "detail": str(away)}]}
        await self._grid.handle(EngineGivenUp(NAME, "detached"))
        await self._engine.stop()
        self._token.unlink(missing_ok=True)
        self.following.kept, self.following.links = {}, {}
        return {"results": results}

    async def _ended(self, name: str, op: requests.DetachRay, tell: Tell) -> View:
        """End and remove the agent of one node, when everything lent there has been given back."""

        def say(step: str) -> None:
            tell({"node_id": name, "step": step})

        target = self.following.kept.get(name)
        if target is None:
            await self.following.forget(name)
            return {"node_id": name, "ok": True, "detail": f"{GONE}: its agent, where it still runs, ends by itself"}
        try:
            if not op.force:
                await self._drained(name, say)
            if self._engine.connected is None:
                raise Unreachable("Ray is away")
            words = await self.following.run("purge", target, say)
        except GridError as failure:
            if op.force:
                await self.following.forget(name)
                return {"node_id": name, "ok": False, "detail": f"let go, its agent ends by itself: {failure}"}
            return {"node_id": name, "ok": False, "detail": str(failure)}
        await self._grid.handle(NodeStopped(name))
        await self.following.forget(name)
        return {"node_id": name, "ok": True, "detail": words}

    async def _drained(self, name: str, say: Say) -> None:
        def lent(ledger: Ledger, now: int) -> int:
            return len(ledger.leases_on.get(name, ()))

        left = await self._grid.read(lent)
        if left:
            say(f"waiting for {left} lease{'' if left == 1 else 's'} to be given back")
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while left := await self._grid.read(lent):
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise TimedOut(
                f"{left} lease{'' if left == 1 else 's'} not given back within {DRAIN_SECONDS:g} s; its agent runs on "
                f"and lends nothing; to end it all the same: {DETACH} --force"
            ) from None


def attached(ledger: Ledger, kept: Container[str]) -> list[str]:
    """The nodes that go with the cluster: those with a hand, and those that only Ray brought."""
    return [node.name for node in ledger.nodes.values() if node.name in kept or node.host == RAY_HOST]


def others(ledger: Ledger, names: list[str]) -> list[View]:
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
