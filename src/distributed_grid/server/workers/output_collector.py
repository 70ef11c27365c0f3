"""Copies of the output and files of attempts, made before their machine ends, in the control plane's directory of jobs.

An interrupted copy is continued: a complete attempt is marked, and within an attempt complete files are kept. Files
beyond the limit of one worker, and unreadable ones, are recorded as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec import Struct, field

from distributed_grid.agent.files.job_dir import STDERR, STDOUT, WORK, is_home, mark_home, record_dropped_output
from distributed_grid.control.agent_files import AttemptOutputFile, RemoteFiles, in_work
from distributed_grid.control.grid import Grid
from distributed_grid.control.reconciler import Reconciler
from distributed_grid.domain.events import OutputsCollected
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.rows import decode_row
from distributed_grid.domain.workers import Worker
from distributed_grid.errors import GridError, NotFound
from distributed_grid.ports import Store
from distributed_grid.reactor.effects import CollectOutputs, collection_effects, is_still_needed
from distributed_grid.server.workers.worker_reconciler import wall_ms
from distributed_grid.trees.manifest import ManifestEntry
from distributed_grid.trees.tree_writer import FileReceiver

CHUNK_BYTES = 1024 * 1024
KEPT_LIMIT_TEXT = "too much was brought home of this worker already"
MAX_HOME_BYTES = 10 * 1024**3
MAX_ATTEMPTS = 20_000
ATTEMPTS_AT_ONCE = 4
POLL_SECONDS = 0.5
LEAVING_SECONDS = 5.0
"""Interval of collections from a worker whose end was announced while attempts still run."""
GIVE_UP_SECONDS = 600.0
"""Longest delay of a termination by a worker that does not answer, or by a full disk."""
EVERYTHING = ("**",)
log = logging.getLogger(__name__)


def dropped_message(stream: str, dropped: int) -> str:
    """The line in place of output that its node has dropped."""
    return f"{dropped} bytes of its {stream} were dropped: a node keeps the newest output (max_output_gb)"


class OutputReader(Protocol):
    async def read(self, node: str, lease_id: str, name: bytes, offset: int, most: int) -> tuple[int, bytes]:
        """Part of a file from an offset on, with its start, at most `most` bytes; empty at the end of the file.
        Unreachable while the node does not answer, NotFound for an unreadable file."""


class Haul(Struct):
    """Files brought home so far, and those that are lost; `room_bytes` is how much more may come."""

    room_bytes: int
    files: int = 0
    bytes: int = 0
    lost: list[str] = field(default_factory=list)
    limit_text: str = KEPT_LIMIT_TEXT

    def admits(self, name: str, size: int) -> bool:
        """True if a file may still come; any other is recorded as lost."""
        if size <= self.room_bytes:
            return True
        self.lost.append(f"{name}: {self.limit_text}")
        return False

    def add(self, size: int) -> None:
        self.files += 1
        self.bytes += size
        self.room_bytes -= size


async def copy_output(reader: OutputReader, node: str, lease_id: str, path: Path, haul: Haul) -> None:
    """Append the missing output, until the node has no more."""
    name = path.name
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        while True:
            if not haul.admits(f"{lease_id}: {name}", CHUNK_BYTES):
                return
            try:
                start, data = await reader.read(node, lease_id, name.encode(), size, CHUNK_BYTES)
            except NotFound as missing:
                haul.lost.append(f"{lease_id}: {missing}")
                return
            if not data:
                break
            if start > size:  # the node has dropped the output before it
                jobs = str(path.parent.parent)
                await asyncio.to_thread(record_dropped_output, jobs, lease_id, name, start)
                await asyncio.to_thread(os.ftruncate, fd, start)
                size = start
            await asyncio.to_thread(os.write, fd, data)
            size += len(data)
            haul.bytes += len(data)
            haul.room_bytes -= len(data)
        haul.files += size > 0
        if size:
            await asyncio.to_thread(os.fsync, fd)
    finally:
        os.close(fd)


class OutputCollector:
    def __init__(
        self,
        grid: Grid,
        jobs: Path,
        remote: RemoteFiles,
        *,
        max_bytes: int = MAX_HOME_BYTES,
        give_up_seconds: float = GIVE_UP_SECONDS,
    ) -> None:
        self._give_up_seconds = give_up_seconds
        self._grid = grid
        self._jobs = jobs
        self._remote = remote
        self._max_bytes = max_bytes
        self._work = Reconciler()
        self._next_check: dict[str, float] = {}

    async def run(self) -> None:

        async def collect_pending() -> None:
            if self._grid.ledger.workers:
                for effect in await self._grid.read(lambda ledger, now: collection_effects(ledger)):
                    self.perform(effect)

        await self._work.run(collect_pending, POLL_SECONDS)

    def perform(self, effect: CollectOutputs) -> None:
        worker = effect.worker
        if self._work.is_under_way(worker.id):
            return
        if is_still_needed(self._grid.ledger, worker.node):  # attempts still run there
            now = asyncio.get_running_loop().time()
            if now < self._next_check.get(worker.id, 0.0):
                return
            self._next_check = {name: due for name, due in self._next_check.items() if due > now}
            self._next_check[worker.id] = now + LEAVING_SECONDS
        self._work.begin(worker.id, partial(self._collect, worker), f"collection of the files of {worker.id}")

    async def _collect(self, worker: Worker) -> None:
        """Collect and report; a failure is tried again for `give_up_seconds`."""
        age_seconds = self._work.age_seconds(worker.id)
        is_in_use = is_still_needed(self._grid.ledger, worker.node)  # then there is more to come
        try:
            haul = await self.collect(worker)
        except (GridError, OSError) as failure:
            tries = self._work.fail(worker.id, str(failure), lasts=False, retry_seconds=0.0)
            if tries.failures == 1:  # once: it is tried again and again
                log.warning("the files on %s cannot be collected yet: %s", worker.id, failure)
            if age_seconds < self._give_up_seconds:
                return
            haul = Haul(0, lost=[f"files of its jobs: {failure}"])
        self._work.forget(worker.id)
        if is_in_use:
            return
        done = OutputsCollected(worker.id, wall_ms(), haul.files, haul.bytes, tuple(haul.lost))
        await self._grid.handle_with_retry(done)

    async def collect(self, worker: Worker) -> Haul:
        """Copy the files of a worker's attempts here; Unreachable or OSError for another try."""
        attempts = await self._grid.query(lambda store: attempts_on(store, worker.node, since_ms=worker.created_at_ms))
        haul = Haul(self._max_bytes)
        if len(attempts) > MAX_ATTEMPTS:
            haul.lost.append(f"the files of {len(attempts) - MAX_ATTEMPTS} attempts or more: too many of them")
        slots = asyncio.Semaphore(ATTEMPTS_AT_ONCE)

        async def bring(lease_id: str) -> None:
            async with slots:
                if not await asyncio.to_thread(is_home, str(self._jobs), lease_id):
                    folder = self._jobs / lease_id
                    await asyncio.to_thread(os.makedirs, folder, 0o700, exist_ok=True)
                    for name in (STDOUT, STDERR):
                        await copy_output(self._remote, worker.node, lease_id, folder / name, haul)
                    try:
                        listing = await self._remote.find(worker.node, lease_id, EVERYTHING)
                    except NotFound:  # it never began
                        listing = AttemptOutputFile((), ())
                    haul.lost += [f"{lease_id}: {reason}" for reason in listing.skipped]
                    for entry in listing.entries:
                        await self._bring_file(worker.node, lease_id, folder, entry, haul)
                    await asyncio.to_thread(mark_home, str(self._jobs), lease_id)

        try:
            async with asyncio.TaskGroup() as group:
                for lease_id in attempts[:MAX_ATTEMPTS]:
                    group.create_task(bring(lease_id))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return haul

    async def _bring_file(self, node: str, lease_id: str, folder: Path, entry: ManifestEntry, haul: Haul) -> None:
        """Copy one whole file, unless it is here."""
        name = f"{WORK}/{entry.path}"
        with contextlib.suppress(OSError):
            status = await asyncio.to_thread(os.lstat, folder / name)
            if status.st_size == entry.size:
                haul.files += 1
                return
        if not haul.admits(f"{lease_id}: {entry.path}", entry.size):
            return
        with FileReceiver(folder) as receiver:
            receiver.begin(name, entry.size, entry.mode)
            got = 0
            while got < entry.size:
                size = min(CHUNK_BYTES, entry.size - got)
                try:
                    _, data = await self._remote.read(node, lease_id, in_work(entry), got, size)
                except NotFound as missing:
                    haul.lost.append(f"{lease_id}: {missing}")
                    return
                if not data:
                    haul.lost.append(f"{lease_id}: {entry.path} became shorter while it was copied")
                    return
                await asyncio.to_thread(receiver.write, data)
                got += len(data)
            await asyncio.to_thread(receiver.finish)
        haul.add(entry.size)


def attempts_on(store: Store, node: str, *, since_ms: int | None = None) -> list[str]:
    """Ids of the attempts that ended on a node, newest first, and one more than `MAX_ATTEMPTS`."""
    rows = store.ended(Lease.kind, node=node, since_ms=since_ms, limit=MAX_ATTEMPTS + 1)
    leases = (decode_row(Lease.kind, row.blob) for row in rows)
    return list(dict.fromkeys(lease.id for lease in leases if isinstance(lease, Lease) and lease.job))
