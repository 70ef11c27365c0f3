"""A command of `grid offload wrap` on another node, as a job; and here, if nothing of it was started there."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from distributed_grid.cli.commands.run import JobFollower, detach_job, parse_variables, upload_for
from distributed_grid.cli.local_start import exec_here, is_advised_elsewhere, reason_to_stay
from distributed_grid.cli.output import echo, printable
from distributed_grid.cli.returned_files import show_delivery
from distributed_grid.cli.session import CliSession
from distributed_grid.cli.signals import HangupWatch, handled_signals, raise_keyboard_interrupt
from distributed_grid.cli.standard_streams import HungUp, OutputFailed
from distributed_grid.client.client import Client
from distributed_grid.client.job_payload import caller_node, check_ship
from distributed_grid.client.job_requests import JobRequest, command_fields, current_directory
from distributed_grid.errors import BadInput, GridError, NotFound, Refused, TimedOut, Unreachable

if TYPE_CHECKING:
    from distributed_grid.api.answers.jobs import JobRow
    from distributed_grid.client.operations import SubmitJobFields

CERTAINTY_SECONDS = 10.0  # how long to find out what became of a submission that was not answered
RETRY_SECONDS = 0.2
NOTHING_RAN = ("never_started", "waited_too_long")  # outcomes of a job of which no process has existed


def run_wrapped(session: CliSession, options: dict[str, Any]) -> int:
    command = list(options["command"])
    variables = parse_variables(options["env"])
    check_ship(options["ship"])
    may_leave = not reason_to_stay(os.environ, reads_input=not options["no_input"])
    if may_leave and is_advised_elsewhere(command, session.state_dir):
        node: str | None = None
        with contextlib.suppress(GridError), session.running_client() as client:
            advice = client.advise_command(argv=command, origin=caller_node())
            node = advice.target_node if advice.elsewhere else None
        if node:
            wrapped = WrappedRun(
                session, command, variables, options["fetch"], options["ship"], overwrite=options["overwrite"]
            )
            code = wrapped.run_on(node)
            if code is not None:
                return code
    return exec_here(command, {**os.environ, **variables})


class WrappedRun:
    """One wrapped command on another node: submitted, followed, and its changed files brought back."""

    def __init__(
        self,
        session: CliSession,
        command: list[str],
        variables: dict[str, str],
        patterns: Sequence[str],
        ship: Sequence[str] = (),
        *,
        overwrite: bool = False,
    ) -> None:
        self._session = session
        self._command = command
        self._variables = variables
        self._patterns = tuple(patterns) or ("**",)
        self._overwrite = overwrite
        self._ship = tuple(ship)
        self._request_id = os.urandom(16).hex()
        self._hangup = HangupWatch()

    def run_on(self, node: str) -> int | None:
        """Run it on this node; its exit code, or None where nothing was started there, so that it may start here.

        A hang-up of the terminal detaches it: its files come all the same.
        """
        with self._hangup.watching(), handled_signals(raise_keyboard_interrupt, signal.SIGTERM):
            try:
                with self._session.running_client() as client:
                    fields = self._prepare(client, node)
                    job = self._submit(client, fields) if fields is not None else None
                if job is None or fields is None:
                    with self._hangup.may_leave():  # nothing is started here for a terminal that has closed
                        return None
                try:
                    code = self._follow(job)
                    if code is not None:
                        with self._hangup.may_leave():
                            show_delivery(self._session, job.uid, quiet=True)
                    return code
                except (HungUp, OutputFailed) as loss:
                    return detach_job(self._session, job, loss, fetches=True)
            except KeyboardInterrupt:
                with contextlib.suppress(GridError), self._session.running_client() as client:
                    client.cancel_job(job_id=self._request_id)
                return 130

    def _prepare(self, client: Client, node: str) -> SubmitJobFields | None:
        """The submission, with the working directory uploaded; None where it cannot be shipped."""
        try:
            command = command_fields(
                self._command,
                self._variables,
                job_id="",
                directory=current_directory(),
                isolated=False,
                ship=self._ship,
                fetch=self._patterns,
                overwrite=self._overwrite,
            )
            command |= {"request_id": self._request_id, "require": [node], "wait_seconds": 0.0, "origin": caller_node()}
            fields = upload_for(self._session, client, JobRequest(command, ship=self._ship))
        except GridError as problem:
            _say_it_starts_here(str(problem))
            return None
        return cast("SubmitJobFields", fields)

    def _submit(self, client: Client, fields: SubmitJobFields) -> JobRow | None:
        """The job; None if the grid refuses or does not know it.

        Raises Unreachable if neither submission nor query is answered in time: the job may run there.
        """
        try:
            return client.submit_job(**fields).job
        except (Refused, BadInput, TimedOut) as refusal:
            _say_it_starts_here(str(refusal))
            return None
        except GridError:
            pass
        deadline = time.monotonic() + CERTAINTY_SECONDS
        while True:
            try:
                with self._session.running_client() as next_client:
                    return next_client.get_job(job_id=self._request_id).job
            except NotFound:
                return None
            except GridError:
                if time.monotonic() >= deadline:
                    raise Unreachable(
                        "nobody can say whether the command was started elsewhere, so it is not started here; "
                        "see `grid jobs list`"
                    ) from None
                time.sleep(RETRY_SECONDS)

    def _follow(self, job: JobRow) -> int | None:
        """Show its output until its end; its exit code, or None where no process of it has existed."""
        follower = JobFollower(self._session, job.uid, self._hangup)
        try:
            code = follower.run()
        except OutputFailed:
            raise
        except GridError as failure:
            if not _is_nothing_ran(follower.ended_job):
                raise
            echo(f"grid: {printable(str(failure))}", err=True)
        else:
            if not _is_nothing_ran(follower.ended_job):
                return code
        _say_it_starts_here("nothing of it was started there")
        return None


def _is_nothing_ran(job: JobRow | None) -> bool:
    """True if a job has ended without ever having a process."""
    return job is not None and job.outcome in NOTHING_RAN and not any(attempt.started_at for attempt in job.attempts)


def _say_it_starts_here(why: str) -> None:
    echo(f"grid: starts here: {printable(why)}", err=True)
