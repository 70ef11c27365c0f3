"""`grid run-shared`: borrow, run a command, stream its output, give back; and following a job for other commands."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from distributed_grid.api.framing import STDERR, STDOUT
from distributed_grid.cli.command_line import Argument, FloatRange, IntRange, Option, command
from distributed_grid.cli.output import (
    echo,
    follow_command,
    format_amount,
    format_sizing,
    print_answer,
    printable,
    write_output,
)
from distributed_grid.cli.request_options import job_options, placement_fields, placement_options, wait_option
from distributed_grid.cli.returned_files import show_delivery
from distributed_grid.cli.session import CliSession
from distributed_grid.cli.signals import HangupWatch, handled_signals, raise_keyboard_interrupt
from distributed_grid.cli.standard_streams import HANGUP_EXIT_CODE, HungUp, OutputFailed, flush_standard_streams
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import JsonObject, Part, present, required
from distributed_grid.client.job_payload import NONE, require_utf8
from distributed_grid.client.job_requests import WAIT_SECONDS, JobRequest, command_fields, current_directory
from distributed_grid.client.operations import Operations
from distributed_grid.errors import BadInput, GridError, TimedOut

if TYPE_CHECKING:
    from distributed_grid.api.answers.jobs import JobDetail, JobRow

CANCEL_SECONDS = 3.0  # wait for the end of cancelled jobs
DETACH_SECONDS = 5  # time of the control plane to note that a job was detached
MAX_REASON_CHARS = 200


@command(
    Option("-r", "--resource-type", help="cpu, gpu, memory or a declared name; without -r and -a the grid sizes it."),
    Option("-a", "--amount", type=float, help="Cores, GPUs or GB; 1 with -r alone."),
    Option("-p", "--priority", default="medium", show_default=True, help="low, medium, high or urgent."),
    Option("-n", "--node", multiple=True, help="Preferred node; may be given several times."),
    Option("--for", "for_node", default="", metavar="NODE", help="The node whose work it is, wherever it runs."),
    *placement_options,
    wait_option(
        None, f"How long to wait for resources; 0 refuses at once (default: {WAIT_SECONDS:g}; --detach: no limit)."
    ),
    *job_options,
    Option("--timeout", type=FloatRange(at_least=0), default=0.0, help="Stop the job after this many seconds."),
    Option(
        "--grace",
        type=FloatRange(at_least=0),
        default=5.0,
        show_default=True,
        help="Seconds between asking a job to stop and killing it.",
    ),
    Option("--retries", type=IntRange(0, 1000), default=0, help="How often it is run again after a failure."),
    Option("--restartable", is_flag=True, help="It may be started again from the beginning on another node."),
    Option("--shell", is_flag=True, help="The command is one string for sh -c."),
    Option("--dry-run", is_flag=True, help="Only say what would happen."),
    Argument("command", nargs=-1, required=True),
    interspersed=False,
)
def run_shared(session: CliSession, /, **options: Any) -> int:
    """Borrow resources, run COMMAND with them, give them back.

    Everything from the first word of COMMAND on belongs to the command. On this machine it runs in the current
    directory; on another node in a private one, into which the current directory is shipped when it is small. Its
    output is shown as it comes, Ctrl-C cancels it, and its exit code is the exit code of this command.
    """
    words = list(options["command"])
    if not all(math.isfinite(options[name] or 0) for name in ("amount", "wait", "timeout", "grace")):
        raise BadInput("an amount or a time must be a number, not nan or inf")
    if options["shell"]:
        if len(words) != 1:
            raise BadInput("--shell takes the command as one quoted string")
        words = ["/bin/sh", "-c", words[0]]
    require_utf8(options["resource_type"] or "", options["priority"])
    fields = {
        **placement_fields(options),
        "resource_type": options["resource_type"],
        "amount": options["amount"],
        "priority": options["priority"],
        "target": options["for_node"],
        "wait_seconds": WAIT_SECONDS if options["wait"] is None and not options["detach"] else options["wait"],
        "timeout_seconds": options["timeout"],
        "grace_seconds": options["grace"],
        "retries": options["retries"],
        "restartable": options["restartable"],
        "dry_run": options["dry_run"],
    }
    request = job_request(words, options, fields)
    return run_job(
        session, options, request.uid, lambda client: client.submit_job(**upload_for(session, client, request))
    )


def job_request(argv: list[str], options: dict[str, Any], fields: dict[str, Any]) -> JobRequest:
    """The submission of a command with these further fields, and the working directory that travels with it."""
    workdir, fetch = options["workdir"], options["fetch"]
    command = command_fields(
        argv,
        parse_variables(options["env"]),
        job_id=options["job_id"],
        directory="" if options["isolated"] and not fetch else current_directory(),
        isolated=options["isolated"],
        ship=options["ship"],
        fetch=fetch,
        fetch_to=os.path.abspath(workdir) if workdir and workdir != NONE else None,
        overwrite=options["overwrite"],
    )
    return JobRequest(
        {**fields, **command, "merge": options["merge"]}, workdir, isolated=options["isolated"], ship=options["ship"]
    )


def upload_for(session: CliSession, client: Client, request: JobRequest) -> dict[str, Any]:
    """The fields of a submission; its working directory is uploaded if the job may run on another machine."""
    fields, notes = request.upload(session.state_dir, client.greet())
    for note in notes:
        echo(f"grid: {printable(note)}", err=True)
    return fields


def run_job(
    session: CliSession, options: dict[str, Any], request_id: str, submit: Callable[[Client], JobDetail]
) -> int:
    """Submit a job and follow it to its end; the exit code. An interrupt before it is followed cancels it.

    A hang-up of the terminal detaches the job: it is submitted to the end and followed no longer. Its files come.
    """
    if has_unread_input():
        echo("grid: the standard input does not reach the job", err=True)
    hangup = HangupWatch()
    with hangup.watching(), handled_signals(raise_keyboard_interrupt, signal.SIGTERM):
        try:
            with session.client() as client:
                accepted = submit(client)
            if options.get("dry_run"):
                planned = accepted.job
                asked = format_amount(planned.resource_type, planned.amount)
                sized = f" ({format_sizing(planned.sizing)})" if planned.sizing is not None else ""
                if planned.state == "queued":
                    verdict = "wait"
                    text = f"would wait for {asked}{sized}: " + "; ".join(required(accepted.reasons))
                else:
                    verdict = "run"
                    text = f"would run on {planned.node_id} with {asked}{sized}"
                    text += f"; {printable(accepted.note)}" if present(accepted.note) else ""
                print_answer(session, {"verdict": verdict, **cast("JsonObject", accepted)}, text)
                return 0
            try:
                job = accepted.job
                if present(accepted.note):
                    echo(printable(f"grid: {accepted.note}"), err=True)
                if options["detach"]:
                    note_detached(session, job)
                    print_answer(session, job, job.job_id)
                    return 0
                if reasons := present(accepted.reasons):
                    echo(f"grid: {job.job_id} waits: {'; '.join(reasons)}", err=True)
                code = JobFollower(session, job.uid, hangup).run()
                if options["fetch"]:
                    with hangup.may_leave():
                        show_delivery(session, job.uid)
                return code
            except (HungUp, OutputFailed) as loss:
                return detach_job(session, accepted.job, loss, fetches=bool(options["fetch"]))
        except KeyboardInterrupt:
            with contextlib.suppress(GridError), session.client(may_start=False, any_config=True) as client:
                client.cancel_job(job_id=request_id)
            return 130


def detach_job(session: CliSession, job: JobRow, loss: HungUp | OutputFailed, *, fetches: bool = False) -> int:
    """Leave a job running whose terminal has closed, or whose output cannot be written; the exit code.

    The control plane notes it at the job, and one line says how to come back. If it `fetches`, the control plane brings
    its files.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.alarm(DETACH_SECONDS)  # ends this process where the control plane does not answer
    flush_standard_streams()  # drops what could not be written
    reason = "the terminal closed" if isinstance(loss, HungUp) else str(loss)
    with contextlib.suppress(GridError), session.running_client() as client:
        job = client.detach_job(job_id=job.uid, reason=reason[:MAX_REASON_CHARS]).job
    if job.state != "ended":
        note_detached(session, job)
    echo(f"grid: {reason}; {way_back(job, fetches=fetches)}", err=True)
    return HANGUP_EXIT_CODE if isinstance(loss, HungUp) else loss.exit_code


def way_back(job: JobRow, *, fetches: bool = False) -> str:
    """The command that shows the output of a job without a follower; its files come by themselves."""
    is_over = job.state == "ended"
    state, verb = ("has ended", "see its output") if is_over else ("goes on", "follow it")
    text = f"{job.job_id} {state}; {verb} with: {follow_command(job)}"
    return f"{text}; its files come when it has ended" if fetches else text


def note_detached(session: CliSession, job: JobRow) -> None:
    """Note a job for `grid jobs wait` without names; a failure does not end the job."""
    from distributed_grid.cli.unwaited_jobs import UnwaitedJobs

    try:
        UnwaitedJobs(session.state_dir).add(job.uid)
    except OSError as failure:
        echo(f"grid: to wait for {job.job_id} name it: it could not be noted ({failure.strerror})", err=True)


def has_unread_input() -> bool:
    """Whether our standard input is a pipe or a file, which the command might be meant to read."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # it is closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def parse_variables(given: tuple[str, ...]) -> dict[str, str]:
    variables = {}
    for entry in given:
        name, equals, value = entry.partition("=")
        if not name:
            raise BadInput(f"--env needs a name: {entry!r}")
        if not equals:
            if name not in os.environ:
                raise BadInput(f"--env {name}: you have no such variable; write {name}=VALUE")
            value = os.environ[name]
        variables[name] = value
    return variables


class _Interrupted(Exception):
    """The user, or the system, wants this command to stop."""


def _interrupt(number: int, stack: FrameType | None) -> None:
    raise _Interrupted


def cancel_jobs(client: Client, names: Sequence[str]) -> list[JobRow]:
    """Cancel jobs and wait a moment for their end; one that has not ended by then is still `stopping`."""
    jobs = [client.cancel_job(job_id=name).job for name in names]
    deadline = time.monotonic() + CANCEL_SECONDS
    for at, job in enumerate(jobs):
        if job.state != "ended":
            left = max(deadline - time.monotonic(), 0.0)
            with contextlib.suppress(TimedOut):
                jobs[at] = client.wait_for_job(job_id=job.uid, timeout_seconds=left).job
    return jobs


class NoticePrinter:
    """Prints the notices about a job on stderr, each once."""

    def __init__(self) -> None:
        self.seen = 0  # the number of the last notice
        self._attempt = 1

    def show(self, notice: JsonObject) -> None:
        """Print a notice, unless a stream that was interrupted has brought it before."""
        self.seen = max(self.seen, notice.seq)
        if notice.notice == "started":
            if notice.attempt <= self._attempt:
                return
            self._attempt = notice.attempt
        echo(f"grid: {notice.message}", err=True)


class JobFollower:
    """Shows a job's output until it has ended, across restarts of the control plane."""

    def __init__(self, session: CliSession, uid: str, hangup: HangupWatch) -> None:
        self._session = session
        self._uid = uid
        self._hangup = hangup
        self._seen = {STDOUT: 0, STDERR: 0}
        self._notices = NoticePrinter()
        self._cancelled = False
        self._output_closed = False
        self.ended_job: JobRow | None = None  # the job as it ended, once it is known

    def run(self) -> int:
        """The exit code. HungUp and OutputFailed leave the job as it is, unless it was cancelled before."""
        try:
            with handled_signals(_interrupt, signal.SIGINT, signal.SIGTERM), self._hangup.may_leave():
                while True:  # the first interrupt cancels, a second one gets through
                    try:
                        return self._stream_output()
                    except _Interrupted:
                        if self._cancelled:
                            raise
                        self._cancel()
                    except BrokenPipeError:
                        self._output_closed = True
                        self._cancel()
        except _Interrupted:
            if not self._cancelled:
                self._cancel()
        except (HungUp, OutputFailed):
            if not self._cancelled:
                raise
            self._cancel()  # the first request may have been cut short
        echo("grid: the job is being stopped; not waiting for it", err=True)
        return 130

    def _cancel(self) -> None:
        self._cancelled = True
        self._session.ask.cancel_job(job_id=self._uid)

    def _stream_output(self) -> int:
        def read_on(client: Operations) -> Iterator[tuple[bytes, Part]]:
            return client.read_logs(
                job_id=self._uid,
                follow=True,
                stdout_seen=self._seen[STDOUT],
                stderr_seen=self._seen[STDERR],
                notices_seen=self._notices.seen,
            )

        for kind, part in self._session.follow(read_on):
            if isinstance(part, bytes):
                self._seen[kind] += len(part)
                if not self._output_closed:
                    write_output(kind, part)
            elif "dropped" in part:
                self._seen[STDOUT if part.stream == "stdout" else STDERR] += part.dropped
                echo(f"grid: {part.message}", err=True)
            elif "notice" in part:
                self._notices.show(part)
            elif part.done:
                job = part.job
                self.ended_job = job
                if self._output_closed:
                    return 141
                if job.sizing is not None and (overruns := job.sizing.overruns):
                    limits = ", ".join(format_amount("memory", limit) for limit in job.sizing.limits_gb[:overruns])
                    echo(
                        f"grid: it ran over {limits} of memory, which the grid gave it, and was run again with more",
                        err=True,
                    )
                if job.outcome == "waited_too_long":
                    raise TimedOut(f"No resource offers available: {job.detail}")
                if job.outcome == "lost":
                    raise GridError(f"{job.job_id} is lost: {job.detail}")
                if job.outcome not in ("exited", "signalled") and job.detail:
                    echo(f"grid: {job.detail}", err=True)
                return int(job.shell_code)
        raise AssertionError("a stream ends with its last message")
