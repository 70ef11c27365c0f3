"""Nodes: the status of the cluster, one node, and draining a node for its owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from distributed_grid.api import requests
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View, Viewer
from distributed_grid.domain.events import NodeDrained, NodeResumed
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import NodeState
from distributed_grid.errors import NotFound, TimedOut
from distributed_grid.server.access.tokens import Caller

POLL_SECONDS = 0.1
RESUME_SECONDS = 10.0
Report = Callable[[View], None]


class NodeService:
    """Answers the requests about nodes."""

    def __init__(self, grid: Grid, viewer: Callable[[], Viewer]) -> None:
        self._grid = grid
        self._viewer = viewer

    async def status(self) -> View:
        """Nodes, offers, leases, jobs and recommendations as they are now."""
        return await self._grid.read(self._viewer().status)

    async def get(self, name: str) -> View:
        def view_node(ledger: Ledger, now: int) -> View:
            if name not in ledger.nodes:
                raise NotFound(f"no node is called {name!r}")
            return self._viewer().node(ledger, ledger.nodes[name], now)

        return {"node": await self._grid.read(view_node)}

    async def drain(self, op: requests.DrainNode, caller: Caller, report: Report) -> View:
        """Return everything the node lends to its owner, reporting progress; or with `off` let it lend again."""
        if op.off:
            return await self._resume(op.node)
        before = await self._lease_count(op.node)
        why = f"{op.node} cools down: {caller.user} wants it back"
        await self._grid.handle(NodeDrained(op.node, why, cooling=True))
        try:
            async with asyncio.timeout(op.wait_seconds):
                left, reported = before, 0
                while left := await self._lease_count(op.node):
                    if left != reported:
                        report({"node_id": op.node, "step": f"waiting for {_leases(left)} to be given back"})
                    reported = left
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise TimedOut(
                f"{_leases(left)} of {op.node} not given back within {op.wait_seconds:g} s; it lends nothing new, and "
                "goes on taking back"
            ) from None
        return {"node_id": op.node, "cooling": True, "given_back": before, "detail": "its owner has everything back"}

    async def _resume(self, name: str) -> View:
        await self._grid.handle(NodeResumed(name))

        def is_alive(ledger: Ledger, now: int) -> bool:
            return ledger.nodes[name].state is NodeState.ALIVE

        try:
            async with asyncio.timeout(RESUME_SECONDS):
                while not await self._grid.read(is_alive):
                    await asyncio.sleep(POLL_SECONDS)
            detail = "lends again"
        except TimeoutError:
            detail = "lends again as soon as its agent is heard"
        return {"node_id": name, "cooling": False, "given_back": 0, "detail": detail}

    async def _lease_count(self, name: str) -> int:
        return await self._grid.read(lambda ledger, now: len(ledger.leases_on.get(name, ())))


def _leases(count: int) -> str:
    return f"{count} lease{'' if count == 1 else 's'}"
