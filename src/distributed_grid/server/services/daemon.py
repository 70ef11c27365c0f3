"""Requests about the daemon: greeting, handover, information, keeping it running, stopping it."""

from __future__ import annotations

import os
import socket
import sys
from typing import Protocol

from distributed_grid import __version__
from distributed_grid.api import requests
from distributed_grid.api.framing import PROTOCOL
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View
from distributed_grid.domain.ledger import Ledger
from distributed_grid.errors import ProtocolError
from distributed_grid.server.active_config import SelectedConfig, save_selection
from distributed_grid.server.exit_policy import IdleTimer, should_hand_over
from distributed_grid.state_dir import StateDir


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
    ) -> None:
        self._state_dir = state_dir
        self._selected = selected
        self._grid = grid
        self._idle_timer = idle_timer
        self._listener = listener

    async def hello(self, op: requests.ClientHello) -> View:
        """Greet a client; hands over to a newer version, or to another config when nothing is held."""
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

    async def info(self) -> View:
        return {
            "pid": os.getpid(),
            "socket": self._state_dir.socket,
            "uptime_seconds": round(self._idle_timer.uptime_seconds, 3),
            "config": self._selected.path,
            "version": __version__,
            "state_dir": str(self._state_dir.root),
            "stays": self._idle_timer.keep_running,
            "python": sys.version.split()[0],
            "host": socket.gethostname(),
            "rest": self._listener.url,
            "warnings": list(self._selected.config.warnings),
        }

    async def config(self) -> View:
        return {"path": self._selected.path, "config": self._selected.config.as_dict()}

    async def keep_running(self, op: requests.KeepRunning) -> View:
        """Do not exit when idle, and listen at the requested address; a successor after a crash does the same."""
        await self._listener.listen(op)
        self._set_keep_running(True)
        return await self.info()

    async def stop(self) -> View:
        self._listener.forget()
        self._set_keep_running(False)
        self._idle_timer.stop()
        return {"stopping": True}

    def _set_keep_running(self, keep_running: bool) -> None:
        self._idle_timer.keep_running = keep_running
        save_selection(self._selected, self._state_dir, stay=keep_running)


def _node_names(ledger: Ledger, now: int) -> View:
    """All nodes, and those on other machines: whoever submits has to know what to ship."""
    remote = [node.name for node in ledger.nodes.values() if node.host != "local"]
    return {"nodes": list(ledger.nodes), "far_nodes": remote}
