"""The nodes of an engine as nodes of the grid: which are known, which are new, and what the new ones are called."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.config import ClusterConfig
from distributed_grid.config_mapping import joined_node
from distributed_grid.domain.events import EngineNode
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Caps, Node
from distributed_grid.domain.resources import WHOLE_GPU
from distributed_grid.reactor.engines import matched

RAY_HOST = "ray"
"""Where a node is that only Ray knows the way to."""
LONGEST, TELLING = 60, 6


class NodeMapping(Struct, frozen=True):
    """A node of the engine, the name it has in the grid, and what is to be done about it."""

    name: str
    place: EngineNode
    is_new: bool
    needs_agent: bool


def planned(ledger: Ledger, places: Sequence[EngineNode]) -> list[NodeMapping]:
    """What each node of the engine is for the grid. The head comes first: it is likeliest this very machine.

    A node whose agent is here or comes by SSH needs no other.
    """
    ordered = tuple(sorted(places, key=lambda place: (not place.head, place.name, place.id)))
    known = {place.id: name for name, place in matched(ledger, ordered).items()}
    plans: list[NodeMapping] = []
    taken = set(ledger.nodes)
    for place in ordered:
        name = known.get(place.id)
        if name is None:
            name = name_for(place, taken)
            taken.add(name)
        node = ledger.nodes.get(name)
        cared_for = node is not None and (node.host == "local" or (node.wanted and node.host != RAY_HOST))
        plans.append(NodeMapping(name, place, node is None or node.forgotten, not cared_for))
    return plans


def name_for(place: EngineNode, taken: Container[str]) -> str:
    """What a newcomer is called: as Ray calls it unless that is only its address, else as its machine; never twice."""
    wanted = place.name if place.name not in ("", place.address) else place.hostname or place.address
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-._")[:LONGEST] or RAY_HOST
    return name if name not in taken else f"{name}-{place.id[:TELLING]}"


def newcomer_of(config: ClusterConfig, plan: NodeMapping) -> Node:
    """The node as the grid begins with it: it lends no more than the engine has there; the rest says its agent."""
    has = plan.place.has
    return replace(
        joined_node(config, plan.name),
        host=RAY_HOST,
        role="head" if plan.place.head else "worker",
        engine="ray",
        engine_node=plan.place.id,
        caps=Caps(cpu_milli=has.cpu_milli, memory_bytes=has.memory_bytes, gpu_count=has.gpu_milli // WHOLE_GPU),
    )
