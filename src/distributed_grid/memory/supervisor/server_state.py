"""State of a memory server that outlives its process: identity, held copies, pending orders."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from distributed_grid.memory.protocol.authentication import TICKET_LIFE_MS, is_copy_id
from distributed_grid.memory.protocol.control_messages import (
    JOURNAL,
    ConfigureServer,
    FreeCopy,
    MakeReplica,
    NewIncarnation,
    ReplicaMade,
    ServerReady,
    batches,
    close_all,
)
from distributed_grid.memory.server.copy_file import COPY_SUFFIX
from distributed_grid.memory.server.copy_store import KEY_BYTES
from distributed_grid.memory.server.server import load_incarnation
from distributed_grid.memory.supervisor.server_process import ServerLink
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.wire import CopiesFreedReport, CopyMadeReport, MakeCopyOrder, ServeMemoryOrder

DEFAULT_HOST: Final = "127.0.0.1"
BATCH_SECONDS: Final = 0.005

log = logging.getLogger(__name__)


class ServerIdentity:
    """Who the server of a folder is, whichever process is it just now: incarnation, key, hold, address.

    A restarted server is the one before, at the same address where that is free. All nodes of an agent share one
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
        """No server is needed any more; safe twice."""
        self._incarnation = self.order = None
        self._floor_boot_ms = 0

    def end_incarnation(self) -> None:
        """The hold has expired while no server ran: the next one gets an incarnation of its own."""
        self._incarnation = None
        self._floor_boot_ms = 0
        self.hold_until_boot_ms = 0

    def accept_order(self, order: ServeMemoryOrder, *, is_serving: bool) -> None:
        """Be what is ordered, unless another node's order counts."""
        if not is_serving or self.order is None or self.order.node in ("", order.node):
            self.order = order

    def must_restart_for(self, order: ServeMemoryOrder, ready: ServerReady) -> bool:
        """Whether the server has to be replaced for this order."""
        if self.order is not None and self.order.node not in ("", order.node):
            return False
        moved = (order.host or DEFAULT_HOST) != ready.endpoint.host
        return moved or bool(order.certificate) != bool(ready.certificate)

    def configuration(self) -> ConfigureServer:
        """The first message to a new server. Where there is no incarnation to continue, one begins."""
        assert self.order is not None
        if self._incarnation is None:
            saved = load_incarnation(self._folder)
            if saved is not None:  # without its tombstones: earlier tickets may be for copies that were freed
                self._floor_boot_ms = boot_ms() + TICKET_LIFE_MS
            self._incarnation = saved or (secrets.token_hex(8), secrets.token_bytes(KEY_BYTES))
        order, (incarnation, key) = self.order, self._incarnation
        host = order.host or DEFAULT_HOST
        return ConfigureServer(
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

    def adopt(self, ready: ServerReady) -> bool:
        """Continue as this server; whether it has to be sent another hold than it has."""
        endpoint = ready.endpoint
        self._incarnation = (endpoint.incarnation, ready.key)
        self._address = (endpoint.host, endpoint.port)
        if self.order is None:
            self.order = ServeMemoryOrder("", ready.certificate, ready.private_key, endpoint.host)
        if self.hold_until_boot_ms and self.hold_until_boot_ms != ready.hold_until_boot_ms:
            return True
        self.hold_until_boot_ms = ready.hold_until_boot_ms
        return False

    def change_incarnation(self, new: NewIncarnation) -> None:
        """The hold expired, and the server has begun another incarnation."""
        self._incarnation = (new.incarnation, new.key)
        self._floor_boot_ms = 0
        self.hold_until_boot_ms = 0


class HeldCopies:
    """What the supervisor holds along with its server: a descriptor of every copy in memory and of the journal, the
    names of the copies on disk.

    What a server lists is incoming until it has listed all; then that, and nothing else, is held. Every descriptor is
    closed once: when its copy is freed, when another takes its place, at the end.
    """

    def __init__(self) -> None:
        self.descriptors: dict[str, int] = {}
        self.on_disk: set[str] = set()
        self._incoming: dict[str, int] = {}

    @property
    def in_memory(self) -> tuple[str, ...]:
        """The names of the copies in memory."""
        return tuple(name for name in self.descriptors if name != JOURNAL)

    @property
    def is_empty(self) -> bool:
        """Whether there is no copy, neither in memory nor on disk."""
        return not self.descriptors.keys() - {JOURNAL} and not self.on_disk

    def measure_bytes(self) -> int:
        """The bytes that what is in memory really uses at this moment."""
        return 512 * sum(os.fstat(fd).st_blocks for fd in self.descriptors.values())

    def start_listing(self) -> None:
        """A server is about to list what it holds; what is held stays until it has."""
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
            close_all([into.pop(name)] if name in into else [])
            into[name] = fd

    def finish_listing(self) -> None:
        """Hold what the server listed, and nothing else."""
        close_all(self.descriptors.values())
        self.descriptors, self._incoming = self._incoming, {}

    def stop_listing(self) -> None:
        """The server that was listing does not go on; safe twice."""
        close_all(self._incoming.values())
        self._incoming = {}

    def free(self, copies: Iterable[str]) -> None:
        """Stop holding these; those that are not here are no error."""
        for copy in copies:
            fd = self.descriptors.pop(copy, -1)
            close_all([fd] if fd >= 0 else [])
            self.on_disk.discard(copy)

    def free_copies_in_memory(self) -> None:
        """Stop holding every copy in memory; the journal stays."""
        journal = self.descriptors.pop(JOURNAL, -1)
        self.free_memory()
        if journal >= 0:
            self.descriptors[JOURNAL] = journal

    def free_memory(self) -> None:
        """Stop holding all that is in memory, the journal too; safe twice."""
        close_all(self.descriptors.values())
        self.descriptors = {}


class PendingOrders:
    """Copies to make and to free, until the server has answered; a restarted server gets them again.

    `is_needed` says whether a server runs or will; where not, copies on disk, in `spill`, are freed here. Frees that
    come together are sent and reported together.
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
        self._replicas: dict[tuple[str, int], MakeReplica] = {}
        self._to_free: dict[str, bool] = {}  # and whether this server was asked
        self._freed: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def start(self) -> None:
        """Forward orders; safe twice."""
        self._stopped = False

    def stop(self) -> None:
        """Forward nothing more; orders are remembered. Safe twice."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def make_copy(self, order: MakeCopyOrder) -> None:
        """Have a copy made elsewhere, and report how that went; an order given twice is done once."""
        if not self._is_needed():
            self._report(CopyMadeReport(order.source, order.generation, "no memory server runs here"))
            return
        replica = MakeReplica(order.source, order.generation, order.target, order.ticket)
        self._replicas[order.source, order.generation] = replica
        self._link.send(replica)

    def replica_made(self, answer: ReplicaMade) -> None:
        """A copy was made, or could not be."""
        if self._replicas.pop((answer.source, answer.generation), None) is not None:
            self._report(CopyMadeReport(answer.source, answer.generation, answer.problem))

    def free(self, copies: Iterable[str]) -> None:
        """Have these freed, and report it; also of those that are not here."""
        for copy in copies:
            self._to_free.setdefault(copy, False)
        self._schedule_flush()

    def copies_freed(self, copies: Iterable[str]) -> None:
        """The server has freed these."""
        self._freed += [copy for copy in copies if self._to_free.pop(copy, None) is not None]
        self._schedule_flush()

    def server_changed(self) -> None:
        """There is another server, which was asked for nothing yet."""
        self._to_free = dict.fromkeys(self._to_free, False)

    def resend(self) -> None:
        """The server serves: ask it for all that is not answered."""
        for replica in self._replicas.values():
            self._link.send(replica)
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if self._timer is None and not self._stopped:
            self._timer = asyncio.get_running_loop().call_later(BATCH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if self._link.ready is not None:
            for names in batches([copy for copy, asked in self._to_free.items() if not asked]):
                self._link.send(FreeCopy(names))
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
