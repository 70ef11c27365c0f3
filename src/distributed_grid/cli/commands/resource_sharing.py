"""`grid resource-sharing`: offers and allocations, borrowing for a node, and giving a node back to its owner."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from distributed_grid.cli.command_line import Argument, Option, group
from distributed_grid.cli.commands.boost import BY_GRID_ALONE, lent_text, release_text, request_boost, use_text
from distributed_grid.cli.commands.status import sharing_parts
from distributed_grid.cli.output import echo, format_unused_borrowing, named_in_part, print_answer, printable
from distributed_grid.cli.request_options import lending_options, wait_option
from distributed_grid.cli.session import CliSession
from distributed_grid.client.conversation import required
from distributed_grid.client.pages import whole_status
from distributed_grid.number_text import counted, plain_number

if TYPE_CHECKING:
    from distributed_grid.api.answers.nodes import NodeStep
    from distributed_grid.api.answers.reports import GridStatus

MAX_NODES = 5  # how many nodes a note names
USED = {"cpu": "CPU", "memory": "memory", "gpu": "GPUs"}
CAPACITIES = {"cpu": "cpu_cores", "memory": "memory_gb", "gpu": "gpus"}
"""Where the row of a node says how much it has."""


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
    answer = request_boost(session, node, resource_type, amount, options)
    if answer is None:
        return
    lease, boost = required(answer.allocation), required(answer.boost)
    lines = [f"allocation {lease.allocation_id}", lent_text(lease, lease.node_id)]
    lines += [BY_GRID_ALONE] if boost.enforced_by == "grid" else []
    lines.append(use_text(boost))
    print_answer(session, lease, "\n".join(lines))


@resource_sharing.command()
def status(session: CliSession) -> None:
    """Offers, allocations, how many requests wait, and which nodes cool down."""
    with session.client(query_only=True) as client:
        answer = whole_status(client) if session.json else client.get_status()
        sharing = client.get_config().config["resource_sharing"]
        levels = required(client.get_metrics(kind="levels").levels)
    cooling = [node.node_id for node in answer.nodes if node.cooling]
    shown: dict[str, Any] = {
        "enabled": sharing["enabled"],
        "mode": sharing["mode"],
        "policy": sharing["policy"],
        "offers": answer.offers,
        "allocations": answer.allocations,
        "waiting": answer.waiting,
        "cooling": cooling,
        "notes": sharing_notes(answer, sharing, levels),
    }
    head = f"sharing is on: mode {sharing['mode']}, policy {sharing['policy']}"
    parts = [*sharing_parts(answer, head if sharing["enabled"] else None), f"{answer.waiting} waiting"]
    if cooling:
        parts.append(printable(f"cooling down, lending nothing: {', '.join(cooling)}"))
    parts += [printable(note) for note in shown["notes"]]
    print_answer(session, shown, "\n\n".join(parts))


@resource_sharing.command(Argument("allocation_id", metavar="ID"))
def release(session: CliSession, allocation_id: str) -> None:
    """Give an allocation back, by its id or any unique prefix; a second time is harmless."""
    answer = session.ask.release_lease(allocation_id=allocation_id)
    lease = answer.allocation
    print_answer(session, lease, release_text(f"allocation {lease.allocation_id}", lease, answer))


@resource_sharing.command(
    Option("--node", required=True, metavar="NODE", help="The node whose owner wants it back."),
    Option("--off", is_flag=True, help="End it: the node lends again."),
    wait_option(300.0, "How long to wait until everything was given back."),
)
def cooldown(session: CliSession, node: str, off: bool, wait: float) -> None:
    """Give a node's owner everything back, and lend nothing of it until --off, not even after a restart.

    Jobs there get notice and go back into the queue; boosts end.
    """

    def show(step: NodeStep) -> None:
        if not session.json:
            echo(printable(f"{step.node_id}: {step.step}"), err=True)

    answer = session.ask.drain_node(show, node=node, off=off, wait_seconds=wait)
    given = f", {counted(answer.given_back, 'lease')} given back" if answer.given_back else ""
    print_answer(session, answer, printable(f"{node}: {answer.detail}{given}"))


def sharing_notes(status: GridStatus, sharing: dict[str, Any], levels: dict[str, dict[str, float]]) -> list[str]:
    """The issues of a grid: nothing offered, nodes that work too hard, requests that wait.

    `levels` are the means of the last minute: a moment's peak is no issue.
    """
    notes = []
    if not sharing["enabled"]:
        notes.append("Resources not being shared: set resource_sharing.enabled to true in the config")
    elif not status.offers:
        keeps = [f"{node.node_id}: {', '.join(node.keeps) or 'nothing left'}" for node in status.nodes]
        reason = "; ".join(named_in_part(keeps, MAX_NODES))
        notes.append(
            f"Resources not being shared: {reason or 'no nodes'}; check the thresholds, can_share and max_share_… of "
            "each node"
        )
    notes += _pressure_notes(status, levels, sharing["thresholds"])
    if status.waiting:
        count = status.waiting
        notes.append(
            f"Tasks not scheduling: {count} request{' waits' if count == 1 else 's wait'}; `grid explain ID` says why: "
            "check the amounts, the affinity and the strategy"
        )
    return notes


def _pressure_notes(status: GridStatus, levels: dict[str, dict[str, float]], marks: dict[str, Any]) -> list[str]:
    """The nodes above their marks, the boosts that would relieve them, and other advice where none would."""
    nodes = {node.node_id: node for node in status.nodes}
    texts, boosts, is_hopeless = [], [], False
    for name, used in levels.items():
        over = {kind: part for kind, part in used.items() if part > marks[f"{kind}_pressure_high"]}
        if not over or name not in nodes:
            continue
        unused = {row.resource_type: row for row in nodes[name].unused_borrowing}
        uses = [
            f"{USED[kind]} at {100 * part:.0f} %"
            + (f" ({format_unused_borrowing(unused[kind])})" if kind in unused else "")
            for kind, part in over.items()
        ]
        texts.append(f"{name}: {', '.join(uses)}")
        for kind, part in over.items():
            borrower = nodes[name]
            amounts = [
                offer.amount
                for offer in status.offers
                if offer.state == "open" and offer.resource_type == kind and offer.node_id != borrower.node_id
            ]
            free = max(amounts, default=0.0)
            free = math.floor(free) if free >= 1 else math.floor(10 * free) / 10
            wanted = max(math.ceil((part - marks[f"{kind}_pressure_high"]) * getattr(borrower, CAPACITIES[kind])), 1)
            boost = f"grid boost request {borrower.node_id} {kind} {plain_number(min(wanted, free))}" if free else ""
            boosts += [boost] if boost and kind not in unused else []
            is_hopeless = is_hopeless or not (boost or kind in unused)
    if not texts:
        return []
    note = f"High resource pressure: {'; '.join(named_in_part(texts, MAX_NODES))}"
    if boosts:
        note += f"; others have room: {', '.join(named_in_part(boosts, MAX_NODES))}"
    if is_hopeless:
        note += "; add nodes, raise the …_pressure_high marks, or look for what leaks there"
    return [note]
