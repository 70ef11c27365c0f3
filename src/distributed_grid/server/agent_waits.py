"""Waiting for nodes: until the agent is heard, until everything that is lent there has been given back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.node.node_messages import AgentLinkChanged
from distributed_grid.control.grid import Grid
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import NodeState
from distributed_grid.errors import Refused, TimedOut

DRAIN_SECONDS, POLL_SECONDS = 60.0, 0.2


async def wait_until_alive(
    grid: Grid,
    name: str,
    links: Mapping[str, AgentLinkChanged],
    *,
    seconds: float,
    since_ms: int = 0,
    say: Say = lambda step: None,
) -> None:
    """Return when the agent was heard, after `since_ms`; meanwhile say what its link does.

    Raises Refused at once where the link says that the agent will not come, TimedOut when it takes too long.
    """

    def is_alive(ledger: Ledger, now: int) -> bool:
        node, seen = ledger.nodes.get(name), ledger.observations.get(name)
        here = node is not None and (node.state is NodeState.ALIVE or node.cooling)
        return here and (not since_ms or (seen is not None and seen.at_ms >= since_ms))

    said = ""
    try:
        async with asyncio.timeout(seconds):
            while not await grid.read(is_alive):
                link = links.get(name)
                if link is not None and link.final:
                    raise Refused(link.detail)
                if link is not None and link.detail != said:
                    said = link.detail
                    say(said or link.state)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        why = f": {said}" if said else ""
        raise TimedOut(f"its agent was not heard from within {seconds:g} s{why}; still trying") from None


async def wait_until_drained(grid: Grid, name: str, say: Say, *, command: str) -> None:
    """Return when nothing is lent on the node any more; raises TimedOut with the command that ends its agent anyway."""

    def lent(ledger: Ledger, now: int) -> int:
        return len(ledger.leases_on.get(name, ()))

    left = await grid.read(lent)
    if left:
        say(f"waiting for {_leases(left)} to be given back")
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while left := await grid.read(lent):
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise TimedOut(
            f"{_leases(left)} not given back within {DRAIN_SECONDS:g} s; its agent runs on and lends nothing; "
            f"to end it all the same: {command} --force"
        ) from None


def _leases(count: int) -> str:
    return f"{count} lease{'' if count == 1 else 's'}"
