"""What `grid cluster status` tells of an attached Ray cluster and of the nodes that it brought."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from distributed_grid.adapters.node.messages import AgentLinkChanged, NodeFacts
from distributed_grid.adapters.ray.connection import CLIENT_SCHEME
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.api import requests
from distributed_grid.control.grid import Grid
from distributed_grid.domain.engines import EngineRow
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.server.ray.attachment import RISK, RayAttachment
from distributed_grid.server.ray.node_mapping import RAY_HOST
from distributed_grid.server.ray.reconciler import NAME

View = dict[str, Any]
Serve = Callable[[requests.ManageCluster], Awaitable[View]]
SHORT = ("address", "session", "authenticated", "risk")


async def status(
    op: requests.ManageCluster, grid: Grid, engine: RayEngine, attaching: RayAttachment, serve: Serve
) -> View:
    """What `serve` says of the config's nodes, and with it what is known of those that Ray brought."""
    brought = await grid.read(lambda ledger, now: _brought(ledger, now, op.nodes))
    rest = tuple(name for name in op.nodes if all(row["node_id"] != name for row in brought))
    view: View = {"nodes": [], "ray": None} if op.nodes and not rest else await serve(replace(op, nodes=rest))
    if attaching.row is None:
        return view
    is_safe = engine.connected.authenticated if engine.connected is not None else attaching.has_token
    ray = _about(attaching.row, engine, is_safe=is_safe)
    lives = await grid.read(lambda ledger, now: {node.name: _life_of(node) for node in ledger.nodes.values()})
    rows = [_completed(row, attaching, ray["problem"]) for row in [*view["nodes"], *brought]]
    for row in rows:
        life = lives.get(row["node_id"])
        row["ray"] = {**{key: ray[key] for key in SHORT}, "state": life} if life else None
    return {"nodes": rows, "ray": {**ray, "nodes": {name: life for name, life in lives.items() if life}}}


def _about(row: EngineRow, engine: RayEngine, *, is_safe: bool) -> View:
    return {
        "mode": row.mode,
        "address": row.address,
        "session": row.session or None,
        "authenticated": is_safe,
        "problem": None if engine.connected is not None else engine.problem or "connecting",
        "risk": None if is_safe else RISK,
        "dashboard": None,
        "client": row.address if row.address.startswith(CLIENT_SCHEME) else None,
        "head": None,
    }


def _brought(ledger: Ledger, now: int, names: tuple[str, ...]) -> list[View]:
    nodes = (node for node in ledger.nodes.values() if node.host == RAY_HOST)
    return [_row_of(node, ledger, now) for node in nodes if not names or node.name in names]


def _completed(row: View, attaching: RayAttachment, problem: str | None) -> View:
    """A node's row with what its hand says."""
    name, known = row["node_id"], attaching.following
    if name not in known.kept:
        return dict(row)
    link, facts = known.links.get(name), known.facts.get(name, NodeFacts())
    if problem is not None:
        link = AgentLinkChanged(name, "down", problem)
    return {
        **row,
        "link": link.state if link is not None else None,
        "detail": (link.detail or None) if link is not None else None,
        "version": facts.running or facts.version or None,
        "python": facts.python or None,
    }


def _life_of(node: Node) -> str:
    """What Ray has of a node, in a word; nothing where it never had it."""
    return "" if node.engine != NAME else "running" if node.engine_node else "lost"


def _row_of(node: Node, ledger: Ledger, now: int) -> View:
    seen = ledger.observations.get(node.name)
    return {
        "node_id": node.name,
        "address": f"{RAY_HOST}:{node.engine_node[:12]}" if node.engine_node else RAY_HOST,
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
