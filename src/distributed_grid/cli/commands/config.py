"""`grid init` and `grid config`: write, check and show a cluster file."""

from __future__ import annotations

import contextlib
import json
import os

from distributed_grid.cli.command_line import Argument, Option, command, group
from distributed_grid.cli.output import print_answer, printable
from distributed_grid.cli.session import CliSession
from distributed_grid.client.conversation import ClientConfig, named_config
from distributed_grid.errors import BadInput, GridError
from distributed_grid.number_text import counted


@command(Argument("path", required=False), Option("--force", is_flag=True, help="Replace a file that is there."))
def init(session: CliSession, path: str | None, force: bool) -> None:
    """Write a commented cluster file to PATH (default: cluster.yaml in the state directory)."""
    from distributed_grid.config import cluster_template

    target = os.path.expanduser(path) if path else session.state_dir.cluster_file
    if path is None:
        session.state_dir.create()
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        with open(os.open(target, flags, 0o644), "w") as file:
            file.write(cluster_template())
    except FileExistsError:
        raise GridError(f"{target} is there already; --force replaces it") from None
    except OSError as failure:
        raise GridError(f"cannot write {target}: {failure.strerror}") from failure
    print_answer(session, {"path": target}, f"wrote {target}; now edit it and try: grid config check {target}")


@group()
def config() -> None:
    """Check and show the configuration."""


@config.command(
    Argument("path", required=False),
    Option("--providers", is_flag=True, help="Ask each provider, too, whether it can be used; nothing is started."),
)
def check(session: CliSession, path: str | None, providers: bool) -> int:
    """Check a cluster file and list every problem with its line."""
    from distributed_grid.config import ConfigProblems

    chosen = _chosen(session, path)
    try:
        cluster = named_config(chosen)
    except ConfigProblems as problems:
        from msgspec.structs import asdict

        listed = [asdict(problem) for problem in problems.problems]
        print_answer(session, {"ok": False, "path": chosen, "problems": listed}, str(problems))
        return 1
    lines = [f"warning: {warning}" for warning in cluster.warnings]
    lines.append(f"{chosen}: fine, {counted(len(cluster.nodes), 'node')}")
    answer = {"ok": True, "path": chosen, "warnings": list(cluster.warnings)}
    if providers:
        from distributed_grid.server.workers.provider_registry import check_providers, report_view

        listens_on = ""  # a control plane that was told to listen elsewhere does so
        with contextlib.suppress(OSError, ValueError, AttributeError):
            listens_on = str(json.loads((session.state_dir.host_dir / "listen.json").read_text()).get("host", ""))
        reports = [dict(report_view(report)) for report in check_providers(cluster, listens_on=listens_on)]
        lines += [] if reports else ["no providers"]
        for report in reports:
            lines.append(f"{report['provider']}: {'can be used' if report['ok'] else 'cannot be used'}")
            lines += [f"  problem: {problem}" for problem in report["problems"]]
            lines += [f"  {check}" for check in report["checks"]]
        answer |= {"ok": all(report["ok"] for report in reports), "providers": reports}
    print_answer(session, answer, "\n".join(printable(line) for line in lines))
    return 0 if answer["ok"] else 1


@config.command(Argument("path", required=False))
def show(session: CliSession, path: str | None) -> None:
    """Show a cluster file (default: the one in use) in its one normal form."""
    from distributed_grid.config.yaml_document import render

    if path is None and session.config is None:
        shown = json.loads(json.dumps(session.query.get_config().config))  # YAML knows no records
    else:
        shown = named_config(_chosen(session, path)).as_dict()
    print_answer(session, shown, render(shown))


@config.command(Argument("path", required=False))
def reload(session: CliSession, path: str | None) -> int:
    """Apply a changed cluster file (default: the one in use) to the running control plane.

    Thresholds, limits, policies, quotas, labels and alerts change at once. Other keys take a new control plane: where
    nothing is held it takes over now, else they are named, with the command to type.
    """
    from distributed_grid.client.client import Client

    chosen = path or session.named_config
    with session.running_client() as client:
        chosen = chosen or client.get_daemon_info().config
        if chosen is None:
            raise BadInput("the control plane uses no cluster file; name one: grid config reload FILE")
        named = ClientConfig(chosen, explicit=True)
        fields = named.greeting_fields()
        fields.pop("config")
        answer = client.reload_config(**fields)
    if answer.handing_over:
        with Client(session.state_dir, named) as client:
            client.greet()
    shown = answer.path or "this machine alone"
    lines = [printable(note) for note in answer.notes]
    if answer.handing_over:
        lines.append(f"a new control plane uses {shown}")
    elif answer.pending:
        pending = ", ".join(answer.pending)
        lines.append(printable(f"not applied: {pending}: a new control plane is needed, and {answer.advice}"))
    elif not lines:
        lines.append(f"nothing has changed in {shown}")
    print_answer(session, answer, "\n".join(lines))
    return 1 if answer.pending else 0


def _chosen(session: CliSession, path: str | None) -> str:
    chosen = path or session.named_config
    if chosen is None:
        chosen = session.find_config()
        if chosen is None:
            raise BadInput("no cluster file found: name one, or make one with: grid init")
        session.announce_config(chosen)
    return chosen
