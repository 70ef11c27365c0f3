"""`grid distribute`: the workers as the scheduler sees them, and probe jobs that show how work spreads over them."""

from __future__ import annotations

import contextlib
import math
import signal
import time
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed_grid.api.framing import STDOUT
from distributed_grid.cli.command_line import IntRange, Option, WordChoice, group
from distributed_grid.cli.commands.run import cancel_jobs
from distributed_grid.cli.output import (
    FREE_AND_LENT,
    echo,
    free_and_lent,
    named_in_part,
    node_state,
    print_answer,
    table,
)
from distributed_grid.cli.request_options import STRATEGIES
from distributed_grid.cli.session import CliSession
from distributed_grid.cli.signals import handled_signals, raise_keyboard_interrupt
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import present
from distributed_grid.client.job_payload import caller_environment
from distributed_grid.client.pages import whole_status
from distributed_grid.errors import BadInput, GridError
from distributed_grid.number_text import counted

if TYPE_CHECKING:
    from distributed_grid.api.answers.jobs import JobRow

PROBES_PER_NODE = 3


@group()
def distribute() -> None:
    """The workers as the scheduler sees them, and a test of how work spreads over them."""


@distribute.command()
def status(session: CliSession) -> None:
    """Each node: whether it takes work, its free resources, its rank, and the reasons for keeping the rest."""
    nodes = whole_status(session.query).nodes
    rows = [
        (
            node.node_id,
            node_state(node),
            "yes" if node.open else "no",
            *free_and_lent(node),
            node.leases,
            "unknown" if node.pressure is None else f"{100 * node.pressure:.0f} %",
            node.priority,
            node.speed,
            node.cost_per_hour,
            "; ".join(node.keeps),
        )
        for node in nodes
    ]
    headings = ("NODE", "STATE", "OPEN", *FREE_AND_LENT, "LEASES", "PRESSURE", "PRIORITY", "SPEED", "COST PER HOUR")
    print_answer(session, nodes, table((*headings, "WHY NOT MORE"), rows, empty="no nodes"))


@distribute.command(
    Option(
        "-n",
        "--count",
        type=IntRange(1, 10_000),
        help=f"How many probes (default: {PROBES_PER_NODE} for each node that is open).",
    ),
    Option("--strategy", type=WordChoice(STRATEGIES, case_sensitive=False), default="spread", show_default=True),
    Option("--node", "nodes", multiple=True, metavar="NODE", help="Only on these nodes."),
    Option("-a", "--amount", type=float, default=0.1, show_default=True, help="Cores for each probe."),
    Option("-s", "--seconds", type=float, default=1.0, show_default=True, help="How long each probe stays."),
    Option("-w", "--wait", type=float, default=30.0, show_default=True, help="Seconds to wait for a place."),
)
def test(session: CliSession, /, count: int | None, nodes: tuple[str, ...], strategy: str, **numbers: float) -> int:
    """Spread small probe jobs over the nodes and show where they ran.

    Each probe is a real job that says where it is and stays a moment, so that the next one finds the place taken. They
    are of low priority. Ctrl-C cancels those that are left. The exit code is 1 when any of them failed.
    """
    if strategy == "node_specific" and not nodes:
        raise BadInput("--strategy node_specific needs a node: --node NODE")
    if not all(math.isfinite(number) and number >= 0 for number in numbers.values()):
        raise BadInput("an amount or a time must be a number that is not negative")
    known = whole_status(session.ask).nodes
    is_open = sum(1 for node in known if node.open)
    probes = Probes(session, count or PROBES_PER_NODE * max(is_open, 1), strategy, nodes, **numbers)
    try:
        results, seconds = probes.run()
    except KeyboardInterrupt:
        return 130
    failed = [probe for probe in results if not probe.ok]
    node_probes = probes_by_node([node.node_id for node in known], results)
    used = sum(1 for row in node_probes if row.probes)
    rows = [
        (
            row.node_id,
            row.probes,
            row.failed,
            *("-" if mean is None else f"{mean:.3f} s" for mean in (row.waited_seconds, row.ran_seconds)),
        )
        for row in node_probes
    ]
    lines = [table(("NODE", "PROBES", "FAILED", "WAITED", "RAN"), rows, empty="no nodes")]
    lines += named_in_part([f"{probe.job_id} failed: {probe.detail}" for probe in failed], 10)
    lines.append(
        f"{counted(len(results), 'probe')} on {counted(used, 'node')} by {strategy}, "
        f"{len(failed)} failed, {seconds:.2f} s in all"
    )
    shown = {
        "strategy": strategy,
        "probes": [probe._asdict() for probe in results],
        "seconds": seconds,
        "nodes": [row._asdict() for row in node_probes],
    }
    print_answer(session, shown, "\n".join(lines))
    return 1 if failed else 0


class Probe(NamedTuple):
    """The result of one probe; it is ok when it ended well and ran where the grid says it did."""

    job_id: str
    node_id: str | None
    host: str | None
    ok: bool
    waited_seconds: float | None
    ran_seconds: float | None
    detail: str | None


class NodeProbes(NamedTuple):
    """Number and mean times of the probes of a node."""

    node_id: str
    probes: int
    failed: int
    waited_seconds: float | None
    ran_seconds: float | None


class Probes:
    """Probes: small jobs in a group of their own that print where they run; none is left behind."""

    def __init__(
        self,
        session: CliSession,
        count: int,
        strategy: str,
        nodes: tuple[str, ...],
        *,
        amount: float,
        seconds: float,
        wait: float,
    ) -> None:
        self._session = session
        self._names = [uuid.uuid4().hex for _ in range(count)]
        self._message: dict[str, Any] = {
            "argv": ["/bin/sh", "-c", f'echo "$GRID_NODE $(uname -n)"; exec sleep {seconds:f}'],
            "resource_type": "cpu",
            "amount": amount,
            "priority": "low",
            "strategy": strategy,
            "group": f"probe-{self._names[0][:12]}",
            "require": list(nodes),
            "wait_seconds": wait,
            "expects_seconds": seconds,
            "env": caller_environment({}),
        }

    def run(self) -> tuple[list[Probe], float]:
        """Submit all, wait for all; the result of each, and the seconds that it took. On any error all are
        cancelled."""
        began = time.monotonic()
        with handled_signals(raise_keyboard_interrupt, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            try:
                with self._session.client() as client:
                    for name in self._names:
                        client.submit_job(request_id=name, job_id=f"probe-{name[:12]}", **self._message)
                    jobs = [client.wait_for_job(job_id=name).job for name in self._names]
                    probes = [_probe_row(client, job) for job in jobs]
            except BaseException:  # an interrupt, too: the probes are cancelled, then it is raised again
                self._cancel()
                raise
        return probes, round(time.monotonic() - began, 3)

    def _cancel(self) -> None:
        jobs = []
        with contextlib.suppress(GridError), self._session.client(may_start=False, any_config=True) as client:
            sent = []
            for name in self._names:
                with contextlib.suppress(GridError):  # it was never sent
                    sent.append(client.cancel_job(job_id=name).job.uid)
            jobs = cancel_jobs(client, sent)
        for count, state in (
            (sum(job.outcome == "cancelled" for job in jobs), "cancelled"),
            (sum(job.state != "ended" for job in jobs), "stopping"),
        ):
            if count:
                echo(f"grid: {counted(count, 'probe')} {state}", err=True)


def _probe_row(client: Client, job: JobRow) -> Probe:
    parts = client.read_logs(job_id=job.uid)
    output = b"".join(part for kind, part in parts if kind == STDOUT and isinstance(part, bytes)).decode().split()
    node, host = output if len(output) == 2 else (None, None)
    ok = job.outcome == "exited" and job.exit_code == 0 and node == job.node_id
    started = job.attempts[-1].started_at if job.attempts else None
    waited: float | None = None
    if started is not None and job.submitted_at is not None:
        waited = (datetime.fromisoformat(started) - datetime.fromisoformat(job.submitted_at)).total_seconds()
    return Probe(
        job_id=job.job_id,
        node_id=job.node_id,
        host=host,
        ok=ok,
        waited_seconds=waited,
        ran_seconds=None if started is None else present(job.wall_seconds),
        detail=None if ok else job.detail or f"{job.outcome}, printed {' '.join(output)!r}",
    )


def probes_by_node(names: Sequence[str], probes: Sequence[Probe]) -> list[NodeProbes]:
    """The probes of each node, nodes without probes included."""
    rows = []
    for name in names:
        here = [probe for probe in probes if probe.node_id == name]
        rows.append(
            NodeProbes(
                node_id=name,
                probes=len(here),
                failed=sum(not probe.ok for probe in here),
                waited_seconds=_mean([probe.waited_seconds for probe in here]),
                ran_seconds=_mean([probe.ran_seconds for probe in here]),
            )
        )
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 3) if known else None
