"""Probes: small jobs that say where they ran, and are all gone afterwards."""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from collections.abc import Iterator
from datetime import datetime
from statistics import fmean
from types import FrameType
from typing import Any

import click

from distributed_grid.api.framing import STDOUT
from distributed_grid.cli.global_options import CliSession
from distributed_grid.client.client import Client
from distributed_grid.client.environment import caller_environment
from distributed_grid.errors import GridError

Row = dict[str, Any]


class Probes:
    """So many probes of one kind, in a group of their own."""

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
        self._strategy = strategy
        self._message: Row = {
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

    def run(self) -> Row:
        """Send them all, wait for them all; what became of each. Whatever goes wrong, none is left behind."""
        began = time.monotonic()
        with self._none_left_behind(), self._session.client() as client:
            for name in self._names:
                client.call("submit_job", request_id=name, job_id=f"probe-{name[:12]}", **self._message)
            jobs = [client.call("wait_for_job", job_id=name)["job"] for name in self._names]
            probes = [_probe(job, _said(client, job["uid"])) for job in jobs]
        return {"strategy": self._strategy, "probes": probes, "seconds": round(time.monotonic() - began, 3)}

    @contextlib.contextmanager
    def _none_left_behind(self) -> Iterator[None]:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        try:
            yield
        except BaseException:  # Ctrl-C, too: the probes go, and whatever it was goes on
            self._cancel()
            raise

    def _cancel(self) -> None:
        stopped = 0
        with contextlib.suppress(GridError), self._session.client(may_start=False) as client:
            for name in self._names:
                with contextlib.suppress(GridError):  # it was never sent
                    stopped += client.call("cancel_job", job_id=name)["job"]["outcome"] in (None, "cancelled")
        if stopped:
            click.echo(f"grid: {stopped} probe{'' if stopped == 1 else 's'} cancelled", err=True)


def _interrupt(number: int, stack: FrameType | None) -> None:
    raise KeyboardInterrupt


def _said(client: Client, uid: str) -> list[str]:
    """What a probe wrote, as words."""
    parts = client.stream("read_logs", job_id=uid)
    return b"".join(part for kind, part in parts if kind == STDOUT and isinstance(part, bytes)).decode().split()


def _probe(job: Row, said: list[str]) -> Row:
    """What became of one; it counts when it ended well and was where the grid thinks it was."""
    node, host = said if len(said) == 2 else (None, None)
    ok = job["outcome"] == "exited" and job["exit_code"] == 0 and node == job["node_id"]
    started = job["attempts"][-1]["started_at"] if job["attempts"] else None
    return {
        "job_id": job["job_id"],
        "node_id": job["node_id"],
        "host": host,
        "ok": ok,
        "waited_seconds": None if started is None else _between(job["submitted_at"], started),
        "ran_seconds": None if started is None else job["wall_seconds"],
        "detail": None if ok else job["detail"] or f"{job['outcome']}, said {' '.join(said)!r}",
    }


def _between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def node_rows(known: list[Row], probes: list[Row]) -> list[Row]:
    """How many probes each node got, and how they fared there on average; nodes that got none, too."""
    rows = []
    for name in [node["node_id"] for node in known]:
        here = [probe for probe in probes if probe["node_id"] == name]
        rows.append(
            {
                "node_id": name,
                "probes": len(here),
                "failed": sum(1 for probe in here if not probe["ok"]),
                "waited_seconds": _mean(here, "waited_seconds"),
                "ran_seconds": _mean(here, "ran_seconds"),
            }
        )
    return rows


def _mean(probes: list[Row], field: str) -> float | None:
    values = [probe[field] for probe in probes if probe[field] is not None]
    return round(fmean(values), 3) if values else None
