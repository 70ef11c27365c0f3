"""Memory server of a node: a process of its own, so that gigabytes never delay a heartbeat.

It outlives its agent: without a supervisor it serves on, within its hold, and a new supervisor finds it by its control
socket. It frees by itself: everything in memory when the hold expires, each copy whose end has passed when there is no
supervisor; and it ends when there is nothing left to hold. It decides nothing: tickets and its supervisor do.

Copies are replicated to other memory servers by threads beside the event loop. The source is frozen before that, and
stays frozen until the control plane decides, also after a failure.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import ssl
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from distributed_grid.errors import GridError, ProtocolError
from distributed_grid.memory.client.server_connection import ServerConnection
from distributed_grid.memory.protocol import control_messages as messages
from distributed_grid.memory.protocol.frames import CHUNK_BYTES, fingerprint_of, read_claims, tls_context
from distributed_grid.memory.server.client_connection import ClientConnection
from distributed_grid.memory.server.copy_file import CopyFile, boot_id_bytes
from distributed_grid.memory.server.copy_store import CopyStore
from distributed_grid.memory.server.event_loop import EventLoop, listen_tcp, listen_unix
from distributed_grid.memory.server.write_journal import WriteJournal
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.posix.sockets import is_own_peer
from distributed_grid.wire import Endpoint, clipped

MAX_RUNNING: Final = 2
MAX_DONE: Final = 10_000
CONNECT_SECONDS: Final = 10.0
Key = tuple[str, int]

log = logging.getLogger(__name__)


class ReplicationTask:
    """A replica to be made, with a descriptor of the source of its own."""

    def __init__(self, order: messages.MakeReplica, backing: CopyFile) -> None:
        self.order = order
        self.fd = os.dup(backing.fd)
        self.size = backing.size
        self.digests = array("Q", backing.digests)
        self.is_cancelled = False

    def run(self) -> str:
        """Make the replica; the problem, or nothing."""
        try:
            if read_claims(self.order.ticket.claims).size != self.size:
                raise GridError("the ticket is for a block of another size")
            connection = ServerConnection.connect(self.order.target, seconds=CONNECT_SECONDS)
            try:
                opened = connection.open(self.order.ticket)
                if not opened.complete:
                    connection.write_chunks(opened, self._chunks())
                    connection.end_fill(opened)
            finally:
                connection.close()
        except (GridError, OSError) as error:
            return str(error) or type(error).__name__
        except Exception as error:  # the outermost frame of a thread: the problem must be reported
            log.exception("a replica could not be made")
            return f"internal error of the memory server: {type(error).__name__}"
        finally:
            os.close(self.fd)
        return ""

    def _chunks(self) -> Iterator[tuple[int, memoryview, int]]:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for index, digest in enumerate(self.digests):
            if self.is_cancelled:
                raise GridError("the source was freed meanwhile")
            if digest:
                view = buffer[: min(CHUNK_BYTES, self.size - index * CHUNK_BYTES)]
                if os.preadv(self.fd, [view], index * CHUNK_BYTES) != len(view):
                    raise GridError("the source could not be read")
                yield index * CHUNK_BYTES, view, digest


class CopyReplicator:
    """Makes a few replicas at once, in threads, and reports each from the event loop's thread."""

    def __init__(self, loop: EventLoop, report: Callable[[str, int, str], None]) -> None:
        self._report = report
        self._waiting: deque[ReplicationTask] = deque()
        self._running: dict[Key, ReplicationTask] = {}
        self._finished: deque[tuple[Key, str]] = deque()
        self._done: dict[Key, None] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.watch(self._wake, lambda _: self._collect())

    def start(self, order: messages.MakeReplica, backing: CopyFile) -> None:
        """Make a replica, unless that is running or done; one that is done is reported again."""
        key = (order.source, order.generation)
        if key in self._done:
            self._report(*key, "")
        elif key not in self._running and all(key != _key(task) for task in self._waiting):
            self._waiting.append(ReplicationTask(order, backing))
            self._start_waiting()

    def cancel(self, source: str) -> None:
        for task in (*self._waiting, *self._running.values()):
            if task.order.source == source:
                task.is_cancelled = True

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < MAX_RUNNING:
            task = self._waiting.popleft()
            self._running[_key(task)] = task
            try:
                threading.Thread(target=self._run, args=(task,), daemon=True).start()
            except RuntimeError as error:  # no thread to be had
                os.close(task.fd)
                self._finish(task, str(error))

    def _run(self, task: ReplicationTask) -> None:
        self._finish(task, task.run())

    def _finish(self, task: ReplicationTask, problem: str) -> None:
        self._finished.append((_key(task), problem))
        os.eventfd_write(self._wake, 1)

    def _collect(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._finished:
            key, problem = self._finished.popleft()
            del self._running[key]
            if not problem:
                self._done[key] = None
                if len(self._done) > MAX_DONE:
                    del self._done[next(iter(self._done))]
            self._report(*key, problem)
        self._start_waiting()


def _key(task: ReplicationTask) -> Key:
    return (task.order.source, task.order.generation)


START_SECONDS: Final = 20.0
DATA_SOCKET: Final = "memory.sock"
CONTROL_SOCKET: Final = "control.sock"
SPILL_DIR: Final = "spill"
INCARNATION_FILE: Final = "incarnation.json"


class MemoryServer:
    """A memory server with its clients and its supervisor."""

    def __init__(
        self,
        control: messages.ControlSocket,
        configuration: messages.ConfigureServer,
        copies: list[CopyFile],
        journal: WriteJournal | None,
    ) -> None:
        self._control: messages.ControlSocket | None = None
        self._unsupervised_since = time.monotonic()
        self._folder = Path(configuration.folder)
        self._folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._configuration = configuration
        self._hold_until_boot_ms = configuration.hold_until_boot_ms
        spill = self._folder / SPILL_DIR
        spill.mkdir(mode=0o700, exist_ok=True)
        self._journal = journal or WriteJournal.make()
        self._store = CopyStore(spill, configuration.incarnation, configuration.key, self._journal)
        self._store.tombstones.raise_floor(configuration.floor_boot_ms)
        finished = self._store.take_over(copies)
        log.info("holds %d copies, finished %d writes", len(self._store.held), finished)
        self._tls: ssl.SSLContext | None = None
        self._fingerprint = ""
        if configuration.certificate:
            self._tls = tls_context(configuration.certificate, configuration.private_key)
            self._fingerprint = fingerprint_of(configuration.certificate)
        self._loop = EventLoop(self._make_connection, configuration.max_connections_per_peer)
        self._tcp = listen_tcp(configuration.host, configuration.port)
        self._address: tuple[str, int] = self._tcp.getsockname()[:2]
        self._loop.listen(self._tcp, is_local=False)
        self._unix = listen_unix(self._folder / DATA_SOCKET, socket.SOCK_STREAM)
        self._loop.listen(self._unix, is_local=True)
        self._control_listener = listen_unix(self._folder / CONTROL_SOCKET, socket.SOCK_SEQPACKET)
        self._loop.watch(self._control_listener.fileno(), lambda _: self._accept_supervisor())
        self._replicator = CopyReplicator(self._loop, self._report_replica)
        self._last_stats = messages.ServerStats()
        self._attach_supervisor(control)

    def run(self) -> None:
        """Serve until there is no reason to."""
        self._loop.run(self._tick)
        self._loop.close()
        if not self._store.in_memory:
            save_incarnation(self._folder, self._store.incarnation, self._store.key)

    # ------------------------------------------------------------------ clients

    def _make_connection(self, sock: socket.socket, is_local: bool, now: float) -> ClientConnection | None:
        if is_local:
            if not is_own_peer(sock):
                sock.close()
                return None
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return ClientConnection(sock, self._store, self, is_local=is_local, now=now)

    # ------------------------------------------------------------------ supervisor

    def _accept_supervisor(self) -> None:
        sock, _ = self._control_listener.accept()
        if is_own_peer(sock):
            self._attach_supervisor(messages.ControlSocket(sock))
        else:
            sock.close()

    def _attach_supervisor(self, control: messages.ControlSocket) -> None:
        """Make this the supervisor, and list all held copies to it."""
        self._detach_supervisor()
        self._control = control
        self._loop.watch(control.fileno(), lambda _: self._receive(control))
        self._send(messages.HeldCopy((messages.JOURNAL,)), [self._journal.fd])
        for names in messages.batches(backing.copy for backing in self._store.in_memory):
            self._send(messages.HeldCopy(names), [self._store.held[name].fd for name in names])
        for names in messages.batches(backing.copy for backing in self._store.held.values() if backing.on_disk):
            self._send(messages.CopyOnDisk(names))
        host, port = self._address
        endpoint = Endpoint(host, port, self._fingerprint, str(self._folder / DATA_SOCKET), self._store.incarnation)
        self._send(
            messages.ServerReady(
                endpoint=endpoint,
                key=self._store.key,
                certificate=self._configuration.certificate,
                private_key=self._configuration.private_key,
                hold_until_boot_ms=self._hold_until_boot_ms,
                pid=os.getpid(),
            )
        )

    def _detach_supervisor(self) -> None:
        if self._control is not None:
            self._loop.unwatch(self._control.fileno())
            self._control.close()
            self._control = None
            self._unsupervised_since = time.monotonic()

    def _send(self, message: messages.Message, fds: list[int] | None = None) -> None:
        if self._control is None:
            return
        try:
            self._control.send(message, fds or [])
        except OSError:
            self._detach_supervisor()
            return
        if self._control.waits_to_send:
            self._loop.watch_for(self._control.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def hold_elsewhere(self, backing: CopyFile) -> bool:
        """Have the supervisor hold a new copy, too; False where that is not possible just now."""
        if backing.on_disk:
            self._send(messages.CopyOnDisk((backing.copy,)))
            return True
        if self._control is None:
            return True  # there is no supervisor to hold it; the next one gets everything
        try:
            return self._control.send_now(messages.HeldCopy((backing.copy,)), [backing.fd])
        except OSError:
            self._detach_supervisor()
            return True

    def sever(self, nonce: bytes) -> None:
        for connection in list(self._loop.connections.values()):
            if nonce and connection.nonce == nonce:
                self._loop.drop(connection)

    def _receive(self, control: messages.ControlSocket) -> None:
        try:
            if control.waits_to_send and control.flush():
                self._loop.watch_for(control.fileno(), select.EPOLLIN)
            received = control.receive()
            for _, fds in received:  # all of them before the first is handled: that may end the connection
                messages.close_all(fds)
            for message, _ in received:
                self._handle(message)
        except (EOFError, OSError, ProtocolError):
            if control is self._control:
                self._detach_supervisor()

    def _handle(self, message: messages.Message) -> None:
        match message:
            case messages.SetHold():
                self._hold_until_boot_ms = message.until_boot_ms
            case messages.FreeCopy():
                for copy in message.copies:
                    self._replicator.cancel(copy)
                    self._store.free(copy, boot_ms())
                self._send(messages.CopyFreed(message.copies))
            case messages.MakeReplica():
                backing = self._store.held.get(message.source) or self._store.create_untouched(message, boot_ms())
                if backing is None or not backing.complete:
                    self._report_replica(message.source, message.generation, f"{message.source} is not here")
                elif (
                    backing.generation >= message.generation
                ):  # sent twice, and answered since: it must not be frozen again
                    problem = f"{message.source} has got past generation {message.generation}"
                    self._report_replica(message.source, message.generation, problem)
                else:
                    self._store.freeze(backing)
                    self._replicator.start(message, backing)
            case messages.SupervisorLeaving():
                if not self._store.held:
                    self._loop.stop()
            case _:
                raise ProtocolError(f"unexpected control message {type(message).__name__}")

    def _report_replica(self, source: str, generation: int, problem: str) -> None:
        if problem:
            log.warning("could not make a copy of %s: %s", source, problem)
        self._send(messages.ReplicaMade(source, generation, clipped(problem)))

    # ------------------------------------------------------------------ timers

    def _tick(self) -> None:
        now = boot_ms()
        if os.fstat(self._folder_fd).st_nlink == 0:
            log.warning("the folder was removed, so no supervisor can find this server: ending")
            self._loop.stop()
            return
        self._store.expire(now)
        if 0 < self._hold_until_boot_ms <= now:
            log.warning("hold expired: freeing all in-memory copies")
            self._hold_until_boot_ms = 0
            self._store.start_incarnation(now)
            self._send(messages.NewIncarnation(self._store.incarnation, self._store.key))
        unsupervised_seconds = self._configuration.unsupervised_ms / 1000
        if self._control is None and time.monotonic() - self._unsupervised_since >= unsupervised_seconds:
            for backing in self._store.in_memory:
                if 0 < backing.ends_boot_ms <= now:
                    self._store.free(backing.copy, now)
            if not self._store.in_memory:
                log.info("no copies and no supervisor: ending")
                self._loop.stop()
        counters = self._store.counters
        stats = messages.ServerStats(
            resident_bytes=self._store.resident_bytes(),
            copies=len(self._store.held),
            reads=counters.reads,
            writes=counters.writes,
            bytes_in=counters.bytes_in,
            bytes_out=counters.bytes_out,
            wire_in=counters.wire_in,
            wire_out=counters.wire_out,
            connections=len(self._loop.connections),
        )
        if stats != self._last_stats:
            self._last_stats = stats
            self._send(stats)


def start_server(sock: socket.socket) -> MemoryServer | None:
    """Receive the configuration from the supervisor; None if no server can start with it, which is reported."""
    control = messages.ControlSocket(sock)
    held: list[CopyFile] = []
    journal: WriteJournal | None = None
    configuration: messages.ConfigureServer | None = None
    is_complete = False
    try:
        for message, fds in _startup_messages(control):
            match message:
                case messages.ConfigureServer():
                    configuration = message
                case messages.HeldCopy():
                    for name, fd in zip(message.copies, fds, strict=True):
                        if name == messages.JOURNAL:
                            journal = WriteJournal(fd)
                        else:
                            held.append(CopyFile.take_over(fd))
                case messages.StartServing():
                    is_complete = True
                case _:
                    break
        if configuration is None or not is_complete:  # starting with a part would free the rest
            return None
        for backing in held:
            if not backing.complete:  # its fill starts over anyway
                backing.close()
        return MemoryServer(control, configuration, [backing for backing in held if backing.complete], journal)
    except (OSError, ValueError, ProtocolError) as error:
        log.error("cannot start: %s", error)
        with contextlib.suppress(OSError):
            control.send(messages.CommandFailed(clipped(f"the memory server cannot start: {error}")))
        return None


def _startup_messages(control: messages.ControlSocket) -> Iterator[tuple[messages.Message, list[int]]]:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        select.select([control], [], [], deadline - time.monotonic())
        try:
            for message, fds in control.receive():
                yield message, fds
                if isinstance(message, messages.StartServing):
                    return
        except EOFError:
            return


def save_incarnation(folder: Path, incarnation: str, key: bytes) -> None:
    """Leave an incarnation that ended empty to the next server; where that fails, the next one begins its own.

    Copies are made when they are first used, so some that were granted may not have been there yet when a server that
    held nothing ended. They are as good as before under the next server, if that continues the incarnation. The journal
    with its tombstones is gone, so the next server creates nothing for tickets issued before it was configured.
    """
    content = json.dumps({"incarnation": incarnation, "key": key.hex(), "boot": boot_id_bytes().hex()}).encode()
    path = folder / INCARNATION_FILE
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)


def load_incarnation(folder: Path) -> tuple[str, bytes] | None:
    """The saved incarnation and its key, once; None where there is none, or the machine was restarted since."""
    path = folder / INCARNATION_FILE
    try:
        note = json.loads(path.read_bytes())
        path.unlink()
        if bytes.fromhex(note["boot"]) != boot_id_bytes():
            return None
        return str(note["incarnation"]), bytes.fromhex(note["key"])
    except (OSError, ValueError, KeyError, TypeError):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return None
