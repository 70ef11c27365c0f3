"""Single-instance lock of the daemon, its listening socket, and the startup report to the starting command."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time

from distributed_grid.errors import GridError
from distributed_grid.posix.private_files import try_lock
from distributed_grid.posix.sockets import short_path
from distributed_grid.state_dir import StateDir

BACKLOG = 4096
LOCK_ATTEMPTS, LOCK_RETRY_SECONDS = 10, 0.01


class AlreadyRunning(Exception):
    """Another control plane holds the lock."""


class InstanceLock:
    """Held by the one daemon of a state directory; held until `release`.

    The lock file is never unlinked, and its descriptor is inherited by nobody. Only its holder touches the socket.
    """

    def __init__(self, state_dir: StateDir) -> None:
        self._state_dir = state_dir
        self._lock = -1
        self.listener: socket.socket | None = None

    def acquire(self) -> None:
        """Acquire the lock, or raise AlreadyRunning."""
        try:
            lock = os.open(self._state_dir.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as failure:
            where = self._state_dir.root
            raise GridError(f"cannot use the state directory {where}: {failure.strerror}") from failure
        for _ in range(LOCK_ATTEMPTS):
            if try_lock(lock):
                self._lock = lock
                return
            time.sleep(LOCK_RETRY_SECONDS)  # held, or a client is just checking whether it is (`StateDir.is_owned`)
        os.close(lock)
        raise AlreadyRunning

    def listen(self) -> socket.socket:
        """Replace the socket of an earlier holder, and listen."""
        self.unlink_socket()
        listener = socket.socket(socket.AF_UNIX)
        with short_path(self._state_dir.socket) as name:
            before = os.umask(0o177)
            try:
                listener.bind(name)
            finally:
                os.umask(before)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self.listener = listener
        return listener

    @property
    def is_removed(self) -> bool:
        """True if the lock file was removed, and with it the state directory: no other daemon finds this one."""
        return self._lock >= 0 and os.fstat(self._lock).st_nlink == 0

    def unlink_socket(self) -> None:
        """Refuse new connections; safe to call twice."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._state_dir.socket)

    def release(self) -> None:
        """Release the lock, last of all; safe to call twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class StartupReport:
    """Pipe to the command that started this daemon and waits for the outcome."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_inheritable(descriptor, False)

    def send(self, state: str, **details: object) -> None:
        """Report once; later calls do nothing."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            os.write(self._descriptor, json.dumps({"state": state, **details}).encode() + b"\n")
            os.close(self._descriptor)
        self._descriptor = None
