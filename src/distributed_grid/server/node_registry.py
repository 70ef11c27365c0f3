"""What the config says about nodes whose agents have just told what they have.

The ledger in line with the config: its rules, its nodes, and nothing of what the config before it named.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from distributed_grid.config import ClusterConfig, NodeConfig
from distributed_grid.control.agent_sessions import NodeRegistry
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import NodeDeclared, NodeForgotten, PolicySet
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import Capacity
from distributed_grid.server.access.certificates import made_certificate
from distributed_grid.wire import OwnerRules
from distributed_grid.wiring import capacity_of, newcomer, nodes_of, owner_rules, policy_of


class ConfigRegistry(NodeRegistry):
    """Answers out of a config."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._nodes = {node.name: node for node in config.nodes}

    def described(self, node: Node, capacity: Capacity) -> Node:
        """The node with what its agent detected; where the declaration is trusted, with that."""
        named = self._nodes.get(node.name)
        return replace(node, capacity=capacity if named is None else capacity_of(named, capacity))

    def owner_rules(self, name: str) -> OwnerRules | None:
        """How a node gives way to its owner; a node that joined by itself goes by the cluster's rules."""
        return owner_rules(self._config, self._nodes.get(name) or NodeConfig(name=name, host=name))

    def newcomer(self, name: str) -> Node | None:
        """A node that joined with a token, as the cluster treats machines it does not name."""
        return newcomer(self._config, name)

    def memory_certificate(self, node: str) -> tuple[bytes, bytes]:
        """A certificate made for this memory server alone; none where the config says that the network is trusted."""
        return (b"", b"") if self._config.trusted_network else made_certificate(f"grid memory {node}", ())


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
