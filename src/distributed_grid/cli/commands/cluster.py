"""`grid cluster` and `grid agent`: the agents of other machines, over SSH, in Ray clusters, or joined by a token."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
from distributed_grid.errors import BadInput

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
Show = Callable[[str, str], None]
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
    return _run(session, "manage_cluster", **_selection("install", nodes), ray=ray)


@cluster.command(_names, Option("--ray", is_flag=True, help="Start Ray, too, the head first (docs/guide/ray.md)."))
def start(session: CliSession, nodes: tuple[str, ...], ray: bool) -> int:
    """Start the agents, and install the package first where this version is missing."""
    code = _run(session, "manage_cluster", **_selection("start", nodes), ray=ray)
    if ray and not code and not session.json:
        view = session.stream_steps("manage_cluster", _show_nothing, query_only=True, **_selection("status", ()))
        echo(ray_hint(view["ray"]))
    return code


@cluster.command(
    _names,
    Option("--force", is_flag=True, help="Do not wait until everything lent has been given back."),
    Option("--purge", is_flag=True, help="Remove what was installed, too; refused while results were not fetched."),
    _discard_results,
)
def stop(session: CliSession, nodes: tuple[str, ...], force: bool, purge: bool, discard_results: bool) -> int:
    """Stop the agents; jobs get notice and go back into the queue. No process is left behind."""
    if discard_results and not purge:
        raise BadInput("--discard-results needs --purge: without it no file is removed")
    options = {"force": force, "purge": purge, "discard_results": discard_results}
    return _run(session, "manage_cluster", **_selection("stop", nodes), **options)


@cluster.command(_names)
def status(session: CliSession, nodes: tuple[str, ...]) -> None:
    """Each node: its state and link, its free and lent resources, its versions, and the reasons why it lends no
    more."""
    view = session.stream_steps("manage_cluster", _show_nothing, query_only=True, **_selection("status", nodes))
    found, ray = view["nodes"], view["ray"]
    rows = [
        (
            row["node_id"],
            row["address"],
            node_state(row),
            row["link"],
            *free_and_lent(row),
            row["jobs"],
            row["version"],
            row["python"],
            row["ray"]["state"] if row["ray"] else None,
            None if row["seconds_since_heard"] is None else f"{row['seconds_since_heard']:.1f} s ago",
            "; ".join([*([row["detail"]] if row["detail"] else []), *row["keeps"]]),
        )
        for row in found
    ]
    headings = (
        *("NODE", "ADDRESS", "STATE", "LINK", *FREE_AND_LENT, "JOBS"),
        *("VERSION", "PYTHON", "RAY", "HEARD", "DETAIL"),
    )
    shown = table(*narrowed(headings, rows, terminal_width()), empty="no nodes")
    if ray is None:
        ray_lines = []
    else:
        lines = [f"Ray: {ray['address']}, {'with a token' if ray['authenticated'] else 'without a token'}"]
        lines.append(f"  dashboard  {printable(ray['dashboard'])}")
        lines.append(f"  client     {printable(ray['client'])}")
        lines.append(f"  {ray_hint(ray)}; on a node: grid cluster env NODE")
        ray_lines = [*lines, f"  RISK: {ray['risk']}"] if ray["risk"] else lines
    print_answer(session, found, "\n".join([shown, *ray_lines]))


@cluster.command(Argument("node", required=False))
def env(session: CliSession, node: str | None) -> None:
    """Variables to export so that Ray programs and `ray status` reach the grid's Ray: on this machine, or on a node.

    Where Ray's head is another machine and no node of Ray is this one, programs use Ray Client, and the last line says
    which address `ray status` needs.

    \b
    $ eval "$(grid cluster env)"
    """
    view = session.stream_steps(
        "manage_cluster", _show_nothing, query_only=True, **_selection("env", (node,) if node else ())
    )
    environ = view["environ"]
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environ.items())]
    if node:
        path = os.path.dirname(environ.get("GRID_RAY_PYTHON", ""))
    else:  # the `ray` command of this environment, where it is not on the caller's path
        path = os.path.dirname(sys.executable)
        is_known = path in os.environ.get("PATH", "").split(os.pathsep)
        path = path if not is_known and os.path.exists(os.path.join(path, "ray")) else ""
    if path:
        lines.append(f'export PATH={shlex.quote(path)}:"$PATH"')
    if environ["RAY_ADDRESS"].startswith("ray://") and view["ray"]["head"]:
        lines.append(f"# ray status needs another address here: ray status --address {view['ray']['head']}")
    print_answer(session, environ, "\n".join(lines))


@cluster.command(Argument("address"))
def attach(session: CliSession, address: str) -> int:
    """Use a Ray cluster that already runs, without SSH: each of its nodes gets an agent, those that join later too.

    ADDRESS is `auto` (a Ray on this machine), HOST:PORT (where this machine is a node of it), or ray://HOST:10001. Its
    token is found as Ray finds it: $RAY_AUTH_TOKEN, $RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token.
    """
    options = {"address": address, "token": _ray_token(), "environ": _inherited_variables()}
    return _run(session, "attach_ray", **options)


@cluster.command(
    Option("--force", is_flag=True, help="Do not wait for what is lent; also when Ray is gone for good."),
    _discard_results,
)
def detach(session: CliSession, force: bool, discard_results: bool) -> int:
    """Leave the attached Ray cluster: jobs go back into the queue, nothing of the grid stays there.

    Refused while results of jobs on its nodes were not fetched.
    """
    return _run(session, "detach_ray", force=force, discard_results=discard_results)


def _run(session: CliSession, op: str, **options: Any) -> int:
    """Run an operation on nodes, show its steps and the result of each node; 1 when any failed."""
    with _progress(session) as show:
        last = session.stream_steps(op, show, any_config=options.get("verb") == "stop", **options)
    for warning in last.get("warnings", ()):
        echo(f"RISK: {printable(warning)}", err=True)
    rows = [(row["node_id"], "done" if row["ok"] else "FAILED", row["detail"]) for row in last["results"]]
    print_answer(session, last["results"], table(("NODE", "RESULT", "DETAIL"), rows, empty="no nodes"))
    return 0 if all(row["ok"] for row in last["results"]) else 1


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


def ray_hint(ray: dict[str, Any] | None) -> str:
    """Commands to type on this machine to use the grid's Ray and to enter its dashboard."""
    if ray is None:
        return USE_RAY
    far = USE_FAR_RAY.format(head=printable(ray["head"])) if ray["head"] else USE_LATER
    hint = USE_RAY if ray["head"] == ray["address"] else far
    return hint + ENTER_DASHBOARD if ray["authenticated"] and ray["dashboard"] else hint


def _selection(verb: str, nodes: tuple[str, ...]) -> dict[str, Any]:
    """Fields of every request about nodes: the operation, the nodes, and parts of the caller's environment."""
    auth_sock = os.environ.get("SSH_AUTH_SOCK", "")
    return {"verb": verb, "nodes": nodes, "auth_sock": auth_sock, "environ": _inherited_variables()}


def _inherited_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in INHERITED_VARIABLES if os.environ.get(name)}


def _show_nothing(node: str, step: str) -> None:
    pass


@contextmanager
def _progress(session: CliSession) -> Iterator[Show]:
    """Display of steps: one live line per node on a terminal, else one plain line per step."""
    if session.json:
        yield _show_nothing
        return
    if not sys.stdout.isatty():
        yield lambda node, step: echo(f"{node}: {printable(step)}")
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

        def show(node: str, step: str) -> None:
            steps[node] = step
            live.update(drawn())

        yield show


@command(
    Option("--dir", "directory", metavar="DIR", help="Where it keeps everything (default: agent in the state dir)."),
    Option("--join", "token", metavar="TOKEN", help="Join a grid with this token of `grid daemon join-token create`."),
    Option("--join-file", "token_file", metavar="FILE", help="The same, with the token in FILE; - is standard input."),
    Option("--address", metavar="HOST:PORT", help="Where the control plane is, if not where the token says."),
    Option("--name", help="The name of this node when joining (default: the host name)."),
    Option("--declare-gpus", type=IntRange(0, 1024), default=0, help="Pretend to have so many GPUs (for labs)."),
    Option("--end", is_flag=True, help="Stop every job that is left there, then exit."),
)
def agent(
    session: CliSession, directory: str | None, token: str | None, token_file: str | None, address: str | None,
    name: str | None, declare_gpus: int, end: bool,
) -> int:  # fmt: skip
    """Serve as a node until stopped; what runs goes on, and the next agent finds it again.

    Over SSH nobody types this: `grid cluster start` does it. On other machines, join with a token once, from a file or
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
