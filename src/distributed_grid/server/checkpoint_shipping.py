"""Shipping of checkpoint directories: the checkpoint of an ended attempt is brought here for the next attempt.

- Awaited checkpoints are derived from the ledger, again and again: start-up, repair and a lost answer are the same.
- The attempt is over, so nothing changes while it is read; a tree is recorded when all of it is in the store, on disk.
- While the job waits in the queue a failure delays nobody, and is tried again. Once its next attempt has a place, a
  lost node is not waited for, and any other only for `GIVE_UP_MS`.
- The store holds the checkpoints that living jobs need, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from distributed_grid.control.agent_files import AttemptFiles, in_checkpoint
from distributed_grid.control.grid import Grid
from distributed_grid.control.reconciler import Reconciler
from distributed_grid.domain.events import CheckpointShipped
from distributed_grid.domain.jobs import Attempt, Job
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import NodeState
from distributed_grid.errors import GridError, ProtocolError, StoreFailed
from distributed_grid.reactor.effects import ShipCheckpoint, checkpoint_effects
from distributed_grid.trees import manifest
from distributed_grid.trees.content_store import ContentMissing, ContentStore
from distributed_grid.trees.manifest import Manifest, ManifestEntry, manifest_of
from distributed_grid.trees.paths import display_path
from distributed_grid.trees.scan import format_bytes
from distributed_grid.trees.tree_listing import MAX_TREE_BYTES, MAX_TREE_FILES

AT_ONCE = 4
POLL_SECONDS = 1.0
CHUNK_BYTES = 4 * 1024 * 1024
MAX_FAILURES = 3  # tries with a lasting failure
GIVE_UP_MS = 600_000
"""Longest wait of an attempt that has its place for the checkpoint of the last one."""
RESERVED_BYTES = 256 * 1024 * 1024
MAX_NAMED = 20
log = logging.getLogger(__name__)


class CheckpointShipper:
    def __init__(self, grid: Grid, files: AttemptFiles, store: ContentStore, *, give_up_ms: int = GIVE_UP_MS) -> None:
        self._grid = grid
        self._files = files
        self._store = store
        self._give_up_ms = give_up_ms
        self._work = Reconciler(at_once=AT_ONCE)
        self._contents: dict[tuple[str, int], set[str]] = {}
        """By attempt, the contents of a checkpoint that are in the store."""
        self._writing = asyncio.Lock()  # no content is removed between its arrival and its entry in a shipment
        self._has_unused = True
        grid.follow(self._on_changes)

    async def run(self) -> None:
        await self._work.run(self._reconcile, POLL_SECONDS)

    def perform(self, effect: ShipCheckpoint) -> None:
        key = (effect.job.uid, effect.attempt.number)
        self._work.begin(key, partial(self._ship, effect), f"the checkpoint of {effect.attempt.lease_id}")

    async def _reconcile(self) -> None:
        """Ship awaited checkpoints, and remove unused contents."""
        if self._grid.ledger.awaited_checkpoints or self._contents:
            effects = await self._grid.read(lambda ledger, now: checkpoint_effects(ledger))
            wanted = {(effect.job.uid, effect.attempt.number) for effect in effects}
            self._work.keep_only(wanted)
            for key in [key for key in self._contents if key not in wanted and not self._work.is_under_way(key)]:
                del self._contents[key]
                self._has_unused = True
            for effect in effects:
                self.perform(effect)
        if self._has_unused:
            await self.remove_unused()

    def _on_changes(self, rows: Sequence[Row]) -> None:
        if any(isinstance(row, Job) and row.is_over and row.checkpoint for row in rows):
            self._has_unused = True
            self._work.wake()

    async def _ship(self, effect: ShipCheckpoint) -> None:
        """Ship one; a passing failure is tried again with the next round."""
        uid, attempt = effect.job.uid, effect.attempt
        key = (uid, attempt.number)
        try:
            contents = self._contents.setdefault(key, set())
            listing = await self._files.find_checkpoint(attempt)
            tree = manifest_of(listing.entries)
            sizes = [entry.size for entry in tree.entries]
            if any(size < 0 for size in sizes) or sum(sizes) > MAX_TREE_BYTES or tree.total_files > MAX_TREE_FILES:
                raise ProtocolError(f"{attempt.node} lists more than may be in a checkpoint directory")
            free_bytes = shutil.disk_usage(self._store.root).free  # of the disk of the ledger
            if free_bytes < tree.total_bytes + RESERVED_BYTES:
                size = format_bytes(tree.total_bytes)
                raise StoreFailed(f"there is no room for its {size} on the control plane's disk")
            entries = [await self._bring_entry(attempt, entry, contents) for entry in tree.entries]
            tree = Manifest(tuple(entries))
            manifest.check(tree, limit_bytes=MAX_TREE_BYTES, limit_files=MAX_TREE_FILES)
            digest = ""
            if tree.entries:
                async with self._writing:
                    digest = await asyncio.to_thread(self._store.add, manifest.encode(tree))
                    contents.add(digest)
            done = CheckpointShipped(
                uid=uid,
                number=attempt.number,
                manifest=digest,
                files=tree.total_files,
                bytes=tree.total_bytes,
                left_out=listing.skipped[:MAX_NAMED],
            )
        except (GridError, OSError) as failure:
            if self._work.tries(key).problem != str(failure):  # once: it is tried again and again
                log.warning("the checkpoint of %s cannot be brought yet: %s", attempt.lease_id, failure)
            lasts = not getattr(failure, "retryable", True)
            tries = self._work.fail(key, str(failure), lasts=lasts, retry_seconds=0.0)
            if tries.lasting < MAX_FAILURES and not self._is_hopeless(self._grid.ledger, effect):
                return
            done = CheckpointShipped(uid=uid, number=attempt.number, problem=tries.problem)
        await self._grid.handle_with_retry(done)
        self._has_unused = True  # the checkpoint before it
        self._work.wake()

    def _is_hopeless(self, ledger: Ledger, effect: ShipCheckpoint) -> bool:
        """True if an attempt that has its place waits for a node that is lost, or too long."""
        job, node = ledger.jobs.get(effect.job.uid), ledger.nodes.get(effect.attempt.node)
        if job is None or job.attempt is None:
            return False  # it waits in the queue
        is_late = self._grid.now_ms() - job.attempt.assigned_at_ms > self._give_up_ms
        return is_late or node is None or node.forgotten or node.state in (NodeState.LOST, NodeState.LEFT)

    async def _bring_entry(self, attempt: Attempt, entry: ManifestEntry, contents: set[str]) -> ManifestEntry:
        """Bring the content of an entry into the store; the entry with its digest."""
        if entry.kind != "file":
            return entry
        name = in_checkpoint(entry)
        with self._store.writer(size=entry.size) as writer:
            got = 0
            while got < entry.size:
                _, data = await self._files.read(attempt, name, got, min(CHUNK_BYTES, entry.size - got))
                if not data:
                    raise ProtocolError(f"{display_path(entry.path)} became shorter while it was copied")
                await asyncio.to_thread(writer.write, data)
                got += len(data)
            async with self._writing:
                digest = await asyncio.to_thread(writer.finish)
                contents.add(digest)
        return replace(entry, digest=digest)

    async def remove_unused(self) -> int:
        """Remove contents that no living job and no shipment needs; the bytes removed."""
        self._has_unused = False

        def in_use(ledger: Ledger, now: int) -> set[str]:
            return {job.checkpoint for job in ledger.jobs.values() if job.checkpoint}

        async with self._writing:
            manifests = await self._grid.read(in_use)
            fresh = {digest for contents in self._contents.values() for digest in contents}
            return await asyncio.to_thread(_remove_others, self._store, manifests, fresh)


def _remove_others(store: ContentStore, manifests: set[str], fresh: set[str]) -> int:
    keep = manifests | fresh
    for digest in manifests:
        try:
            with store.open(digest) as file:
                tree = manifest.decode(file.read(), limit_bytes=MAX_TREE_BYTES, limit_files=MAX_TREE_FILES)
        except ContentMissing:
            continue
        keep |= tree.contents().keys()
    return store.trim(0, keep=keep, grace_seconds=0)
