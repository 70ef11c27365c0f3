"""Client of the spawner process: starts it, restarts it when it dies, and sends it attempts to launch.

One spawner at a time: the next starts when the last has exited, after a delay that grows while they die young.
An attempt sent to a spawner that dies is not lost: its channel closes, and the host sends it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from distributed_grid.agent.execution.shim import NOTICE_VARIABLE
from distributed_grid.agent.files import job_dir
from distributed_grid.errors import BadInput
from distributed_grid.posix.private_files import open_regular, try_lock
from distributed_grid.supervision import start_restarted

MAX_RESTART_DELAY_S = 5.0
YOUNG_S = 1.0
log = logging.getLogger(__name__)


class SpawnerClient:
    """Holds the lock of `root` and keeps one spawner running for it."""

    def __init__(self, root: str, *, use_cgroups: bool, lock_timeout_s: float, grid_locks: Sequence[str]) -> None:
        self._root = root
        self._use_cgroups = use_cgroups
        self._lock_timeout_s = lock_timeout_s
        self._grid_locks = grid_locks
        self._lock = -1
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connected = asyncio.Event()
        self._restart: asyncio.Task[None] | None = None
        self._started_at = 0.0
        self._early_deaths = 0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def lock_root(self) -> None:
        """Become the root's only host; `BadInput` where another one stays."""
        if self._lock < 0:
            try:
                self._lock = open_regular(f"{self._root}/{job_dir.HOST_LOCK}", os.O_RDWR | os.O_CREAT)
            except OSError as error:
                raise BadInput(f"cannot use {self._root}/{job_dir.HOST_LOCK}: {error.strerror}") from error
        try:  # a predecessor's spawner may need a moment to see that it is alone
            async with asyncio.timeout(self._lock_timeout_s):
                await wait_until(lambda: try_lock(self._lock))
        except TimeoutError as error:
            self._unlock_root()
            raise BadInput(f"{self._root} is in use by another agent") from error

    def _unlock_root(self) -> None:
        os.close(self._lock)
        self._lock = -1

    def start(self) -> None:
        """Start a spawner: its own session, no descriptor but its own, next to nothing in its environment."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        package_home = __file__.rsplit("/", 4)[0]
        command = [sys.executable, "-P", "-S", "-m", "distributed_grid.agent.execution.spawner", self._root]
        command += [str(theirs.fileno()), str(self._lock), "1" if self._use_cgroups else "0", *self._grid_locks]
        kept = ("LD_LIBRARY_PATH", "PYTHONHOME", NOTICE_VARIABLE)
        inherited = {name: os.environ[name] for name in kept if name in os.environ}
        try:
            log = open_regular(f"{self._root}/{job_dir.SPAWNER_LOG}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError:  # a full disk, or something in its place
            log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=inherited | {"GRID_ROLE": "spawner", "PYTHONPATH": package_home},
                pass_fds=(theirs.fileno(), self._lock),
                start_new_session=True,
            )
        os.close(log)
        self._sock = ours
        self._started_at = time.monotonic()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._on_exit)
        self._connected.set()

    async def stop(self) -> None:
        """Stop the spawner, wait until it has exited, and unlock the root; shims keep running."""
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        self._disconnect()
        await wait_until(self._has_exited)
        self._unlock_root()

    async def send(self, attempt_id: str, channel: int) -> None:
        """Send an attempt with the write end of its channel, which is closed here whatever happens."""
        try:
            await self._connected.wait()
            while True:
                if self._sock is None:
                    raise BrokenPipeError
                try:
                    socket.send_fds(self._sock, [attempt_id.encode()], [channel])
                    break
                except BlockingIOError:  # the spawner has too much to do
                    loop = asyncio.get_running_loop()
                    writable: asyncio.Future[None] = loop.create_future()
                    fd = self._sock.fileno()
                    loop.add_writer(fd, _resolve, writable)
                    try:
                        await writable
                    finally:
                        loop.remove_writer(fd)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the spawner just died: the channel closes with this block, and the host sends again
        finally:
            os.close(channel)

    def _on_exit(self) -> None:
        """The socket closed (the spawner never writes to it): start another."""
        self._disconnect()
        self._restart = start_restarted(self._start_again, "the restart of the spawner")

    def _disconnect(self) -> None:
        """Close the socket, which ends the spawner. Safe twice."""
        self._connected.clear()
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None

    async def _start_again(self) -> None:
        await wait_until(self._has_exited)
        if time.monotonic() - self._started_at < YOUNG_S:
            self._early_deaths += 1
            await asyncio.sleep(min(MAX_RESTART_DELAY_S, 0.02 * 2**self._early_deaths))
        else:
            self._early_deaths = 0
        while True:
            try:
                self.start()
                return
            except OSError as error:  # no process or no memory to be had just now: nothing starts until there is
                log.error("the spawner could not be started: %s", error.strerror)
                await asyncio.sleep(MAX_RESTART_DELAY_S)

    def _has_exited(self) -> bool:
        return self._process is None or self._process.poll() is not None


async def wait_until(condition: Callable[[], bool]) -> None:
    """Poll for a state without an event: a free lock, the end of a process."""
    while not condition():
        await asyncio.sleep(0.002)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
