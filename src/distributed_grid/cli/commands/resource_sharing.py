"""`grid resource-sharing`: what can be had and what is lent, borrowing for a node, and giving an owner a node back."""

from __future__ import annotations

import sys
from typing import Any

import click

from distributed_grid.cli.commands.boost import BY_GRID_ALONE, ask, lending_options, verdict, would
from distributed_grid.cli.commands.status import allocations_table, offers_table
from distributed_grid.cli.global_options import CliSession, GridGroup
from distributed_grid.cli.output import amount, answer, clean, clock
from distributed_grid.cli.sharing_diagnosis import notes

OFF = "Resource sharing not enabled: set resource_sharing.enabled to true in the config"


@click.group(cls=GridGroup)
def resource_sharing() -> None:
    """Offers and allocations, borrowing for a node, and giving an owner a node back."""


@resource_sharing.command()
@click.option("--node", required=True, metavar="NODE", help="The node it is for; another one lends it.")
@click.option("--type", "resource_type", required=True, metavar="TYPE", help="cpu, gpu, memory or a declared name.")
@click.option("--amount", "number", required=True, type=float, help="Cores, GPUs or GB.")
@lending_options
@click.pass_obj
def request(session: CliSession, /, node: str, resource_type: str, number: float, **options: Any) -> None:
    """Borrow for a node from the others: the same as `grid boost request`."""
    found = ask(session, node, resource_type, number, options)
    if options["dry_run"]:
        answer(session, {**found["decision"], "verdict": verdict(found)}, would(found))
        return
    lease = found["allocation"]
    asked = amount(lease["resource_type"], lease["amount"])
    lines = [
        f"allocation {lease['allocation_id']}",
        clean(f"{asked} from {lease['node_id']} for {lease['target_node']}, until {clock(lease['expires_at'])}"),
        *([BY_GRID_ALONE] if found["boost"]["enforced_by"] == "grid" else []),
    ]
    answer(session, lease, "\n".join(lines))


@resource_sharing.command()
@click.pass_obj
def status(session: CliSession) -> None:
    """What can be had, what is lent, who waits, and which nodes cool down."""
    with session.client() as client:
        found = client.call("get_status")
        sharing = client.call("get_config")["config"]["resource_sharing"]
    cooling = [node["node_id"] for node in found["nodes"] if node["cooling"]]
    shown = {
        "enabled": sharing["enabled"],
        "mode": sharing["mode"],
        "policy": sharing["policy"],
        "offers": found["offers"],
        "allocations": found["allocations"],
        "waiting": found["waiting"],
        "cooling": cooling,
        "notes": notes(found, sharing),
    }
    head = f"sharing is on: mode {sharing['mode']}, policy {sharing['policy']}"
    parts = [
        head if sharing["enabled"] else OFF,
        offers_table(found["offers"]),
        allocations_table(found["allocations"]),
    ]
    parts.append(f"{found['waiting']} waiting")
    if cooling:
        parts.append(clean(f"cooling down, lending nothing: {', '.join(cooling)}"))
    parts += [clean(note) for note in shown["notes"]]
    answer(session, shown, "\n\n".join(parts))


@resource_sharing.command()
@click.argument("allocation_id", metavar="ID")
@click.pass_obj
def release(session: CliSession, allocation_id: str) -> None:
    """Give an allocation back, by its id or any unique prefix; a second time is harmless."""
    with session.client() as client:
        found = client.call("release_lease", allocation_id=allocation_id)["allocation"]
    answer(session, found, clean(f"allocation {found['allocation_id']}: {found['reason'] or found['state']}"))


@resource_sharing.command()
@click.option("--node", required=True, metavar="NODE", help="The node whose owner wants it back.")
@click.option("--off", is_flag=True, help="End it: the node lends again.")
@click.option(
    "-w",
    "--wait",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until everything was given back.",
)
@click.pass_obj
def cooldown(session: CliSession, node: str, off: bool, wait: float) -> None:
    """Give a node's owner everything back, and lend nothing of it until --off, not even after a restart.

    Jobs there get notice and go back into the line; boosts end.
    """
    last: dict[str, Any] = {}
    with session.client() as client:
        for _, message in client.stream("drain_node", node=node, off=off, wait_seconds=wait):
            assert isinstance(message, dict)
            if "step" in message and not session.json:
                click.echo(clean(f"{message['node_id']}: {message['step']}"), file=sys.stderr)
            last = message
    last.pop("done", None)
    given = f", {last['given_back']} given back" if last["given_back"] else ""
    answer(session, last, clean(f"{node}: {last['detail']}{given}"))
