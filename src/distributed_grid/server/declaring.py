"""The ledger in line with the config: its rules, its nodes, and nothing of what the config before it named."""

from __future__ import annotations

import msgspec

from distributed_grid.config import ClusterConfig
from distributed_grid.domain.events import NodeDeclared, NodeForgotten, PolicySet
from distributed_grid.domain.resources import Capacity
from distributed_grid.orchestration.runtime import Grid
from distributed_grid.wiring import nodes_of, policy_of


async def declare(grid: Grid, config: ClusterConfig, machine: Capacity) -> None:
    """Bring the ledger in line with the config; what another machine has, its agent said last time."""
    await grid.handle(PolicySet(policy_of(config)))
    nodes = nodes_of(config, machine)
    known = await grid.read(lambda ledger, now: dict(ledger.nodes))
    for node in nodes:
        old = known.get(node.name)
        if node.host != "local" and old is not None:
            node = msgspec.structs.replace(node, capacity=old.capacity)
        await grid.handle(NodeDeclared(node))
    named = {node.name for node in nodes}
    for name, node in known.items():
        if name not in named and not node.joined:
            await grid.handle(NodeForgotten(name))
