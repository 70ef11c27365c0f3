"""`grid run-shared`: borrow, run a command, stream its output, give back; and following a job for other commands."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import stat
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from distributed_grid.api.framing import STDERR, STDOUT
from distributed_grid.cli.command_line import Argument, FloatRange, IntRange, Option, command
from distributed_grid.cli.output import (
    echo,
    format_amount,
    format_sizing,
    print_answer,
    printable,
    write_output,
)
from distributed_grid.cli.request_options import job_options, placement_fields, placement_options, wait_option
from distributed_grid.cli.session import CliSession
from distributed_grid.client.client import Client
from distributed_grid.client.job_payload import (
    NONE,
    FileDownload,
    caller_environment,
    check_command,
    require_utf8,
    upload_workdir,
)
from distributed_grid.errors import BadInput, GridError, TimedOut

CANCEL_SECONDS = 3.0
"""How long to wait for the end of what was cancelled."""


@command(
    Option("-r", "--resource-type", help="cpu, gpu, memory or a declared name; without -r and -a the grid sizes it."),
    Option("-a", "--amount", type=float, help="Cores, GPUs or GB; 1 with -r alone."),
    Option("-p", "--priority", default="medium", show_default=True, help="low, medium, high or urgent."),
    Option("-n", "--node", multiple=True, help="Preferred node; may be given several times."),
    Option("--for", "for_node", default="", metavar="NODE", help="The node whose work it is, wherever it runs."),
    *placement_options,
    wait_option(300.0, "How long to wait for resources; 0 refuses at once."),
    *job_options,
    Option("--timeout", type=FloatRange(at_least=0), default=0.0, help="Stop the job after this many seconds."),
    Option(
        "--grace",
        type=FloatRange(at_least=0),
        default=5.0,
        show_default=True,
        help="Seconds between asking a job to stop and killing it.",
    ),
    Option("--retries", type=IntRange(0, 1000), default=0, help="Run again so many times after a failure."),
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
    submission = _submission(options)

    def submit(client: Client) -> dict[str, Any]:
        upload = upload_for(session, client, options, submission["require"])
        return client.call("submit_job", **submission | upload)

    return run_job(session, options, submission["request_id"], submit)


def _submission(options: dict[str, Any]) -> dict[str, Any]:
    words = list(options["command"])
    if not all(math.isfinite(options[name] or 0) for name in ("amount", "wait", "timeout", "grace")):
        raise BadInput("an amount or a time must be a number, not nan or inf")
    if options["shell"]:
        if len(words) != 1:
            raise BadInput("--shell takes the command as one quoted string")
        words = ["/bin/sh", "-c", words[0]]
    require_utf8(options["resource_type"] or "", options["priority"])
    return {
        **placement_fields(options),
        **job_fields(words, options),
        "resource_type": options["resource_type"],
        "amount": options["amount"],
        "priority": options["priority"],
        "target": options["for_node"],
        "wait_seconds": options["wait"],
        "timeout_seconds": options["timeout"],
        "grace_seconds": options["grace"],
        "retries": options["retries"],
        "restartable": options["restartable"],
        "dry_run": options["dry_run"],
    }


def job_fields(argv: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a submission that every job has, with a new request id."""
    require_utf8(options["job_id"])
    variables = parse_variables(options["env"])
    env = caller_environment(variables)
    check_command(argv, env, variables)
    return {
        "request_id": os.urandom(16).hex(),
        "argv": argv,
        "job_id": options["job_id"],
        "env": env,
        "given": list(variables),
        "cwd": "" if options["isolated"] else current_directory(),
    }


def upload_for(session: CliSession, client: Client, options: dict[str, Any], require: Sequence[str]) -> dict[str, Any]:
    """Upload the working directory if the job may run on another machine; the fields that say so."""
    welcome = client.greet()
    upload = upload_workdir(
        options["workdir"],
        session.state_dir,
        nodes=welcome.get("nodes", ()),
        far=welcome.get("far_nodes", ()),
        require=require,
        isolated=options["isolated"],
    )
    for note in upload.notes:
        echo(f"grid: {note}", err=True)
    return {"workdir": upload.workdir, "require": list(upload.require)}


def run_job(
    session: CliSession, options: dict[str, Any], request_id: str, submit: Callable[[Client], dict[str, Any]]
) -> int:
    """Submit a job and follow it to its end; the exit code. An interrupt before it is followed cancels it."""
    if has_unread_input():
        echo("grid: the standard input does not reach the job", err=True)
    try:
        with session.client() as client:
            accepted = submit(client)
        job = accepted["job"]
        if options.get("dry_run"):
            return _print_verdict(session, accepted)
        if options["detach"]:
            print_answer(session, job, job["job_id"])
            return 0
        if accepted.get("reasons"):
            echo(f"grid: {job['job_id']} waits: {'; '.join(accepted['reasons'])}", err=True)
        code = JobFollower(session, job["uid"]).run()
        if options["fetch"]:
            fetch_results(session, job["uid"], options)
        return code
    except KeyboardInterrupt:
        with contextlib.suppress(GridError), session.client(may_start=False, any_config=True) as client:
            client.call("cancel_job", job_id=request_id)
        return 130


def has_unread_input() -> bool:
    """Whether our standard input is a pipe or a file, which the command might be meant to read."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # it is closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def fetch_results(session: CliSession, uid: str, options: dict[str, Any]) -> None:
    """Download what `--fetch` names."""
    workdir = options["workdir"]
    target = workdir if workdir and workdir != NONE else "."
    came = fetch_files(session, uid, options["fetch"], target)
    for reason in came["skipped"]:
        echo(f"grid: not fetched: {printable(reason)}", err=True)
    if not came["in_place"]:
        echo(f"grid: fetched {came['files']} file{'' if came['files'] == 1 else 's'}", err=True)


def fetch_files(session: CliSession, job_id: str, patterns: Sequence[str], target: str) -> dict[str, Any]:
    """Download the files that match into a directory; what came, and what could not."""
    download = FileDownload(target, patterns)
    return {**receive_files(session, job_id, patterns, download), "target": target, "paths": download.paths}


def receive_files(session: CliSession, job_id: str, patterns: Sequence[str], download: FileDownload) -> dict[str, Any]:
    """Pass the files that match on to a download, which is closed; the totals."""
    try:
        with session.client(query_only=True) as client:
            for kind, part in client.stream("fetch_files", job_id=job_id, patterns=list(patterns)):
                done = download.receive(kind, part)
                if done is not None:
                    return done
    finally:
        download.close()
    raise AssertionError("a stream ends with its sum")


def current_directory() -> str:
    """The current directory, as the working directory of a job."""
    try:
        found = os.getcwd()
    except FileNotFoundError:
        raise BadInput("the current directory does not exist any more; use --isolated") from None
    require_utf8(found)
    return found


def parse_variables(given: tuple[str, ...]) -> dict[str, str]:
    """The variables of `--env`."""
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


def _print_verdict(session: CliSession, accepted: dict[str, Any]) -> int:
    job = accepted["job"]
    asked = format_amount(job["resource_type"], job["amount"])
    sized = f" ({format_sizing(job['sizing'])})" if job["sizing"] is not None else ""
    if job["state"] == "queued":
        text = f"would wait for {asked}{sized}: " + "; ".join(accepted["reasons"])
    else:
        text = f"would run on {job['node_id']} with {asked}{sized}"
    print_answer(session, {"verdict": "wait" if job["state"] == "queued" else "run", **accepted}, text)
    return 0


def _overrun_limits(job: dict[str, Any]) -> list[float]:
    """The limits after which a job was run again with more."""
    limits: list[float] = job["sizing"]["limits_gb"]
    return limits[: job["sizing"]["overruns"]]


class _Interrupted(Exception):
    """The user, or the system, wants this command to stop."""


def cancel_jobs(client: Client, names: Sequence[str]) -> list[dict[str, Any]]:
    """Cancel jobs and wait a moment until they are over; one that is not by then is still `stopping`."""
    found = [client.call("cancel_job", job_id=name)["job"] for name in names]
    deadline = time.monotonic() + CANCEL_SECONDS
    return [_over_by(client, job, deadline) for job in found]


def _over_by(client: Client, job: dict[str, Any], deadline: float) -> dict[str, Any]:
    if job["state"] != "ended":
        left = max(deadline - time.monotonic(), 0.0)
        with contextlib.suppress(TimedOut):
            job = client.call("wait_for_job", job_id=job["uid"], timeout_seconds=left)["job"]
    return job


class JobFollower:
    """Shows a job's output until it is over; survives a control plane that goes away meanwhile."""

    def __init__(self, session: CliSession, uid: str) -> None:
        self._session = session
        self._uid = uid
        self._seen = {STDOUT: 0, STDERR: 0}
        self._cancelled = False
        self._output_closed = False
        self.ended_job: dict[str, Any] | None = None
        """The job as it ended, once it is known."""

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            return self._follow()
        except _Interrupted:
            if not self._cancelled:
                self._cancel()
            echo("grid: the job is being stopped; not waiting for it", err=True)
            return 130

    def _follow(self) -> int:
        """Until the end; the first interrupt cancels, a second one gets through."""
        while True:
            try:
                return self._stream_output()
            except _Interrupted:
                if self._cancelled:
                    raise
                self._cancel()
            except BrokenPipeError:
                self._output_closed = True
                self._cancel()

    def _on_signal(self, number: int, stack: FrameType | None) -> None:
        raise _Interrupted

    def _cancel(self) -> None:
        self._cancelled = True
        self._session.call("cancel_job", job_id=self._uid)

    def _stream_output(self) -> int:
        for kind, part in self._session.follow("read_logs", self._position):
            if isinstance(part, bytes):
                self._show(kind, part)
            elif part.get("done"):
                return self._finish(part["job"])
        raise AssertionError("a stream ends with its last message")

    def _position(self) -> dict[str, Any]:
        seen = {"stdout_seen": self._seen[STDOUT], "stderr_seen": self._seen[STDERR]}
        return {"job_id": self._uid, "follow": True, **seen}

    def _show(self, kind: bytes, chunk: bytes) -> None:
        self._seen[kind] += len(chunk)
        if not self._output_closed:
            write_output(kind, chunk)

    def _finish(self, job: dict[str, Any]) -> int:
        self.ended_job = job
        if self._output_closed:
            return 141
        if job["sizing"] is not None and job["sizing"]["overruns"]:
            limits = ", ".join(format_amount("memory", limit) for limit in _overrun_limits(job))
            echo(f"grid: it ran over {limits} of memory, which the grid gave it, and was run again with more", err=True)
        if job["outcome"] == "waited_too_long":
            raise TimedOut(f"No resource offers available: {job['detail']}")
        if job["outcome"] == "lost":
            raise GridError(f"{job['job_id']} is lost: {job['detail']}")
        if job["outcome"] not in ("exited", "signalled") and job["detail"]:
            echo(f"grid: {job['detail']}", err=True)
        return int(job["shell_code"])
