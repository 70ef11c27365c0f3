"""`grid scale`: how scaling stands, what it would do and cost, and one evaluation now."""

from __future__ import annotations

import sys
from typing import Any

from distributed_grid.cli.command_line import Option, group
from distributed_grid.cli.commands.workers import core_hours_text, cost_text, money_text
from distributed_grid.cli.output import confirm, echo, print_answer, printable
from distributed_grid.cli.session import CliSession
from distributed_grid.errors import Refused
from distributed_grid.number_text import plain_number


@group()
def scale() -> None:
    """Start workers when the queue calls for them, and give them back when it does not."""


@scale.command()
def status(session: CliSession) -> None:
    """Workers by state, utilization over the window, what waits, cooldowns, and money."""
    found = session.query("get_scaling")["scaling"]
    print_answer(session, found, "\n".join(status_lines(found)))


def status_lines(found: dict[str, Any]) -> list[str]:
    """How scaling stands, line by line."""
    provider = found["provider"]
    lines = [f"provider: {provider}" if provider else "provider: none; set scaling.provider to start workers by itself"]
    if found["problem"]:
        lines.append(f"no workers can be started: {found['problem']}")
    states = ", ".join(f"{count} {state}" for state, count in found["workers"].items()) or "none"
    lines.append(f"workers: {states}; at least {found['min_workers']}, at most {found['max_workers']}")
    if found["idle"]:
        longest = max(found["idle"].values())
        lines.append(f"idle: {len(found['idle'])}, the longest for {longest:.0f} s")
    used = ", ".join(f"{name} {100 * part:.0f} %" for name, part in found["utilization"].items())
    lines.append(f"utilization over {plain_number(found['window_seconds'])} s: {used}")
    demand = found["demand"]
    lines.append(f"waiting for a worker: {demand['requests']} requests, {demand['unmet']} of them unmet")
    lines += [f"  not counted: {count} ({why})" for why, count in demand["not_counted"].items()]
    for name, key in (("up", "scale_up_cooldown"), ("down", "scale_down_cooldown")):
        if found[key]:
            lines.append(f"scaling {name} rests for {found[key]:.0f} s")
    if found["expected_load"] is not None:
        lines.append(f"expected load: {found['expected_load']:.1f} workers")
    if found["warm_workers"]:
        lines.append(f"kept warm: {found['warm_workers']} workers")
    lines.append(f"cost: {money_text(found['budget'])}")
    lines += [f"  {spending_text(one, found['budget'])}" for one in found["spending"]]
    return [printable(line) for line in lines]


def spending_text(one: dict[str, Any], budget: dict[str, Any]) -> str:
    """What one provider's workers cost, and what of the day's budgets they have spent."""
    count = f"{one['workers']} worker{'' if one['workers'] == 1 else 's'}"
    text = f"{one['provider']}: {count}, ${plain_number(one['per_hour'])} an hour, ${one['spent_today']:.4f} today"
    if budget["budget_per_day"]:
        text += f" ({100 * one['spent_today'] / budget['budget_per_day']:.0f} % of the day's budget)"
    cores = budget["core_hours"].get(one["provider"])
    return text if cores is None else f"{text}, {core_hours_text(cores)}"


@scale.command()
def plan(session: CliSession) -> None:
    """What would be done now, why, and what it would cost an hour and until midnight. Nothing is done."""
    found = session.query("plan_scaling")
    print_answer(session, found, "\n".join(plan_lines(found)))


def plan_lines(found: dict[str, Any]) -> list[str]:
    """A plan and its price, line by line."""
    shown, decision = found["plan"], found["plan"]["decision"]
    lines = [f"{action_text(decision)}: {decision['reason']}"]
    if found["problem"]:
        lines.append(f"no workers can be started: {found['problem']}")
    lines += [f"  {worker_id}" for worker_id in decision["worker_ids"]]
    if decision["count"] and decision["action"] == "scale_up":
        if shown["cost_per_hour"] is None:
            lines.append("what they cost is not known")
        else:
            hour, day = shown["cost_per_hour"], shown["cost_until_midnight"]
            today = plain_number(float(f"{day:.4g}"))
            lines.append(f"they cost ${plain_number(hour)} an hour, ${today} until midnight UTC")
    lines.append(f"all workers then: {cost_text(shown['budget'])}")
    return [printable(line) for line in lines]


def action_text(decision: dict[str, Any]) -> str:
    """What is done, in words."""
    count, kept = decision["count"], len(decision["worker_ids"])
    if decision["action"] == "scale_down":
        return f"give back {count} worker{'' if count == 1 else 's'}"
    if decision["action"] == "none":
        return "do nothing"
    parts = [f"keep {kept} that drain"] if kept else []
    if count:
        what = f"{decision['worker_type']} worker{'' if count == 1 else 's'} of {decision['provider']}"
        parts.insert(0, f"start {count} {what} ({decision['offer']})")
    return ", ".join(parts)


@scale.command(Option("--yes", "-y", is_flag=True, help="Do not ask."))
def run(session: CliSession, yes: bool) -> None:
    """Evaluate once now, and act. What it costs is shown first, and asked about unless --yes is given."""
    if not yes:
        planned = session.query("plan_scaling")
        if planned["plan"]["decision"]["action"] != "none":
            echo("\n".join(plan_lines(planned)), err=session.json)
            if not sys.stdin.isatty():
                raise Refused("nothing was done; without a terminal to ask on, type: grid scale run --yes")
            if not confirm("do it?"):
                raise Refused("nothing was done")
    done = session.call("run_scaling")
    lines = plan_lines(done)
    lines += [printable(f"{worker_id}: wanted") for worker_id in done["started"]]
    print_answer(session, done, "\n".join(lines))
