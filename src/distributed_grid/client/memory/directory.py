"""Client of the block directory: the control plane, asked directly or through an agent of this machine.

A job on another node finds its agent's query socket in GRID_MEMORY_SOCKET, and goes there whatever else it knows. Else
a control plane that runs on this machine is asked, or the agents that run here; only where there is none of these is a
control plane started.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_grid.client.client import Client
from distributed_grid.client.conversation import JsonObject
from distributed_grid.client.operations import Operations
from distributed_grid.errors import GridError
from distributed_grid.posix.sockets import short_path
from distributed_grid.state_dir import StateDir

if TYPE_CHECKING:  # a command that names no config starts without what reads one
    from distributed_grid.api.answers.memory import BlockRow
    from distributed_grid.config import ClusterConfig

SOCKET_VARIABLE = "GRID_MEMORY_SOCKET"
MAX_IDLE = 16
EMPTY_META = '{"length": 0}'
"""The meta of a block whose value has no bytes: the one byte it has means nothing."""
_PACKED_META = re.compile(r'\{"length": (\d{1,20}), "codec": "lz4"\}')


def length_of(block: BlockRow) -> int:
    """How many bytes were stored in a block: all it has, more if they are compressed there, or none."""
    return 0 if block.meta == EMPTY_META else packed_length(block.meta) or block.size


def packed_meta(length: int) -> str:
    """The meta of a block with a compressed value of this length (`packed_values`)."""
    return f'{{"length": {length}, "codec": "lz4"}}'


def packed_length(meta: str) -> int:
    """The length of the compressed value in a block with this meta; 0 where it has none."""
    match = _PACKED_META.fullmatch(meta) if meta else None
    return int(match[1]) if match is not None else 0


def preference_note(block: BlockRow, preferred: str) -> str:
    """One line where other nodes lend a block than the preferred one; empty where there is nothing to say."""
    nodes = block.nodes
    if not preferred or not nodes or preferred in nodes:
        return ""
    return f"{', '.join(nodes)} {'lends' if len(nodes) == 1 else 'lend'} it: {preferred} has no room for it"


class AgentStateDir(StateDir):
    """A state directory with the query socket of an agent instead of a control plane's."""

    def __init__(self, query_socket: Path, state_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__(state_dir)
        self.socket = str(query_socket)


class BlockDirectoryClient(Operations):
    """A pool of clients for any thread; each request has a connection to itself while it lasts."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: list[Client] = []
        self._closed = False

    def call(self, op: str, **arguments: Any) -> JsonObject:
        """The answer to one request; raises the refusal."""
        with self._lock:
            client = self._idle.pop() if self._idle else self._connect()
        try:
            answer = client.call(op, **arguments)
        except GridError:
            self._release(client)
            raise
        except BaseException:  # an answer may still be on its way
            client.close()
            raise
        self._release(client)
        return answer

    def every_block(self) -> list[BlockRow]:
        """Every block, the oldest first; they come page by page, in the order of their ids."""
        page = self.list_blocks()
        blocks = page.blocks
        while page.more:
            page = self.list_blocks(after=blocks[-1].block_id)
            blocks += page.blocks
        return sorted(blocks, key=lambda block: str(block.created_at))

    def close(self) -> None:
        """Close all connections; safe to call twice."""
        with self._lock:
            self._closed = True
            clients, self._idle = self._idle, []
        for client in clients:
            client.close()

    def _release(self, client: Client) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(client)
                return
        client.close()


def block_directory(
    config: ClusterConfig | None = None, state_dir: str | os.PathLike[str] | None = None
) -> BlockDirectoryClient:
    """The directory to use from here; nothing is connected yet."""
    local = agent_directory(StateDir(state_dir), has_config=config is not None)
    if local is not None:
        return local
    from distributed_grid.client.async_client import locate_grid

    directory, settings = locate_grid(config, state_dir)
    return BlockDirectoryClient(lambda: Client(directory, settings))


def agent_directory(state_dir: StateDir, *, has_config: bool) -> BlockDirectoryClient | None:
    """The agent's that a job runs under or, unless a config was named, of an agent of this machine; else None."""
    query_socket = _find_query_socket(state_dir, has_config=has_config)
    if query_socket is None:
        return None
    agent_dir = AgentStateDir(query_socket, state_dir.root)
    return BlockDirectoryClient(lambda: Client(agent_dir, may_start=False))


def _find_query_socket(state_dir: StateDir, *, has_config: bool) -> Path | None:
    given = os.environ.get(SOCKET_VARIABLE)
    if given:
        return Path(given)
    if has_config or state_dir.is_locked():
        return None
    root = state_dir.root
    return next(
        filter(_accepts, sorted([*root.glob("agents/*/*/memory/query.sock"), root / "agent/memory/query.sock"])), None
    )


def _accepts(query_socket: Path) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            with short_path(query_socket) as path:
                probe.connect(path)
        except OSError:
            return False
    return True
