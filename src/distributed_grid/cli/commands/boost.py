"""`grid boost`: what nodes lend to one that needs more, for a while."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import click

from distributed_grid.cli.global_options import CliSession, GridGroup
from distributed_grid.cli.output import amount, answer, clean, clock, table

F = TypeVar("F", bound=Callable[..., Any])
PRIORITIES = ("low", "normal", "medium", "high", "critical", "urgent")
BY_GRID_ALONE = "Without Ray a boost is enforced by grid alone: the grid lends nobody else what it holds."
SHOWN = 8
"""So many characters of an id are shown; any unique prefix is understood."""


def lending_options(command: F) -> F:
    """The options that every request for a node has."""
    options = (
        click.option(
            "--priority",
            type=click.Choice(PRIORITIES, case_sensitive=False),
            default="normal",
            show_default=True,
            help="normal is medium, critical is urgent: that one displaces others.",
        ),
        click.option(
            "--duration",
            type=click.FloatRange(min=0, min_open=True),
            default=3600.0,
            show_default=True,
            metavar="SECONDS",
            help="When it ends by itself.",
        ),
        click.option("--source", metavar="NODE", default="", help="The node that has to lend it; nobody else does."),
        click.option(
            "-w",
            "--wait",
            type=click.FloatRange(min=0),
            default=0.0,
            show_default=True,
            metavar="SECONDS",
            help="How long to stand in line where nobody can lend it now.",
        ),
        click.option("--dry-run", is_flag=True, help="Say what would happen, and do nothing."),
    )
    for option in reversed(options):
        command = option(command)
    return command


class BoostGroup(GridGroup):
    """The commands of boosts; what `run` needs is imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "run"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "run":
            from distributed_grid.cli.commands.boost_run import run

            return run
        return super().get_command(ctx, cmd_name)


@click.group(cls=BoostGroup)
def boost() -> None:
    """Lend a node what others can spare, for a while. A boost is named by its id or any unique prefix."""


@boost.command()
@click.argument("target", metavar="TARGET")
@click.argument("resource_type", metavar="TYPE")
@click.argument("number", metavar="AMOUNT", type=float)
@lending_options
@click.pass_obj
def request(session: CliSession, /, target: str, resource_type: str, number: float, **options: Any) -> None:
    """Request AMOUNT of TYPE (cpu, gpu, memory in GB) for the node TARGET, from another one."""
    found = ask(session, target, resource_type, number, options)
    if options["dry_run"]:
        answer(session, {**found["decision"], "verdict": verdict(found)}, would(found))
        return
    answer(session, found["boost"], "\n".join(granted(found["boost"])))


def ask(session: CliSession, target: str, resource_type: str, number: float, options: dict[str, Any]) -> dict[str, Any]:
    """What became of a request for a node."""
    message = {
        "request_id": uuid.uuid4().hex,
        "target": target,
        "resource_type": resource_type,
        "amount": number,
        "priority": options["priority"],
        "duration_seconds": options["duration"],
        "source": options["source"],
        "wait_seconds": options["wait"],
        "dry_run": options["dry_run"],
    }
    with session.client() as client:
        return client.call("request_boost", **message)


def verdict(found: dict[str, Any]) -> str:
    return "wait" if found["decision"]["node_id"] is None else "grant"


def would(found: dict[str, Any]) -> str:
    """What a dry run says."""
    lease, decision = found["allocation"], found["decision"]
    asked = amount(lease["resource_type"], lease["amount"])
    if decision["node_id"] is None:
        return clean(f"would wait for {asked}: {'; '.join(found['reasons'])}")
    return clean(f"{decision['node_id']} would lend {asked} to {lease['target_node']}")


def granted(found: dict[str, Any]) -> list[str]:
    """A boost that was just granted, in lines; one that was asked for again after its end says so."""
    if found["reason"]:
        return [clean(f"boost {found['boost_id']}: {found['reason']}")]
    asked = amount(found["resource_type"], found["amount"])
    lines = [
        f"boost {found['boost_id']}",
        clean(f"{asked} from {found['source_node']} for {found['target_node']}, until {clock(found['expires_at'])}"),
    ]
    if found["placement_group"]:
        lines.append(clean(f"reserved in Ray by the placement group {found['placement_group']}"))
    else:
        lines.append(BY_GRID_ALONE)
    return lines


@boost.command()
@click.option("--node", default="", metavar="NODE", help="Only what is lent to this node.")
@click.pass_obj
def status(session: CliSession, node: str) -> None:
    """The boosts that are active, summed up and one by one."""
    with session.client() as client:
        found = client.call("list_boosts", node=node)
    answer(session, found, status_text(found))


def status_text(found: dict[str, Any]) -> str:
    """The boosts, summed up and one by one, and what is wrong."""
    boosts, totals = found["boosts"], found["totals"]
    count = found["active_boosts"]
    head = f"{count} active boost{'' if count == 1 else 's'}"
    if totals:
        head += ": " + ", ".join(amount(kind, total) for kind, total in totals.items())
    rows = [
        (
            boost["boost_id"][:SHOWN],
            boost["source_node"],
            boost["target_node"],
            boost["resource_type"],
            amount(boost["resource_type"], boost["amount"]),
            _state(boost),
            clock(boost["allocated_at"]),
            clock(boost["expires_at"]),
            "Ray" if boost["enforced_by"] == "ray" else "grid alone",
        )
        for boost in boosts
    ]
    headings = ("ID", "SOURCE", "TARGET", "TYPE", "AMOUNT", "STATE", "ALLOCATED", "EXPIRES", "ENFORCED BY")
    parts = [head, table(headings, rows, empty="")]
    if any(boost["enforced_by"] == "grid" for boost in boosts):
        parts.append(BY_GRID_ALONE)
    parts += [clean(f"warning: {warning}") for warning in found["warnings"]]
    return "\n\n".join(part for part in parts if part)


def _state(boost: dict[str, Any]) -> str:
    return "recovered, not confirmed yet" if boost["recovered"] else str(boost["state"])


@boost.command()
@click.argument("boost_id", metavar="ID")
@click.argument("seconds", type=click.FloatRange(min=0, min_open=True))
@click.pass_obj
def extend(session: CliSession, boost_id: str, seconds: float) -> None:
    """Give a boost SECONDS more, counted from its end."""
    with session.client() as client:
        found = client.call("extend_boost", boost_id=boost_id, seconds=seconds)["boost"]
    answer(session, found, f"boost {found['boost_id']} ends at {clock(found['expires_at'])}")


@boost.command()
@click.argument("boost_id", metavar="ID")
@click.pass_obj
def release(session: CliSession, boost_id: str) -> None:
    """Give a boost back before its time is over; a second time is harmless."""
    with session.client() as client:
        found = client.call("release_boost", boost_id=boost_id)["boost"]
    answer(session, found, clean(f"boost {found['boost_id']}: {found['reason'] or found['state']}"))
