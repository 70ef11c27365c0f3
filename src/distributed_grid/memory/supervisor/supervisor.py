"""The agent's hand on its memory server: starts it, holds what it holds, starts it again when it dies.

Rule 1. Every copy in memory is held here too, so a server that dies loses nothing: the next one gets the descriptors,
        the key and the incarnation, and clients only see a delay.
Rule 2. One folder has one keeper and one server, each with a lock that lasts as long as its process.
Rule 3. Orders are remembered until they are answered, and given again to a server that was started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from distributed_grid.memory.protocol.control_messages import (
    CommandFailed,
    CopyFreed,
    ExtendHold,
    HeldCopy,
    Leave,
    Message,
    NewIncarnation,
    OnDisk,
    ReplicaMade,
    ServerReady,
    ServerStats,
)
from distributed_grid.memory.server.server import SPILL
from distributed_grid.memory.supervisor.failover import ServerFailover
from distributed_grid.memory.supervisor.held_copies import HeldCopies, close_all
from distributed_grid.memory.supervisor.identity import ServerIdentity
from distributed_grid.memory.supervisor.pending_orders import PendingOrders
from distributed_grid.memory.supervisor.process import lock, unlock
from distributed_grid.memory.supervisor.server_link import ServerLink
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.wire import (
    CopiesFreedReport,
    CopyMadeReport,
    FreeCopiesOrder,
    MakeCopyOrder,
    MemoryFailedReport,
    MemoryServedReport,
    ServeMemoryOrder,
)

LONGEST_PAUSE_SECONDS: Final = 5.0
LEAVE_SECONDS: Final = 3.0
LOCK_SECONDS: Final = 2.0
Report = MemoryServedReport | MemoryFailedReport | CopyMadeReport | CopiesFreedReport


class ServerSupervisor:
    """Keeps the memory server of one folder; `tell` is called with every report. For `alone_ms` a server without a
    keeper waits for the next one."""

    def __init__(self, folder: Path, *, tell: Callable[[Report], None], alone_ms: int = 60_000) -> None:
        self._folder = folder
        self._tell = tell
        self._lock = -1
        self._nodes: dict[str, None] = {}
        self._identity = ServerIdentity(folder, alone_ms)
        self._holding = HeldCopies()
        self._grip = ServerLink(self._take_in, self._gone)
        self._orders = PendingOrders(self._grip, folder / SPILL, is_wanted=self._is_wanted, tell=tell)
        self._succession = ServerFailover(
            folder, self._grip, identity=self._identity, holding=self._holding, orders=self._orders
        )
        self._numbers = ServerStats()
        self._watch: asyncio.TimerHandle | None = None
        self._opening = asyncio.Lock()
        self._again: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def _serving(self) -> ServerReady | None:
        return self._grip.serving

    def _is_wanted(self) -> bool:
        return self._serving is not None or self._identity.order is not None

    # ------------------------------------------------------------------ beginning and end

    async def start(self) -> None:
        """Take over a server that outlived the last agent; start none. Safe to call twice."""
        self._stopped = False
        self._orders.start()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        (self._folder / SPILL).mkdir(mode=0o700, exist_ok=True)
        async with self._opening:
            if self._serving is None and await self._take_folder():
                await self._succession.adopt()

    async def stop(self) -> None:
        """Leave a server that holds something running, and end one that holds nothing. Safe to call twice."""
        self._stopped = True
        self._orders.stop()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._again is not None:
            self._again.cancel()
            await asyncio.gather(self._again, return_exceptions=True)
            self._again = None
        if self._grip.is_linked:
            self._grip.say(Leave())
            if self._holding.is_empty:
                await self._grip.until(lambda: not self._grip.is_linked, LEAVE_SECONDS)
            self._succession.let_go()
        self._identity.forget()
        self._holding.free_memory()
        self._holding.on_disk.clear()
        if self._lock >= 0:
            unlock(self._lock)
            self._lock = -1

    async def end(self) -> None:
        """End the server, whatever it holds in memory; what is on disk stays. Safe to call twice."""
        if self._serving is not None:
            self._succession.end()
            for _ in range(round(LEAVE_SECONDS / 0.02)):
                at = lock(self._folder / "server.lock")
                if at >= 0:
                    unlock(at)
                    break
                await asyncio.sleep(0.02)
        await self.stop()

    async def _take_folder(self) -> bool:
        """Be the folder's one keeper; False where another one is and stays."""
        deadline = asyncio.get_running_loop().time() + LOCK_SECONDS
        while self._lock < 0:
            self._lock = lock(self._folder / "keeper.lock")
            if self._lock < 0:
                if asyncio.get_running_loop().time() > deadline:
                    return False
                await asyncio.sleep(0.05)
        return True

    # ------------------------------------------------------------------ orders

    async def open(self, order: ServeMemoryOrder) -> None:
        """Have the memory of a node served, and tell where, also when it was already; or tell why it cannot be."""
        self._nodes[order.node] = None
        async with self._opening:
            if not await self._take_folder():
                self._tell(MemoryFailedReport(order.node, f"another agent keeps the memory in {self._folder}"))
                return
            if self._serving is not None and self._identity.differs(order, self._serving):
                self._succession.end()
            self._identity.take_order(order, is_serving=self._serving is not None)
            problem = ""
            if self._serving is None:
                problem = await self._succession.get()
        found = self.served(order.node)
        if found is not None:
            self._tell(found)
        else:
            self._tell(MemoryFailedReport(order.node, problem or "the memory server has ended again"))
            self._start_again()

    def served(self, node: str) -> MemoryServedReport | None:
        """What can be used, and where; None where nothing can."""
        if self._serving is None:
            return None
        on_disk = tuple(sorted(self._holding.on_disk))
        return MemoryServedReport(node, self._serving.endpoint, self._serving.key, self._holding.in_memory, on_disk)

    def make_copy(self, order: MakeCopyOrder) -> None:
        """Have a copy made elsewhere, and tell how that went; an order given twice is done once."""
        self._orders.make_copy(order)

    def free(self, copies: Iterable[str] | FreeCopiesOrder) -> None:
        """Have these let go of, and tell; those that are not here are told, too."""
        self._orders.free(copies.copies if isinstance(copies, FreeCopiesOrder) else copies)

    def hold(self, until_boot_ms: int) -> None:
        """Keep what is in memory until then (0: without end); the server sees to it without this keeper, too."""
        if until_boot_ms == self._identity.until_boot_ms:
            return
        self._identity.until_boot_ms = until_boot_ms
        self._grip.say(ExtendHold(until_boot_ms))
        if self._watch is None:
            self._look_at_hold()

    def _look_at_hold(self) -> None:
        """Where no server runs, what is held is let go of here when the hold has run out."""
        self._watch = None
        if self._identity.until_boot_ms == 0:
            return
        left_ms = self._identity.until_boot_ms - boot_ms()
        if left_ms > 0:
            self._watch = asyncio.get_running_loop().call_later(left_ms / 1000 + 0.01, self._look_at_hold)
        elif self._serving is None:
            self._holding.free_memory()
            self._identity.end_life()

    # ------------------------------------------------------------------ numbers

    @property
    def resident_bytes(self) -> int:
        """What the copies in memory really use, as the server said within the last second."""
        return self._numbers.resident_bytes

    def measure(self) -> int:
        """What the copies in memory really use at this moment."""
        return self._holding.measure()

    def stats(self) -> dict[str, int]:
        """What the server holds and has done since it was started."""
        numbers = self._numbers
        return {name: getattr(numbers, name) for name in numbers.__struct_fields__}

    # ------------------------------------------------------------------ one server after another

    def _gone(self) -> None:
        """The server is not there any more."""
        self._succession.let_go()
        self._grip.bury()
        if not self._stopped:
            self._start_again()

    def _start_again(self) -> None:
        if self._identity.order is not None and not self._stopped and (self._again is None or self._again.done()):
            self._again = asyncio.create_task(self._keep_starting())

    async def _keep_starting(self) -> None:
        pause = 0.0
        while self._serving is None and not self._stopped:
            await asyncio.sleep(pause)
            async with self._opening:
                if self._serving is None:
                    await self._succession.get()
            pause = min(max(0.1, 2 * pause), LONGEST_PAUSE_SECONDS)
        self._tell_served()

    # ------------------------------------------------------------------ what the server says

    def _take_in(self, message: Message, fds: list[int]) -> None:
        match message:
            case HeldCopy():
                self._holding.take(message.copies, fds, is_told=self._serving is not None)
                return
            case OnDisk():
                self._holding.on_disk.update(message.copies)
            case ServerReady():
                self._now_serving(message)
            case CommandFailed():
                self._succession.problem = message.problem
            case NewIncarnation():
                self._new_life(message)
            case CopyFreed():
                self._holding.free(message.copies)
                self._orders.freed(message.copies)
            case ReplicaMade():
                self._orders.made(message)
            case ServerStats():
                self._numbers = message
            case _:
                pass
        close_all(fds)

    def _now_serving(self, serving: ServerReady) -> None:
        """All it holds has been told."""
        self._holding.all_told()
        self._grip.serving = serving
        if self._identity.serves(serving):
            self._grip.say(ExtendHold(self._identity.until_boot_ms))
        self._orders.give_again()

    def _new_life(self, life: NewIncarnation) -> None:
        self._holding.keep_journal()
        self._identity.lives_anew(life)
        if self._serving is not None:
            endpoint = replace(self._serving.endpoint, incarnation=life.incarnation)
            self._grip.serving = replace(self._serving, endpoint=endpoint, key=life.key)
            self._tell_served()

    def _tell_served(self) -> None:
        for node in self._nodes:
            found = self.served(node)
            if found is not None:
                self._tell(found)
