"""Memory that a node lends: the memory server supervised, orders about copies carried out, the owner's need reported.

No copy is given up here for the owner's sake: the control plane gets the needed amount, and moves whole copies
away. Only when a hold has expired does the memory server free everything by itself. Each node of an agent has a memory
server of its own.

Programs on this node query the memory pool through a Unix socket whose requests go to the control plane: the agent's
link is the only way there. Frames are those of the control plane's own socket: four bytes of length, a letter, JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from distributed_grid import wire
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.errors import GridError
from distributed_grid.memory.supervisor.supervisor import ServerSupervisor
from distributed_grid.posix.sockets import is_own_peer, short_path
from distributed_grid.supervision import start_restarted

REPLY_SECONDS = 60.0
CHECK_SECONDS = 2.0
MAX_CONNECTIONS = 256
HEADER = struct.Struct(">I1s")
log = logging.getLogger(__name__)


class MemoryQueryProxy:
    """Serves the programs of one user; `send` is where their queries go."""

    def __init__(
        self, path: Path, send: Callable[[wire.MemoryQuery], None], *, check_seconds: float = CHECK_SECONDS
    ) -> None:
        self.path = path
        self._check_seconds = check_seconds
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._parts: dict[int, bytearray] = {}
        self._server: asyncio.Server | None = None
        self._inode = 0  # of its socket; 0 where it has none
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; a socket that another agent left is replaced."""
        self._close()
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.unlink(missing_ok=True)
        with short_path(self.path) as name:
            self._server = await asyncio.start_unix_server(self._serve, name)
        self.path.chmod(0o600)
        self._inode = self.path.stat().st_ino

    async def keep_listening(self) -> None:
        """Listen anew if the socket is gone or foreign; connected programs stay."""
        while True:
            await asyncio.sleep(self._check_seconds)
            if not self._is_there():
                log.warning("%s was removed or replaced: it is made anew", self.path)
                await self.start()

    async def stop(self) -> None:
        """Stop listening; safe to call twice."""
        self._close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_there(self) -> bool:
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def _close(self) -> None:
        """Stop accepting; the socket of another agent stays."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        if self._is_there():
            self.path.unlink(missing_ok=True)
        self._inode = 0

    def deliver(self, reply: wire.MemoryReply) -> None:
        """Pass a complete reply on; one without a waiting program is dropped."""
        if reply.number not in self._waiting:
            return
        parts = self._parts.setdefault(reply.number, bytearray())
        parts += reply.body
        if reply.more and len(parts) <= wire.MAX_REPLY_BYTES:
            return
        waiting = self._waiting.pop(reply.number)
        del self._parts[reply.number]
        if not waiting.done():
            waiting.set_result(_unreachable("the answer is too long") if reply.more else bytes(parts))

    def fail_pending(self) -> None:
        """Fail all queries: the replies are lost with the link, and programs may ask again."""
        self._parts.clear()
        for number in tuple(self._waiting):
            self.deliver(wire.MemoryReply(number, _unreachable("the link to the control plane was lost")))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) <= MAX_CONNECTIONS and is_own_peer(writer.get_extra_info("socket")):
                while True:
                    length, kind = HEADER.unpack(await reader.readexactly(HEADER.size))
                    if length > wire.MAX_QUERY_BYTES or kind != b"J":
                        break
                    body = await reader.readexactly(length)
                    number = next(self._numbers)
                    self._waiting[number] = asyncio.get_running_loop().create_future()
                    try:
                        self._send(wire.MemoryQuery(number, body))
                        async with asyncio.timeout(REPLY_SECONDS):
                            body = await self._waiting[number]
                    except TimeoutError:
                        body = _unreachable("the control plane did not answer")
                    finally:
                        self._waiting.pop(number, None)
                        self._parts.pop(number, None)
                    writer.write(HEADER.pack(len(body), b"J") + body)
                    await writer.drain()
        except (OSError, EOFError):
            pass  # the program went away, or does not speak this protocol
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _unreachable(reason: str) -> bytes:
    return json.dumps({"error": {"type": "Unreachable", "message": reason, "exit_code": 3}}).encode()


QUERY_SOCKET = "query.sock"
POLL_SECONDS = 0.5
REPORT_EVERY = 4
"""Polls between two reports of a lasting need."""
MIN_FREE_MILLI = 150
"""Part of the memory that is kept free, or less if the owner's rules ask for less."""
RELIEF_MILLI = 1200
"""Part of the minimum that is made free when it is undercut, so that the next byte does not bring the need back."""


class LentMemory:
    """Runs the memory server of a node and watches the need of its owner; `send` is where its reports go.

    Where the control plane is on another machine (`has_proxy`), programs of this one send their queries here.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        meter: UsageMeter,
        host: AttemptHost,
        send: Callable[[wire.MemoryReport | wire.MemoryQuery], None],
        *,
        addresses: Callable[[], Iterable[str]] = tuple,
        has_proxy: bool = True,
    ) -> None:
        self._node = node
        self._meter = meter
        self._host = host
        self._send = send
        self._addresses = addresses
        self._supervisor = ServerSupervisor(folder, report=self._report)
        self.proxy = MemoryQueryProxy(folder / QUERY_SOCKET, send) if has_proxy else None
        self._orders: asyncio.Queue[wire.MemoryOrder] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._rules: wire.OwnerRules | None = None

    async def start(self) -> None:
        """Find the memory server that outlived the last agent, if there is one; it is started when it is needed."""
        await self._supervisor.start()
        self._meter.count_lent_memory(self._node, self._supervisor.measure_bytes)
        self._tasks = [
            start_restarted(self._process_orders, "orders about memory"),
            start_restarted(self._watch_owner, "the watch of memory for the owner"),
        ]
        if self.proxy is not None:
            await self.proxy.start()
            self._tasks.append(start_restarted(self.proxy.keep_listening, "the socket for memory queries"))

    async def stop(self) -> None:
        """Stop; a memory server with copies keeps running. Safe twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self.proxy is not None:
            await self.proxy.stop()
        await self._supervisor.stop()

    def receive(self, order: wire.MemoryOrder | wire.MemoryReply) -> None:
        """Queue an order; they are carried out one after the other. Replies go to the program that asked."""
        if not isinstance(order, wire.MemoryReply):
            self._orders.put_nowait(order)
        elif self.proxy is not None:
            self.proxy.deliver(order)

    def link_lost(self) -> None:
        if self.proxy is not None:
            self.proxy.fail_pending()

    def set_owner_rules(self, rules: wire.OwnerRules | None) -> None:
        self._rules = rules

    def report_served(self) -> None:
        """Report the use of the memory, as for a new link."""
        served = self._supervisor.served(self._node)
        if served is not None:
            self._send_served(served)

    def extend_hold(self, until_boot_ms: int) -> None:
        self._supervisor.extend_hold(until_boot_ms)

    @property
    def resident_bytes(self) -> int:
        return self._supervisor.resident_bytes

    # ------------------------------------------------------------------ orders

    def _report(
        self, report: wire.MemoryServedReport | wire.MemoryFailedReport | wire.CopyMadeReport | wire.CopiesFreedReport
    ) -> None:
        if isinstance(report, wire.MemoryServedReport):
            self._send_served(report)
        elif isinstance(report, wire.CopiesFreedReport):
            for page in wire.pages(len(report.copies), wire.MAX_IDS):
                self._send(wire.CopiesFreedReport(report.copies[page]))
        else:
            self._send(replace(report, problem=wire.clipped(report.problem)))

    def _send_served(self, report: wire.MemoryServedReport) -> None:
        for page in wire.served_pages(report):
            self._send(page)

    async def _process_orders(self) -> None:
        while True:
            order = await self._orders.get()
            try:
                if isinstance(order, wire.ServeMemoryOrder):
                    host = await asyncio.to_thread(own_address, [*self._addresses(), order.host])
                    served = self._supervisor.served(order.node)
                    if (
                        served is not None
                        and served.endpoint.host == host
                        and bool(served.endpoint.fingerprint) == bool(order.certificate)  # any certificate is as good
                    ):
                        self._report(served)
                    else:
                        await self._supervisor.serve(replace(order, host=host))
                elif isinstance(order, wire.MakeCopyOrder):
                    self._supervisor.make_copy(order)
                elif isinstance(order, wire.FreeCopiesOrder):
                    self._supervisor.free_copies(order.copies)
            except Exception as failure:  # the outermost loop: the next order may well succeed
                is_expected = isinstance(failure, GridError | OSError)
                log.warning("a memory order failed: %s", failure, exc_info=None if is_expected else failure)
                if isinstance(order, wire.ServeMemoryOrder):
                    self._send(
                        wire.MemoryFailedReport(order.node, wire.clipped(str(failure) or type(failure).__name__))
                    )

    # ------------------------------------------------------------------ the owner

    async def _watch_owner(self) -> None:
        """Report the owner's need when two polls in a row show it, and again while it lasts."""
        polls = 0
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self._rules is None or not self.resident_bytes:
                needed = 0
            else:
                total, used, outside = self._meter.memory(self._host.usage())
                needed = min(
                    bytes_to_reclaim(self._rules, total=total, used=used, outside=outside), self.resident_bytes
                )
            polls = polls + 1 if needed else 0
            if polls % REPORT_EVERY == 2:
                log.info("the owner needs %d bytes of the memory of blocks", needed)
                self._send(wire.MemoryReclaimReport(self._node, needed))


class LocalMemory:
    """The memory of all nodes of the control plane's own machine, each lent by a server of its own."""

    proxy = None

    def __init__(self, lent: Mapping[str, LentMemory]) -> None:
        self._lent = lent

    async def start(self) -> None:
        for lent in self._lent.values():
            await lent.start()

    async def stop(self) -> None:
        await asyncio.gather(*(lent.stop() for lent in self._lent.values()))

    def receive(self, order: wire.MemoryOrder | wire.MemoryReply) -> None:
        if not isinstance(order, wire.MemoryReply) and order.node in self._lent:
            self._lent[order.node].receive(order)

    def link_lost(self) -> None:
        """The link in memory cannot break."""

    def set_owner_rules(self, rules: wire.OwnerRules | None) -> None:
        for lent in self._lent.values():
            lent.set_owner_rules(rules)

    def report_served(self) -> None:
        for lent in self._lent.values():
            lent.report_served()

    def extend_hold(self, until_boot_ms: int) -> None:
        for lent in self._lent.values():
            lent.extend_hold(until_boot_ms)


def bytes_to_reclaim(rules: wire.OwnerRules, *, total: int, used: int, outside: int) -> int:
    """Bytes of copies that have to move away for the owner.

    That is everything above the mark, when the owner alone is above it; and at any time the shortfall of a minimum of
    free memory. That minimum is below the memory that is never lent, so lending alone does not cause the need.
    """
    minimum, free = min(rules.memory_min_bytes, total * MIN_FREE_MILLI // 1000), total - used
    short = minimum * RELIEF_MILLI // 1000 - free if free < minimum else 0
    mark = total * rules.memory_used_max_milli // 1000
    return max(short, used - mark if outside > mark else 0, 0)


def own_address(names: Iterable[str]) -> str:
    """The first of these that is an address of this machine; "local" is this machine alone."""
    for name in names:
        if name == "local":
            return "127.0.0.1"
        for address in _addresses_of(name):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
                return address
    raise OSError("none of the addresses that the cluster has for this machine is its own")


def address_towards(name: str) -> str:
    """The address from which this machine reaches another; nothing is sent to find out. Empty where it does not."""
    for address in _addresses_of(name):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    return ""


def _addresses_of(name: str) -> list[str]:
    if not name:
        return []
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):  # the latter: nothing that a host can be called
        return []
