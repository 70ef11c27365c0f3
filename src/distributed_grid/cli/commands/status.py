"""`grid status` and `grid shared-status`: nodes, offers, leases and jobs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from distributed_grid.cli.command_line import Option, command
from distributed_grid.cli.output import (
    COMMAND_CHARS,
    detached_lines,
    format_amount,
    format_time,
    named_in_part,
    narrowed,
    node_state,
    print_answer,
    printable,
    shorten,
    table,
    terminal_width,
    unique_prefixes,
)
from distributed_grid.cli.session import CliSession
from distributed_grid.client.conversation import JsonObject
from distributed_grid.client.pages import every_page, whole_status
from distributed_grid.number_text import plain_number

if TYPE_CHECKING:
    from distributed_grid.api.answers.jobs import JobRow
    from distributed_grid.api.answers.leases import AllocationRow
    from distributed_grid.api.answers.nodes import NodeRow, OfferRow
    from distributed_grid.api.answers.reports import GridStatus

MAX_ROWS = 10
PAGE_ROWS = 1_000
MAX_NAMED = 5  # number of stopped nodes that are named
MAX_NAME_CHARS = 32
OFF = "Resource sharing not enabled: set resource_sharing.enabled to true in the config"


@command(Option("-a", "--all", "all_", is_flag=True, help=f"Not only {MAX_ROWS} nodes and jobs."))
def status(session: CliSession, all_: bool) -> None:
    """Nodes, pressure, offers, leases and jobs at a glance."""
    if all_ and not session.json:
        answer = whole_status(session.query)
        if answer.omitted["jobs"]:
            answer = cast("GridStatus", JsonObject(cast("JsonObject", answer), jobs=_living_jobs(session)))
    else:
        answer = session.query.get_status()
    text = "" if session.json else status_text(answer, sys.maxsize if all_ else MAX_ROWS, terminal_width())
    print_answer(session, answer, text)


def _living_jobs(session: CliSession) -> list[JobRow]:
    """Every job that has not ended, the oldest first."""
    living: list[JobRow] = []
    for page in every_page(session.query.list_jobs, limit=PAGE_ROWS):
        living += [job for job in reversed(page.jobs) if job.state != "ended"]
        if len(living) >= page.total - page.by_state.get("ended", 0):
            break
    return living[::-1]


def status_text(status: GridStatus, max_rows: int, width: int) -> str:
    """The status for a person: at most `max_rows` of each kind, within `width` columns (0: any number)."""
    nodes, jobs = status.nodes, status.jobs
    problems = [f"{node.node_id}: its agent is turned away: {node.rejected}" for node in nodes if node.rejected]
    problems += [f"{node.node_id} is degraded: {node.degraded}" for node in nodes if node.degraded]
    stopped = [node.node_id for node in nodes if node.stopped]
    if stopped:
        be = "is" if len(stopped) == 1 else "are"
        words = " ".join(stopped) if len(stopped) <= MAX_NAMED else "NODE"
        names = ", ".join(named_in_part(stopped, MAX_NAMED))
        problems.append(f"{names} {be} stopped; type: grid cluster start {words}")
    problems += [node.clock_jump for node in nodes if node.clock_jump]
    states, omitted = status.job_states, status.omitted
    running = states.get("running", 0)
    held = len(status.allocations) + omitted["allocations"]
    leases = f"{held:,} lease{'' if held == 1 else 's'}"
    summary = f"{leases}, {running:,} job{'' if running == 1 else 's'} running, {status.waiting:,} waiting"
    moves = ""
    if recommendations := status.recommendations:
        rows = [
            (
                recommendation.job_id or "other processes",
                recommendation.source_node,
                recommendation.target_node,
                recommendation.reason,
            )
            for recommendation in recommendations[:max_rows]
        ]
        moves = table(*narrowed(("SHOULD MOVE", "FROM", "TO", "BECAUSE"), rows, width), empty="")
        moves += _more(len(recommendations) - len(rows), "grid status --all")
    parts = [
        _nodes(nodes, max_rows, width),
        "\n".join(map(printable, named_in_part(problems, max_rows))),
        summary,
        "\n".join([_jobs(jobs, states, max_rows, width), *detached_lines(jobs)]) if jobs else "",
        moves,
    ]
    return "\n\n".join(part for part in parts if part)


@command()
def shared_status(session: CliSession) -> None:
    """Offers and active allocations."""
    with session.client(query_only=True) as client:
        answer = whole_status(client) if session.json else client.get_status()
        enabled = client.get_config().config["resource_sharing"]["enabled"]
    shared = {"enabled": enabled, "offers": answer.offers, "allocations": answer.allocations}
    print_answer(session, shared, "\n\n".join(sharing_parts(answer, "" if enabled else None)))


def sharing_parts(status: GridStatus, head: str | None) -> list[str]:
    """Offers and allocations below a line about sharing; where sharing is off (None) nothing is offered."""
    first = [OFF] if head is None else [*([head] if head else []), offers_table(status.offers)]
    return [*first, allocations_table(status.allocations, status.omitted["allocations"])]


def _nodes(nodes: list[NodeRow], max_rows: int, width: int) -> str:
    """A table of nodes; where there are too many, those with a problem come first."""
    shown = nodes
    if len(nodes) > max_rows:
        shown = sorted(nodes, key=lambda node: _state(node) == "alive" and not node.rejected)[:max_rows]
    rows = [
        (
            node.node_id,
            _state(node) + (", simulated" if node.simulated else ""),
            "unknown" if node.pressure is None else f"{100 * node.pressure:.0f} %",
            f"{plain_number(node.cpu_lent)} of {plain_number(node.cpu_cores)}",
            f"{node.memory_lent_gb:.1f} of {node.memory_gb:.1f} GB",
            f"{plain_number(node.gpus_lent)} of {node.gpus}" if node.gpus else "-",
        )
        for node in shown
    ]
    headings = ("NODE", "STATE", "PRESSURE", "CORES LENT", "MEMORY LENT", "GPUS LENT")
    more = _more(len(nodes) - len(shown), "grid status --all", _totals(Counter(map(_state, nodes))))
    return table(*narrowed(headings, rows, width), empty="no nodes") + more


def _totals(counts: Mapping[str, int]) -> str:
    """Number in each state, the most frequent first."""
    return ", ".join(f"{count:,} {state}" for state, count in sorted(counts.items(), key=lambda item: -item[1]))


def _more(left_out: int, advice: str, totals: str = "") -> str:
    """The line about rows that are left out; empty where none is."""
    if left_out <= 0:
        return ""
    return f"\n… and {left_out:,} more ({advice})" + (f"; in all {totals}" if totals else "")


def _state(node: NodeRow) -> str:
    return "degraded" if node.degraded and not node.cooling else node_state(node)


def _jobs(jobs: list[JobRow], states: dict[str, int], max_rows: int, width: int) -> str:
    shown = sorted(jobs, key=lambda job: _JOB_ORDER.get(job.state, len(_JOB_ORDER)))[:max_rows]
    rows = [
        (
            shorten(job.job_id, MAX_NAME_CHARS) if width else job.job_id,
            job.state,
            job.node_id,
            format_amount(job.resource_type, job.amount),
            shorten(job.command, terminal_width() or COMMAND_CHARS),
        )
        for job in shown
    ]
    more = _more(sum(states.values()) - len(shown), "grid jobs list", _totals(states))
    return table(*narrowed(("JOB", "STATE", "NODE", "ASKED", "COMMAND"), rows, width), empty="no jobs") + more


_JOB_ORDER = {state: at for at, state in enumerate(("running", "paused", "stopping", "assigned", "queued"))}


def offers_table(offers: list[OfferRow]) -> str:
    rows = [
        (
            offer.node_id,
            format_amount(offer.resource_type, round(offer.amount, 1) or offer.amount),
            format_time(offer.expires_at),
            pause_text(offer),
        )
        for offer in offers
    ]
    if all(offer.state == "open" for offer in offers):
        return table(("NODE", "OFFERS", "UNTIL"), [row[:3] for row in rows], empty="No resource offers available")
    return table(("NODE", "OFFERS", "UNTIL", "PAUSED"), rows, empty="")


def pause_text(offer: OfferRow) -> str:
    if offer.measured_percent is None or offer.mark_percent is None:  # it is open
        return "-"
    measured, limit = plain_number(offer.measured_percent), plain_number(offer.mark_percent)
    used = f"{measured} % over the last minute, limit {limit} %"
    if offer.measured_percent <= offer.mark_percent:
        return f"{used}, often more in the last hour; returns at {format_time(offer.returns_at)} if it stays below"
    return f"{used}; may return at {format_time(offer.returns_at)}"


def allocations_table(allocations: list[AllocationRow], omitted: int = 0) -> str:
    """A table of the active allocations, and how many more there are."""
    short = unique_prefixes(lease.allocation_id for lease in allocations)
    targets = any(lease.target_node for lease in allocations)
    rows = [
        (
            short[lease.allocation_id],
            lease.node_id,
            format_amount(lease.resource_type, lease.amount),
            *([lease.target_node] if targets else []),
            lease.user,
            lease.priority,
            lease.state,
            lease.job_id,
            format_time(lease.expires_at),
        )
        for lease in allocations
    ]
    target = ("FOR",) if targets else ()
    headings = ("ALLOCATION", "NODE", "AMOUNT", *target, "USER", "PRIORITY", "STATE", "JOB", "EXPIRES")
    return table(headings, rows, empty="no active allocations") + _more(omitted, "grid explain ID shows any of them")
