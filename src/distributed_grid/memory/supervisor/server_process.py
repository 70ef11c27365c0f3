"""Process of a memory server and the state that outlives it: identity, held copies, pending orders; start and locks."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol import control_messages as messages
from distributed_grid.memory.protocol.frames import TICKET_LIFE_MS, is_copy_id
from distributed_grid.memory.server.copy_file import COPY_SUFFIX
from distributed_grid.memory.server.copy_store import KEY_BYTES
from distributed_grid.memory.server.server import CONTROL_SOCKET, load_incarnation
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.posix.private_files import try_lock
from distributed_grid.posix.sockets import short_path
from distributed_grid.wire import CopiesFreedReport, CopyMadeReport, MakeCopyOrder, ServeMemoryOrder

LOG_FILE: Final = "memory.log"
MAX_LOG_BYTES: Final = 1024 * 1024
INHERITED_VARIABLES: Final = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "COVERAGE_PROCESS_START")
_BEFORE_SERVING = (messages.ConfigureServer, messages.HeldCopy, messages.StartServing, messages.SupervisorLeaving)


class ServerProcess:
    """A server that this process started, and has to reap; `sock` is its control socket."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock
        self._reaped = False

    def kill(self) -> None:
        """Kill and reap the server. The supervisor holds its copies, too."""
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.reap()

    def reap(self) -> None:
        """Reap it later, without waiting; safe twice."""
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
    """Descriptor of this lock file, locked; -1 if it is locked already."""
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

    def __init__(self, on_message: Callable[[messages.Message, list[int]], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._control: messages.ControlSocket | None = None
        self._process: ServerProcess | None = None
        self._received = asyncio.Event()
        self.ready: messages.ServerReady | None = None  # report of the serving server; None before it serves

    @property
    def is_connected(self) -> bool:
        return self._control is not None

    def connect(self, sock: socket.socket, process: ServerProcess | None) -> None:
        """Use this control socket from now on; `process` where this process started the server."""
        self._control = control = messages.ControlSocket(sock)
        self._process = process
        self.ready = None
        asyncio.get_running_loop().add_reader(control.fileno(), self._receive, control)

    def disconnect(self) -> None:
        """Leave the server to itself; safe twice."""
        if self._control is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._control.fileno())
            loop.remove_writer(self._control.fileno())
            self._control.close()
            self._control = None
        self.ready = None
        self._received.set()

    def reap(self) -> None:
        """Reap an ended server that this process has started."""
        if self._process is not None:
            self._process.reap()

    def terminate(self) -> None:
        """End the server that serves, and disconnect."""
        assert self.ready is not None
        pid = self.ready.pid
        self.disconnect()
        if self._process is not None:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def send(self, message: messages.Message, fds: list[int] | None = None) -> None:
        """Send or queue this; nothing happens where there is no server for it."""
        if self._control is None or (self.ready is None and not isinstance(message, _BEFORE_SERVING)):
            return
        with contextlib.suppress(OSError):  # the end is noticed by reading
            self._control.send(message, fds or [])
            if self._control.waits_to_send:
                asyncio.get_running_loop().add_writer(self._control.fileno(), self._flush, self._control)

    def _flush(self, control: messages.ControlSocket) -> None:
        done = True
        with contextlib.suppress(OSError):
            done = control.flush()
        if done:
            asyncio.get_running_loop().remove_writer(control.fileno())

    def _receive(self, control: messages.ControlSocket) -> None:
        try:
            for message, fds in control.receive():
                self._on_message(message, fds)
                self._received.set()
        except (EOFError, OSError, ProtocolError):
            if control is self._control:
                self._on_lost()

    async def wait_until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Wait for a state of the server; True if it came in time."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                while not reached():
                    self._received.clear()
                    await self._received.wait()
        except TimeoutError:
            return reached()
        return True

    async def wait_until_ready(self, seconds: float) -> bool:
        """Wait until it serves or is gone; False if neither came in time."""
        return await self.wait_until(lambda: self.ready is not None or self._control is None, seconds)


DEFAULT_HOST: Final = "127.0.0.1"
BATCH_SECONDS: Final = 0.005

log = logging.getLogger(__name__)


class ServerIdentity:
    """Identity of the server of a folder, across its processes: incarnation, key, hold, address.

    A restarted server is the one before, at the same address if that is free. All nodes of an agent share one
    server, configured by the first order.
    """

    def __init__(self, folder: Path, unsupervised_ms: int) -> None:
        self._folder = folder
        self._unsupervised_ms = unsupervised_ms
        self._incarnation: tuple[str, bytes] | None = None  # and its key
        self._floor_boot_ms = 0  # tickets that expire at or before this time create no copy
        self._address = ("", 0)
        self.order: ServeMemoryOrder | None = None
        self.hold_until_boot_ms = 0

    def clear(self) -> None:
        """No server is needed any more. Safe twice."""
        self._incarnation = self.order = None
        self._floor_boot_ms = 0

    def end_incarnation(self) -> None:
        """The hold has expired while no server ran: the next one gets an incarnation of its own."""
        self._incarnation = None
        self._floor_boot_ms = 0
        self.hold_until_boot_ms = 0

    def accept_order(self, order: ServeMemoryOrder, *, is_serving: bool) -> None:
        """Take over an order, unless another node's order counts."""
        if not is_serving or self.order is None or self.order.node in ("", order.node):
            self.order = order

    def must_restart_for(self, order: ServeMemoryOrder, ready: messages.ServerReady) -> bool:
        """True if the server has to be replaced for this order."""
        if self.order is not None and self.order.node not in ("", order.node):
            return False
        moved = (order.host or DEFAULT_HOST) != ready.endpoint.host
        return moved or bool(order.certificate) != bool(ready.certificate)

    def configuration(self) -> messages.ConfigureServer:
        """The first message to a new server. Where there is no incarnation to continue, one begins."""
        assert self.order is not None
        if self._incarnation is None:
            saved = load_incarnation(self._folder)
            if saved is not None:  # without its tombstones: earlier tickets may be for copies that were freed
                self._floor_boot_ms = boot_ms() + TICKET_LIFE_MS
            self._incarnation = saved or (secrets.token_hex(8), secrets.token_bytes(KEY_BYTES))
        order, (incarnation, key) = self.order, self._incarnation
        host = order.host or DEFAULT_HOST
        return messages.ConfigureServer(
            folder=str(self._folder),
            host=host,
            port=self._address[1] if self._address[0] == host else 0,
            incarnation=incarnation,
            key=key,
            certificate=order.certificate,
            private_key=order.private_key,
            hold_until_boot_ms=self.hold_until_boot_ms,
            floor_boot_ms=self._floor_boot_ms,
            max_connections_per_peer=order.max_connections_per_peer,
            unsupervised_ms=self._unsupervised_ms,
        )

    def adopt(self, ready: messages.ServerReady) -> bool:
        """Continue as this server; True if it needs another hold than it has."""
        endpoint = ready.endpoint
        self._incarnation = (endpoint.incarnation, ready.key)
        self._address = (endpoint.host, endpoint.port)
        if self.order is None:
            self.order = ServeMemoryOrder("", ready.certificate, ready.private_key, endpoint.host)
        if self.hold_until_boot_ms and self.hold_until_boot_ms != ready.hold_until_boot_ms:
            return True
        self.hold_until_boot_ms = ready.hold_until_boot_ms
        return False

    def change_incarnation(self, new: messages.NewIncarnation) -> None:
        self._incarnation = (new.incarnation, new.key)
        self._floor_boot_ms = 0
        self.hold_until_boot_ms = 0


class HeldCopies:
    """Copies that the supervisor holds along with its server.

    It has a descriptor of every copy in memory and of the journal, and the names of the copies on disk. Copies that
    a server lists are incoming until the list is complete; then that list is held. Every descriptor is closed once:
    when its copy is freed, when another takes its place, at the end.
    """

    def __init__(self) -> None:
        self.descriptors: dict[str, int] = {}
        self.on_disk: set[str] = set()
        self._incoming: dict[str, int] = {}

    @property
    def in_memory(self) -> tuple[str, ...]:
        return tuple(name for name in self.descriptors if name != messages.JOURNAL)

    @property
    def is_empty(self) -> bool:
        return not self.descriptors.keys() - {messages.JOURNAL} and not self.on_disk

    def measure_bytes(self) -> int:
        return 512 * sum(os.fstat(fd).st_blocks for fd in self.descriptors.values())

    def start_listing(self) -> None:
        """A server begins to list its copies; held ones stay until the list is complete."""
        self.stop_listing()
        self.on_disk = set()

    def add(self, names: tuple[str, ...], fds: list[int], *, is_listed: bool) -> None:
        """Hold these: at once where the server has listed everything, or else when it has.

        Where this process has no room for more descriptors, the kernel leaves some out: those only the server holds.
        """
        into = self.descriptors if is_listed else self._incoming
        if len(fds) < len(names):
            log.warning("too many open files: %d copies are held by the server alone", len(names) - len(fds))
        for name, fd in zip(names, fds, strict=False):
            messages.close_all([into.pop(name)] if name in into else [])
            into[name] = fd

    def finish_listing(self) -> None:
        """Hold the listed copies, and no others."""
        messages.close_all(self.descriptors.values())
        self.descriptors, self._incoming = self._incoming, {}

    def stop_listing(self) -> None:
        """The listing server is gone. Safe twice."""
        messages.close_all(self._incoming.values())
        self._incoming = {}

    def free(self, copies: Iterable[str]) -> None:
        """Stop holding these; those that are not here are no error."""
        for copy in copies:
            fd = self.descriptors.pop(copy, -1)
            messages.close_all([fd] if fd >= 0 else [])
            self.on_disk.discard(copy)

    def free_copies_in_memory(self) -> None:
        """Stop holding every copy in memory; the journal stays."""
        journal = self.descriptors.pop(messages.JOURNAL, -1)
        self.free_memory()
        if journal >= 0:
            self.descriptors[messages.JOURNAL] = journal

    def free_memory(self) -> None:
        """Release all copies in memory, the journal too. Safe twice."""
        messages.close_all(self.descriptors.values())
        self.descriptors = {}


class PendingOrders:
    """Copies to make and to free, until the server has answered; a restarted server gets them again.

    `is_needed`: a server runs or will; otherwise copies on disk, in `spill`, are freed here. Frees that come
    together are sent and reported together.
    """

    def __init__(
        self,
        link: ServerLink,
        spill: Path,
        *,
        is_needed: Callable[[], bool],
        report: Callable[[CopyMadeReport | CopiesFreedReport], None],
    ) -> None:
        self._link = link
        self._spill = spill
        self._is_needed = is_needed
        self._report = report
        self._replicas: dict[tuple[str, int], messages.MakeReplica] = {}
        self._to_free: dict[str, bool] = {}  # True once this server has the order
        self._freed: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def start(self) -> None:
        self._stopped = False

    def stop(self) -> None:
        """Forward nothing more; orders are remembered. Safe twice."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def make_copy(self, order: MakeCopyOrder) -> None:
        """Have a copy made elsewhere, and report the result; a repeated order is done once."""
        if not self._is_needed():
            self._report(CopyMadeReport(order.source, order.generation, "no memory server runs here"))
            return
        replica = messages.MakeReplica(order.source, order.generation, order.target, order.ticket)
        self._replicas[order.source, order.generation] = replica
        self._link.send(replica)

    def replica_made(self, answer: messages.ReplicaMade) -> None:
        if self._replicas.pop((answer.source, answer.generation), None) is not None:
            self._report(CopyMadeReport(answer.source, answer.generation, answer.problem))

    def free(self, copies: Iterable[str]) -> None:
        """Free these, and report it, even of copies that are not here."""
        for copy in copies:
            self._to_free.setdefault(copy, False)
        self._schedule_flush()

    def copies_freed(self, copies: Iterable[str]) -> None:
        self._freed += [copy for copy in copies if self._to_free.pop(copy, None) is not None]
        self._schedule_flush()

    def server_changed(self) -> None:
        self._to_free = dict.fromkeys(self._to_free, False)

    def resend(self) -> None:
        """The server serves: send all unanswered orders."""
        for replica in self._replicas.values():
            self._link.send(replica)
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if self._timer is None and not self._stopped:
            self._timer = asyncio.get_running_loop().call_later(BATCH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if self._link.ready is not None:
            for names in messages.batches([copy for copy, asked in self._to_free.items() if not asked]):
                self._link.send(messages.FreeCopy(names))
                self._to_free.update(dict.fromkeys(names, True))
        elif not self._is_needed():
            for copy in list(self._to_free):
                try:
                    if is_copy_id(copy):
                        (self._spill / f"{copy}{COPY_SUFFIX}").unlink(missing_ok=True)
                except OSError as error:  # a disk that cannot be written to: the order comes again
                    log.warning("%s could not be deleted yet: %s", copy, error.strerror)
                    continue
                del self._to_free[copy]
                self._freed.append(copy)
        if self._freed:
            freed, self._freed = tuple(self._freed), []
            self._report(CopiesFreedReport(freed))


def raise_descriptor_limit() -> None:
    """As many descriptors as this process may have: each copy in memory takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
