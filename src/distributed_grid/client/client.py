"""The grid as seen from another process: a blocking client of the control plane's socket.

Rule 1: where no control plane runs, one is started; two terminals always see the same grid.
Rule 2: a call that got no answer is made again with the same request id, so nothing happens twice.
Rule 3: only the standard library is needed, so that a command starts fast.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed_grid import __version__
from distributed_grid.api.errors import error_from
from distributed_grid.api.framing import JSON, PROTOCOL, BrokenFrame, Unpacker, frame
from distributed_grid.client.daemon_start import start_daemon
from distributed_grid.errors import (
    BadInput,
    GridError,
    Unreachable,
)
from distributed_grid.posix.unix_sockets import UNCONNECTED, peer_uid, short_path
from distributed_grid.state_dir import StateDir

MAX_ATTEMPTS = 20
MAX_LOSSES = 6
RETRY_SECONDS = 0.05
IDLE_SECONDS = 900.0
START_SECONDS = 60.0


class ClientConfig:
    """Which config a client wants: named by the user, found by default, or none at all."""

    def __init__(self, path: str | None = None, *, explicit: bool = False) -> None:
        self.path = os.path.abspath(os.path.expanduser(path)) if path else None
        self.explicit = explicit and path is not None

    @property
    def digest(self) -> str | None:
        """What identifies the content of the file."""
        return file_digest(self.path) if self.path else None


def file_digest(path: str) -> str:
    """A digest of a config file's bytes."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError as failure:
        raise BadInput(f"cannot read the config {path}: {failure.strerror}") from failure


class Client:
    """A connection to the control plane, made (with the control plane, if need be) on the first call."""

    def __init__(self, places: StateDir, config: ClientConfig | None = None, *, may_start: bool = True) -> None:
        self.places = places
        self._config = config or ClientConfig()
        self._may_start = may_start
        self._socket: socket.socket | None = None
        self._frames: list[tuple[bytes, bytes]] = []
        self._unpacker = Unpacker()
        self.welcome: dict[str, Any] = {}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; safe to call twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._frames = []
        self._unpacker = Unpacker()

    def greet(self) -> dict[str, Any]:
        """What the control plane said of itself and its nodes when we met."""
        self._connect()
        return self.welcome

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One question, one answer; asked again when the control plane went away before it answered."""
        for _ in range(MAX_ATTEMPTS):
            try:
                self._connect()
                self._send({"op": op, **arguments})
                return self._answer()
            except (ConnectionError, EOFError, BrokenFrame):
                self.close()
                time.sleep(RETRY_SECONDS)
        raise Unreachable("the control plane does not answer; see `grid daemon status`")

    def stream(self, op: str, **arguments: Any) -> Iterator[tuple[bytes, bytes | dict[str, Any]]]:
        """The frames of a long answer as they come; the last one is the JSON message with `"done": true`."""
        self._connect()
        asked = False
        while True:
            try:
                if not asked:
                    self._send({"op": op, **arguments})
                    asked = True
                kind, body = self._next()
            except (ConnectionError, EOFError, BrokenFrame) as lost:
                self.close()
                raise Unreachable("the connection to the control plane was lost") from lost
            if kind != JSON:
                yield kind, body
                continue
            message = checked(json.loads(body))
            yield kind, message
            if message.get("done"):
                return

    def _connect(self) -> None:
        if self._socket is not None:
            return
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                self._dial()
                self._greet()
                return
            except (OSError, EOFError):  # nobody there, or a place that starting will find fault with
                self.close()
                if not self._may_start:
                    raise Unreachable(f"no control plane runs for {self.places.state_dir}") from None
                if self.places.is_owned():  # one is just starting, or just leaving
                    time.sleep(RETRY_SECONDS)
                else:
                    self.start(stay=False)
            except _HandedOver:
                self.close()
                time.sleep(RETRY_SECONDS)
        raise Unreachable("the control plane could not be reached; see `grid daemon status`")

    def start(self, *, stay: bool) -> None:
        """Start a control plane; where another is just starting, give it a moment."""
        config = self._config
        idle = float(os.environ.get("GRID_IDLE_SECONDS") or IDLE_SECONDS)
        began = start_daemon(self.places, config=config.path, explicit=config.explicit, stay=stay, idle_seconds=idle)
        if not began:
            time.sleep(4 * RETRY_SECONDS)

    def _dial(self) -> None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            with short_path(self.places.socket) as path:
                connection.connect(path)
            check_peer(connection)
        except BaseException:
            connection.close()
            raise
        self._socket = connection

    def _greet(self) -> None:
        """Say who we are; hear whether the control plane fits, and make it hand over where it does not."""
        self._send(greeting(self._config))
        self.welcome = self._answer()
        if self.welcome.get("handing_over"):
            raise _HandedOver

    def _send(self, message: dict[str, Any]) -> None:
        assert self._socket is not None
        self._socket.sendall(frame(JSON, json.dumps(message).encode()))

    def _next(self) -> tuple[bytes, bytes]:
        assert self._socket is not None
        while not self._frames:
            chunk = self._socket.recv(1 << 18)
            if not chunk:
                raise EOFError
            self._frames += self._unpacker.feed(chunk)
        return self._frames.pop(0)

    def _answer(self) -> dict[str, Any]:
        return checked(json.loads(self._next()[1]))


class ReconnectBackoff:
    """How often a lost connection is made again before it is an error; hearing anything renews it."""

    def __init__(self) -> None:
        self._lost = 0

    def heard(self) -> None:
        self._lost = 0

    def pause_after(self, loss: Unreachable) -> float:
        """Seconds to wait before the next try; raises the loss when there were too many in a row."""
        self._lost += 1
        if self._lost > MAX_LOSSES:
            raise loss
        return RETRY_SECONDS * float(2**self._lost)


class _HandedOver(Exception):
    """The old control plane makes room for a new one."""


def greeting(config: ClientConfig) -> dict[str, Any]:
    """The first message of a connection: who we are, and which config we insist on."""
    return {
        "op": "hello",
        "protocol": PROTOCOL,
        "version": __version__,
        "config": config.digest if config.explicit else None,
        "config_path": config.path if config.explicit else None,
    }


def checked(message: dict[str, Any]) -> dict[str, Any]:
    """The message, or the error it carries, raised."""
    error = message.get("error")
    if error is None:
        return message
    raise error_from(error)


def check_peer(connection: socket.socket) -> None:
    """Make sure that the other end of a Unix socket is this user's (or root's) process."""
    uid = peer_uid(connection)
    if uid == UNCONNECTED:
        raise ConnectionRefusedError("the control plane has more callers than it can take at once")
    if uid not in (os.geteuid(), 0):
        raise GridError(f"the other end of the grid's socket belongs to uid {uid}, not to you")
