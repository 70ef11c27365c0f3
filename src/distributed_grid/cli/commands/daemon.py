"""`grid daemon`: the control plane."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from distributed_grid.cli.commands.tokens import join_token, token
from distributed_grid.cli.global_options import CliSession, GridGroup
from distributed_grid.cli.output import answer
from distributed_grid.errors import TimedOut, Unreachable

STOP_SECONDS = 30.0


@click.group(cls=GridGroup)
def daemon() -> None:
    """Start, stop and look at the control plane. Any command starts one where none runs."""


daemon.add_command(token)
daemon.add_command(join_token)


@daemon.command()
@click.option("--listen", metavar="HOST:PORT", help="Where REST and joining agents are served, until it is stopped.")
@click.option("--tls/--no-tls", default=None, help="Encrypt (default: wherever other machines can reach it).")
@click.option("--force-plain", is_flag=True, help="Listen for other machines without TLS.")
@click.pass_obj
def start(session: CliSession, listen: str | None, tls: bool | None, force_plain: bool) -> None:
    """Start the control plane and let it stay until it is stopped."""
    where = _listening(listen, tls, force_plain)
    try:
        with session.client(may_start=False) as client:
            info = client.call("keep_running", **where)
        answer(session, info, f"already running, pid {info['pid']}")
        return
    except Unreachable:
        pass
    with session.client() as client:
        client.start(stay=True)
        info = client.call("keep_running", **where)  # where another command was quicker, its daemon stays, too
    answer(session, info, f"running, pid {info['pid']}")


@daemon.command()
@click.pass_obj
def stop(session: CliSession) -> None:
    """Stop the control plane; jobs go on and are found again by the next one."""
    try:
        with session.running() as client:
            pid = client.call("get_daemon_info")["pid"]
            client.call("stop_daemon")
    except Unreachable:
        answer(session, {"stopped": False}, "not running")
        return
    deadline = time.monotonic() + STOP_SECONDS
    while session.places.is_owned() or _is_alive(pid):
        if time.monotonic() > deadline:
            raise TimedOut(f"the control plane (pid {pid}) has not stopped within {STOP_SECONDS:g} s")
        time.sleep(0.02)
    answer(session, {"stopped": True, "pid": pid}, f"stopped, pid {pid}")


@daemon.command()
@click.pass_obj
def status(session: CliSession) -> None:
    """Whether the control plane runs, and where; exits 3 where it does not."""
    with session.client(may_start=False) as client:
        info = client.call("get_daemon_info")
    lines = [
        f"{name.replace('_', ' ') + ':':16}{info[name]}"
        for name in ("pid", "socket", "rest", "uptime_seconds", "version")
    ]
    lines.append(f"{'config:':16}{info['config'] or 'none (this machine alone)'}")
    answer(session, info, "\n".join(lines + [f"warning: {warning}" for warning in info["warnings"]]))


def _listening(listen: str | None, tls: bool | None, force_plain: bool) -> dict[str, Any]:
    """The fields that say where to listen; what cannot be is refused before anything is started."""
    if listen is None:
        if tls is not None or force_plain:
            raise click.UsageError("--tls, --no-tls and --force-plain go with --listen HOST:PORT")
        return {}
    from distributed_grid.server.rest.listener import parse_address

    parse_address(listen, tls=tls, force_plain=force_plain)
    if force_plain:
        click.echo(f"grid: warning: what is said on {listen} can be read by anybody on the way", err=True)
    return {"listen": listen, "tls": tls, "force_plain": force_plain}


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
