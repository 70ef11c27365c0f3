"""Reconciler of moves: ships the files of originals, and brings results back, until the ledger has their report.

Orders go to the agents of the sources. A failure that stays ends the move, and leaves the original as it was; one that
may pass is tried again.

A directory that is still written to is shipped without the files that change meanwhile: the next difference has them.
A directory that stands still is shipped whole, or not at all. Stored content is not sent again.

Results are the differences from the directory that the job began with, and its output. The job's output on descriptors
1 and 2 replaces the files that the original wrote by them, or is appended where the original appended. If both are one
file, all of 1 precedes all of 2.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from msgspec import Struct

from distributed_grid.agent.files.job_dir import STDERR, STDOUT
from distributed_grid.control.agent_files import AttemptFiles, AttemptOutputFile, in_work
from distributed_grid.control.agent_messages import move_order
from distributed_grid.control.agents import AgentGateway
from distributed_grid.control.grid import Grid
from distributed_grid.control.reconciler import Reconciler
from distributed_grid.domain.events import Event, MoveFailed, MoveFilesSettled, MoveResultsBrought, MoveShipped
from distributed_grid.domain.jobs import Attempt
from distributed_grid.domain.moves import Move, MovedProcess
from distributed_grid.domain.processes import StreamKind
from distributed_grid.domain.states import MoveState, NodeState, Step
from distributed_grid.errors import BadInput, GridError, NotFound, ProtocolError, Unreachable
from distributed_grid.reactor.effects import BringResults, MoveEffect, OrderMoveStep, move_effects
from distributed_grid.server.workers.output_collector import dropped_message
from distributed_grid.trees import manifest as manifests
from distributed_grid.trees.content_store import ContentMissing, ContentStore
from distributed_grid.trees.manifest import EXECUTABLE, PLAIN, Manifest, ManifestEntry, manifest_of
from distributed_grid.trees.paths import display_path, leads_outside, split_path, to_bytes, to_text
from distributed_grid.wire import MoveReport

CHUNK_BYTES = 4 * 1024 * 1024
FILES_AT_ONCE = 8
Read = Callable[[bytes, int, int], Coroutine[Any, Any, bytes]]
"""Reads a file of the directory: its name, from where on, and how much at most."""
MAX_LEFT_OUT = 20
"""Files that were not shipped and that a move names."""
MAX_OUTPUT_BYTES = manifests.LIMIT_BYTES
STREAM_NAMES = {1: STDOUT.encode(), 2: STDERR.encode()}
POLL_SECONDS = 1.0
RETRY_SECONDS = 0.2
OPEN_SECONDS = 20.0
"""So long after its first try the directory of an original may be unknown to its agent, which has not opened it yet."""
MAX_ROUNDS = 3
SMALL_BYTES = 1024 * 1024
"""A round of shipping ahead that brings less than this is the last; the rest is shipped while nothing moves there."""
log = logging.getLogger(__name__)


class ShippedTree(Struct, frozen=True):
    """A directory that is in the store; `new_bytes` were sent, `changing` files were left out. `left_out` names files
    that look like secrets or cannot be read, with the reason."""

    manifest: Manifest
    digest: str
    new_bytes: int
    changing: int = 0
    left_out: tuple[str, ...] = ()


class _ChangedMeanwhile(Exception):
    """A file has changed since it was listed."""


async def ship_tree(store: ContentStore, listing: AttemptOutputFile, read: Read, *, still: bool) -> ShippedTree:
    """Store the files of a directory, and its manifest. With `still` nothing may change meanwhile: NotFound if a file
    does. BadInput if it is too large, or has a link that leads outside."""
    tree = manifest_of(listing.entries)
    links = {to_bytes(entry.path): to_bytes(entry.target) for entry in tree.entries if entry.kind == "link"}
    for path, target in links.items():
        if leads_outside(path, links):
            shown = f"{display_path(path)} -> {display_path(target)}"
            raise BadInput(f"the link {shown} leads outside the working directory, which cannot be shipped with it")
    manifests.check(tree, limit_bytes=manifests.LIMIT_BYTES, limit_files=manifests.LIMIT_FILES)
    missing = set(await asyncio.to_thread(store.missing, tree.contents()))
    wanted = {entry.digest: entry for entry in tree.entries if entry.digest in missing}
    changed: set[str] = set()
    slots = asyncio.Semaphore(FILES_AT_ONCE)

    async def fetch(entry: ManifestEntry) -> None:
        async with slots:
            try:
                with store.writer(digest=entry.digest, size=entry.size) as writer:
                    offset = 0
                    while offset < entry.size:
                        data = await read(in_work(entry), offset, min(CHUNK_BYTES, entry.size - offset))
                        if not data:
                            raise _ChangedMeanwhile("it became shorter")
                        await asyncio.to_thread(writer.write, data)
                        offset += len(data)
                    try:
                        await asyncio.to_thread(writer.finish)
                    except ProtocolError:
                        raise _ChangedMeanwhile("its content is another") from None
            except (NotFound, _ChangedMeanwhile) as failure:
                if still:
                    name = display_path(entry.path)
                    raise NotFound(f"{name} changed though its process stood still: {failure}") from None
                changed.add(entry.digest)

    try:
        async with asyncio.TaskGroup() as group:
            for entry in wanted.values():
                group.create_task(fetch(entry))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    new_bytes = sum(entry.size for digest, entry in wanted.items() if digest not in changed)
    kept = manifest_of(entry for entry in tree.entries if entry.digest not in changed or entry.kind != "file")
    digest = await asyncio.to_thread(store.add, manifests.encode(kept))
    changing = len(tree.entries) - len(kept.entries)
    left_out = listing.skipped
    if len(left_out) > MAX_LEFT_OUT:
        left_out = (*left_out[:MAX_LEFT_OUT], f"and {len(left_out) - MAX_LEFT_OUT} more")
    return ShippedTree(kept, digest, new_bytes, changing, left_out=left_out)


def stored_manifest(store: ContentStore, digest: str) -> Manifest:
    """A manifest that was stored before; ContentMissing where it is gone."""
    with store.open(digest) as file:
        return manifests.decode(file.read())


class ResultCollector:
    """Brings the results of moved processes into the content store."""

    def __init__(self, store: ContentStore, files: AttemptFiles) -> None:
        self._store = store
        self._files = files

    async def collect(self, move: Move) -> tuple[str, str]:
        """Manifest of the files that the job has written (empty: none), and the reason of losses. Unreachable if it
        has to be tried again."""
        attempt = Attempt(number=0, lease_id=move.ran_as, node=move.ran_on, fence=0, assigned_at_ms=0)
        problems: list[str] = []
        try:
            began = await asyncio.to_thread(stored_manifest, self._store, move.final)
        except ContentMissing:  # then everything counts as written by the job; at the source nothing is overwritten
            began = Manifest()
        try:
            listing = await self._files.find_tree(attempt)
        except NotFound as missing:  # it never ran there, or its directory is gone
            listing = AttemptOutputFile((), ())
            problems.append(str(missing))
        changed = await self._changed(attempt, listing, began, problems)
        assert move.process is not None
        for path, numbers in stream_files(move.process).items():
            old = next((entry for entry in began.entries if entry.path == path), None)
            try:
                digest, size = await self._write_output(attempt, numbers, old)
            except (BadInput, NotFound) as failure:
                problems.append(f"{path!a}: {failure}")
                continue
            mode = old.mode if old is not None else PLAIN
            if old is None or old.digest != digest:
                changed[path] = ManifestEntry(path, "file", size, mode, digest)
        if not changed:
            return "", "; ".join(problems)
        tree = manifest_of((*_parents(changed), *changed.values()))
        return await asyncio.to_thread(self._store.add, manifests.encode(tree)), "; ".join(problems)

    async def _changed(
        self, attempt: Attempt, listing: AttemptOutputFile, began: Manifest, problems: list[str]
    ) -> dict[str, ManifestEntry]:
        """Entries that the job has made or changed, by path; their contents are in the store."""
        before = {entry.path: entry for entry in began.entries}
        links = {to_bytes(entry.path): to_bytes(entry.target) for entry in listing.entries if entry.kind == "link"}
        new = [entry for entry in listing.entries if before.get(entry.path) != entry]
        outside = [entry for entry in new if entry.kind == "link" and leads_outside(to_bytes(entry.path), links)]
        problems += [f"the link {entry.path!a} leads outside its directory" for entry in outside]
        kept = {entry.path: entry for entry in new if entry not in outside}
        wanted = manifest_of((*_parents(kept), *kept.values()))

        async def read(name: bytes, offset: int, most: int) -> bytes:
            return (await self._files.read(attempt, name, offset, most))[1]

        try:
            await ship_tree(self._store, AttemptOutputFile(wanted.entries, ()), read, still=True)
        except BadInput as too_much:
            problems.append(str(too_much))
            return {}
        return kept

    async def _write_output(
        self, attempt: Attempt, numbers: list[int], before: ManifestEntry | None
    ) -> tuple[str, int]:
        """Store the content that an output file of the original has now: the lines of the original, then the output of
        the job; its digest and size."""
        size = 0
        with self._store.writer() as writer:
            if before is not None and before.kind == "file":
                with self._store.open(before.digest) as file:
                    while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                        await asyncio.to_thread(writer.write, data)
                        size += len(data)
            for number in numbers:
                offset = 0
                while True:
                    start, data = await self._files.read(attempt, STREAM_NAMES[number], offset, CHUNK_BYTES)
                    if not data:
                        break
                    offset, dropped = start + len(data), start - offset
                    if dropped > 0:
                        data = f"[grid: {dropped_message(STREAM_NAMES[number].decode(), dropped)}]\n".encode() + data
                    size += len(data)
                    if size > MAX_OUTPUT_BYTES:
                        raise BadInput(f"its output is larger than {MAX_OUTPUT_BYTES >> 20} MB; see: grid jobs logs")
                    await asyncio.to_thread(writer.write, data)
            return await asyncio.to_thread(writer.finish), size


def stream_files(process: MovedProcess) -> dict[str, list[int]]:
    """The files below its working directory that a process writes its output to, with the descriptors of each."""
    files: dict[str, list[int]] = {}
    for number, stream in enumerate(process.streams):
        if number not in STREAM_NAMES or stream.kind is not StreamKind.FILE:
            continue
        path = os.path.relpath(stream.path, process.cwd)
        try:
            split_path(to_bytes(path))
        except ProtocolError:  # outside the directory
            continue
        files.setdefault(path, []).append(number)
    return files


def _parents(entries: dict[str, ManifestEntry]) -> list[ManifestEntry]:
    """The directories that files are in and that are not listed themselves."""
    parents: dict[str, ManifestEntry] = {}
    for path in entries:
        names = to_bytes(path).split(b"/")
        for depth in range(1, len(names)):
            parent = to_text(b"/".join(names[:depth]))
            if parent not in entries:
                parents[parent] = ManifestEntry(parent, "dir", 0, EXECUTABLE)
    return [*parents.values()]


class MoveReconciler:
    """Performs the effects of moves; orders are repeated by the sessions of agents."""

    def __init__(self, grid: Grid, agents: AgentGateway, store: ContentStore, results: ResultCollector) -> None:
        self._grid = grid
        self._agents = agents
        self._store = store
        self._results = results
        self._work = Reconciler()
        self._opened: dict[str, None] = {}

    def perform(self, effect: MoveEffect) -> None:
        move = effect.move
        if isinstance(effect, OrderMoveStep):
            self._agents.sessions.order_moves([move_order(effect)])
            if effect.step is Step.CLOSE:
                self._opened.pop(move.id, None)
        elif isinstance(effect, BringResults):
            self._work.begin((move.id, "results"), partial(self._bring_results, move), f"results of {move.id}")
        elif move.state is MoveState.FROZEN:
            self._work.begin((move.id, "difference"), partial(self._ship_difference, move), f"difference of {move.id}")
        else:
            self._work.begin((move.id, "ahead"), partial(self._ship_ahead, move), f"shipping ahead of {move.id}")

    def reported(self, report: MoveReport) -> None:
        """Note that an agent has opened the files of a move."""
        if report.state is MoveState.OPENED and report.move_id in self._grid.ledger.moves:
            self._opened[report.move_id] = None

    async def run(self) -> None:
        """Perform shipments of files until cancelled."""
        await asyncio.sleep(POLL_SECONDS)  # after a restart agents come back first: a difference is shipped once only

        async def ship_pending() -> None:
            if not self._grid.ledger.moves:
                self._opened.clear()
                return
            for effect in await self._grid.read(lambda ledger, now: move_effects(ledger)):
                if not isinstance(effect, OrderMoveStep):
                    self.perform(effect)

        await self._work.run(ship_pending, POLL_SECONDS)

    async def stop(self) -> None:
        await self._work.stop()

    # ------------------------------------------------------------------ the files of the original

    async def _ship_ahead(self, move: Move) -> None:
        """Ship the directory while the original runs, until little is left to ship, or often enough."""
        total = 0
        shipped: ShippedTree | None = None
        try:
            for _ in range(MAX_ROUNDS):
                shipped = await self._ship_once(move)
                if shipped is None:
                    return
                total += shipped.new_bytes
                if shipped.new_bytes <= SMALL_BYTES:
                    break
        except GridError as failure:
            await self._record(MoveFailed(move.id, f"its directory cannot be shipped: {failure}"))
            return
        if shipped is not None:
            await self._record(MoveShipped(move.id, shipped.digest, total, shipped.left_out))

    async def _ship_difference(self, move: Move) -> None:
        """Ship the changed files while the original stands still: every moment counts, nothing is tried twice."""
        try:
            shipped = await self._ship_tree(move, still=True)
        except GridError as failure:
            reason = f"what had changed in its directory could not be shipped: {failure}"
            await self._record(MoveFailed(move.id, reason))
            return
        await self._record(MoveFilesSettled(move.id, shipped.digest, shipped.new_bytes, shipped.left_out))

    async def _ship_once(self, move: Move) -> ShippedTree | None:
        """One round, tried again while the source is away or has not opened the directory; None if the move is in
        another state meanwhile."""
        until = asyncio.get_running_loop().time() + OPEN_SECONDS
        moves = self._grid.ledger.moves
        while (row := moves.get(move.id)) is not None and row.state is MoveState.RESERVED and row.ending is None:
            was_open = move.id in self._opened
            try:
                return await self._ship_tree(move, still=False)
            except Unreachable:
                until = asyncio.get_running_loop().time() + OPEN_SECONDS
            except NotFound:
                if was_open or asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(RETRY_SECONDS)
        return None

    async def _ship_tree(self, move: Move, *, still: bool) -> ShippedTree:
        remote = self._agents.files

        async def read(name: bytes, offset: int, most: int) -> bytes:
            return (await remote.read(move.source, move.id, name, offset, most))[1]

        return await ship_tree(self._store, await remote.find_tree(move.source, move.id), read, still=still)

    # ------------------------------------------------------------------ the results of its job

    async def _bring_results(self, move: Move) -> None:
        """Bring the results of the job; if its node is gone for good, record that they are lost."""
        try:
            manifest, problem = await self._results.collect(move)
        except Unreachable as failure:
            node = await self._grid.read(lambda ledger, now: ledger.nodes.get(move.ran_on))
            if node is not None and node.state not in (NodeState.LOST, NodeState.LEFT):
                return  # tried again with the next poll
            manifest, problem = "", f"its files are lost with {move.ran_on}: {failure}"
        except (GridError, OSError) as failure:
            if isinstance(failure, GridError) and failure.retryable:
                return
            manifest, problem = "", f"its files could not be brought: {failure}"
        await self._record(MoveResultsBrought(move.id, manifest, problem))

    # ------------------------------------------------------------------ reporting

    async def _record(self, event: Event) -> None:
        """Report an event; the refusal of a move that has ended meanwhile is harmless."""
        try:
            await self._grid.handle_with_retry(event)
        except GridError as refusal:
            log.info("%s came too late: %s", type(event).__name__, refusal)
