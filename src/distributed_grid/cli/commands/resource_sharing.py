"""`grid resource-sharing`: offers and allocations, borrowing for a node, and giving a node back to its owner."""

from __future__ import annotations

from typing import Any

from distributed_grid.cli.command_line import Argument, Option, group
from distributed_grid.cli.commands.boost import BY_GRID_ALONE, lent_text, request_boost, use_text
from distributed_grid.cli.commands.status import OFF, allocations_table, offers_table
from distributed_grid.cli.output import echo, named_in_part, print_answer, printable
from distributed_grid.cli.request_options import lending_options, wait_option
from distributed_grid.cli.session import CliSession

MAX_NODES = 5
"""How many nodes a note names."""


@group()
def resource_sharing() -> None:
    """Offers and allocations, borrowing for a node, and giving an owner a node back."""


@resource_sharing.command(
    Option("--node", required=True, metavar="NODE", help="The node it is for; another one lends it."),
    Option("--type", "resource_type", required=True, metavar="TYPE", help="cpu, gpu, memory or a declared name."),
    Option("--amount", required=True, type=float, help="Cores, GPUs or GB."),
    *lending_options,
)
def request(session: CliSession, /, node: str, resource_type: str, amount: float, **options: Any) -> None:
    """Borrow for a node from the others: the same as `grid boost request`."""
    found = request_boost(session, node, resource_type, amount, options)
    if found is None:
        return
    lease = found["allocation"]
    lines = [f"allocation {lease['allocation_id']}", lent_text(lease, lease["node_id"])]
    lines += [BY_GRID_ALONE] if found["boost"]["enforced_by"] == "grid" else []
    lines.append(use_text(found["boost"]))
    print_answer(session, lease, "\n".join(lines))


@resource_sharing.command()
def status(session: CliSession) -> None:
    """Offers, allocations, how many requests wait, and which nodes cool down."""
    with session.client(query_only=True) as client:
        found = client.call("get_status")
        sharing = client.call("get_config")["config"]["resource_sharing"]
        levels = client.call("get_metrics", kind="levels")["levels"]
    cooling = [node["node_id"] for node in found["nodes"] if node["cooling"]]
    shown = {
        "enabled": sharing["enabled"],
        "mode": sharing["mode"],
        "policy": sharing["policy"],
        "offers": found["offers"],
        "allocations": found["allocations"],
        "waiting": found["waiting"],
        "cooling": cooling,
        "notes": sharing_notes(found, sharing, levels),
    }
    head = f"sharing is on: mode {sharing['mode']}, policy {sharing['policy']}"
    parts = [
        head if sharing["enabled"] else OFF,
        offers_table(found["offers"]),
        allocations_table(found["allocations"], found["omitted"]["allocations"]),
    ]
    parts.append(f"{found['waiting']} waiting")
    if cooling:
        parts.append(printable(f"cooling down, lending nothing: {', '.join(cooling)}"))
    parts += [printable(note) for note in shown["notes"]]
    print_answer(session, shown, "\n\n".join(parts))


@resource_sharing.command(Argument("allocation_id", metavar="ID"))
def release(session: CliSession, allocation_id: str) -> None:
    """Give an allocation back, by its id or any unique prefix; a second time is harmless."""
    found = session.call("release_lease", allocation_id=allocation_id)["allocation"]
    print_answer(session, found, printable(f"allocation {found['allocation_id']}: {found['reason'] or found['state']}"))


@resource_sharing.command(
    Option("--node", required=True, metavar="NODE", help="The node whose owner wants it back."),
    Option("--off", is_flag=True, help="End it: the node lends again."),
    wait_option(300.0, "How long to wait until everything was given back."),
)
def cooldown(session: CliSession, node: str, off: bool, wait: float) -> None:
    """Give a node's owner everything back, and lend nothing of it until --off, not even after a restart.

    Jobs there get notice and go back into the queue; boosts end.
    """

    def show(name: str, step: str) -> None:
        if not session.json:
            echo(printable(f"{name}: {step}"), err=True)

    last = session.stream_steps("drain_node", show, node=node, off=off, wait_seconds=wait)
    last.pop("done", None)
    count = last["given_back"]
    given = f", {count} lease{'' if count == 1 else 's'} given back" if count else ""
    print_answer(session, last, printable(f"{node}: {last['detail']}{given}"))


def sharing_notes(found: dict[str, Any], sharing: dict[str, Any], levels: dict[str, dict[str, float]]) -> list[str]:
    """The issues of a grid: nothing offered, nodes that work too hard, requests that wait.

    `levels` are the means of the last minute: a moment's peak is no issue.
    """
    notes = []
    if not sharing["enabled"]:
        notes.append("Resources not being shared: set resource_sharing.enabled to true in the config")
    elif not found["offers"]:
        keeps = [f"{node['node_id']}: {', '.join(node['keeps']) or 'nothing left'}" for node in found["nodes"]]
        why = "; ".join(named_in_part(keeps, MAX_NODES))
        notes.append(
            f"Resources not being shared: {why or 'no nodes'}; check the thresholds, can_share and max_share_… of each "
            "node"
        )
    hard = [text for node, used in levels.items() if (text := _pressure_text(node, used, sharing["thresholds"]))]
    if hard:
        notes.append(
            f"High resource pressure: {'; '.join(named_in_part(hard, MAX_NODES))}; add nodes, raise the "
            "…_pressure_high marks, or look for what leaks there"
        )
    if found["waiting"]:
        count = found["waiting"]
        notes.append(
            f"Tasks not scheduling: {count} request{' waits' if count == 1 else 's wait'}; `grid explain ID` says why: "
            "check the amounts, the affinity and the strategy"
        )
    return notes


def _pressure_text(node: str, used: dict[str, float], marks: dict[str, Any]) -> str:
    """What a node uses beyond its marks, in words; empty where nothing is."""
    names = {"cpu": "CPU", "memory": "memory", "gpu": "GPUs"}
    over = [(kind, part) for kind, part in used.items() if part > marks[f"{kind}_pressure_high"]]
    return f"{node}: {', '.join(f'{names[kind]} at {100 * part:.0f} %' for kind, part in over)}" if over else ""
