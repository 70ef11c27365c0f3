"""Files that come back from a job: fetching them, waiting for their delivery, and the lines about both."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distributed_grid.cli.output import echo, format_size, printable
from distributed_grid.cli.session import CliSession
from distributed_grid.client.conversation import required
from distributed_grid.client.job_payload import FetchTotals, FileDownload
from distributed_grid.errors import Unreachable

if TYPE_CHECKING:
    from distributed_grid.api.answers.jobs import DeliveryRow

MAX_LINES = 10
DELAY_SECONDS = 10.0  # wait for a delivery that has a problem, before it is left to the control plane
POLL_SECONDS = 2.0


def fetch_files(
    session: CliSession, job_id: str, patterns: Sequence[str], target: str, *, overwrite: bool
) -> FetchTotals:
    """Download the files that match into a directory, and record that they are there; the totals."""
    download = FileDownload(target, patterns, session.state_dir, overwrite=overwrite)
    totals: FetchTotals | None = None
    try:
        with session.client(query_only=True) as client:
            for kind, part in client.fetch_files(job_id=job_id, patterns=list(patterns)):
                totals = download.receive(kind, part) or totals
            if totals is not None and not totals.in_place:
                client.record_fetch(
                    job_id=job_id,
                    patterns=list(patterns),
                    directory=os.path.abspath(target),
                    files=totals.files,
                    bytes=totals.bytes,
                )
    finally:
        download.close()
    if totals is None:
        raise Unreachable("the control plane went away while files were fetched; type the command again")
    return totals


def show_delivery(session: CliSession, uid: str, *, quiet: bool = False) -> None:
    """Wait for the delivery of an ended job's files and report it, or (`quiet`) only problems; a delayed delivery
    continues without this command."""
    delayed_since = 0.0
    while True:
        delivery: DeliveryRow | None = None
        try:
            with session.client(query_only=True) as client:
                delivery = required(client.wait_for_delivery(job_id=uid, timeout_seconds=POLL_SECONDS).delivery)
            problem = delivery.problem
        except Unreachable as failure:  # the next control plane continues with it
            problem = str(failure)
            time.sleep(POLL_SECONDS / 4)
        except KeyboardInterrupt:
            echo(f"grid: its files come without you waiting; see: grid jobs show {uid}", err=True)
            return
        if delivery is not None and delivery.state in ("delivered", "failed"):
            for line in delivery_lines(delivery)[1 if quiet and delivery.state == "delivered" else 0 :]:
                echo(f"grid: {line}", err=True)
            return
        delayed_since = (delayed_since or time.monotonic()) if problem else 0.0
        if delayed_since and time.monotonic() - delayed_since > DELAY_SECONDS:
            echo(
                f"grid: its files come when they can be had ({printable(problem)}); see: grid jobs show {uid}", err=True
            )
            return


def delivery_lines(delivery: DeliveryRow) -> list[str]:
    """An ended delivery, in lines; none if the job ran in its user's own directory."""
    if delivery.state == "failed":
        return [f"its files were not fetched: {printable(delivery.problem)}"]
    if delivery.in_place:
        return []
    return [summary(delivery, delivery.directory), *return_lines(delivery)]


def summary(totals: DeliveryRow | FetchTotals, directory: str | None) -> str:
    files, unchanged = totals.files, totals.unchanged
    text = f"fetched {files} file{'' if files == 1 else 's'} ({format_size(totals.bytes)}) into {printable(directory)}"
    return f"{text}; {unchanged} unchanged" if unchanged else text


def return_lines(totals: DeliveryRow | FetchTotals) -> list[str]:
    """The lines about files that are not simply there."""
    lines = [
        f"kept your {printable(path)}; the job's version is {printable(name)}" for path, name in totals.beside.items()
    ]
    lines += [f"not fetched: {printable(reason)}" for reason in totals.skipped]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 1 :] = [f"and {len(lines) - MAX_LINES + 1} more such files"]
    if totals.protected:
        lines.append(f"never written back: {_names(totals.protected)}")
    if totals.executable:
        lines.append(f"executable now: {_names(totals.executable)}")
    return lines


def _names(paths: Sequence[str]) -> str:
    shown = ", ".join(printable(path) for path in paths[:MAX_LINES])
    return shown if len(paths) <= MAX_LINES else f"{shown} and {len(paths) - MAX_LINES} more"


def delivery_text(delivery: DeliveryRow | None) -> str | None:
    """The files of a job in one line, for `jobs show`."""
    if delivery is None:
        return None
    place = delivery.directory or "a directory of the control plane"
    if delivery.state == "waiting":
        return f"{' '.join(delivery.patterns)} will come into {place}"
    if delivery.state == "delivering":
        reason = f": {delivery.problem}" if delivery.problem else ""
        return f"on their way into {place}{reason}"
    if delivery.state == "failed":
        return f"not fetched: {delivery.problem}"
    if delivery.in_place:
        return "in the directory that it ran in"
    beside = f"; beside changed files: {', '.join(delivery.beside.values())}" if delivery.beside else ""
    return summary(delivery, place) + beside
