"""`grid distribute`: the workers as the scheduler sees them, and a test of how work spreads over them."""

from __future__ import annotations

import math
from typing import Any

import click

from distributed_grid.cli.global_options import CliSession, GridGroup
from distributed_grid.cli.output import answer, table
from distributed_grid.cli.placement_options import STRATEGIES
from distributed_grid.cli.probe_jobs import Probes, node_rows
from distributed_grid.errors import BadInput

PROBES_PER_NODE = 3


@click.group(cls=GridGroup)
def distribute() -> None:
    """The workers as the scheduler sees them, and a test of how work spreads over them."""


@distribute.command()
@click.pass_obj
def status(session: CliSession) -> None:
    """Each node: whether it takes work, what it has left, how it ranks, and why it keeps what it keeps."""
    with session.client() as client:
        nodes = client.call("get_status")["nodes"]
    answer(session, nodes, _workers(nodes))


def _workers(nodes: list[dict[str, Any]]) -> str:
    rows = [
        (
            node["node_id"],
            node["state"],
            "yes" if node["open"] else "no",
            f"{node['cpu_free']:g} + {node['cpu_lent']:g}",
            f"{node['memory_free_gb']:.1f} + {node['memory_lent_gb']:.1f} GB",
            f"{node['gpus_free']:g} + {node['gpus_lent']:g}" if node["gpus"] else "-",
            node["leases"],
            "unknown" if node["pressure"] is None else f"{100 * node['pressure']:.0f} %",
            node["priority"],
            node["speed"],
            node["cost_per_hour"],
            "; ".join(node["keeps"]),
        )
        for node in nodes
    ]
    lent = ("CORES FREE+LENT", "MEMORY FREE+LENT", "GPUS FREE+LENT")
    headings = ("NODE", "STATE", "OPEN", *lent, "LEASES", "PRESSURE", "PRIORITY", "SPEED", "COST", "WHY NOT MORE")
    return table(headings, rows, empty="no nodes")


@distribute.command()
@click.option(
    "-n",
    "--count",
    type=click.IntRange(1, 10_000),
    help=f"How many probes (default: {PROBES_PER_NODE} for each node that is open).",
)
@click.option(
    "--strategy", type=click.Choice(STRATEGIES, case_sensitive=False), default="spread", show_default=True
)  # fmt: skip
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="Only on these nodes.")
@click.option("-a", "--amount", type=float, default=0.1, show_default=True, help="Cores for each probe.")
@click.option("-s", "--seconds", type=float, default=1.0, show_default=True, help="How long each probe stays.")
@click.option("-w", "--wait", type=float, default=30.0, show_default=True, help="Seconds to wait for a place.")
@click.pass_obj
def test(session: CliSession, /, count: int | None, nodes: tuple[str, ...], strategy: str, **numbers: float) -> int:
    """Spread small probe jobs over the nodes and show where they ran.

    Each probe is a real job that says where it is and stays a moment, so that the next one finds the place taken. They
    are of low priority. Ctrl-C cancels those that are left. The exit code is 1 when any of them failed.
    """
    if strategy == "node_specific" and not nodes:
        raise BadInput("--strategy node_specific needs a node: --node NODE")
    if not all(math.isfinite(number) and number >= 0 for number in numbers.values()):
        raise BadInput("an amount or a time must be a number that is not negative")
    with session.client() as client:
        known = client.call("get_status")["nodes"]
    is_open = sum(1 for node in known if node["open"])
    probes = Probes(session, count or PROBES_PER_NODE * max(is_open, 1), strategy, nodes, **numbers)
    try:
        found = probes.run()
    except KeyboardInterrupt:
        return 130
    failed = [probe for probe in found["probes"] if not probe["ok"]]
    found["nodes"] = node_rows(known, found["probes"])
    used = sum(1 for row in found["nodes"] if row["probes"])
    lines = [_spread(found["nodes"])]
    lines += [f"{probe['job_id']} failed: {probe['detail']}" for probe in failed[:10]]
    many = len(found["probes"])
    lines.append(
        f"{many} probe{'' if many == 1 else 's'} on {used} node{'' if used == 1 else 's'} by {strategy}, "
        f"{len(failed)} failed, {found['seconds']:.2f} s in all"
    )
    answer(session, found, "\n".join(lines))
    return 1 if failed else 0


def _spread(nodes: list[dict[str, Any]]) -> str:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f} s"

    rows = [
        (row["node_id"], row["probes"], row["failed"], seconds(row["waited_seconds"]), seconds(row["ran_seconds"]))
        for row in nodes
    ]
    return table(("NODE", "PROBES", "FAILED", "WAITED", "RAN"), rows, empty="no nodes")
