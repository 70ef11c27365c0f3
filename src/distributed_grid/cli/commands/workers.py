"""`grid workers`: start, list and end the workers of a provider."""

from __future__ import annotations

import secrets
import sys
import time
from typing import Any

from distributed_grid.cli.command_line import Argument, FloatRange, IntRange, Option, group
from distributed_grid.cli.output import (
    confirm,
    echo,
    narrowed,
    note,
    print_answer,
    printable,
    table,
    terminal_width,
    unique_prefixes,
)
from distributed_grid.cli.session import CliSession
from distributed_grid.errors import GridError, Refused, TimedOut
from distributed_grid.number_text import plain_number

POLL_SECONDS = 0.5
PROVIDER = Option("--provider", default="", metavar="NAME", help="A provider of the config (default: the only one).")


@group()
def workers() -> None:
    """Machines that a provider starts for the grid, and what they cost. A worker is named by its id or a prefix."""


@workers.command(
    PROVIDER,
    Option("--type", "worker_type", default="cpu", metavar="KIND", help="The kind of worker (default: cpu)."),
    Option("--count", default=1, type=IntRange(1, 1000), help="How many (default: 1)."),
    Option("--cpu", default=0.0, type=FloatRange(0), help="Cores of each (default: what the offer has)."),
    Option("--memory", default=0.0, type=FloatRange(0), metavar="GB", help="Memory of each."),
    Option("--gpu", default=0, type=IntRange(0, 1024), help="GPUs of each."),
    Option("--dry-run", is_flag=True, help="Say what it would cost, start nothing."),
    Option("--yes", "-y", is_flag=True, help="Do not ask."),
    Option("--wait", default=0.0, type=FloatRange(0), metavar="SECONDS", help="Until they have joined."),
)
def create(
    session: CliSession,
    provider: str,
    worker_type: str,
    count: int,
    cpu: float,
    memory: float,
    gpu: int,
    dry_run: bool,
    yes: bool,
    wait: float,
) -> None:
    """Start workers. On a terminal the price is shown first, and asked about unless --yes is given."""
    ids = [f"worker-{secrets.token_hex(6)}" for _ in range(count)]
    asked = {
        "worker_ids": ids,
        "provider": provider,
        "worker_type": worker_type,
        "cpu": cpu,
        "memory_gb": memory,
        "gpu": gpu,
    }
    if dry_run or (not yes and not session.json and sys.stdout.isatty()):
        plan = session.call("create_workers", **asked, dry_run=True)
        if dry_run:
            print_answer(session, plan, plan_text(plan))
            return
        echo(plan_text(plan))
        if not confirm("start them?"):
            raise Refused("nothing was started")
    made = session.call("create_workers", **asked)
    if not session.json:
        echo(started_text(made))
    if wait:
        made = _wait(session, [one["worker_id"] for one in made["workers"]], wait)
    if session.json:
        print_answer(session, made, "")


def plan_text(plan: dict[str, Any]) -> str:
    """What would be started, and what that costs."""
    first, budget = plan["workers"][0], plan["budget"]
    count = len(plan["workers"])
    what = f"{count} {first['worker_type']} worker{'' if count == 1 else 's'} of {first['provider']} ({first['offer']})"
    price = (
        "at an unknown price"
        if first["price_per_hour"] is None
        else f"at ${plain_number(first['price_per_hour'])} an hour"
    )
    return printable(f"would start {what} {price}; then all workers cost {cost_text(budget)}")


def cost_text(budget: dict[str, Any]) -> str:
    """What workers cost in money and in core-hours, and the limits."""
    used = [f"{name}: {core_hours_text(one)}" for name, one in budget["core_hours"].items()]
    return "; ".join([money_text(budget), *used])


def core_hours_text(one: dict[str, Any]) -> str:
    """What workers of a provider use of its core-hours, and the limit."""
    used, ahead, limit = one["core_hours_today"], one["by_midnight"], one["budget_core_hours"]
    return f"{plain_number(used)} core-hours today ({plain_number(ahead)} by midnight UTC) of {plain_number(limit)}"


def money_text(budget: dict[str, Any]) -> str:
    """What workers cost in money, and the limits."""
    hour, day = f"${plain_number(budget['per_hour'])} an hour", f"${budget['spent_today']:.4f} today"
    if budget["budget_per_hour"] is not None:
        hour += f" of ${plain_number(budget['budget_per_hour'])}"
    if budget["budget_per_day"] is not None:
        day += f" (${budget['by_midnight']:.2f} by midnight UTC) of ${plain_number(budget['budget_per_day'])}"
    return f"{hour}, {day}"


def started_text(made: dict[str, Any]) -> str:
    lines = [printable(f"{one['worker_id']}: {one['state']}") for one in made["workers"]]
    return "\n".join(lines)


def _wait(session: CliSession, ids: list[str], seconds: float) -> dict[str, Any]:
    """Wait until the workers have joined, and show each step; a worker that takes another's place is waited for."""
    deadline = time.monotonic() + seconds
    shown: dict[str, str] = {}
    while True:
        found = session.query("list_workers", all=True)
        rows = {one["worker_id"]: one for one in found["workers"]}
        ours = [_current(rows, one) for one in ids]
        for row in ours:
            text = f"{row['worker_id']}: {row['state']}" + (f" ({row['problem']})" if row["problem"] else "")
            if shown.get(row["worker_id"]) != text:
                shown[row["worker_id"]] = text
                echo(printable(text), err=True)
        gone = next((row for row in ours if row["state"] in ("gone", "terminating")), None)
        if gone is not None:
            raise GridError(f"{gone['worker_id']} is {gone['state']}: {gone['reason'] or 'no reason is known'}")
        if all(row["state"] == "joined" for row in ours):
            return {**found, "workers": ours}
        if time.monotonic() > deadline:
            raise TimedOut(
                f"the workers have not joined within {plain_number(seconds)} s; grid workers list shows them"
            )
        time.sleep(POLL_SECONDS)


def _current(rows: dict[str, Any], worker_id: str) -> Any:
    """A worker, or the one that took its place."""
    by_reason = {row["reason"]: row for row in rows.values()}
    row = rows[worker_id]
    while row["state"] in ("gone", "terminating") and f"instead of {row['worker_id']}" in by_reason:
        row = by_reason[f"instead of {row['worker_id']}"]
    return row


@workers.command(Option("--all", "everything", is_flag=True, help="Those that are gone, too."), PROVIDER, name="list")
def list_(session: CliSession, everything: bool, provider: str) -> None:
    """The workers that are not proven gone, what each costs, and what is wrong."""
    found = session.query("list_workers", all=everything, provider=provider)
    rows, budget = found["workers"], found["budget"]
    short = unique_prefixes([one["worker_id"] for one in rows])
    lines = [
        (
            short[one["worker_id"]],
            one["provider"],
            one["machine_type"],
            one["zone"],
            one["market"],
            "not known" if one["price_per_hour"] is None else f"${plain_number(one['price_per_hour'])}",
            age_text(one["age_seconds"]),
            one["state"],
            why_text(one),
        )
        for one in rows
    ]
    heads = ("WORKER", "PROVIDER", "TYPE", "ZONE", "MARKET", "PRICE/H", "AGE", "STATE", "WHY")
    text = table(*narrowed(heads, lines, terminal_width()), empty="no workers")
    print_answer(session, found, f"{text}\n{cost_text(budget)}" if rows else text)
    if found["more"]:
        note("only the workers that were proven gone last are listed; `grid events --type worker-gone` has all")


def why_text(worker: dict[str, Any]) -> str:
    """What is wrong with a worker, else why it is as it is, and when its provider ends it."""
    said = [worker["problem"] or worker["reason"], worker["warning"]]
    if worker["ends_at"] and worker["state"] != "gone":
        said.append(f"ends in {age_text(seconds_until(worker['ends_at']))}")
    return "; ".join(one for one in said if one)


def seconds_until(moment: str) -> float:
    """How far a time in ISO 8601 is ahead; 0 where it has passed."""
    from datetime import UTC, datetime

    return max((datetime.fromisoformat(moment) - datetime.now(UTC)).total_seconds(), 0.0)


def age_text(seconds: float) -> str:
    """An age in the largest unit that says enough."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@workers.command(
    Argument("worker_ids", metavar="ID", nargs=-1, required=True),
    Option("--force", is_flag=True, help="Also those with leases; what runs there ends."),
    Option("--discard-results", is_flag=True, help="With --force: also with results that were never fetched."),
    Option("--wait", default=0.0, type=FloatRange(0), metavar="SECONDS", help="Until they are proven gone."),
)
def terminate(
    session: CliSession, worker_ids: tuple[str, ...], force: bool, discard_results: bool, wait: float
) -> None:
    """End workers. Each is listed, and costs, until its provider has proven it gone."""
    options = {"force": force, "discard_results": discard_results}
    found = session.call("terminate_workers", worker_ids=list(worker_ids), **options)
    deadline = time.monotonic() + wait
    while wait and any(one["state"] != "gone" for one in found["workers"]):
        if time.monotonic() > deadline:
            raise TimedOut(
                f"not proven gone within {plain_number(wait)} s; they are terminated further, see: grid workers list"
            )
        time.sleep(POLL_SECONDS)
        rows = [session.query("get_worker", worker_id=one["worker_id"])["worker"] for one in found["workers"]]
        found = {**found, "workers": rows}
    print_answer(session, found, started_text(found))
