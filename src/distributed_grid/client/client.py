"""Blocking client of the control plane's socket; it starts a control plane where none runs.

Imports only the standard library, and not asyncio, so that a command starts fast.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from distributed_grid.client.conversation import (
    LOST,
    MAX_ATTEMPTS,
    READ_BYTES,
    RETRY_SECONDS,
    ClientConfig,
    Conversation,
    HandedOver,
    JsonObject,
    Message,
    Part,
    answer_of,
    connection_lost,
    encode,
    hello,
    is_last,
    no_answer,
)
from distributed_grid.client.operations import Operations
from distributed_grid.errors import GridError, Unreachable
from distributed_grid.posix.sockets import UNCONNECTED, peer_uid, short_path
from distributed_grid.state_dir import StateDir

if TYPE_CHECKING:
    from distributed_grid.client.daemon_start import StartedDaemon

IDLE_SECONDS = 900.0
START_SECONDS = 60.0
RECONNECT_SECONDS = 6.0
"""Wait of a query for the next control plane, which another command may start."""


class Client(Operations):
    """A connection to the control plane, made (with the control plane, if need be) on the first call."""

    def __init__(
        self,
        state_dir: StateDir,
        config: ClientConfig | None = None,
        *,
        may_start: bool = True,
        query_only: bool = False,
        any_config: bool = False,
        find_config: Callable[[], str | None] = lambda: None,
        on_started: Callable[[StartedDaemon], None] = lambda started: None,
        on_note: Callable[[str], None] = lambda note: None,
        on_welcome: Callable[[Message], None] = lambda welcome: None,
    ) -> None:
        """`query_only`: a control plane that runs stays as it is. `any_config`: it keeps its config. Where one is
        started without a config that was named, `find_config` says with which; `on_started` is called with the one it
        uses, `on_note` with each line that the control plane has for the user, `on_welcome` with its answer to our
        hello."""
        self.state_dir = state_dir
        self._config = config or ClientConfig()
        self._may_start = may_start
        self._query_only = query_only
        self._any_config = any_config
        self._reconnect_seconds = 0.0
        self._find_config = find_config
        self._on_started = on_started
        self._on_note = on_note
        self._on_welcome = on_welcome
        self._socket: socket.socket | None = None
        self._conversation = Conversation()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._conversation = Conversation()

    def greet(self) -> JsonObject:
        """The control plane's answer to our hello: its version, its config and its nodes."""
        self._connect()
        return self._conversation.welcome

    def call(self, op: str, **arguments: Any) -> JsonObject:
        """One request, one answer; sent again when the control plane went away before it answered."""
        for _ in range(MAX_ATTEMPTS):
            try:
                self._connect()
                self._send({"op": op, **arguments})
                return answer_of(self._next_part()[1])
            except LOST:
                self.close()
                time.sleep(RETRY_SECONDS)
        raise no_answer()

    def stream(self, op: str, **arguments: Any) -> Iterator[tuple[bytes, Part]]:
        """The frames of a long answer as they come; the last one is the JSON message with `"done": true`."""
        self._connect()
        sent = False
        while True:
            try:
                if not sent:
                    self._send({"op": op, **arguments})
                    sent = True
                kind, part = self._next_part()
            except LOST as lost:
                self.close()
                raise connection_lost() from lost
            yield kind, part
            if is_last(part):
                return

    def _connect(self) -> None:
        if self._socket is not None:
            return
        deadline = time.monotonic() + START_SECONDS
        gives_up = time.monotonic() + self._reconnect_seconds
        while time.monotonic() < deadline:
            try:
                self._open_socket()
                self._send(hello(self._config, query_only=self._query_only, any_config=self._any_config))
                try:
                    self._conversation.accept_welcome(self._next_part()[1])
                finally:
                    for note in self._conversation.welcome.get("notes", ()):
                        self._on_note(str(note))
                self._on_welcome(self._conversation.welcome)
                if self._query_only:  # should it go away, somebody may have stopped it
                    self._may_start, self._reconnect_seconds = False, RECONNECT_SECONDS
                return
            except HandedOver:
                self.close()
                time.sleep(RETRY_SECONDS)
            except (OSError, EOFError):  # nobody there, or a directory that starting will find fault with
                self.close()
                if not self._may_start and time.monotonic() >= gives_up:
                    raise Unreachable(f"no control plane runs for {self.state_dir.root}") from None
                if not self._may_start or self.state_dir.is_locked():  # one is just starting, or just leaving
                    time.sleep(RETRY_SECONDS)
                else:
                    self.start(stay=False)
        raise Unreachable("the control plane could not be reached; see `grid daemon status`")

    def start(self, *, stay: bool) -> None:
        """Start a control plane; where another is just starting, give it a moment."""
        from distributed_grid.client.daemon_start import start_daemon  # most commands find one that runs

        config = self._config if self._config.explicit else ClientConfig(self._find_config())
        idle = float(os.environ.get("GRID_IDLE_SECONDS") or IDLE_SECONDS)
        started = start_daemon(
            self.state_dir, config=config.path, explicit=config.explicit, stay=stay, idle_seconds=idle
        )
        if started is None:
            time.sleep(4 * RETRY_SECONDS)
        else:
            self._on_started(started)

    def _open_socket(self) -> None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            with short_path(self.state_dir.socket) as path:
                connection.connect(path)
            check_peer(connection)
        except BaseException:
            connection.close()
            raise
        self._socket = connection

    def _send(self, message: Message) -> None:
        assert self._socket is not None
        self._socket.sendall(encode(message))

    def _next_part(self) -> tuple[bytes, Part]:
        assert self._socket is not None
        while (part := self._conversation.next_part()) is None:
            self._conversation.receive(self._socket.recv(READ_BYTES))
        return part


def check_peer(connection: socket.socket) -> None:
    """Make sure that the other end of a Unix socket is this user's (or root's) process."""
    uid = peer_uid(connection)
    if uid == UNCONNECTED:
        raise ConnectionRefusedError("the control plane has more callers than it can take at once")
    if uid not in (os.geteuid(), 0):
        raise GridError(f"the other end of the grid's socket belongs to uid {uid}, not to you")
