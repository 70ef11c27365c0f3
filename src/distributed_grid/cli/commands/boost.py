"""`grid boost`: request, use, extend, release and list boosts, which nodes lend to one that needs more."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, cast

from distributed_grid.cli.command_line import Argument, FloatRange, Option, group
from distributed_grid.cli.output import (
    echo,
    format_amount,
    format_time,
    print_answer,
    printable,
    table,
    unique_prefixes,
)
from distributed_grid.cli.request_options import job_options, lending_options
from distributed_grid.cli.session import CliSession
from distributed_grid.client.conversation import JsonObject, present, required
from distributed_grid.client.pages import every_page, joined
from distributed_grid.errors import BadInput
from distributed_grid.number_text import counted

if TYPE_CHECKING:
    from distributed_grid.api.answers.jobs import JobDetail
    from distributed_grid.api.answers.leases import AllocationDetail, AllocationRow, BoostDetail, BoostRow, BoostStatus
    from distributed_grid.client.client import Client

BY_GRID_ALONE = "Without Ray a boost is enforced by grid alone: the grid lends nobody else what it holds."


@group()
def boost() -> None:
    """Lend a node what others can spare, for a while. A boost is named by its id or any unique prefix."""


@boost.command(
    Argument("target", metavar="TARGET"),
    Argument("resource_type", metavar="TYPE"),
    Argument("amount", metavar="AMOUNT", type=float),
    *lending_options,
)
def request(session: CliSession, /, target: str, resource_type: str, amount: float, **options: Any) -> None:
    """Request AMOUNT of TYPE (cpu, gpu, memory in GB) for the node TARGET, from another one."""
    answer = request_boost(session, target, resource_type, amount, options)
    if answer is not None:
        boost = required(answer.boost)
        print_answer(session, boost, "\n".join(granted_lines(boost)))


def request_boost(
    session: CliSession, target: str, resource_type: str, amount: float, options: dict[str, Any]
) -> BoostDetail | None:
    """Request a boost for a node; None for a dry run, whose verdict is printed."""
    if options["only"] and not options["source"]:
        raise BadInput("--only goes with --source NODE")
    answer = session.ask.request_boost(
        request_id=uuid.uuid4().hex,
        target=target,
        resource_type=resource_type,
        amount=amount,
        priority=options["priority"],
        duration_seconds=options["duration"],
        source=options["source"],
        only=options["only"],
        wait_seconds=options["wait"],
        dry_run=options["dry_run"],
    )
    if answer.note:
        echo(printable(f"grid: {answer.note}"), err=True)
    if not options["dry_run"]:
        return answer
    lease, decision = required(answer.allocation), required(answer.decision)
    asked = format_amount(lease.resource_type, lease.amount)
    if decision.node_id is None:
        verdict, text = "wait", f"would wait for {asked}: {'; '.join(required(answer.reasons))}"
    else:
        verdict, text = "grant", f"{decision.node_id} would lend {asked} to {lease.target_node}"
    print_answer(session, {**cast("JsonObject", decision), "verdict": verdict}, printable(text))
    return None


def granted_lines(boost: BoostRow) -> list[str]:
    """A boost that was just granted, in lines; one that was asked for again after its end says so."""
    if boost.reason:
        return [printable(f"boost {boost.boost_id}: {boost.reason}")]
    group = boost.placement_group
    reserved = printable(f"reserved in Ray by the placement group {group}") if group else BY_GRID_ALONE
    return [f"boost {boost.boost_id}", lent_text(boost, boost.source_node), reserved, use_text(boost)]


def use_text(boost: BoostRow) -> str:
    text = f"use it: grid boost run {boost.boost_id} -- COMMAND"
    return f"{text}; in a Ray program: with boost.use()" if boost.placement_group else text


def release_text(name: str, lease: BoostRow | AllocationRow, answer: BoostDetail | AllocationDetail) -> str:
    """The end of a lease that was released, or how and when it had ended before."""
    end = str(lease.reason or lease.state)
    ended_at = present(answer.already_ended_at)
    return printable(f"{name}: {end if ended_at is None else f'already {end} at {format_time(ended_at)}'}")


def lent_text(lease: BoostRow | AllocationRow, source: str | None) -> str:
    """The amount that one node lends to another, and its end."""
    amount = format_amount(lease.resource_type, lease.amount)
    return printable(f"{amount} from {source} for {lease.target_node}, until {format_time(lease.expires_at)}")


@boost.command(Option("--node", default="", metavar="NODE", help="Only boosts of this target node."))
def status(session: CliSession, node: str) -> None:
    """The boosts that are active, summed up and one by one."""
    answer = joined(every_page(session.query.list_boosts, node=node), "boosts")
    print_answer(session, answer, status_text(answer))


def status_text(status: BoostStatus) -> str:
    boosts, totals = status.boosts, status.totals
    head = counted(status.active_boosts, "active boost")
    if totals:
        head += ": " + ", ".join(format_amount(kind, total) for kind, total in totals.items())
    short = unique_prefixes(boost.boost_id for boost in boosts)
    automatic = any(boost.automatic for boost in boosts)
    rows = [
        (
            short[boost.boost_id],
            boost.source_node,
            boost.target_node,
            boost.resource_type,
            format_amount(boost.resource_type, boost.amount),
            *([used_text(boost)] if automatic else []),
            "recovered, not confirmed yet" if boost.recovered else boost.state,
            format_time(boost.allocated_at),
            format_time(boost.expires_at),
            "Ray" if boost.enforced_by == "ray" else "grid alone",
        )
        for boost in boosts
    ]
    used = ("USED",) if automatic else ()
    headings = ("ID", "SOURCE", "TARGET", "TYPE", "AMOUNT", *used, "STATE", "ALLOCATED", "EXPIRES", "ENFORCED BY")
    parts = [head, table(headings, rows, empty="")]
    if any(boost.enforced_by == "grid" for boost in boosts):
        parts.append(BY_GRID_ALONE)
    parts += [printable(f"warning: {warning}") for warning in status.warnings]
    return "\n\n".join(part for part in parts if part)


def used_text(boost: BoostRow) -> str:
    """The used part of an automatic boost; of the others the grid does not know."""
    used = boost.used_amount
    if used is None:
        return "-"
    return format_amount(boost.resource_type, used) if used else "nothing"


@boost.command(Argument("boost_id", metavar="ID"), Argument("seconds", type=FloatRange(above=0)))
def extend(session: CliSession, boost_id: str, seconds: float) -> None:
    """Give a boost SECONDS more, counted from its end."""
    answer = session.ask.extend_boost(request_id=uuid.uuid4().hex, boost_id=boost_id, seconds=seconds)
    boost = required(answer.boost)
    print_answer(session, boost, f"boost {boost.boost_id} ends at {format_time(boost.expires_at)}")


@boost.command(Argument("boost_id", metavar="ID"))
def release(session: CliSession, boost_id: str) -> None:
    """Return a boost before its end; a second time is harmless."""
    answer = session.ask.release_boost(boost_id=boost_id)
    boost = required(answer.boost)
    print_answer(session, boost, release_text(f"boost {boost.boost_id}", boost, answer))


@boost.command(
    *job_options,
    Argument("boost_id", metavar="ID"),
    Argument("command", nargs=-1, required=True),
    interspersed=False,
)
def run(session: CliSession, /, boost_id: str, **options: Any) -> int:
    """Run COMMAND with the resources of the boost ID, on the node that lends them; `--` may come before COMMAND.

    Where the boost is reserved in Ray, the tasks and actors of a Ray program use it, too, without a change to the
    program. Everything else is as with run-shared: output is shown as it comes, Ctrl-C cancels, and the exit code is
    the command's. When the boost ends, the command is stopped.
    """
    from distributed_grid.cli.commands.run import job_request, run_job, upload_for

    words = list(options["command"])
    request = job_request(words[1:] if words[0] == "--" else words, options, {"boost_id": boost_id})

    def submit(client: Client) -> JobDetail:
        boost = required(client.get_boost(boost_id=boost_id).boost)
        there = request._replace(lease_node=required(boost.source_node))
        return client.run_in_boost(**upload_for(session, client, there))

    return run_job(session, options, request.uid, submit)
