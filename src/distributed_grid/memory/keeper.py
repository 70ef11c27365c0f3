"""The agent's hand on its memory server: starts it, holds what it holds, starts it again when it dies.

Rule 1. Every copy in memory is held here too, so a server that dies loses nothing: the next one gets the descriptors,
        the key and the incarnation, and clients only see a delay.
Rule 2. One folder has one keeper and one server, each with a lock that lasts as long as its process.
Rule 3. Orders are remembered until they are answered, and given again to a server that was started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.backing import ENDING
from distributed_grid.memory.claims import boot_ms, is_copy_id
from distributed_grid.memory.control import (
    JOURNAL,
    Begin,
    Copy,
    Failed,
    Free,
    Freed,
    Go,
    Held,
    Hold,
    Leave,
    Link,
    Made,
    Message,
    NewLife,
    Numbers,
    OnDisk,
    Serving,
    batches,
)
from distributed_grid.memory.launching import Launched, launch, lock, reach, unlock
from distributed_grid.memory.lives import take_life
from distributed_grid.memory.server import SPILL
from distributed_grid.memory.shelf import KEY_BYTES
from distributed_grid.wire import CopiesFreed, CopyMade, FreeCopies, MakeCopy, MemoryFailed, MemoryServed, OpenMemory

SERVE_SECONDS: Final = 20.0
LONGEST_PAUSE_SECONDS: Final = 5.0
TOGETHER_SECONDS: Final = 0.005
LEAVE_SECONDS: Final = 3.0
LOCK_SECONDS: Final = 2.0
ANY_HOST: Final = "127.0.0.1"
Report = MemoryServed | MemoryFailed | CopyMade | CopiesFreed


class Keeper:
    """Keeps the memory server of one folder; `tell` is called with every report. For `alone_ms` a server without a
    keeper waits for the next one."""

    def __init__(self, folder: Path, *, tell: Callable[[Report], None], alone_ms: int = 60_000) -> None:
        self._folder = folder
        self._alone_ms = alone_ms
        self._tell = tell
        self._lock = -1
        self._link: Link | None = None
        self._launched: Launched | None = None
        self._serving: Serving | None = None
        self._life: tuple[str, bytes] | None = None
        self._held: dict[str, int] = {}
        self._coming: dict[str, int] = {}
        self._on_disk: set[str] = set()
        self._heard = asyncio.Event()
        self._problem = ""
        self._order: OpenMemory | None = None
        self._nodes: dict[str, None] = {}
        self._at = ("", 0)
        self._until_boot_ms = 0
        self._watch: asyncio.TimerHandle | None = None
        self._to_free: dict[str, bool] = {}  # and whether this server was asked
        self._freed: list[str] = []
        self._copying: dict[tuple[str, int], Copy] = {}
        self._numbers = Numbers()
        self._later: asyncio.TimerHandle | None = None
        self._opening = asyncio.Lock()
        self._again: asyncio.Task[None] | None = None
        self._stopped = False

    # ------------------------------------------------------------------ beginning and end

    async def start(self) -> None:
        """Take over a server that outlived the last agent; start none. Safe to call twice."""
        self._stopped = False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        (self._folder / SPILL).mkdir(mode=0o700, exist_ok=True)
        async with self._opening:
            if self._serving is None and await self._take_folder():
                await self._adopt()

    async def stop(self) -> None:
        """Leave a server that holds something running, and end one that holds nothing. Safe to call twice."""
        self._stopped = True
        for timer in (self._later, self._watch):
            if timer is not None:
                timer.cancel()
        self._later = self._watch = None
        if self._again is not None:
            self._again.cancel()
            await asyncio.gather(self._again, return_exceptions=True)
            self._again = None
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.send(Leave())
            if not self._held.keys() - {JOURNAL} and not self._on_disk:
                await self._until(lambda: self._link is None, LEAVE_SECONDS)
            self._unlink()
        self._serving = self._life = self._order = None
        _close_all(self._held.values())
        self._held.clear()
        self._on_disk.clear()
        if self._lock >= 0:
            unlock(self._lock)
            self._lock = -1

    async def end(self) -> None:
        """End the server, whatever it holds in memory; what is on disk stays. Safe to call twice."""
        if self._serving is not None:
            await self._end_server()
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

    async def open(self, order: OpenMemory) -> None:
        """Have the memory of a node served, and tell where, also when it was already; or tell why it cannot be."""
        self._nodes[order.node] = None
        async with self._opening:
            if not await self._take_folder():
                self._tell(MemoryFailed(order.node, f"another agent keeps the memory in {self._folder}"))
                return
            if self._serving is not None and self._differs(order, self._serving):
                await self._end_server()
            if self._serving is None or self._order is None or self._order.node in ("", order.node):
                self._order = order
            problem = ""
            if self._serving is None:
                problem = await self._get_server()
        found = self.served(order.node)
        if found is not None:
            self._tell(found)
        else:
            self._tell(MemoryFailed(order.node, problem or "the memory server has ended again"))
            self._start_again()

    def served(self, node: str) -> MemoryServed | None:
        """What can be used, and where; None where nothing can."""
        if self._serving is None:
            return None
        copies = tuple(name for name in self._held if name != JOURNAL)
        return MemoryServed(node, self._serving.endpoint, self._serving.key, copies, tuple(sorted(self._on_disk)))

    def make_copy(self, order: MakeCopy) -> None:
        """Have a copy made elsewhere, and tell how that went; an order given twice is done once."""
        wanted = Copy(order.source, order.generation, order.target, order.ticket)
        if self._serving is None and self._order is None:
            self._tell(CopyMade(order.source, order.generation, "no memory server runs here"))
            return
        self._copying[order.source, order.generation] = wanted
        self._say(wanted)

    def free(self, copies: Iterable[str] | FreeCopies) -> None:
        """Have these let go of, and tell; those that are not here are told, too."""
        for copy in copies.copies if isinstance(copies, FreeCopies) else copies:
            self._to_free.setdefault(copy, False)
        self._soon()

    def hold(self, until_boot_ms: int) -> None:
        """Keep what is in memory until then (0: without end); the server sees to it without this keeper, too."""
        if until_boot_ms == self._until_boot_ms:
            return
        self._until_boot_ms = until_boot_ms
        self._say(Hold(until_boot_ms))
        if self._watch is None:
            self._look_at_hold()

    # ------------------------------------------------------------------ numbers

    @property
    def resident_bytes(self) -> int:
        """What the copies in memory really use, as the server said within the last second."""
        return self._numbers.resident_bytes

    def measure(self) -> int:
        """What the copies in memory really use at this moment."""
        return 512 * sum(os.fstat(fd).st_blocks for fd in self._held.values())

    def stats(self) -> dict[str, int]:
        """What the server holds and has done since it was started."""
        numbers = self._numbers
        return {name: getattr(numbers, name) for name in numbers.__struct_fields__}

    # ------------------------------------------------------------------ one server after another

    async def _adopt(self) -> bool:
        """Take over a server that runs; False where none does."""
        sock = reach(self._folder)
        if sock is None:
            return False
        self._connect(Link(sock), None)
        if await self._until(lambda: self._serving is not None or self._link is None, SERVE_SECONDS):
            return self._serving is not None
        self._unlink()
        return False

    async def _get_server(self) -> str:
        """Adopt or start one; why that did not work, or nothing."""
        deadline = asyncio.get_running_loop().time() + SERVE_SECONDS
        self._problem = "the memory server did not begin"
        while asyncio.get_running_loop().time() < deadline:
            if await self._adopt():
                return ""
            at = lock(self._folder / "server.lock")
            if at < 0:  # one is about to begin or to end
                await asyncio.sleep(0.05)
                continue
            try:
                launched = launch(self._folder, at)
            except OSError as error:
                return f"the memory server cannot be started: {error.strerror}"
            finally:
                os.close(at)
            self._introduce(launched)
            left = deadline - asyncio.get_running_loop().time()
            await self._until(lambda: self._serving is not None or self._link is None, left)
            if self._serving is None:
                self._unlink()
                launched.kill()
                return self._problem
            return ""
        return self._problem

    def _introduce(self, launched: Launched) -> None:
        """Tell a fresh server who it is and what it holds."""
        assert self._order is not None
        if self._life is None:
            self._life = take_life(self._folder) or (secrets.token_hex(8), secrets.token_bytes(KEY_BYTES))
        _raise_limit()
        order, (incarnation, key) = self._order, self._life
        link = Link(launched.sock)
        host = order.host or ANY_HOST
        port = self._at[1] if self._at[0] == host else 0
        self._connect(link, launched)
        messages: list[tuple[Message, list[int]]] = [
            (
                Begin(
                    str(self._folder),
                    host,
                    port,
                    incarnation,
                    key,
                    order.certificate,
                    order.private_key,
                    self._until_boot_ms,
                    self._alone_ms,
                ),
                [],
            )
        ]
        messages += [(Held(names), [self._held[name] for name in names]) for names in batches(self._held)]
        for message, fds in (*messages, (Go(), [])):
            self._say(message, fds)

    def _connect(self, link: Link, launched: Launched | None) -> None:
        self._link = link
        self._launched = launched
        self._serving = None
        _close_all(self._coming.values())
        self._coming = {}
        self._on_disk = set()
        self._to_free = dict.fromkeys(self._to_free, False)
        asyncio.get_running_loop().add_reader(link.fileno(), self._hear, link)

    def _unlink(self) -> None:
        if self._link is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._link.fileno())
            loop.remove_writer(self._link.fileno())
            self._link.close()
            self._link = None
        self._serving = None
        _close_all(self._coming.values())
        self._coming = {}
        self._ring()

    async def _end_server(self) -> None:
        """End the server, and keep what it held."""
        assert self._serving is not None
        launched, pid = self._launched, self._serving.pid
        self._unlink()
        if launched is not None:
            launched.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 15)

    def _differs(self, order: OpenMemory, serving: Serving) -> bool:
        """Whether the server has to be another one. All nodes of an agent share it: the first one's word counts."""
        if self._order is not None and self._order.node not in ("", order.node):
            return False
        moved = (order.host or ANY_HOST) != serving.endpoint.host
        return moved or bool(order.certificate) != bool(serving.certificate)

    def _gone(self) -> None:
        """The server is not there any more."""
        launched = self._launched
        self._unlink()
        if launched is not None:
            launched.bury()
        if not self._stopped:
            self._start_again()

    def _start_again(self) -> None:
        if self._order is not None and not self._stopped and (self._again is None or self._again.done()):
            self._again = asyncio.create_task(self._keep_starting())

    async def _keep_starting(self) -> None:
        pause = 0.0
        while self._serving is None and not self._stopped:
            await asyncio.sleep(pause)
            async with self._opening:
                if self._serving is None:
                    await self._get_server()
            pause = min(max(0.1, 2 * pause), LONGEST_PAUSE_SECONDS)
        self._tell_served()

    # ------------------------------------------------------------------ what the server says

    def _hear(self, link: Link) -> None:
        try:
            for message, fds in link.receive():
                self._take_in(message, fds)
        except (EOFError, OSError, ProtocolError):
            if link is self._link:
                self._gone()

    def _take_in(self, message: Message, fds: list[int]) -> None:
        match message:
            case Held():
                into = self._coming if self._serving is None else self._held
                for name, fd in zip(message.copies, fds, strict=True):
                    _close_all([into.pop(name)] if name in into else [])
                    into[name] = fd
                return
            case OnDisk():
                self._on_disk.update(message.copies)
            case Serving():
                self._now_serving(message)
            case Failed():
                self._problem = message.problem
            case NewLife():
                self._new_life(message)
            case Freed():
                self._are_freed(message.copies)
            case Made():
                if self._copying.pop((message.source, message.generation), None) is not None:
                    self._tell(CopyMade(message.source, message.generation, message.problem))
            case Numbers():
                self._numbers = message
            case _:
                pass
        _close_all(fds)
        self._ring()

    def _now_serving(self, serving: Serving) -> None:
        """All it holds has been told: what it does not hold, nobody does."""
        _close_all(self._held.values())
        self._held, self._coming = self._coming, {}
        self._serving = serving
        self._life = (serving.endpoint.incarnation, serving.key)
        self._at = (serving.endpoint.host, serving.endpoint.port)
        if self._order is None:
            host, certificate, key = serving.endpoint.host, serving.certificate, serving.private_key
            self._order = OpenMemory("", certificate, key, host)
        if self._until_boot_ms and self._until_boot_ms != serving.until_boot_ms:
            self._say(Hold(self._until_boot_ms))
        else:
            self._until_boot_ms = serving.until_boot_ms
        for wanted in self._copying.values():
            self._say(wanted)
        self._soon()

    def _new_life(self, message: NewLife) -> None:
        journal = self._held.pop(JOURNAL, -1)
        _close_all(self._held.values())
        self._held = {JOURNAL: journal} if journal >= 0 else {}
        self._life = (message.incarnation, message.key)
        self._until_boot_ms = 0
        if self._serving is not None:
            endpoint = _replaced(self._serving.endpoint, incarnation=message.incarnation)
            self._serving = _replaced(self._serving, endpoint=endpoint, key=message.key)
            self._tell_served()

    def _are_freed(self, copies: tuple[str, ...]) -> None:
        for copy in copies:
            fd = self._held.pop(copy, -1)
            _close_all([fd] if fd >= 0 else [])
            self._on_disk.discard(copy)
            if self._to_free.pop(copy, None) is not None:
                self._freed.append(copy)
        self._soon()

    def _tell_served(self) -> None:
        for node in self._nodes:
            found = self.served(node)
            if found is not None:
                self._tell(found)

    # ------------------------------------------------------------------ together

    def _soon(self) -> None:
        """Pass on what came together, together."""
        if self._later is None and not self._stopped:
            self._later = asyncio.get_running_loop().call_later(TOGETHER_SECONDS, self._pass_on)

    def _pass_on(self) -> None:
        self._later = None
        if self._serving is not None:
            for names in batches([copy for copy, asked in self._to_free.items() if not asked]):
                self._say(Free(names))
                self._to_free.update(dict.fromkeys(names, True))
        elif self._order is None:
            self._free_without_server()
        if self._freed:
            freed, self._freed = tuple(self._freed), []
            self._tell(CopiesFreed(freed))

    def _free_without_server(self) -> None:
        """Nothing is in memory; what is on disk is deleted here."""
        for copy in self._to_free:
            if is_copy_id(copy):
                (self._folder / SPILL / f"{copy}{ENDING}").unlink(missing_ok=True)
            self._freed.append(copy)
        self._to_free.clear()

    def _look_at_hold(self) -> None:
        """Where no server runs, what is held is let go of here when the hold has run out."""
        self._watch = None
        if self._until_boot_ms == 0:
            return
        left_ms = self._until_boot_ms - boot_ms()
        if left_ms > 0:
            self._watch = asyncio.get_running_loop().call_later(left_ms / 1000 + 0.01, self._look_at_hold)
        elif self._serving is None:
            _close_all(self._held.values())
            self._held.clear()
            self._life = None
            self._until_boot_ms = 0

    # ------------------------------------------------------------------ small parts

    def _say(self, message: Message, fds: list[int] | None = None) -> None:
        if self._link is None or (self._serving is None and not isinstance(message, Begin | Held | Go)):
            return
        with contextlib.suppress(OSError):  # the end is heard of by reading
            self._link.send(message, fds or [])
            if self._link.waits_to_send:
                asyncio.get_running_loop().add_writer(self._link.fileno(), self._go_on_sending, self._link)

    def _go_on_sending(self, link: Link) -> None:
        done = True
        with contextlib.suppress(OSError):
            done = link.flush()
        if done:
            asyncio.get_running_loop().remove_writer(link.fileno())

    def _ring(self) -> None:
        self._heard.set()

    async def _until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Wait for what the server says or does; whether it came in time."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                while not reached():
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            return reached()
        return True


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _replaced(struct: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(struct, **changes)


def _raise_limit() -> None:
    """Each copy in memory takes a descriptor here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
