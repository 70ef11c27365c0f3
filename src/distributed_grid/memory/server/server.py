"""The memory server of a node: a process of its own, so that gigabytes never delay a heartbeat.

Rule 1. It outlives its agent: without a keeper it serves on, within its hold, and a new keeper finds it by its
        control socket.
Rule 2. It lets go by itself: of everything in memory when the hold runs out, of each copy whose end has passed when
        nobody keeps it, and of itself when there is nothing left to hold.
Rule 3. It decides nothing: it believes tickets and its keeper.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.control_messages import (
    JOURNAL,
    Begin,
    CommandFailed,
    ControlSocket,
    CopyFreed,
    ExtendHold,
    FreeCopy,
    Go,
    HeldCopy,
    Leave,
    MakeReplica,
    Message,
    NewIncarnation,
    OnDisk,
    ReplicaMade,
    ServerReady,
    ServerStats,
    batches,
)
from distributed_grid.memory.protocol.tls import fingerprint_of, tls_context
from distributed_grid.memory.server.connection import ClientConnection
from distributed_grid.memory.server.copy_file import CopyFile
from distributed_grid.memory.server.copy_store import CopyStore
from distributed_grid.memory.server.event_loop import EventLoop
from distributed_grid.memory.server.listeners import tcp_listening, unix_listening
from distributed_grid.memory.server.replication import CopyReplicator
from distributed_grid.memory.server.saved_incarnation import keep_life
from distributed_grid.memory.server.write_journal import WriteJournal
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.posix.unix_sockets import is_own_peer
from distributed_grid.wire import Endpoint

BEGIN_SECONDS: Final = 20.0
SOCKET: Final = "memory.sock"
CONTROL: Final = "control.sock"
SPILL: Final = "spill"

log = logging.getLogger(__name__)


class MemoryServer:
    """All parts of one memory server, from its first message on."""

    def __init__(self, link: ControlSocket, begin: Begin, copies: list[CopyFile], journal: WriteJournal | None) -> None:
        self._link: ControlSocket | None = None
        self._keeping_since = time.monotonic()
        self._folder = Path(begin.folder)
        self._begin = begin
        self._until_boot_ms = begin.until_boot_ms
        spill = self._folder / SPILL
        spill.mkdir(mode=0o700, exist_ok=True)
        self._journal = journal or WriteJournal.make()
        self._shelf = CopyStore(spill, begin.incarnation, begin.key, self._journal)
        finished = self._shelf.take_over(copies)
        log.info("holds %d copies, finished %d writes", len(self._shelf.held), finished)
        self._context = tls_context(begin.certificate, begin.private_key) if begin.certificate else None
        self._fingerprint = fingerprint_of(begin.certificate) if begin.certificate else ""
        self._loop = EventLoop(self._accepted)
        self._listen()
        self._copier = CopyReplicator(self._loop, self._made)
        self._told = ServerStats()
        self._take_keeper(link)

    def run(self) -> None:
        """Serve until there is no reason to."""
        self._loop.run(self._tick)
        self._loop.close()
        if not self._shelf.in_memory:
            keep_life(self._folder, self._shelf.incarnation, self._shelf.key)

    # ------------------------------------------------------------------ who comes in

    def _listen(self) -> None:
        tcp = tcp_listening(self._begin.host, self._begin.port)
        self._at: tuple[str, int] = tcp.getsockname()[:2]
        self._tcp = tcp
        self._loop.listen(tcp, is_local=False)
        self._unix = unix_listening(self._folder / SOCKET, socket.SOCK_STREAM)
        self._loop.listen(self._unix, is_local=True)
        self._control = unix_listening(self._folder / CONTROL, socket.SOCK_SEQPACKET)
        self._loop.watch(self._control.fileno(), lambda _: self._keeper_comes())

    def _accepted(self, sock: socket.socket, is_local: bool, now: float) -> ClientConnection | None:
        if is_local:
            if not is_own_peer(sock):
                sock.close()
                return None
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return ClientConnection(sock, self._shelf, self, is_local=is_local, now=now)

    # ------------------------------------------------------------------ the keeper

    def _keeper_comes(self) -> None:
        sock, _ = self._control.accept()
        if is_own_peer(sock):
            self._take_keeper(ControlSocket(sock))
        else:
            sock.close()

    def _take_keeper(self, link: ControlSocket) -> None:
        """This one is the keeper from now on; tell it everything."""
        self._lose_keeper()
        self._link = link
        self._loop.watch(link.fileno(), lambda _: self._hear(link))
        self._say(HeldCopy((JOURNAL,)), [self._journal.fd])
        for names in batches(one.copy for one in self._shelf.in_memory):
            self._say(HeldCopy(names), [self._shelf.held[name].fd for name in names])
        for names in batches(one.copy for one in self._shelf.held.values() if one.on_disk):
            self._say(OnDisk(names))
        host, port = self._at
        endpoint = Endpoint(host, port, self._fingerprint, str(self._folder / SOCKET), self._shelf.incarnation)
        begin = self._begin
        until = self._until_boot_ms
        self._say(ServerReady(endpoint, self._shelf.key, begin.certificate, begin.private_key, until, os.getpid()))

    def _lose_keeper(self) -> None:
        if self._link is not None:
            self._loop.unwatch(self._link.fileno())
            self._link.close()
            self._link = None
            self._keeping_since = time.monotonic()

    def _say(self, message: Message, fds: list[int] | None = None) -> None:
        if self._link is None:
            return
        try:
            self._link.send(message, fds or [])
        except OSError:
            self._lose_keeper()
            return
        if self._link.waits_to_send:
            self._loop.watch_for(self._link.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def secure(self, backing: CopyFile) -> bool:
        if backing.on_disk:
            self._say(OnDisk((backing.copy,)))
            return True
        if self._link is None:
            return True  # nobody is there to hold it; a keeper that comes gets everything
        try:
            return self._link.send_now(HeldCopy((backing.copy,)), [backing.fd])
        except OSError:
            self._lose_keeper()
            return True

    def sever(self, nonce: bytes) -> None:
        for connection in list(self._loop.connections.values()):
            if nonce and connection.nonce == nonce:
                self._loop.drop(connection)

    def _hear(self, link: ControlSocket) -> None:
        try:
            if link.waits_to_send and link.flush():
                self._loop.watch_for(link.fileno(), select.EPOLLIN)
            for message, fds in link.receive():
                for fd in fds:
                    os.close(fd)
                self._obey(message)
        except (EOFError, OSError, ProtocolError):
            if link is self._link:
                self._lose_keeper()

    def _obey(self, message: Message) -> None:
        match message:
            case ExtendHold():
                self._until_boot_ms = message.until_boot_ms
            case FreeCopy():
                for copy in message.copies:
                    self._copier.cancel(copy)
                    self._shelf.free(copy, boot_ms())
                self._say(CopyFreed(message.copies))
            case MakeReplica():
                self._copy(message)
            case Leave():
                if not self._shelf.held:
                    self._loop.ended = True
            case _:
                raise ProtocolError("a keeper does not say that")

    def _copy(self, order: MakeReplica) -> None:
        backing = self._shelf.held.get(order.source) or self._shelf.make_untouched(order, boot_ms())
        if backing is None or not backing.complete:
            self._made(order.source, order.generation, f"{order.source} is not here")
        elif backing.generation >= order.generation:  # said twice, and answered since: it must not be frozen again
            self._made(order.source, order.generation, f"{order.source} has got past generation {order.generation}")
        else:
            self._shelf.freeze(backing)
            self._copier.begin(order, backing)

    def _made(self, source: str, generation: int, problem: str) -> None:
        if problem:
            log.warning("could not make a copy of %s: %s", source, problem)
        self._say(ReplicaMade(source, generation, problem))

    # ------------------------------------------------------------------ by itself

    def _tick(self) -> None:
        now = boot_ms()
        self._shelf.forget_old(now)
        if 0 < self._until_boot_ms <= now:
            self._hold_ran_out(now)
        if self._link is None:
            self._alone(now)
        numbers = self._numbers()
        if numbers != self._told:
            self._told = numbers
            self._say(numbers)

    def _hold_ran_out(self, now: int) -> None:
        log.warning("nobody has extended the hold: lets go of all that is in memory")
        self._until_boot_ms = 0
        self._shelf.begin_new_life(now)
        self._say(NewIncarnation(self._shelf.incarnation, self._shelf.key))

    def _alone(self, now: int) -> None:
        if time.monotonic() - self._keeping_since < self._begin.alone_ms / 1000:
            return
        for backing in self._shelf.in_memory:
            if 0 < backing.ends_boot_ms <= now:
                self._shelf.free(backing.copy, now)
        if not self._shelf.in_memory:
            log.info("nothing is left to hold, and nobody asks for it")
            self._loop.ended = True

    def _numbers(self) -> ServerStats:
        did = self._shelf.counters
        return ServerStats(
            resident_bytes=self._shelf.resident_bytes(),
            copies=len(self._shelf.held),
            reads=did.reads,
            writes=did.writes,
            bytes_in=did.bytes_in,
            bytes_out=did.bytes_out,
            wire_in=did.wire_in,
            wire_out=did.wire_out,
            connections=len(self._loop.connections),
        )


def begin(sock: socket.socket) -> MemoryServer | None:
    """Hear from the keeper who to be, and be it; None where that is not possible, and the keeper was told why."""
    link = ControlSocket(sock)
    held: list[CopyFile] = []
    journal: WriteJournal | None = None
    told: Begin | None = None
    is_all = False
    try:
        for message, fds in _first_messages(link):
            match message:
                case Begin():
                    told = message
                case HeldCopy():
                    for name, fd in zip(message.copies, fds, strict=True):
                        if name == JOURNAL:
                            journal = WriteJournal(fd)
                        else:
                            held.append(CopyFile.take_over(fd))
                case Go():
                    is_all = True
                case _:
                    break
        if told is None or not is_all:  # who goes on with a part would let go of the rest
            return None
        for backing in held:
            if not backing.complete:  # its fill begins anew anyway
                backing.close()
        return MemoryServer(link, told, [one for one in held if one.complete], journal)
    except (OSError, ValueError, ProtocolError) as error:
        log.error("cannot begin: %s", error)
        with contextlib.suppress(OSError):
            link.send(CommandFailed(f"the memory server cannot begin: {error}"))
        return None


def _first_messages(link: ControlSocket) -> Iterator[tuple[Message, list[int]]]:
    deadline = time.monotonic() + BEGIN_SECONDS
    while time.monotonic() < deadline:
        select.select([link], [], [], deadline - time.monotonic())
        try:
            for message, fds in link.receive():
                yield message, fds
                if isinstance(message, Go):
                    return
        except EOFError:
            return
