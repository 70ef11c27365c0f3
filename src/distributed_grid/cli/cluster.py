"""`grid cluster`: the agents of other machines, by SSH."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from distributed_grid.cli.globals import GridGroup, Session
from distributed_grid.cli.show import answer, clean, table

PASSED_ON = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONFIG_FILE", "PIP_CERT"),
    *("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "GRID_WHEELS"),
)
"""What the control plane, whose environment is clean, needs of the caller's to fetch packages for nodes."""
Show = Callable[[str, str], None]
_names = click.argument("nodes", nargs=-1, metavar="[NODE]...")


@click.group(cls=GridGroup)
def cluster() -> None:
    """Install, start, stop and look at the agents of other machines, by SSH. Without names: of all of them."""


@cluster.command()
@_names
@click.pass_obj
def install(session: Session, nodes: tuple[str, ...]) -> int:
    """Put the package on the nodes. They need Python 3.11 and SSH, but no internet."""
    return _carry_out(session, "install", nodes)


@cluster.command()
@_names
@click.pass_obj
def start(session: Session, nodes: tuple[str, ...]) -> int:
    """Start the agents, and install the package first where this version is missing."""
    return _carry_out(session, "start", nodes)


@cluster.command()
@_names
@click.option("--force", is_flag=True, help="Do not wait until everything lent has been given back.")
@click.option("--purge", is_flag=True, help="Remove what was installed, too.")
@click.pass_obj
def stop(session: Session, nodes: tuple[str, ...], force: bool, purge: bool) -> int:
    """Stop the agents; jobs get notice and go back into the line. No process is left behind."""
    return _carry_out(session, "stop", nodes, force=force, purge=purge)


@cluster.command()
@_names
@click.pass_obj
def status(session: Session, nodes: tuple[str, ...]) -> None:
    """Each node: its state, its link, what runs there."""
    found = _asked(session, "status", nodes, lambda node, step: None)["nodes"]
    rows = [
        (
            row["node_id"],
            row["address"],
            row["state"],
            row["link"],
            row["version"],
            row["python"],
            None if row["seconds_since_heard"] is None else f"{row['seconds_since_heard']:.1f} s ago",
            row["jobs"],
            row["detail"],
        )
        for row in found
    ]
    headings = ("NODE", "ADDRESS", "STATE", "LINK", "VERSION", "PYTHON", "HEARD", "JOBS", "DETAIL")
    answer(session, found, table(headings, rows, empty="no nodes"))


def _carry_out(session: Session, verb: str, nodes: tuple[str, ...], **options: bool) -> int:
    """Do it on every node at once and say what became of each; 1 when any failed."""
    with _progress(session) as show:
        results = _asked(session, verb, nodes, show, **options)["results"]
    rows = [(row["node_id"], "done" if row["ok"] else "FAILED", row["detail"]) for row in results]
    answer(session, results, table(("NODE", "RESULT", "DETAIL"), rows, empty="no nodes"))
    return 0 if all(row["ok"] for row in results) else 1


def _asked(session: Session, verb: str, nodes: tuple[str, ...], show: Show, **options: bool) -> dict[str, Any]:
    environ = {name: os.environ[name] for name in PASSED_ON if os.environ.get(name)}
    caller = {"auth_sock": os.environ.get("SSH_AUTH_SOCK", ""), "environ": environ}
    last: dict[str, Any] = {}
    with session.client() as client:
        for _, message in client.stream("cluster", verb=verb, nodes=nodes, **caller, **options):
            assert isinstance(message, dict)
            if "step" in message:
                show(message["node_id"], message["step"])
            last = message
    return last


@contextmanager
def _progress(session: Session) -> Iterator[Show]:
    """Where steps are shown: one living line per node on a terminal, else one plain line per step."""
    if session.json:
        yield lambda node, step: None
    elif sys.stdout.isatty():
        with _living_lines() as show:
            yield show
    else:
        yield lambda node, step: click.echo(f"{node}: {clean(step)}")


@contextmanager
def _living_lines() -> Iterator[Show]:
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    steps: dict[str, str] = {}

    def drawn() -> Table:
        lines = Table.grid(padding=(0, 1))
        for node, step in steps.items():
            lines.add_row(Spinner("dots"), Text(clean(node), style="bold"), Text(clean(step)))
        return lines

    with Live(drawn(), transient=True, refresh_per_second=8) as live:

        def show(node: str, step: str) -> None:
            steps[node] = step
            live.update(drawn())

        yield show
