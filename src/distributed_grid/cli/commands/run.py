"""`grid run-shared`: borrow, run, stream output live, give back."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import uuid
from types import FrameType
from typing import Any

import click

from distributed_grid.api.framing import JSON, STDERR, STDOUT
from distributed_grid.cli.file_fetch import fetch
from distributed_grid.cli.global_options import CliSession, GridCommand
from distributed_grid.cli.output import amount as with_unit
from distributed_grid.cli.output import answer, clean, write_output
from distributed_grid.cli.placement_options import placing, placing_options
from distributed_grid.client.client import ReconnectBackoff
from distributed_grid.client.environment import caller_environment, make_sure_of_text
from distributed_grid.client.upload import NONE, ship
from distributed_grid.errors import BadInput, GridError, TimedOut, Unreachable


@click.command(cls=GridCommand, context_settings={"allow_interspersed_args": False})
@click.option("-r", "--resource-type", default="cpu", show_default=True, help="cpu, gpu, memory or a declared name.")
@click.option("-a", "--amount", type=float, default=1.0, show_default=True, help="Cores, GPUs or GB.")
@click.option("-p", "--priority", default="medium", show_default=True, help="low, medium, high or urgent.")
@click.option("-n", "--node", multiple=True, help="Preferred node; may be given several times.")
@placing_options
@click.option(
    "-w",
    "--wait",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    help="Seconds to wait for resources; 0 refuses at once.",
)
@click.option("-j", "--job-id", default="", help="A name of your own for the job.")
@click.option("-d", "--detach", is_flag=True, help="Do not wait: print the job's id and return.")
@click.option(
    "-e",
    "--env",
    multiple=True,
    metavar="K[=V]",
    help="A variable for the job; without =V your own value is passed on.",
)
@click.option("--timeout", type=click.FloatRange(min=0), default=0.0, help="Stop the job after this many seconds.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Seconds between asking a job to stop and killing it.",
)
@click.option("--retries", type=click.IntRange(0, 1000), default=0, help="Run again so many times after a failure.")
@click.option("--isolated", is_flag=True, help="Run in an empty private directory instead of the current one.")
@click.option("--workdir", metavar="DIR", help="What is shipped to another node, or none (default: this directory).")
@click.option("--fetch", multiple=True, metavar="GLOB", help="Bring these files back afterwards, such as 'out/**'.")
@click.option("--shell", is_flag=True, help="The command is one string for sh -c.")
@click.option("--dry-run", is_flag=True, help="Only say what would happen.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def run_shared(session: CliSession, /, **options: Any) -> int:
    """Borrow resources, run COMMAND with them, give them back.

    Everything from the first word of COMMAND on belongs to the command. On this machine it runs in the current
    directory; on another node in a private one, into which the current directory is shipped when it is small. Its
    output is shown as it comes, Ctrl-C cancels it, and its exit code is the exit code of this command.
    """
    submission = _submission(options)
    try:
        with session.client() as client:
            ship_along(session, client.greet(), options, submission)
            accepted = client.call("submit_job", **submission)
        job = accepted["job"]
        if options["dry_run"]:
            return _tell_verdict(session, accepted)
        if options["detach"]:
            answer(session, job, job["job_id"])
            return 0
        if accepted["reasons"]:
            click.echo(f"grid: {job['job_id']} waits: {'; '.join(accepted['reasons'])}", err=True)
        code = Follower(session, job["uid"]).run()
        if options["fetch"]:
            fetch_back(session, job["uid"], options)
        return code
    except KeyboardInterrupt:  # before the follower looks after it
        with contextlib.suppress(GridError), session.client(may_start=False) as client:
            client.call("cancel_job", job_id=submission["request_id"])
        return 130


def _submission(options: dict[str, Any]) -> dict[str, Any]:
    words = list(options["command"])
    if not all(math.isfinite(options[name]) for name in ("amount", "wait", "timeout", "grace")):
        raise BadInput("an amount or a time must be a number, not nan or inf")
    if options["shell"]:
        if len(words) != 1:
            raise BadInput("--shell takes the command as one quoted string")
        words = ["/bin/sh", "-c", words[0]]
    make_sure_of_text(*words, options["job_id"], options["resource_type"], options["priority"])
    return {
        **placing(options),
        "request_id": uuid.uuid4().hex,
        "argv": words,
        "resource_type": options["resource_type"],
        "amount": options["amount"],
        "priority": options["priority"],
        "wait_seconds": options["wait"],
        "job_id": options["job_id"],
        "env": caller_environment(variables_of(options["env"])),
        "given": list(variables_of(options["env"])),
        "cwd": "" if options["isolated"] else here(),
        "timeout_seconds": options["timeout"],
        "grace_seconds": options["grace"],
        "retries": options["retries"],
        "dry_run": options["dry_run"],
    }


def ship_along(
    session: CliSession, welcome: dict[str, Any], options: dict[str, Any], submission: dict[str, Any]
) -> None:
    """Take the directory along where the job may run on another machine."""
    shipment = ship(
        options["workdir"],
        session.places,
        nodes=welcome.get("nodes", ()),
        far=welcome.get("far_nodes", ()),
        require=submission["require"],
        isolated=options["isolated"],
    )
    for note in shipment.notes:
        click.echo(f"grid: {note}", err=True)
    submission["workdir"], submission["require"] = shipment.workdir, list(shipment.require)


def fetch_back(session: CliSession, uid: str, options: dict[str, Any]) -> None:
    """Bring back what `--fetch` names."""
    workdir = options["workdir"]
    target = workdir if workdir and workdir != NONE else "."
    came = fetch(session, uid, options["fetch"], target)
    for reason in came["skipped"]:
        click.echo(f"grid: not fetched: {clean(reason)}", err=True)
    if not came["in_place"]:
        click.echo(f"grid: fetched {came['files']} file{'' if came['files'] == 1 else 's'}", err=True)


def here() -> str:
    """The current directory, as a job's."""
    try:
        found = os.getcwd()
    except FileNotFoundError:
        raise BadInput("the current directory does not exist any more; use --isolated") from None
    make_sure_of_text(found)
    return found


def variables_of(given: tuple[str, ...]) -> dict[str, str]:
    """What `--env` says."""
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


def _tell_verdict(session: CliSession, accepted: dict[str, Any]) -> int:
    job = accepted["job"]
    asked = with_unit(job["resource_type"], job["amount"])
    if job["state"] == "queued":
        text = f"would wait for {asked}: " + "; ".join(accepted["reasons"])
    else:
        text = f"would run on {job['node_id']} with {asked}"
    answer(session, {"verdict": "wait" if job["state"] == "queued" else "run", **accepted}, text)
    return 0


class _Interrupted(Exception):
    """The user, or the system, wants this command to stop."""


class Follower:
    """Shows a job's output until it is over; survives a control plane that goes away meanwhile."""

    def __init__(self, session: CliSession, uid: str) -> None:
        self._session = session
        self._uid = uid
        self._seen = {STDOUT: 0, STDERR: 0}
        self._cancelled = False
        self._deaf = False
        self._patience = ReconnectBackoff()

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            return self._follow()
        except _Interrupted:
            if not self._cancelled:
                self._cancel()
            click.echo("grid: the job is being stopped; not waiting for it", err=True)
            return 130

    def _follow(self) -> int:
        """Until the end; the first interrupt cancels, a second one gets through."""
        while True:
            try:
                return self._until_over()
            except _Interrupted:
                if self._cancelled:
                    raise
                self._cancel()
            except BrokenPipeError:
                self._deaf = True
                self._cancel()
            except Unreachable as loss:  # the control plane went away: the next one knows the job
                time.sleep(self._patience.pause_after(loss))

    def _on_signal(self, number: int, stack: FrameType | None) -> None:
        raise _Interrupted

    def _cancel(self) -> None:
        self._cancelled = True
        with self._session.client() as client:
            client.call("cancel_job", job_id=self._uid)

    def _until_over(self) -> int:
        with self._session.client() as client:
            seen = {"stdout_seen": self._seen[STDOUT], "stderr_seen": self._seen[STDERR]}
            for kind, part in client.stream("read_logs", job_id=self._uid, follow=True, **seen):
                self._patience.heard()
                if kind == JSON:
                    assert isinstance(part, dict)
                    if part.get("done"):
                        return self._finish(part["job"])
                else:
                    assert isinstance(part, bytes)
                    self._show(kind, part)
        raise Unreachable("the stream ended early")

    def _show(self, kind: bytes, chunk: bytes) -> None:
        self._seen[kind] += len(chunk)
        if self._deaf:
            return
        write_output(kind, chunk)

    def _finish(self, job: dict[str, Any]) -> int:
        if self._deaf:
            return 141
        if job["outcome"] == "waited_too_long":
            raise TimedOut(f"No resource offers available: {job['detail']}")
        if job["outcome"] == "lost":
            raise GridError(f"{job['job_id']} is lost: {job['detail']}")
        if job["outcome"] not in ("exited", "signalled") and job["detail"]:
            click.echo(f"grid: {job['detail']}", err=True)
        return int(job["shell_code"])
