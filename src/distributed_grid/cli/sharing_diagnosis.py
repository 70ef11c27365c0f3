"""What keeps sharing from going well, in the words of the guide's list of common issues, and what to do about each."""

from __future__ import annotations

from typing import Any

MOST = 5
"""Of so many nodes it is told what is the matter."""


def notes(found: dict[str, Any], sharing: dict[str, Any]) -> list[str]:
    """The issues of a grid: nothing offered, nodes that work too hard, requests that wait."""
    told = []
    if not sharing["enabled"]:
        told.append("Resources not being shared: set resource_sharing.enabled to true in the config")
    elif not found["offers"]:
        why = "; ".join(f"{node['node_id']}: {', '.join(node['keeps']) or 'nothing left'}" for node in _some(found))
        told.append(
            f"Resources not being shared: {why or 'no nodes'}; check the thresholds, can_share and max_share_… of each "
            "node"
        )
    hard = [one for node in found["nodes"] if (one := _pressed(node, sharing["thresholds"]))]
    if hard:
        told.append(
            f"High resource pressure: {'; '.join(hard[:MOST])}; add nodes, raise the …_pressure_high marks, or look "
            "for what leaks there"
        )
    if found["waiting"]:
        count = found["waiting"]
        told.append(
            f"Tasks not scheduling: {count} request{' waits' if count == 1 else 's wait'}; `grid explain ID` says why: "
            "check the amounts, the affinity and the strategy"
        )
    return told


def _some(found: dict[str, Any]) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = found["nodes"]
    return nodes[:MOST]


def _pressed(node: dict[str, Any], marks: dict[str, Any]) -> str:
    """What a node uses beyond its marks, in words; empty where nothing is."""
    cpu, memory = node["cpu_percent"], node["memory_used_gb"]
    parts = []
    if cpu is not None and cpu > 100 * marks["cpu_pressure_high"]:
        parts.append(f"CPU at {cpu:.0f} %")
    if memory is not None and memory > marks["memory_pressure_high"] * node["memory_gb"] > 0:
        parts.append(f"memory at {100 * memory / node['memory_gb']:.0f} %")
    return f"{node['node_id']}: {', '.join(parts)}" if parts else ""
