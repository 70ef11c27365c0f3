"""Where a program asks about memory: at the control plane of its machine, or at the desk of its machine's agent.

Rule 1. A job on another node is told where the desk is (GRID_MEMORY_SOCKET), and goes there whatever else it knows.
Rule 2. Where a control plane runs on this machine, it is asked; else the agents that run here are tried.
Rule 3. Only where there is none of these is a control plane started.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_grid.client.client import Client
from distributed_grid.errors import GridError
from distributed_grid.posix.unix_sockets import short_path
from distributed_grid.state_dir import StateDir

if TYPE_CHECKING:  # a command that names no config starts without what reads one
    from distributed_grid.config import ClusterConfig

if TYPE_CHECKING:
    from distributed_grid.config import ClusterConfig

DESK_VARIABLE = "GRID_MEMORY_SOCKET"
MOST_FREE = 16
"""So many connections are kept open while nobody asks anything."""


class AgentStateDir(StateDir):
    """The files of an agent instead of a control plane's."""

    def __init__(self, desk: Path, state_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__(state_dir)
        self.socket = desk


class BlockDirectoryClient:
    """Asks about memory from any thread; every question has a connection to itself while it lasts."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._free: list[Client] = []
        self._closed = False

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One question, one answer; raises the refusal."""
        with self._lock:
            client = self._free.pop() if self._free else self._make()
        try:
            answer = client.call(op, **arguments)
        except GridError:
            self._give_back(client)
            raise
        except BaseException:  # an answer may still be on its way
            client.close()
            raise
        self._give_back(client)
        return answer

    def close(self) -> None:
        """Hang up; safe to call twice."""
        with self._lock:
            self._closed = True
            clients, self._free = self._free, []
        for client in clients:
            client.close()

    def _give_back(self, client: Client) -> None:
        with self._lock:
            if not self._closed and len(self._free) < MOST_FREE:
                self._free.append(client)
                return
        client.close()


def memory_desk(
    config: ClusterConfig | None = None, state_dir: str | os.PathLike[str] | None = None
) -> BlockDirectoryClient:
    """Whom to ask about memory from here; nobody is asked yet."""
    near = near_desk(StateDir(state_dir), named=config is not None)
    if near is not None:
        return near
    from distributed_grid.client.async_client import locate_grid

    places, wanted = locate_grid(config, state_dir)
    return BlockDirectoryClient(lambda: Client(places, wanted))


def near_desk(places: StateDir, *, named: bool) -> BlockDirectoryClient | None:
    """The desk that a job was told of or, unless a config was named, that an agent of this machine has; else None."""
    desk = _desk_here(places, named=named)
    if desk is None:
        return None
    at = AgentStateDir(desk, places.root)
    return BlockDirectoryClient(lambda: Client(at, may_start=False))


def _desk_here(places: StateDir, *, named: bool) -> Path | None:
    """The desk of an agent, where that is whom to ask."""
    told = os.environ.get(DESK_VARIABLE)
    if told:
        return Path(told)
    if named or places.is_locked():
        return None
    desks = [*places.root.glob("agents/*/*/memory/query.sock"), places.root / "agent/memory/query.sock"]
    return next(filter(_is_open, sorted(desks)), None)


def _is_open(desk: Path) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            with short_path(desk) as path:
                probe.connect(path)
        except OSError:
            return False
    return True
