"""Memory servers with their supervisors, and a block directory that plays the control plane, for tests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distributed_grid.errors import NotFound
from distributed_grid.memory.protocol.frames import FILL, READ, WRITE, TicketClaims, issue_ticket
from distributed_grid.memory.supervisor.supervisor import Report, ServerSupervisor
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.wire import (
    CopiesFreedReport,
    CopyMadeReport,
    MakeCopyOrder,
    MemoryFailedReport,
    MemoryServedReport,
    ServeMemoryOrder,
    Ticket,
)


def wait_for(reached: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What becomes true in another process, as soon as it does."""
    deadline = time.monotonic() + seconds
    while True:
        found = reached()
        if found:
            return found
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


class Lender:
    """A supervisor in an event loop of its own, as an agent has it."""

    def __init__(self, folder: Path, node: str = "gpu1", unsupervised_ms: int = 60_000, **order: Any) -> None:
        self.folder = folder
        self.node = node
        self.reports: list[Report] = []
        self._order = order
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.supervisor = ServerSupervisor(folder, report=self.reports.append, unsupervised_ms=unsupervised_ms)
        self.run(self.supervisor.start())

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def call(self, function: Callable[[], Any]) -> Any:
        async def called() -> Any:
            return function()

        return self.run(called())

    def open(self) -> MemoryServedReport:
        before = len(self.reports)
        self.run(self.supervisor.serve(ServeMemoryOrder(self.node, **self._order)))
        report = [one for one in self.reports[before:] if isinstance(one, MemoryServedReport | MemoryFailedReport)][-1]
        assert isinstance(report, MemoryServedReport), report
        return report

    @property
    def served(self) -> MemoryServedReport | None:
        return self.call(lambda: self.supervisor.served(self.node))

    @property
    def pid(self) -> int:
        """The server's process."""
        return wait_for(lambda: self.supervisor.ready and self.supervisor.ready.pid)

    def kill_server(self) -> None:
        pid = self.pid
        os.kill(pid, 9)
        wait_for(lambda: self.supervisor.ready is None or self.supervisor.ready.pid != pid)

    def free(self, *copies: str) -> None:
        self.call(lambda: self.supervisor.free_copies(copies))
        freed: set[str] = set()

        def all_told() -> bool:
            for report in self.reports:
                if isinstance(report, CopiesFreedReport):
                    freed.update(report.copies)
            return freed.issuperset(copies)

        wait_for(all_told)

    def make_copy(self, order: MakeCopyOrder) -> CopyMadeReport:
        before = len(self.reports)
        self.call(lambda: self.supervisor.make_copy(order))

        def copy_made() -> CopyMadeReport | None:
            for report in self.reports[before:]:
                if isinstance(report, CopyMadeReport) and report.generation == order.generation:
                    return report
            return None

        return wait_for(copy_made)

    def leave(self) -> None:
        """The supervisor goes, and leaves what it held with the server."""
        self.run(self.supervisor.stop())

    def close(self) -> None:
        """End everything, whatever is held and whoever supervises it."""
        if self.supervisor.ready is None:
            self.run(self.supervisor.start())
        pid = self.supervisor.ready.pid if self.supervisor.ready is not None else 0
        self.run(self.supervisor.stop())
        if pid:
            end(pid)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def end(pid: int) -> None:
    """End a server process and wait until nothing is left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)

    def is_gone() -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        return not Path(f"/proc/{pid}").exists()

    wait_for(is_gone)


class FakeDirectory:
    """Plays the control plane: knows where each block is, and makes tickets."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[str, Any]] = {}
        self.calls = 0
        self._lock = threading.RLock()  # what is known of a block changes in one step
        self.ticket_ms = 600_000
        self.ends_boot_ms = 0
        self.use_path = True
        self.endpoint: Callable[[MemoryServedReport], tuple[str, int]] = lambda served: (
            served.endpoint.host,
            served.endpoint.port,
        )

    def allocate(self, block_id: str, size: int, *lenders: Lender, on_disk: bool = False) -> dict[str, Any]:
        places = [(lender, f"{block_id}:{number}", on_disk) for number, lender in enumerate(lenders, 1)]
        self.blocks[block_id] = {"size": size, "generation": 1, "places": places, "next": len(lenders) + 1}
        return self.find_block(block_id=block_id)

    def ticket(self, block_id: str, lender: Lender, copy: str, on_disk: bool, generation: int, rights: int) -> Ticket:
        served = wait_for(lambda: lender.served)
        block = self.blocks[block_id]
        expires, life = boot_ms() + self.ticket_ms, served.endpoint.incarnation
        claims = TicketClaims(copy, generation, block["size"], rights, expires, self.ends_boot_ms, life, on_disk)
        return issue_ticket(served.key, claims)

    def find_block(self, *, block_id: str) -> dict[str, Any]:
        self.calls += 1
        block = self.blocks.get(block_id)
        if block is None:
            raise NotFound(f"no block {block_id}")
        with self._lock:
            return self._found(block_id, block)

    def _found(self, block_id: str, block: dict[str, Any]) -> dict[str, Any]:
        return {
            "block": {"block_id": block_id, "size": block["size"], "generation": block["generation"], "state": "ready"},
            "places": [self._place(block_id, *place) for place in block["places"]],
        }

    def _place(self, block_id: str, lender: Lender, copy: str, on_disk: bool) -> dict[str, Any]:
        served = wait_for(lambda: lender.served)
        generation = self.blocks[block_id]["generation"]
        ticket = self.ticket(block_id, lender, copy, on_disk, generation, READ | WRITE)
        host, port = self.endpoint(served)
        return {
            "node": lender.node,
            "copy": copy,
            "host": host,
            "port": port,
            "fingerprint": served.endpoint.fingerprint,
            "path": served.endpoint.path if self.use_path else "",
            "incarnation": served.endpoint.incarnation,
            "claims": base64.b64encode(ticket.claims).decode(),
            "secret": base64.b64encode(ticket.secret).decode(),
            "on_disk": on_disk,
        }

    def move(self, block_id: str, to: Lender, *, on_disk: bool = False) -> CopyMadeReport:
        """Move the first place of a block: copy, then the new place with the next generation, then free."""
        block = self.blocks[block_id]
        source, copy, _ = block["places"][0]
        generation = block["generation"] + 1
        fresh = f"{block_id}:{block['next']}"
        block["next"] += 1
        ticket = self.ticket(block_id, to, fresh, on_disk, generation, READ | WRITE | FILL)
        endpoint = wait_for(lambda: to.served).endpoint
        made = source.make_copy(MakeCopyOrder(copy, generation, endpoint, ticket))
        with self._lock:
            block["generation"] = generation + bool(made.problem)
            if not made.problem:
                block["places"] = [(to, fresh, on_disk), *block["places"][1:]]
        if not made.problem:
            source.free(copy)
        return made


@contextlib.contextmanager
def lenders(*folders: Path, **order: Any) -> Iterator[list[Lender]]:
    """Some lenders that serve, ended on the way out."""
    found: list[Lender] = []
    try:
        for number, folder in enumerate(folders, 1):
            found.append(Lender(folder, f"gpu{number}", **order))
            found[-1].open()
        yield found
    finally:
        for lender in found:
            lender.close()
