"""`grid daemon`: the control plane."""

from __future__ import annotations

import time
from pathlib import Path

import click

from distributed_grid.cli.globals import GridGroup, Session
from distributed_grid.cli.show import answer
from distributed_grid.errors import TimedOut, Unreachable

STOP_SECONDS = 30.0


@click.group(cls=GridGroup)
def daemon() -> None:
    """Start, stop and look at the control plane. Any command starts one where none runs."""


@daemon.command()
@click.pass_obj
def start(session: Session) -> None:
    """Start the control plane and let it stay until it is stopped."""
    try:
        with session.client(may_start=False) as client:
            info = client.call("stay")
        answer(session, info, f"already running, pid {info['pid']}")
        return
    except Unreachable:
        pass
    with session.client() as client:
        client.start(stay=True)
        info = client.call("stay")  # where another command was quicker, its daemon stays, too
    answer(session, info, f"running, pid {info['pid']}")


@daemon.command()
@click.pass_obj
def stop(session: Session) -> None:
    """Stop the control plane; jobs go on and are found again by the next one."""
    try:
        with session.client(may_start=False) as client:
            pid = client.call("info")["pid"]
            client.call("stop")
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
def status(session: Session) -> None:
    """Whether the control plane runs, and where; exits 3 where it does not."""
    with session.client(may_start=False) as client:
        info = client.call("info")
    lines = [
        f"{name.replace('_', ' ') + ':':16}{info[name]}" for name in ("pid", "socket", "uptime_seconds", "version")
    ]
    lines.append(f"{'config:':16}{info['config'] or 'none (this machine alone)'}")
    answer(session, info, "\n".join(lines + [f"warning: {warning}" for warning in info["warnings"]]))


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
