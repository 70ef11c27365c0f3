"""`grid workers` and `grid scale`: start, list and end the workers of a provider, by hand or as the queue calls for."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from distributed_grid.cli.command_line import Argument, FloatRange, IntRange, Option, group
from distributed_grid.cli.output import (
    confirm,
    echo,
    format_span,
    narrowed,
    print_answer,
    printable,
    table,
    terminal_width,
    unique_prefixes,
)
from distributed_grid.cli.session import CliSession
from distributed_grid.client.conversation import JsonObject, required
from distributed_grid.client.pages import every_page, joined
from distributed_grid.errors import GridError, Refused, TimedOut
from distributed_grid.number_text import counted, plain_number

if TYPE_CHECKING:
    from distributed_grid.api.answers.workers import (
        CoreHourBudget,
        ProviderSpending,
        ScalingDecisionRow,
        ScalingPlanDetail,
        ScalingStatus,
        WorkerBudget,
        WorkerList,
        WorkerRow,
    )
    from distributed_grid.client.operations import CreateWorkersFields

POLL_SECONDS = 0.5
PROVIDER = Option("--provider", default="", metavar="NAME", help="A provider of the config (default: the only one).")


@group()
def workers() -> None:
    """Machines that a provider starts for the grid, and what they cost. A worker is named by its id or a prefix."""


@workers.command(
    PROVIDER,
    Option("--type", "worker_type", default="cpu", metavar="KIND", help="The kind of worker (default: cpu)."),
    Option("--count", default=1, type=IntRange(1, 1000), help="How many (default: 1)."),
    Option("--cpu", default=0.0, type=FloatRange(0), help="Cores of each (default: those of the offer)."),
    Option("--memory", default=0.0, type=FloatRange(0), metavar="GB", help="Memory of each."),
    Option("--gpu", default=0, type=IntRange(0, 1024), help="GPUs of each."),
    Option("--dry-run", is_flag=True, help="Print the cost, start nothing."),
    Option("--yes", "-y", is_flag=True, help="Do not ask."),
    Option("--wait", default=0.0, type=FloatRange(0), metavar="SECONDS", help="Until they have joined."),
)
def create(
    session: CliSession, provider: str, worker_type: str, count: int, cpu: float, memory: float, gpu: int,
    dry_run: bool, yes: bool, wait: float,
) -> None:  # fmt: skip
    """Start workers. On a terminal the price is shown first, and asked about unless --yes is given."""
    ids = [f"worker-{secrets.token_hex(6)}" for _ in range(count)]
    fields: CreateWorkersFields = {
        "worker_ids": ids,
        "provider": provider,
        "worker_type": worker_type,
        "cpu": cpu,
        "memory_gb": memory,
        "gpu": gpu,
    }
    if dry_run or (not yes and not session.json and sys.stdout.isatty()):
        planned: CreateWorkersFields = {**fields, "dry_run": True}
        plan = session.ask.create_workers(**planned)
        if dry_run:
            print_answer(session, plan, plan_text(plan))
            return
        echo(plan_text(plan))
        if not confirm("start them?"):
            raise Refused("nothing was started")
    answer = session.ask.create_workers(**fields)
    if not session.json:
        echo(started_text(answer.workers))
    if wait:
        answer = _wait_for_join(session, [worker.worker_id for worker in answer.workers], wait)
    if session.json:
        print_answer(session, answer, "")


def plan_text(plan: WorkerList) -> str:
    first, price = plan.workers[0], plan.workers[0].price_per_hour
    workers = counted(len(plan.workers), "worker").replace(" ", f" {first.worker_type} ")
    cost = "at an unknown price" if price is None else f"at ${plain_number(price)} an hour"
    text = f"would start {workers} of {first.provider} ({first.offer}) {cost}"
    return printable(f"{text}; then all workers cost {cost_text(plan.budget)}")


def cost_text(budget: WorkerBudget) -> str:
    """The cost of workers in money and in core-hours, and the limits."""
    used = [f"{name}: {core_hours_text(cores)}" for name, cores in budget.core_hours.items()]
    return "; ".join([money_text(budget), *used])


def core_hours_text(budget: CoreHourBudget) -> str:
    used, ahead, limit = budget.core_hours_today, budget.by_midnight, budget.budget_core_hours
    return f"{plain_number(used)} core-hours today ({plain_number(ahead)} by midnight UTC) of {plain_number(limit)}"


def money_text(budget: WorkerBudget) -> str:
    hour, day = f"${plain_number(budget.per_hour)} an hour", f"${budget.spent_today:.4f} today"
    if budget.budget_per_hour is not None:
        hour += f" of ${plain_number(budget.budget_per_hour)}"
    if budget.budget_per_day is not None:
        day += f" (${budget.by_midnight:.2f} by midnight UTC) of ${plain_number(budget.budget_per_day)}"
    return f"{hour}, {day}"


def started_text(workers: Sequence[WorkerRow]) -> str:
    return "\n".join(printable(f"{worker.worker_id}: {worker.state}") for worker in workers)


def _wait_for_join(session: CliSession, ids: list[str], seconds: float) -> WorkerList:
    """Wait until the workers have joined, and show each step; a worker that takes another's place is waited for."""
    deadline = time.monotonic() + seconds
    shown: dict[str, str] = {}
    while True:
        answer = session.query.list_workers(all=True, limit=1_000)
        rows = {worker.worker_id: worker for worker in answer.workers}
        ours = [_current(rows, worker_id) for worker_id in ids]
        for row in ours:
            text = f"{row.worker_id}: {row.state}" + (f" ({row.problem})" if row.problem else "")
            if shown.get(row.worker_id) != text:
                shown[row.worker_id] = text
                echo(printable(text), err=True)
        gone = next((row for row in ours if row.state in ("gone", "terminating")), None)
        if gone is not None:
            raise GridError(f"{gone.worker_id} is {gone.state}: {gone.reason or 'no reason is known'}")
        if all(row.state == "joined" for row in ours):
            return cast("WorkerList", JsonObject(cast("JsonObject", answer), workers=ours))
        if time.monotonic() > deadline:
            raise TimedOut(
                f"the workers have not joined within {plain_number(seconds)} s; grid workers list shows them"
            )
        time.sleep(POLL_SECONDS)


def _current(rows: dict[str, WorkerRow], worker_id: str) -> WorkerRow:
    """A worker, or the one that took its place."""
    by_reason = {row.reason: row for row in rows.values()}
    row = rows[worker_id]
    while row.state in ("gone", "terminating") and f"instead of {row.worker_id}" in by_reason:
        row = by_reason[f"instead of {row.worker_id}"]
    return row


@workers.command(Option("--all", "everything", is_flag=True, help="Those that are gone, too."), PROVIDER, name="list")
def list_(session: CliSession, everything: bool, provider: str) -> None:
    """The workers that are not proven gone, with their costs and problems."""
    pages = every_page(session.query.list_workers, all=everything, provider=provider)
    answer = joined(pages, "workers")
    rows, budget = answer.workers, answer.budget
    short = unique_prefixes([row.worker_id for row in rows])
    lines = [
        (
            short[row.worker_id],
            row.provider,
            row.machine_type,
            row.zone,
            row.market,
            "not known" if row.price_per_hour is None else f"${plain_number(row.price_per_hour)}",
            format_span(row.age_seconds),
            row.state,
            why_text(row),
        )
        for row in rows
    ]
    heads = ("WORKER", "PROVIDER", "TYPE", "ZONE", "MARKET", "PRICE/H", "AGE", "STATE", "WHY")
    text = table(*narrowed(heads, lines, terminal_width()), empty="no workers")
    print_answer(session, answer, f"{text}\n{cost_text(budget)}" if rows else text)


def why_text(worker: WorkerRow) -> str:
    """The problem of a worker, else the reason of its state, and when its provider ends it."""
    parts = [worker.problem or worker.reason, worker.warning]
    if worker.ends_at and worker.state != "gone":
        from datetime import UTC, datetime

        left = (datetime.fromisoformat(worker.ends_at) - datetime.now(UTC)).total_seconds()
        parts.append(f"ends in {format_span(left)}")
    return "; ".join(part for part in parts if part)


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
    answer = session.ask.terminate_workers(worker_ids=worker_ids, force=force, discard_results=discard_results)
    rows, deadline = answer.workers, time.monotonic() + wait
    while wait and any(worker.state != "gone" for worker in rows):
        if time.monotonic() > deadline:
            raise TimedOut(
                f"not proven gone within {plain_number(wait)} s; they are terminated further, see: grid workers list"
            )
        time.sleep(POLL_SECONDS)
        rows = [session.query.get_worker(worker_id=worker.worker_id).worker for worker in rows]
    print_answer(session, {**cast("JsonObject", answer), "workers": rows}, started_text(rows))


@group()
def scale() -> None:
    """Start workers when the queue calls for them, and give them back when it does not."""


@scale.command()
def status(session: CliSession) -> None:
    """Workers by state, utilization over the window, what waits, cooldowns, and money."""
    scaling = session.query.get_scaling().scaling
    print_answer(session, scaling, "\n".join(status_lines(scaling)))


def status_lines(scaling: ScalingStatus) -> list[str]:
    provider = scaling.provider
    lines = [f"provider: {provider}" if provider else "provider: none; set scaling.provider to start workers by itself"]
    if scaling.problem:
        lines.append(f"no workers can be started: {scaling.problem}")
    states = ", ".join(f"{count} {state}" for state, count in scaling.workers.items()) or "none"
    lines.append(f"workers: {states}; at least {scaling.min_workers}, at most {scaling.max_workers}")
    if scaling.idle:
        longest = max(scaling.idle.values())
        lines.append(f"idle: {len(scaling.idle)}, the longest for {longest:.0f} s")
    used = ", ".join(f"{name} {100 * part:.0f} %" for name, part in scaling.utilization.items())
    lines.append(f"utilization over {plain_number(scaling.window_seconds)} s: {used}")
    demand = scaling.demand
    lines.append(f"waiting for a worker: {demand.requests} requests, {demand.unmet} of them unmet")
    lines += [f"  not counted: {count} ({why})" for why, count in demand.not_counted.items()]
    for name, seconds in (("up", scaling.scale_up_cooldown), ("down", scaling.scale_down_cooldown)):
        if seconds:
            lines.append(f"scaling {name} rests for {seconds:.0f} s")
    if scaling.expected_load is not None:
        lines.append(f"expected load: {scaling.expected_load:.1f} workers")
    if scaling.warm_workers:
        lines.append(f"kept warm: {scaling.warm_workers} workers")
    lines.append(f"cost: {money_text(scaling.budget)}")
    lines += [f"  {spending_text(spending, scaling.budget)}" for spending in scaling.spending]
    return [printable(line) for line in lines]


def spending_text(spending: ProviderSpending, budget: WorkerBudget) -> str:
    count = counted(spending.workers, "worker")
    text = (
        f"{spending.provider}: {count}, ${plain_number(spending.per_hour)} an hour, ${spending.spent_today:.4f} today"
    )
    if budget.budget_per_day:
        text += f" ({100 * spending.spent_today / budget.budget_per_day:.0f} % of the day's budget)"
    cores = budget.core_hours.get(spending.provider)
    return text if cores is None else f"{text}, {core_hours_text(cores)}"


@scale.command()
def plan(session: CliSession) -> None:
    """Show the next evaluation: actions, reasons, and the cost an hour and until midnight. Nothing is done."""
    answer = session.query.plan_scaling()
    print_answer(session, answer, "\n".join(plan_lines(answer)))


def plan_lines(answer: ScalingPlanDetail) -> list[str]:
    shown, decision = answer.plan, answer.plan.decision
    lines = [f"{action_text(decision)}: {decision.reason}"]
    if answer.problem:
        lines.append(f"no workers can be started: {answer.problem}")
    lines += [f"  {worker_id}" for worker_id in decision.worker_ids]
    if decision.count and decision.action == "scale_up":
        hour, day = shown.cost_per_hour, shown.cost_until_midnight
        if hour is None or day is None:
            lines.append("what they cost is not known")
        else:
            today = plain_number(float(f"{day:.4g}"))
            lines.append(f"they cost ${plain_number(hour)} an hour, ${today} until midnight UTC")
    lines.append(f"all workers then: {cost_text(shown.budget)}")
    return [printable(line) for line in lines]


def action_text(decision: ScalingDecisionRow) -> str:
    count, kept = decision.count, len(decision.worker_ids)
    if decision.action == "scale_down":
        return f"give back {counted(count, 'worker')}"
    if decision.action == "none":
        return "do nothing"
    parts = [f"keep {kept} that drain"] if kept else []
    if count:
        what = f"{decision.worker_type} worker{'' if count == 1 else 's'} of {decision.provider}"
        parts.insert(0, f"start {count} {what} ({decision.offer})")
    return ", ".join(parts)


@scale.command(Option("--yes", "-y", is_flag=True, help="Do not ask."))
def run(session: CliSession, yes: bool) -> None:
    """Evaluate once now, and act. The cost is shown first, and asked about unless --yes is given."""
    if not yes:
        planned = session.query.plan_scaling()
        if planned.plan.decision.action != "none":
            echo("\n".join(plan_lines(planned)), err=session.json)
            if not sys.stdin.isatty():
                raise Refused("nothing was done; without a terminal to ask on, type: grid scale run --yes")
            if not confirm("do it?"):
                raise Refused("nothing was done")
    done = session.ask.run_scaling()
    lines = plan_lines(done)
    lines += [printable(f"{worker_id}: wanted") for worker_id in required(done.started)]
    print_answer(session, done, "\n".join(lines))
