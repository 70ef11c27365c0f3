"""`grid jobs`: list, show, logs, fetch, cancel, wait."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

from distributed_grid.api.framing import STDERR, STDOUT
from distributed_grid.cli.command_line import Argument, FloatRange, IntRange, Option, group
from distributed_grid.cli.commands.run import NoticePrinter, cancel_jobs
from distributed_grid.cli.output import (
    COMMAND_CHARS,
    detached_lines,
    follow_command,
    format_amount,
    format_outcome,
    format_size,
    format_sizing,
    format_span,
    format_time,
    narrowed,
    note,
    print_answer,
    printable,
    shorten,
    table,
    terminal_width,
    write_output,
)
from distributed_grid.cli.session import CliSession
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import JsonObject, Part, present
from distributed_grid.client.operations import Operations
from distributed_grid.client.pages import every_page
from distributed_grid.errors import BadInput, NotFound
from distributed_grid.number_text import counted

if TYPE_CHECKING:
    from distributed_grid.api.answers.jobs import JobList, JobRow

LISTED, MAX_LIVING = 20, 200  # without a limit: jobs in all, and of those that have not ended
MAX_LISTED = 10_000
PAGE_ROWS = 1_000


@group()
def jobs() -> None:
    """List, show, follow, cancel and wait for jobs. A job is named by its id or any unique prefix."""


@jobs.command(
    Option("-a", "--all", "all_", is_flag=True, help="Every job that is kept."),
    Option("-l", "--limit", type=IntRange(1, MAX_LISTED), help=f"How many (default: {LISTED})."),
    name="list",
)
def list_(session: CliSession, all_: bool, limit: int | None) -> None:
    """The jobs that have not ended, and those that ended last."""
    pages: list[JobList] = []
    wanted = limit or (sys.maxsize if all_ or session.json else LISTED)
    count = 0
    cursor: str | None = ""
    while cursor is not None and count < wanted:
        page = session.query.list_jobs(limit=min(wanted - count, PAGE_ROWS), cursor=cursor)
        pages.insert(0, page)  # the newest jobs come first, page by page
        count, cursor = count + len(page.jobs), page.next
        if limit is None:
            living = page.total - page.by_state.get("ended", 0)
            wanted = max(wanted, min(living, MAX_LIVING))
    listed = [job for page in pages for job in page.jobs]
    rows = [
        (
            job.job_id,
            job.state,
            format_outcome(job),
            job.node_id,
            format_amount(job.resource_type, job.amount),
            format_time(job.submitted_at),
            shorten(job.command, terminal_width() or COMMAND_CHARS),
        )
        for job in listed
    ]
    headings = ("JOB", "STATE", "OUTCOME", "NODE", "ASKED", "SUBMITTED", "COMMAND")
    lines = [table(*narrowed(headings, rows, terminal_width()), empty="no jobs"), *detached_lines(listed)]
    print_answer(session, listed, "\n".join(lines))
    if pages[0].more:
        rest = "" if all_ else "; --limit N lists more of them, --all all"
        note(f"the last {len(listed):,} of {pages[0].total:,} jobs{rest}")


@jobs.command(Argument("job_id"))
def show(session: CliSession, job_id: str) -> None:
    """Everything known about one job."""
    from distributed_grid.cli.returned_files import delivery_text

    answer = session.query.get_job(job_id=job_id)
    job, delivery = answer.job, present(answer.delivery)
    expected = job.expected_seconds
    takes = None if expected is None or job.ended_at else f"about {format_span(expected, '.3g')}, by earlier runs"
    detached = None
    if job.detached_at is not None:
        detached = f"{format_time(job.detached_at)}, {job.detached_reason}; its output: {follow_command(job)}"
    if job.state != "queued":
        limit = None
    elif job.wait_seconds is None or job.attempts:
        limit = "until it starts or is cancelled"
    else:
        limit = f"at most {format_span(job.wait_seconds, '.3g')} for resources"
    notes = []
    if (checkpoint := job.checkpoint) is not None:
        if checkpoint.attempt is not None:
            files = counted(checkpoint.files, "file")
            notes.append(f"{files}, {format_size(checkpoint.bytes)}, of attempt {checkpoint.attempt}")
        if checkpoint.awaited_attempt is not None:
            notes.append(f"that of attempt {checkpoint.awaited_attempt} is being brought")
        if checkpoint.problem is not None:
            notes.append(f"not brought: {checkpoint.problem}")
    shown = [
        ("job", job.job_id),
        ("state", job.state),
        ("outcome", format_outcome(job)),
        ("detail", job.detail),
        ("command", job.command),
        ("directory", job.cwd or "its own"),
        ("user", job.user),
        ("asked", format_amount(job.resource_type, job.amount)),
        ("memory", format_sizing(job.sizing) if job.sizing is not None else None),
        ("takes", takes),
        ("priority", job.priority),
        ("submitted", format_time(job.submitted_at)),
        ("waits", limit),
        ("ended", format_time(job.ended_at)),
        ("retries left", job.retries_left),
        ("checkpoint", "; ".join(notes) or None),
        ("restartable", "yes" if job.restartable else None),
        ("moved", format_time(job.moved_at)),
        ("files", delivery_text(delivery)),
        ("detached", detached),
        ("result", None if job.result is None else json.dumps(job.result)),
    ]
    lines = [f"{name + ':':14}{printable(value)}" for name, value in shown if value not in (None, "-")]
    for attempt in job.attempts:
        cores = attempt.cores
        parts = [attempt.node_id]
        if cores:
            parts.append(f"core{'' if len(cores) == 1 else 's'} {','.join(map(str, cores))}")
        since = format_time(attempt.started_at)
        if attempt.ended_at:
            parts.append(f"{since} to {format_time(attempt.ended_at)}")
        elif attempt.started_at:
            parts.append(f"since {since}")
        if attempt.checkpoint_at:
            parts.append(f"last checkpoint {format_time(attempt.checkpoint_at)}")
        if attempt.memory_limit_gb:
            size = format_amount("memory", attempt.memory_limit_gb)
            if not (job.sizing is not None and job.sizing.may_outgrow):
                memory_text = f"limit {size}"
            else:
                grown = f", grown {counted(attempt.growths, 'time')}" if attempt.growths else ""
                refused = f", not larger ({attempt.growth_refused})" if attempt.growth_refused else ""
                memory_text = f"{size} leased{grown}{refused}"
            parts.append(memory_text)
        if attempt.outcome:
            parts.append(format_outcome(attempt))
        lines.append(printable(f"attempt {attempt.number}:".ljust(14) + ", ".join(parts)))
    print_answer(session, {**cast("JsonObject", job), "delivery": delivery}, "\n".join(lines))


@jobs.command(
    Argument("job_id"),
    Option("-f", "--follow", is_flag=True, help="Continue until the job ends."),
    Option("--tail", type=IntRange(at_least=0), metavar="BYTES", help="Begin this number of bytes before the end."),
)
def logs(session: CliSession, job_id: str, follow: bool, tail: int | None) -> None:
    """The output of a job: its stdout on stdout, its stderr on stderr."""
    seen, notices = {STDOUT: 0, STDERR: 0}, NoticePrinter()

    def read_on(client: Operations) -> Iterator[tuple[bytes, Part]]:
        return client.read_logs(
            job_id=job_id,
            follow=follow,
            tail_bytes=tail,
            stdout_seen=seen[STDOUT],
            stderr_seen=seen[STDERR],
            notices_seen=notices.seen,
        )

    for kind, part in session.follow(read_on, reconnect=follow and tail is None, query_only=True):
        if isinstance(part, bytes):
            seen[kind] += len(part)
            write_output(kind, part)
        elif "dropped" in part:
            seen[STDOUT if part.stream == "stdout" else STDERR] += part.dropped
            note(part.message)
        elif "notice" in part:
            notices.show(part)


@jobs.command(
    Argument("job_id"),
    Argument("patterns", nargs=-1),
    Option("--to", "target", default=".", show_default=True, metavar="DIRECTORY", help="Where to."),
    Option("--overwrite", is_flag=True, help="Replace local files that were edited since they were shipped."),
)
def fetch(session: CliSession, job_id: str, patterns: tuple[str, ...], target: str, overwrite: bool) -> None:
    """Bring back the files that a job has made or changed: all of them, or those that fit PATTERNS.

    A local file that was edited since it was shipped stays, and the job's version is put beside it as NAME.from-JOB.
    """
    from distributed_grid.cli.returned_files import fetch_files, return_lines, summary

    if os.path.isfile(target):
        raise BadInput(f"--to {target}: that is a file, not a directory")
    totals = fetch_files(session, job_id, patterns or ("**",), target, overwrite=overwrite)
    if totals.in_place:
        lines = ["it ran in a directory of this machine: its files are there"]
    else:
        lines = [*return_lines(totals), summary(totals, target)]
    print_answer(session, {**totals._asdict(), "done": True, "target": target}, "\n".join(lines))


@jobs.command(Argument("job_ids", nargs=-1, required=True))
def cancel(session: CliSession, job_ids: tuple[str, ...]) -> None:
    """Stop jobs for good, with everything they have started; says `stopping` where that takes longer."""
    with session.client(any_config=True) as client:
        cancelled = cancel_jobs(client, job_ids)
    _forget(session, cancelled)
    lines = []
    for job in cancelled:
        end = "cancelled" if job.outcome == "cancelled" else f"over already ({format_outcome(job)})"
        lines.append(f"{job.job_id}: {end if job.state == 'ended' else 'stopping'}")
    print_answer(session, cancelled, "\n".join(lines))


@jobs.command(
    Argument("job_ids", nargs=-1),
    Option("-t", "--timeout", type=FloatRange(at_least=0), help="Give up after this number of seconds (exit 124)."),
)
def wait(session: CliSession, job_ids: tuple[str, ...], timeout: float | None) -> int:
    """Wait until jobs are over; exits with the first failure's code.

    Without names: all jobs of yours that are going on, and the detached ones that ended since and that no `jobs wait`
    or `jobs cancel` has shown yet. So a job that fails before the wait begins counts, too.
    """
    from distributed_grid.cli.unwaited_jobs import UnwaitedJobs

    deadline = time.monotonic() + timeout if timeout is not None else None
    with session.client(query_only=True) as client:
        if job_ids:
            ended = [_ended(client, name, deadline) for name in job_ids]
        else:
            unwaited = UnwaitedJobs(session.state_dir)
            noted, ended = unwaited.read(), []
            living = [uid for page in every_page(client.list_live_jobs) for uid in page.uids]
            for uid in dict.fromkeys([*noted, *living]):
                try:
                    ended.append(_ended(client, uid, deadline))
                except NotFound:  # of a database that was removed, or ended before the kept history
                    unwaited.remove([uid])
            ended.sort(key=lambda job: job.submitted_at or "")
    _forget(session, ended)
    print_answer(session, ended, "\n".join(f"{job.job_id}: {format_outcome(job)}" for job in ended) or "no jobs")
    return next((int(job.shell_code) for job in ended if job.shell_code), 0)


def _ended(client: Client, name: str, deadline: float | None) -> JobRow:
    left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
    return client.wait_for_job(job_id=name, timeout_seconds=left).job


def _forget(session: CliSession, shown: Iterable[JobRow]) -> None:
    from distributed_grid.cli.unwaited_jobs import UnwaitedJobs

    with contextlib.suppress(OSError):  # then they are shown once more
        UnwaitedJobs(session.state_dir).remove({job.uid for job in shown if job.state == "ended"})
