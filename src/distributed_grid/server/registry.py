"""What the config says about nodes whose agents have just told what they have."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.config import ClusterConfig, NodeConfig
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import Capacity
from distributed_grid.orchestration.links import Registry
from distributed_grid.server.certificate import made_certificate
from distributed_grid.wire import OwnerRules
from distributed_grid.wiring import capacity_of, newcomer, owner_rules


class ConfigRegistry(Registry):
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
