"""`grid cluster` and `grid agent`: the agents of other machines, over SSH, in Ray clusters, or joined by a token."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

from distributed_grid.cli.command_line import Argument, IntRange, Option, command, group
from distributed_grid.cli.output import (
    FREE_AND_LENT,
    echo,
    free_and_lent,
    narrowed,
    node_state,
    print_answer,
    printable,
    table,
    terminal_width,
)
from distributed_grid.cli.session import CliSession
from distributed_grid.client.conversation import present
from distributed_grid.errors import BadInput

if TYPE_CHECKING:
    from distributed_grid.api.answers.cluster import ClusterEnvironment, ClusterMachines, NodeResults, RayStatus
    from distributed_grid.api.answers.nodes import NodeRow, NodeStep
    from distributed_grid.client.operations import ManageClusterFields

INHERITED_VARIABLES = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONFIG_FILE", "PIP_CERT"),
    *("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "GRID_WHEELS"),
)
"""Variables of the caller that fetch packages for nodes; the environment of the control plane is clean."""
USE_RAY = 'for `ray status` and Ray programs, in each new shell: eval "$(grid cluster env)"'
USE_FAR_RAY = 'for Ray programs, in each new shell: eval "$(grid cluster env)"; then also: ray status --address {head}'
"""Where Ray's head is another machine: programs may have to use Ray Client, which `ray status` cannot."""
USE_LATER = 'for Ray programs, once the ports of its head are forwarded, in each new shell: eval "$(grid cluster env)"'
ENTER_DASHBOARD = '; the dashboard\'s token: cat "$RAY_AUTH_TOKEN_PATH"'
Show = Callable[["NodeStep"], None]
Verb = Literal["install", "start", "stop", "status", "env"]
_names = Argument("nodes", nargs=-1, metavar="[NODE]...")
_discard_results = Option("--discard-results", is_flag=True, help="Also remove results that were never fetched.")


@group()
def cluster() -> None:
    """Install, start, stop and show the agents of other machines, by SSH. Without names: of all of them."""


@cluster.command(
    _names,
    Option("--ray", is_flag=True, help="Put Ray there too, in this grid's own version, unless `ray.python` is set."),
)
def install(session: CliSession, nodes: tuple[str, ...], ray: bool) -> int:
    """Put the package on the nodes. They need Python 3.11 and SSH, but no internet."""
    with _steps(session) as show:
        answer = session.ask.manage_cluster(show, **_selection("install", nodes, ray=ray))
    return _print_results(session, answer)


@cluster.command(_names, Option("--ray", is_flag=True, help="Start Ray, too, the head first (docs/guide/ray.md)."))
def start(session: CliSession, nodes: tuple[str, ...], ray: bool) -> int:
    """Start the agents, and install the package first where this version is missing."""
    with _steps(session) as show:
        answer = session.ask.manage_cluster(show, **_selection("start", nodes, ray=ray))
    code = _print_results(session, answer)
    if ray and not code and not session.json:
        echo(ray_hint(_machines(session).ray))
    return code


@cluster.command(
    _names,
    Option("--force", is_flag=True, help="Do not wait until everything lent has been given back."),
    Option("--purge", is_flag=True, help="Also remove the installed files; refused while results were not fetched."),
    _discard_results,
)
def stop(session: CliSession, nodes: tuple[str, ...], force: bool, purge: bool, discard_results: bool) -> int:
    """Stop the agents; jobs get notice and go back into the queue. No process is left behind."""
    if discard_results and not purge:
        raise BadInput("--discard-results needs --purge: without it no file is removed")
    with _steps(session) as show, session.client(any_config=True) as client:
        selection = _selection("stop", nodes, force=force, purge=purge, discard_results=discard_results)
        answer = client.manage_cluster(show, **selection)
    return _print_results(session, answer)


@cluster.command(_names)
def status(session: CliSession, nodes: tuple[str, ...]) -> None:
    """Each node: its state and link, its free and lent resources, its versions, and the reasons why it lends no
    more."""
    machines = _machines(session, nodes)
    ray = machines.ray
    rows = [
        (
            node.node_id,
            node.address,
            node_state(node),
            node.link,
            *free_and_lent(cast("NodeRow", node)),
            node.jobs,
            node.version,
            node.python,
            node.ray.state if node.ray else None,
            None if node.seconds_since_heard is None else f"{node.seconds_since_heard:.1f} s ago",
            "; ".join([*([node.detail] if node.detail else []), *(present(node.keeps) or ())]),
        )
        for node in machines.nodes
    ]
    headings = (
        *("NODE", "ADDRESS", "STATE", "LINK", *FREE_AND_LENT, "JOBS"),
        *("VERSION", "PYTHON", "RAY", "HEARD", "DETAIL"),
    )
    shown = table(*narrowed(headings, rows, terminal_width()), empty="no nodes")
    if ray is None:
        ray_lines = []
    else:
        lines = [f"Ray: {ray.address}, {'with a token' if ray.authenticated else 'without a token'}"]
        lines.append(f"  dashboard  {printable(ray.dashboard)}")
        lines.append(f"  client     {printable(ray.client)}")
        lines.append(f"  {ray_hint(ray)}; on a node: grid cluster env NODE")
        ray_lines = [*lines, f"  RISK: {ray.risk}"] if ray.risk else lines
    print_answer(session, machines.nodes, "\n".join([shown, *ray_lines]))


@cluster.command(Argument("node", required=False))
def env(session: CliSession, node: str | None) -> None:
    """Variables to export so that Ray programs and `ray status` reach the grid's Ray: on this machine, or on a node.

    Where Ray's head is another machine and no node of Ray is this one, programs use Ray Client, and the last line says
    which address `ray status` needs.

    \b
    $ eval "$(grid cluster env)"
    """
    selection = _selection("env", (node,) if node else ())
    answer = cast("ClusterEnvironment", session.query.manage_cluster(_ignore_step, **selection))
    environ, head = answer.environ, answer.ray.head if answer.ray else None
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environ.items())]
    if node:
        path = os.path.dirname(environ.get("GRID_RAY_PYTHON", ""))
    else:  # the `ray` command of this environment, where it is not on the caller's path
        path = os.path.dirname(sys.executable)
        is_known = path in os.environ.get("PATH", "").split(os.pathsep)
        path = path if not is_known and os.path.exists(os.path.join(path, "ray")) else ""
    if path:
        lines.append(f'export PATH={shlex.quote(path)}:"$PATH"')
    if environ["RAY_ADDRESS"].startswith("ray://") and head:
        lines.append(f"# ray status needs another address here: ray status --address {head}")
    print_answer(session, environ, "\n".join(lines))


@cluster.command(Argument("address"))
def attach(session: CliSession, address: str) -> int:
    """Use a Ray cluster that already runs, without SSH: each of its nodes gets an agent, those that join later too.

    ADDRESS is `auto` (a Ray on this machine), HOST:PORT (where this machine is a node of it), or ray://HOST:10001. Its
    token is found as Ray finds it: $RAY_AUTH_TOKEN, $RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token.
    """
    with _steps(session) as show:
        answer = session.ask.attach_ray(show, address=address, token=_ray_token(), environ=_inherited_variables())
    for warning in answer.warnings:
        echo(f"RISK: {printable(warning)}", err=True)
    return _print_results(session, answer)


@cluster.command(
    Option("--force", is_flag=True, help="Do not wait for leases; also when Ray is gone for good."),
    _discard_results,
)
def detach(session: CliSession, force: bool, discard_results: bool) -> int:
    """Leave the attached Ray cluster: jobs go back into the queue, nothing of the grid stays there.

    Refused while results of jobs on its nodes were not fetched.
    """
    with _steps(session) as show:
        answer = session.ask.detach_ray(show, force=force, discard_results=discard_results)
    return _print_results(session, answer)


def _print_results(session: CliSession, answer: object) -> int:
    """Print the result of each node; 1 when any failed."""
    results = cast("NodeResults", answer).results
    rows = [(result.node_id, "done" if result.ok else "FAILED", result.detail) for result in results]
    print_answer(session, results, table(("NODE", "RESULT", "DETAIL"), rows, empty="no nodes"))
    return 0 if all(result.ok for result in results) else 1


def _machines(session: CliSession, nodes: tuple[str, ...] = ()) -> ClusterMachines:
    """The machines of the cluster, by the answer to `grid cluster status`."""
    return cast("ClusterMachines", session.query.manage_cluster(_ignore_step, **_selection("status", nodes)))


def _ray_token() -> str:
    """The token that Ray itself would use here; empty where there is none."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip()
    path = os.path.expanduser(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token")
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        if os.environ.get("RAY_AUTH_TOKEN_PATH"):
            raise BadInput(f"$RAY_AUTH_TOKEN_PATH names {path}, which cannot be read") from None
        return ""


def ray_hint(ray: RayStatus | None) -> str:
    """Commands to type on this machine to use the grid's Ray and to enter its dashboard."""
    if ray is None:
        return USE_RAY
    far = USE_FAR_RAY.format(head=printable(ray.head)) if ray.head else USE_LATER
    hint = USE_RAY if ray.head == ray.address else far
    return hint + ENTER_DASHBOARD if ray.authenticated and ray.dashboard else hint


def _selection(
    verb: Verb,
    nodes: tuple[str, ...],
    *,
    force: bool = False,
    purge: bool = False,
    discard_results: bool = False,
    ray: bool = False,
) -> ManageClusterFields:
    """Fields of every request about nodes: the operation, the nodes, and parts of the caller's environment."""
    return {
        "verb": verb,
        "nodes": nodes,
        "force": force,
        "purge": purge,
        "discard_results": discard_results,
        "ray": ray,
        "auth_sock": os.environ.get("SSH_AUTH_SOCK", ""),
        "environ": _inherited_variables(),
    }


def _inherited_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in INHERITED_VARIABLES if os.environ.get(name)}


def _ignore_step(step: NodeStep) -> None:
    pass


@contextmanager
def _steps(session: CliSession) -> Iterator[Show]:
    """Display of steps: one live line per node on a terminal, else one plain line per step."""
    if session.json:
        yield _ignore_step
        return
    if not sys.stdout.isatty():
        yield lambda step: echo(f"{step.node_id}: {printable(step.step)}")
        return
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    steps: dict[str, str] = {}

    def drawn() -> Table:
        lines = Table.grid(padding=(0, 1))
        for node, step in steps.items():
            lines.add_row(Spinner("dots"), Text(printable(node), style="bold"), Text(printable(step)))
        return lines

    with Live(drawn(), transient=True, refresh_per_second=8) as live:

        def show(step: NodeStep) -> None:
            steps[step.node_id] = step.step
            live.update(drawn())

        yield show


@command(
    Option("--dir", "directory", metavar="DIR", help="Where it keeps everything (default: agent in the state dir)."),
    Option("--join", "token", metavar="TOKEN", help="Join a grid with this token of `grid daemon join-token create`."),
    Option("--join-file", "token_file", metavar="FILE", help="The same, with the token in FILE; - is standard input."),
    Option("--address", metavar="HOST:PORT", help="Where the control plane is, if not where the token says."),
    Option("--name", help="The name of this node when joining (default: the host name)."),
    Option("--declare-gpus", type=IntRange(0, 1024), default=0, help="Number of GPUs to pretend to have (for labs)."),
    Option("--end", is_flag=True, help="Stop every job that is left there, then exit."),
)
def agent(
    session: CliSession, directory: str | None, token: str | None, token_file: str | None, address: str | None,
    name: str | None, declare_gpus: int, end: bool,
) -> int:  # fmt: skip
    """Serve as a node until stopped; running jobs continue, and the next agent finds them again.

    With SSH, `grid cluster start` starts it. On other machines, join with a token once, from a file or
    $GRID_JOIN_TOKEN (a token on the command line is seen by others until the agent has hidden it); after that
    `grid agent` alone is enough.
    """
    from distributed_grid.agent.__main__ import main

    words = ["--dir", directory or str(session.state_dir.root / "agent")]
    words += ["--declare-gpus", str(declare_gpus)] if declare_gpus else []
    given = (("--join", token), ("--join-file", token_file), ("--address", address), ("--name", name))
    for flag, value in given:
        words += [flag, value] if value else []
    return main([*words, "--end"] if end else words)
