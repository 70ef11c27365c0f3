"""`grid status` and `grid shared-status`: nodes, offers, leases and jobs."""

from __future__ import annotations

from typing import Any

from distributed_grid.cli.command_line import command
from distributed_grid.cli.output import (
    format_amount,
    format_time,
    print_answer,
    printable,
    shorten,
    table,
    unique_prefixes,
)
from distributed_grid.cli.session import CliSession

OFF = "Resource sharing not enabled: set resource_sharing.enabled to true in the config"


@command()
def status(session: CliSession) -> None:
    """Nodes, pressure, offers, leases and jobs at a glance."""
    found = session.query("get_status")
    jobs = found["jobs"]
    parts = [_nodes(found["nodes"])]
    rejected = [node for node in found["nodes"] if node["rejected"]]
    if rejected:
        lines = (f"{node['node_id']}: its agent is turned away: {node['rejected']}" for node in rejected)
        parts.append("\n".join(map(printable, lines)))
    degraded = [node for node in found["nodes"] if node["degraded"]]
    if degraded:
        parts.append("\n".join(printable(f"{node['node_id']} is degraded: {node['degraded']}") for node in degraded))
    jumps = [node["clock_jump"] for node in found["nodes"] if node["clock_jump"]]
    if jumps:
        parts.append("\n".join(map(printable, jumps)))
    running = sum(1 for job in jobs if job["state"] == "running")
    leases = f"{len(found['allocations'])} lease{'' if len(found['allocations']) == 1 else 's'}"
    parts.append(f"{leases}, {running} job{'' if running == 1 else 's'} running, {found['waiting']} waiting")
    if jobs:
        parts.append(_jobs(jobs))
    if found["recommendations"]:
        parts.append(_recommendations(found["recommendations"]))
    print_answer(session, found, "\n\n".join(parts))


@command()
def shared_status(session: CliSession) -> None:
    """Offers and active allocations."""
    with session.client(query_only=True) as client:
        found = client.call("get_status")
        enabled = client.call("get_config")["config"]["resource_sharing"]["enabled"]
    shared = {"enabled": enabled, "offers": found["offers"], "allocations": found["allocations"]}
    parts = [*([] if enabled else [OFF]), offers_table(found["offers"]), allocations_table(found["allocations"])]
    print_answer(session, shared, "\n\n".join(parts))


def _nodes(nodes: list[dict[str, Any]]) -> str:
    rows = [
        (
            node["node_id"],
            _state(node) + (", simulated" if node["simulated"] else ""),
            "unknown" if node["pressure"] is None else f"{100 * node['pressure']:.0f} %",
            f"{node['cpu_lent']:g} of {node['cpu_cores']:g}",
            f"{node['memory_lent_gb']:.1f} of {node['memory_gb']:.1f} GB",
            f"{node['gpus_lent']:g} of {node['gpus']}" if node["gpus"] else "-",
        )
        for node in nodes
    ]
    return table(("NODE", "STATE", "PRESSURE", "CORES LENT", "MEMORY LENT", "GPUS LENT"), rows, empty="no nodes")


def _state(node: dict[str, Any]) -> str:
    if node["cooling"]:
        return "cooling down"
    return "degraded" if node["degraded"] else str(node["state"])


def _jobs(jobs: list[dict[str, Any]]) -> str:
    rows = [
        (
            job["job_id"],
            job["state"],
            job["node_id"],
            format_amount(job["resource_type"], job["amount"]),
            shorten(job["command"], 60),
        )
        for job in jobs
    ]
    return table(("JOB", "STATE", "NODE", "ASKED", "COMMAND"), rows, empty="no jobs")


def _recommendations(recommendations: list[dict[str, Any]]) -> str:
    rows = [
        (one["job_id"] or "other processes", one["source_node"], one["target_node"], one["reason"])
        for one in recommendations
    ]
    return table(("SHOULD MOVE", "FROM", "TO", "BECAUSE"), rows, empty="")


def offers_table(offers: list[dict[str, Any]]) -> str:
    """A table of the current offers."""
    rows = [
        (
            offer["node_id"],
            format_amount(offer["resource_type"], round_amount(offer["amount"])),
            format_time(offer["expires_at"]),
            _pause(offer),
        )
        for offer in offers
    ]
    if all(offer["state"] == "open" for offer in offers):
        return table(("NODE", "OFFERS", "UNTIL"), [row[:3] for row in rows], empty="No resource offers available")
    return table(("NODE", "OFFERS", "UNTIL", "PAUSED"), rows, empty="")


def _pause(offer: dict[str, Any]) -> str:
    if offer["state"] == "open":
        return "-"
    used = f"{offer['measured_percent']:g} % used in the last minute, may be {offer['mark_percent']:g} %"
    return f"{used}; may return at {format_time(offer['returns_at'])}"


def round_amount(amount: float) -> float:
    """An amount to one decimal; less than that to its first digit, so that a little is not shown as nothing."""
    return round(amount, 1) or float(f"{amount:.1g}")


def allocations_table(allocations: list[dict[str, Any]]) -> str:
    """A table of the active allocations."""
    short = unique_prefixes(lease["allocation_id"] for lease in allocations)
    targets = any(lease["target_node"] for lease in allocations)
    rows = [
        (
            short[lease["allocation_id"]],
            lease["node_id"],
            format_amount(lease["resource_type"], lease["amount"]),
            *([lease["target_node"]] if targets else []),
            lease["user"],
            lease["priority"],
            lease["state"],
            lease["job_id"],
            format_time(lease["expires_at"]),
        )
        for lease in allocations
    ]
    target = ("FOR",) if targets else ()
    headings = ("ALLOCATION", "NODE", "AMOUNT", *target, "USER", "PRIORITY", "STATE", "JOB", "EXPIRES")
    return table(headings, rows, empty="no active allocations")
