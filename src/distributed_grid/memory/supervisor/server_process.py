"""Process of a memory server: its start, the locks that keep it single, and the supervisor's control link to it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.control_messages import (
    ConfigureServer,
    ControlSocket,
    HeldCopy,
    Message,
    ServerReady,
    StartServing,
    SupervisorLeaving,
)
from distributed_grid.memory.server.server import CONTROL_SOCKET
from distributed_grid.posix.private_files import try_lock
from distributed_grid.posix.unix_sockets import short_path

LOG_FILE: Final = "memory.log"
MAX_LOG_BYTES: Final = 1024 * 1024
INHERITED_VARIABLES: Final = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "COVERAGE_PROCESS_START")
_BEFORE_SERVING = (ConfigureServer, HeldCopy, StartServing, SupervisorLeaving)


class ServerProcess:
    """A server that this process started, and has to reap; `sock` is its control socket."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock
        self._reaped = False

    def kill(self) -> None:
        """Kill and reap it. What it held is held elsewhere too."""
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.reap()

    def reap(self) -> None:
        """Have it reaped as soon as it is gone, without waiting for that; a second time nothing happens."""
        if not self._reaped:
            self._reaped = True
            threading.Thread(target=_wait_for, args=(self.pid,), name=f"reap-{self.pid}", daemon=True).start()


def _wait_for(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def start_server(folder: Path, lock_fd: int) -> ServerProcess:
    """Start a server that has this lock for as long as it runs: own session, two descriptors, a clean environment."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = folder / LOG_FILE
    with contextlib.suppress(OSError):
        if path.stat().st_size > MAX_LOG_BYTES:
            path.unlink()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (log, theirs.fileno(), lock_fd)]
    environment = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    environment |= {"GRID_ROLE": "memory", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "distributed_grid.memory", "3", "4"],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, high[0], 1),
                (os.POSIX_SPAWN_DUP2, high[0], 2),
                (os.POSIX_SPAWN_DUP2, high[1], 3),
                (os.POSIX_SPAWN_DUP2, high[2], 4),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE],
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        for fd in (*high, log):
            os.close(fd)
    return ServerProcess(pid, ours)


def connect_control(folder: Path) -> socket.socket | None:
    """A connection to the control socket of the server that runs here; None where none does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        with short_path(folder / CONTROL_SOCKET) as name:
            sock.connect(name)
    except OSError:
        sock.close()
        return None
    return sock


def try_lock_file(path: Path) -> int:
    """The descriptor of this lock file, locked; -1 where somebody else has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not try_lock(fd):
        os.close(fd)
        return -1
    return fd


class ServerLink:
    """The control link to the current server, if there is one. `on_message` is called with each message and its
    descriptors, `on_lost` once for each link when the server is gone; sending to one that is gone is no error.

    Before a server serves, only its configuration and a farewell are sent to it.
    """

    def __init__(self, on_message: Callable[[Message, list[int]], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._control: ControlSocket | None = None
        self._process: ServerProcess | None = None
        self._received = asyncio.Event()
        self._ready: ServerReady | None = None

    @property
    def is_connected(self) -> bool:
        """Whether a server is at the other end, for all that is known."""
        return self._control is not None

    @property
    def ready(self) -> ServerReady | None:
        """What the server that serves has reported; None until it has."""
        return self._ready

    def set_ready(self, ready: ServerReady) -> None:
        """The server serves from now on, or serves under a new incarnation."""
        self._ready = ready

    def connect(self, sock: socket.socket, process: ServerProcess | None) -> None:
        """Use this control socket from now on; `process` where this process started the server."""
        self._control = control = ControlSocket(sock)
        self._process = process
        self._ready = None
        asyncio.get_running_loop().add_reader(control.fileno(), self._receive, control)

    def disconnect(self) -> None:
        """Leave the server to itself; safe twice."""
        if self._control is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._control.fileno())
            loop.remove_writer(self._control.fileno())
            self._control.close()
            self._control = None
        self._ready = None
        self._received.set()

    def reap(self) -> None:
        """Reap a server that has ended, where this process started it."""
        if self._process is not None:
            self._process.reap()

    def terminate(self) -> None:
        """End the server that serves, and disconnect."""
        assert self._ready is not None
        pid = self._ready.pid
        self.disconnect()
        if self._process is not None:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """Send or queue this; nothing happens where there is no server for it."""
        if self._control is None or (self._ready is None and not isinstance(message, _BEFORE_SERVING)):
            return
        with contextlib.suppress(OSError):  # the end is noticed by reading
            self._control.send(message, fds or [])
            if self._control.waits_to_send:
                asyncio.get_running_loop().add_writer(self._control.fileno(), self._flush, self._control)

    def _flush(self, control: ControlSocket) -> None:
        done = True
        with contextlib.suppress(OSError):
            done = control.flush()
        if done:
            asyncio.get_running_loop().remove_writer(control.fileno())

    def _receive(self, control: ControlSocket) -> None:
        try:
            for message, fds in control.receive():
                self._on_message(message, fds)
                self._received.set()
        except (EOFError, OSError, ProtocolError):
            if control is self._control:
                self._on_lost()

    async def wait_until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Wait for what the server reports or does; whether it came in time."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                while not reached():
                    self._received.clear()
                    await self._received.wait()
        except TimeoutError:
            return reached()
        return True

    async def wait_until_ready(self, seconds: float) -> bool:
        """Wait until it serves or is gone; False where neither came in time."""
        return await self.wait_until(lambda: self._ready is not None or self._control is None, seconds)
