"""Supervisor of the memory server of an agent.

Every copy in memory is held here too, so a server that dies loses nothing: the next one gets the descriptors, the key
and the incarnation, and clients only see a delay. A folder has one supervisor and one server, each with a lock that
lasts as long as its process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from distributed_grid.memory.protocol import control_messages as messages
from distributed_grid.memory.server.server import SPILL_DIR
from distributed_grid.memory.supervisor.server_process import (
    HeldCopies,
    PendingOrders,
    ServerIdentity,
    ServerLink,
    connect_control,
    raise_descriptor_limit,
    start_server,
    try_lock_file,
)
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.supervision import start_restarted
from distributed_grid.wire import (
    CopiesFreedReport,
    CopyMadeReport,
    MemoryFailedReport,
    MemoryServedReport,
    ServeMemoryOrder,
)

log = logging.getLogger(__name__)
START_SECONDS: Final = 20.0
MAX_RESTART_PAUSE_SECONDS: Final = 5.0
LEAVE_SECONDS: Final = 3.0
LOCK_SECONDS: Final = 2.0
SUPERVISOR_LOCK: Final = "supervisor.lock"
SERVER_LOCK: Final = "server.lock"
Report = MemoryServedReport | MemoryFailedReport | CopyMadeReport | CopiesFreedReport


class ServerSupervisor:
    """Supervises the memory server of one folder; `report` is called with every report. A server without a supervisor
    waits `unsupervised_ms` for the next one."""

    def __init__(self, folder: Path, *, report: Callable[[Report], None], unsupervised_ms: int = 60_000) -> None:
        self._folder = folder
        self._report = report
        self._lock = -1
        self._nodes: dict[str, None] = {}
        self._identity = ServerIdentity(folder, unsupervised_ms)
        self._held = HeldCopies()
        self._link = ServerLink(self._on_message, self._on_lost)
        self._orders = PendingOrders(
            self._link,
            folder / SPILL_DIR,
            is_needed=lambda: self.ready is not None or self._identity.order is not None,
            report=report,
        )
        self.make_copy = self._orders.make_copy
        self.free_copies = self._orders.free
        self.measure_bytes = self._held.measure_bytes
        self._stats = messages.ServerStats()
        self._problem = ""  # why the last server could not start
        self._hold_timer: asyncio.TimerHandle | None = None
        self._starting = asyncio.Lock()
        self._restart: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def ready(self) -> messages.ServerReady | None:
        return self._link.ready

    # ------------------------------------------------------------------ start and stop

    async def start(self) -> None:
        """Take over a server that outlived the last agent; start none. Safe to call twice."""
        self._stopped = False
        self._orders.start()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        (self._folder / SPILL_DIR).mkdir(mode=0o700, exist_ok=True)
        async with self._starting:
            if self.ready is None and await self._lock_folder():
                await self._adopt_server()

    async def stop(self) -> None:
        """Leave a server that holds something running, and end one that holds nothing. Safe to call twice."""
        self._stopped = True
        self._orders.stop()
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
            self._restart = None
        if self._link.is_connected:
            self._link.send(messages.SupervisorLeaving())
            if self._held.is_empty:
                await self._link.wait_until(lambda: not self._link.is_connected, LEAVE_SECONDS)
            self._disconnect()
        self._identity.clear()
        self._held.free_memory()
        self._held.on_disk.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def terminate(self) -> None:
        """End the server and free its memory; copies on disk stay. Safe twice."""
        if self.ready is not None:
            self._terminate_server()
            for _ in range(round(LEAVE_SECONDS / 0.02)):
                fd = try_lock_file(self._folder / SERVER_LOCK)
                if fd >= 0:
                    os.close(fd)
                    break
                await asyncio.sleep(0.02)
        await self.stop()

    async def _lock_folder(self) -> bool:
        """Be the folder's one supervisor; False where another one is and stays."""
        deadline = asyncio.get_running_loop().time() + LOCK_SECONDS
        while self._lock < 0:
            self._lock = try_lock_file(self._folder / SUPERVISOR_LOCK)
            if self._lock < 0:
                if asyncio.get_running_loop().time() > deadline:
                    return False
                await asyncio.sleep(0.05)
        return True

    # ------------------------------------------------------------------ orders

    async def serve(self, order: ServeMemoryOrder) -> None:
        """Have the memory of a node served, and report where, also when it was already; or why it cannot be."""
        self._nodes[order.node] = None
        async with self._starting:
            if not await self._lock_folder():
                self._report(MemoryFailedReport(order.node, f"another agent uses the memory in {self._folder}"))
                return
            if self.ready is not None and self._identity.must_restart_for(order, self.ready):
                self._terminate_server()
            self._identity.accept_order(order, is_serving=self.ready is not None)
            problem = ""
            if self.ready is None:
                problem = await self._adopt_or_start_server()
        report = self.served(order.node)
        if report is not None:
            self._report(report)
        else:
            self._report(MemoryFailedReport(order.node, problem or "the memory server has ended again"))
            self._schedule_restart()

    def served(self, node: str) -> MemoryServedReport | None:
        """The report of what is served, and where; None where nothing is."""
        ready = self.ready
        if ready is None:
            return None
        on_disk = tuple(sorted(self._held.on_disk))
        return MemoryServedReport(
            node=node, endpoint=ready.endpoint, key=ready.key, copies=self._held.in_memory, on_disk=on_disk
        )

    def extend_hold(self, until_boot_ms: int) -> None:
        """Hold what is in memory until then (0: without end); the server sees to it without a supervisor, too."""
        if until_boot_ms == self._identity.hold_until_boot_ms:
            return
        self._identity.hold_until_boot_ms = until_boot_ms
        self._link.send(messages.SetHold(until_boot_ms))
        if self._hold_timer is None:
            self._check_hold()

    def _check_hold(self) -> None:
        """Free all copies here when the hold has expired and no server runs."""
        self._hold_timer = None
        if self._identity.hold_until_boot_ms == 0:
            return
        left_ms = self._identity.hold_until_boot_ms - boot_ms()
        if left_ms > 0:
            self._hold_timer = asyncio.get_running_loop().call_later(left_ms / 1000 + 0.01, self._check_hold)
        elif self.ready is None:
            self._held.free_memory()
            self._identity.end_incarnation()

    # ------------------------------------------------------------------ usage

    @property
    def resident_bytes(self) -> int:
        """Memory that the copies really use, as reported by the server within the last second."""
        return self._stats.resident_bytes

    def stats(self) -> dict[str, int]:
        return {name: getattr(self._stats, name) for name in self._stats.__struct_fields__}

    # ------------------------------------------------------------------ server processes

    async def _adopt_server(self) -> bool:
        """Take over a server that runs; False where none does."""
        sock = connect_control(self._folder)
        if sock is None:
            return False
        self._link.connect(sock, None)
        self._begin_listing()
        if await self._link.wait_until_ready(START_SECONDS):
            return self.ready is not None
        self._disconnect()
        return False

    async def _adopt_or_start_server(self) -> str:
        """Adopt the server that runs or start one; the problem, or nothing.

        Only the holder of its lock starts a server, and the server has that lock for as long as it runs: so there is
        no second one.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_SECONDS
        self._problem = "the memory server did not start"
        while loop.time() < deadline:
            if await self._adopt_server():
                return ""
            lock_fd = try_lock_file(self._folder / SERVER_LOCK)
            if lock_fd < 0:  # one is about to begin or to end
                await asyncio.sleep(0.05)
                continue
            try:
                process = start_server(self._folder, lock_fd)
            except OSError as error:
                return f"the memory server cannot be started: {error.strerror}"
            finally:
                os.close(lock_fd)
            raise_descriptor_limit()
            configuration = self._identity.configuration()
            self._link.connect(process.sock, process)
            self._begin_listing()
            self._link.send(configuration)
            for names in messages.batches(self._held.descriptors):
                self._link.send(messages.HeldCopy(names), [self._held.descriptors[name] for name in names])
            self._link.send(messages.StartServing())
            await self._link.wait_until_ready(deadline - loop.time())
            if self.ready is None:
                self._disconnect()
                process.kill()
                return self._problem
            return ""
        return self._problem

    def _begin_listing(self) -> None:
        self._held.start_listing()
        self._orders.server_changed()

    def _disconnect(self) -> None:
        """Leave the server to itself. Safe twice."""
        self._link.disconnect()
        self._held.stop_listing()

    def _terminate_server(self) -> None:
        """End the server, and keep its copies."""
        self._link.terminate()
        self._held.stop_listing()

    def _on_lost(self) -> None:
        self._disconnect()
        self._link.reap()
        if not self._stopped:
            self._schedule_restart()

    def _schedule_restart(self) -> None:
        if self._identity.order is not None and not self._stopped and (self._restart is None or self._restart.done()):
            self._restart = start_restarted(self._restart_until_ready, "the restart of the memory server")

    async def _restart_until_ready(self) -> None:
        pause = 0.0
        while self.ready is None and not self._stopped:
            await asyncio.sleep(pause)
            async with self._starting:
                problem = await self._adopt_or_start_server() if self._link.ready is None else ""
            if problem:
                log.warning("the memory server could not be started again yet: %s", problem)
            pause = min(max(0.1, 2 * pause), MAX_RESTART_PAUSE_SECONDS)
        self._report_served()

    # ------------------------------------------------------------------ messages of the server

    def _on_message(self, message: messages.Message, fds: list[int]) -> None:
        match message:
            case messages.HeldCopy():
                self._held.add(message.copies, fds, is_listed=self.ready is not None)
                return
            case messages.CopyOnDisk():
                self._held.on_disk.update(message.copies)
            case messages.ServerReady():
                self._held.finish_listing()
                self._link.ready = message
                if self._identity.adopt(message):
                    self._link.send(messages.SetHold(self._identity.hold_until_boot_ms))
                self._orders.resend()
            case messages.CommandFailed():
                self._problem = message.problem
            case messages.NewIncarnation():
                self._held.free_copies_in_memory()
                self._identity.change_incarnation(message)
                if self.ready is not None:
                    endpoint = replace(self.ready.endpoint, incarnation=message.incarnation)
                    self._link.ready = replace(self.ready, endpoint=endpoint, key=message.key)
                    self._report_served()
            case messages.CopyFreed():
                self._held.free(message.copies)
                self._orders.copies_freed(message.copies)
            case messages.ReplicaMade():
                self._orders.replica_made(message)
            case messages.ServerStats():
                self._stats = message
            case _:
                pass
        messages.close_all(fds)

    def _report_served(self) -> None:
        for node in self._nodes:
            report = self.served(node)
            if report is not None:
                self._report(report)
