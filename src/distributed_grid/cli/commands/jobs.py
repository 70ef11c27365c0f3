"""`grid jobs`: list, show, logs, fetch, cancel, wait."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from distributed_grid.api.framing import STDERR, STDOUT
from distributed_grid.cli.command_line import Argument, FloatRange, IntRange, Option, group
from distributed_grid.cli.commands.run import cancel_jobs, fetch_files
from distributed_grid.cli.output import (
    format_amount,
    format_outcome,
    format_size,
    format_sizing,
    format_span,
    format_time,
    print_answer,
    printable,
    shorten,
    table,
    write_output,
)
from distributed_grid.cli.session import CliSession
from distributed_grid.errors import BadInput


@group()
def jobs() -> None:
    """List, show, follow, cancel and wait for jobs. A job is named by its id or any unique prefix."""


@jobs.command(
    Option("-a", "--all", "all_", is_flag=True, help="Ended jobs beyond the newest, too."),
    Option("-l", "--limit", type=IntRange(1, 10_000), default=20, show_default=True),
    name="list",
)
def list_(session: CliSession, all_: bool, limit: int) -> None:
    """The jobs that are going on, and those that ended of late."""
    found = session.query("list_jobs", all=all_, limit=10_000 if all_ else limit)["jobs"]
    rows = [
        (
            job["job_id"],
            job["state"],
            format_outcome(job),
            job["node_id"],
            format_amount(job["resource_type"], job["amount"]),
            format_time(job["submitted_at"]),
            shorten(job["command"], 60),
        )
        for job in found
    ]
    headings = ("JOB", "STATE", "OUTCOME", "NODE", "ASKED", "SUBMITTED", "COMMAND")
    print_answer(session, found, table(headings, rows, empty="no jobs"))


@jobs.command(Argument("job_id"))
def show(session: CliSession, job_id: str) -> None:
    """Everything known about one job."""
    job = session.query("get_job", job_id=job_id)["job"]
    print_answer(session, job, "\n".join(_lines(job)))


def _lines(job: dict[str, Any]) -> list[str]:
    shown = [
        ("job", job["job_id"]),
        ("state", job["state"]),
        ("outcome", format_outcome(job)),
        ("detail", job["detail"]),
        ("command", job["command"]),
        ("directory", job["cwd"] or "its own"),
        ("user", job["user"]),
        ("asked", format_amount(job["resource_type"], job["amount"])),
        ("memory", format_sizing(job["sizing"]) if job["sizing"] is not None else None),
        ("takes", _expected(job)),
        ("priority", job["priority"]),
        ("submitted", format_time(job["submitted_at"])),
        ("ended", format_time(job["ended_at"])),
        ("retries left", job["retries_left"]),
        ("checkpoint", _checkpoint(job)),
        ("restartable", "yes" if job["restartable"] else None),
        ("moved", format_time(job["moved_at"])),
        ("result", None if job["result"] is None else json.dumps(job["result"])),
    ]
    lines = [f"{name + ':':14}{printable(value)}" for name, value in shown if value not in (None, "-")]
    for attempt in job["attempts"]:
        cores = ",".join(map(str, attempt["cores"]))
        parts = [attempt["node_id"]]
        if cores:
            parts.append(f"core{'' if len(attempt['cores']) == 1 else 's'} {cores}")
        since = format_time(attempt["started_at"])
        if attempt["ended_at"]:
            parts.append(f"{since} to {format_time(attempt['ended_at'])}")
        elif attempt["started_at"]:
            parts.append(f"since {since}")
        if attempt.get("checkpoint_at"):
            parts.append(f"last checkpoint {format_time(attempt['checkpoint_at'])}")
        if attempt["memory_limit_gb"]:
            parts.append(f"limit {format_amount('memory', attempt['memory_limit_gb'])}")
        if attempt["outcome"]:
            parts.append(format_outcome(attempt))
        lines.append(printable(f"attempt {attempt['number']}:".ljust(14) + ", ".join(parts)))
    return lines


def _checkpoint(job: dict[str, Any]) -> str | None:
    """What the next attempt finds in the checkpoint directory; None where no attempt has left anything."""
    found = job.get("checkpoint")
    if found is None:
        return None
    parts = []
    if found["attempt"] is not None:
        files = f"{found['files']} file{'' if found['files'] == 1 else 's'}"
        parts.append(f"{files}, {format_size(found['bytes'])}, of attempt {found['attempt']}")
    if found["awaited_attempt"] is not None:
        parts.append(f"that of attempt {found['awaited_attempt']} is being brought")
    if found["problem"] is not None:
        parts.append(f"not brought: {found['problem']}")
    return "; ".join(parts)


def _expected(job: dict[str, Any]) -> str | None:
    """How long a job that is not over takes by earlier runs; None where there were none."""
    expected = job["expected_seconds"]
    return None if expected is None or job["ended_at"] else f"about {format_span(expected, '.3g')}, by earlier runs"


@jobs.command(
    Argument("job_id"),
    Option("-f", "--follow", is_flag=True, help="Go on until the job is over."),
    Option("--tail", type=IntRange(at_least=0), metavar="BYTES", help="Begin so many bytes before the end."),
)
def logs(session: CliSession, job_id: str, follow: bool, tail: int | None) -> None:
    """The output of a job: its stdout on stdout, its stderr on stderr."""
    seen = {STDOUT: 0, STDERR: 0}

    def position() -> dict[str, Any]:
        place = {"stdout_seen": seen[STDOUT], "stderr_seen": seen[STDERR]}
        return {"job_id": job_id, "follow": follow, "tail_bytes": tail, **place}

    for kind, part in session.follow("read_logs", position, reconnect=follow and tail is None, query_only=True):
        if isinstance(part, bytes):
            seen[kind] += len(part)
            write_output(kind, part)


@jobs.command(
    Argument("job_id"),
    Argument("patterns", nargs=-1),
    Option("--to", "target", default=".", show_default=True, metavar="DIRECTORY", help="Where to."),
)
def fetch(session: CliSession, job_id: str, patterns: tuple[str, ...], target: str) -> None:
    """Bring back files that a job has left in its private directory: all of them, or those that fit PATTERNS."""
    if os.path.isfile(target):
        raise BadInput(f"--to {target}: that is a file, not a directory")
    came = fetch_files(session, job_id, patterns or ("**",), target)
    lines = [f"not fetched: {printable(reason)}" for reason in came["skipped"]]
    if came["in_place"]:
        lines.append("it ran in a directory of this machine: its files are there")
    else:
        lines.append(f"{came['files']} files, {came['bytes']} bytes, in {printable(target)}")
    print_answer(session, came, "\n".join(lines))


@jobs.command(Argument("job_ids", nargs=-1, required=True))
def cancel(session: CliSession, job_ids: tuple[str, ...]) -> None:
    """Stop jobs for good, with everything they have started; says `stopping` where that takes longer."""
    with session.client(any_config=True) as client:
        found = cancel_jobs(client, job_ids)
    print_answer(session, found, "\n".join(f"{job['job_id']}: {_fate(job)}" for job in found))


def _fate(job: dict[str, Any]) -> str:
    if job["state"] != "ended":
        return "stopping"
    return "cancelled" if job["outcome"] == "cancelled" else f"over already ({format_outcome(job)})"


@jobs.command(
    Argument("job_ids", nargs=-1),
    Option("-t", "--timeout", type=FloatRange(at_least=0), help="Give up after so many seconds (exit 124)."),
)
def wait(session: CliSession, job_ids: tuple[str, ...], timeout: float | None) -> int:
    """Wait until jobs are over (all that are going on, where none is named); exits with the first failure's code."""
    with session.client(query_only=True) as client:
        names = job_ids or [job["uid"] for job in client.call("get_status")["jobs"]]
        deadline = time.monotonic() + timeout if timeout is not None else None
        found = [client.call("wait_for_job", job_id=name, timeout_seconds=_left(deadline))["job"] for name in names]
    print_answer(session, found, "\n".join(f"{job['job_id']}: {format_outcome(job)}" for job in found) or "no jobs")
    return next((int(job["shell_code"]) for job in found if job["shell_code"]), 0)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
