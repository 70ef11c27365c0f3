"""Cooling a node down: it gives everything back to its owner, and lends nothing until somebody ends that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from distributed_grid.api import requests
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View
from distributed_grid.domain.events import NodeDrained, NodeResumed
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import NodeState
from distributed_grid.errors import TimedOut

LOOK_SECONDS = 0.1
RESUME_SECONDS = 10.0


async def cooled(grid: Grid, op: requests.DrainNode, user: str, tell: Callable[[View], None]) -> View:
    """Begin or end it, telling each step; the answer says how many leases were given back, and what is left."""
    if op.off:
        return await _resumed(grid, op.node)
    before = await grid.read(lambda ledger, now: _lent(ledger, op.node))
    await grid.handle(NodeDrained(op.node, f"{op.node} cools down: {user} wants it back", cooling=True))
    try:
        async with asyncio.timeout(op.wait_seconds):
            left, told = before, 0
            while left := await grid.read(lambda ledger, now: _lent(ledger, op.node)):
                if left != told:
                    tell({"node_id": op.node, "step": f"waiting for {_leases(left)} to be given back"})
                told = left
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise TimedOut(
            f"{_leases(left)} of {op.node} not given back within {op.wait_seconds:g} s; it lends nothing new, and goes "
            "on taking back"
        ) from None
    return {"node_id": op.node, "cooling": True, "given_back": before, "detail": "its owner has everything back"}


async def _resumed(grid: Grid, name: str) -> View:
    await grid.handle(NodeResumed(name))

    def is_back(ledger: Ledger, now: int) -> bool:
        return ledger.nodes[name].state is NodeState.ALIVE

    try:
        async with asyncio.timeout(RESUME_SECONDS):
            while not await grid.read(is_back):
                await asyncio.sleep(LOOK_SECONDS)
        detail = "lends again"
    except TimeoutError:
        detail = "lends again as soon as its agent is heard"
    return {"node_id": name, "cooling": False, "given_back": 0, "detail": detail}


def _lent(ledger: Ledger, name: str) -> int:
    return len(ledger.leases_on.get(name, ()))


def _leases(count: int) -> str:
    return f"{count} lease{'' if count == 1 else 's'}"
