"""Starting a memory server as a process of its own, reaching one that runs, and the locks that keep them single."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Final

from distributed_grid.memory.server.server import CONTROL
from distributed_grid.posix.private_files import try_lock
from distributed_grid.posix.unix_sockets import short_path

LOG: Final = "memory.log"
LARGEST_LOG: Final = 1024 * 1024
KEPT: Final = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "COVERAGE_PROCESS_START")


class Launched:
    """A server that this process started: the socket to it, and the duty to bury it."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock
        self._buried = False

    def kill(self) -> None:
        """End it at once, and bury it. What it held is held elsewhere too."""
        if not self._buried:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.bury()

    def bury(self) -> None:
        """Have it collected as soon as it is gone, without waiting for that; a second time nothing happens."""
        if not self._buried:
            self._buried = True
            threading.Thread(target=_collect, args=(self.pid,), name=f"bury-{self.pid}", daemon=True).start()


def _collect(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def launch(folder: Path, lock_fd: int) -> Launched:
    """Start a server that has this lock for as long as it lives: own session, two descriptors, a clean environment."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log = _log(folder / LOG)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (log, theirs.fileno(), lock_fd)]
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
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
    return Launched(pid, ours)


def _log(path: Path) -> int:
    with contextlib.suppress(OSError):
        if path.stat().st_size > LARGEST_LOG:
            path.unlink()
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def reach(folder: Path) -> socket.socket | None:
    """The control socket of the server that runs here; None where none does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        with short_path(folder / CONTROL) as name:
            sock.connect(name)
    except OSError:
        sock.close()
        return None
    return sock


def lock(path: Path) -> int:
    """The descriptor of this lock file, locked; -1 where somebody else has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not try_lock(fd):
        os.close(fd)
        return -1
    return fd


def unlock(fd: int) -> None:
    """Let go of a lock."""
    os.close(fd)
