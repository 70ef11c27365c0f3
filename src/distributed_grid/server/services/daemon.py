"""Requests about the daemon, and when it exits: idle timer, stop, handover to a newer version or another config."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from distributed_grid import __version__
from distributed_grid.adapters.age_clock import AgeClock
from distributed_grid.api import requests
from distributed_grid.api.framing import PROTOCOL
from distributed_grid.config import ClusterConfig
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View
from distributed_grid.domain.clock_jumps import jump_text
from distributed_grid.domain.events import ClocksConfirmed
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import PULL_HOST
from distributed_grid.domain.rebalancing import is_automatic
from distributed_grid.errors import ProtocolError, Refused
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.active_config import NamedConfigs, SelectedConfig, save_selection
from distributed_grid.state_dir import StateDir

MAX_NAMED = 10
TERMINATE_ADVICE = "grid workers terminate ID…"
QUERY_ADVICE = "leave --config (or $GRID_CONFIG) out, or type: grid daemon stop"
log = logging.getLogger(__name__)


class IdleTimer:
    """Ends the daemon after `idle_seconds` without requests and without anything held; never with `keep_running`."""

    def __init__(self, *, keep_running: bool, idle_seconds: float) -> None:
        self.keep_running = keep_running
        self._idle_seconds = idle_seconds
        self._started = self._last_request = time.monotonic()
        self._stopping = asyncio.Event()

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started

    def reset(self) -> None:
        """A request came in just now."""
        self._last_request = time.monotonic()

    def stop(self) -> None:
        """Let `wait` return; safe to call twice."""
        self._stopping.set()

    async def wait(self, is_idle: Callable[[], Awaitable[bool]]) -> None:
        """Return on `stop`, or when `is_idle` held and no request came for long enough."""
        idle_since = time.monotonic()
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), min(max(self._idle_seconds / 10, 0.05), 5.0))
            if self.keep_running or not await is_idle():
                idle_since = time.monotonic()
            elif time.monotonic() - max(idle_since, self._last_request) >= self._idle_seconds:
                log.info("idle for %g s", self._idle_seconds)
                return


def is_unused(ledger: Ledger, now: int) -> bool:
    """Whether nothing is held, nobody waits, no worker costs money, and no agent elsewhere counts on this control
    plane."""
    has_agents = ledger.engines or any(node.wanted for node in ledger.nodes.values())
    has_blocks = any(not block.lost for block in ledger.blocks.values())
    return not ledger.jobs and not has_blocks and not user_leases(ledger) and not has_agents and not ledger.workers


def user_leases(ledger: Ledger) -> list[Lease]:
    """Leases that somebody holds or waits for; automatic ones do not keep the daemon running."""
    return [lease for lease in ledger.leases.values() if not is_automatic(lease.request)]


async def should_hand_over(hello: requests.ClientHello, selected: SelectedConfig, grid: Grid) -> bool:
    """Whether to exit for the client's newer version or other config; Refused while that config is in use.

    Never for a client that only asks: where it has named another config than ours, it is refused.
    """
    is_same = hello.config is None or hello.config == selected.digest
    using = f"the running control plane uses {selected.path or 'no config'}"
    if hello.query_only:
        if is_same:
            return False
        raise Refused(f"{using}, and a command that only shows something does not change that; {QUERY_ADVICE}")
    if _numbers(hello.version) > _numbers(__version__):
        log.info("handing over to version %s", hello.version)
        return True
    if is_same and not (hello.config and selected.inert):
        return False

    def in_use(ledger: Ledger, now: int) -> tuple[int, list[str], list[str]]:
        wanted = [node.name for node in ledger.nodes.values() if node.wanted and not node.joined]
        return len(user_leases(ledger)), wanted, list(ledger.workers)

    busy, served, workers = await grid.read(in_use)
    if is_same:  # what was inert in it acts from the next start on: now, unless that would disturb somebody
        return not busy and not served
    if workers:
        raise Refused(f"{using} and has workers of a provider: {name_some(workers)}; first type: {TERMINATE_ADVICE}")
    if busy:
        raise Refused(
            f"{using} and holds {busy} lease{'' if busy == 1 else 's'}; "
            "wait until they are over, or type: grid daemon stop"
        )
    if served:
        raise Refused(f"{using} and agents run on {', '.join(served)}; first type: grid cluster stop")
    if hello.config_path is not None:
        ClusterConfig.from_yaml(hello.config_path)  # an unusable config must not end this daemon
    log.info("handing over to config %s", hello.config_path)
    return True


def name_some(workers: list[str]) -> str:
    """Workers in a message."""
    return ", ".join(workers[:MAX_NAMED]) + (" and others" if workers[MAX_NAMED:] else "")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".") if part.isdigit())


class NetworkListener(Protocol):
    """The TCP port of the control plane."""

    @property
    def url(self) -> str | None: ...
    async def listen(self, op: requests.KeepRunning) -> None:
        """Listen at the requested address, now and after a crash; without an address nothing changes."""

    def forget(self) -> None:
        """Let the next control plane listen where the config says."""


class DaemonService:
    """Answers the requests about the daemon."""

    def __init__(
        self,
        state_dir: StateDir,
        selected: SelectedConfig,
        grid: Grid,
        idle_timer: IdleTimer,
        listener: NetworkListener,
        ages: AgeClock,
    ) -> None:
        self._state_dir = state_dir
        self._selected = selected
        self._grid = grid
        self._idle_timer = idle_timer
        self._listener = listener
        self._ages = ages

    async def hello(self, op: requests.ClientHello) -> View:
        """Greet a client; hands over to a newer version, or to another config when nothing is held."""
        if op.config is not None and op.config == self._selected.digest and op.config_path is not None:
            NamedConfigs(self._state_dir).add(op.config_path, op.config)
        handing_over = await should_hand_over(op, self._selected, self._grid)
        if handing_over:
            self._idle_timer.stop()
        elif op.protocol != PROTOCOL:
            raise ProtocolError(
                f"this control plane is grid {__version__} and speaks protocol {PROTOCOL}, not {op.protocol} like grid "
                f"{op.version}: upgrade the older one"
            )
        welcome = {"protocol": PROTOCOL, "version": __version__, "pid": os.getpid(), "handing_over": handing_over}
        return {**welcome, **await self._grid.read(_node_names)}

    async def clocks(self) -> View:
        """The wall clocks of the control plane and of the nodes on other machines, with their pending jumps."""
        state = self._ages.look()
        by_ms = state.jump.by_ms if state.jump is not None else 0
        others = await self._grid.read(_other_clocks)
        return {"clocks": [_clock_row(None, by_ms, state.waits_ms), *others]}

    async def confirm_clocks(self, caller: Caller) -> View:
        """End the waits: here at once, on nodes with their next heartbeats. A second time is harmless."""
        self._ages.confirm()
        await self._grid.handle(ClocksConfirmed(caller.user))
        return await self.clocks()

    async def info(self) -> View:
        state = self._ages.look()
        jumped = [jump_text("this machine", state.jump.by_ms, state.waits_ms)] if state.jump is not None else []
        return {
            "pid": os.getpid(),
            "socket": self._state_dir.socket,
            "uptime_seconds": round(self._idle_timer.uptime_seconds, 3),
            "config": self._selected.path,
            "name": self._selected.config.name,
            "version": __version__,
            "state_dir": str(self._state_dir.root),
            "stays": self._idle_timer.keep_running,
            "python": sys.version.split()[0],
            "host": socket.gethostname(),
            "rest": self._listener.url,
            "warnings": [*self._selected.config.warnings, *self._selected.notes(), *jumped],
        }

    async def config(self) -> View:
        return {"path": self._selected.path, "config": self._selected.config.as_dict()}

    async def keep_running(self, op: requests.KeepRunning) -> View:
        """Do not exit when idle, and listen at the requested address; a successor after a crash does the same."""
        await self._listener.listen(op)
        self._set_keep_running(True)
        return await self.info()

    async def stop(self, op: requests.StopDaemon) -> View:
        """Stop; refused while workers of providers are not proven gone, unless it is forced: they cost money."""
        workers: list[str] = await self._grid.read(lambda ledger, now: list(ledger.workers))
        if workers and not op.force:
            raise Refused(
                f"{len(workers)} worker{'' if len(workers) == 1 else 's'} of a provider would go on and cost money: "
                f"{name_some(workers)}; first type: {TERMINATE_ADVICE}, or stop all the same: grid daemon stop --force"
            )
        self._listener.forget()
        self._set_keep_running(False)
        self._idle_timer.stop()
        return {"stopping": True, "workers": workers}

    def _set_keep_running(self, keep_running: bool) -> None:
        self._idle_timer.keep_running = keep_running
        save_selection(self._selected, self._state_dir, stay=keep_running)


def _other_clocks(ledger: Ledger, now: int) -> list[View]:
    nodes = (node.name for node in ledger.nodes.values() if node.host not in ("local", PULL_HOST))
    heard = (ledger.observations.get(name) for name in nodes)
    return [
        _clock_row(seen.node, 0 if seen.clock_confirmed else seen.clock_jump_ms, seen.clock_waits_ms)
        for seen in heard
        if seen is not None
    ]


def _clock_row(node: str | None, by_ms: int, waits_ms: int) -> View:
    return {
        "node_id": node,
        "jumped_seconds": by_ms / 1000 if by_ms else None,
        "waits_seconds": waits_ms / 1000 if by_ms else None,
    }


def _node_names(ledger: Ledger, now: int) -> View:
    """All nodes, and those on other machines: whoever submits has to know what to ship."""
    remote = [node.name for node in ledger.nodes.values() if node.host not in ("local", PULL_HOST)]
    return {"nodes": list(ledger.nodes), "far_nodes": remote}
