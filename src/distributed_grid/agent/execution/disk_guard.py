"""Disk guard of a node: ends attempts whose files exceed their limit, or fill the disk of all.

- The files of an attempt are those in its own directory on the node: `$GRID_JOB_DIR` and `$GRID_CHECKPOINT_DIR`. A
  directory that is used in place is not measured. stdout and stderr have a limit of their own.
- Above its limit an attempt is paused for its grace; if its files are still above it then, it is ended.
- While less than the reserve is free on the disk, the attempt that has written most is ended at once, if that is at
  least as much as the reserve. From then on writing is counted anew, so that a disk which stays full does not end one
  attempt after the other.
- Nothing is deleted.

Files are counted in slices, with rests that are `REST` times as long: a tree of a million files costs a twentieth of a
core. A tree whose file system hangs is left out until it answers.

The size of a tree is counted a few entries at a time:

- Links are not followed, and other file systems are not entered.
- A file of several names counts once. At most `MAX_LINKED` of those are remembered; beyond that each name counts for
  its part.
- An entry that vanishes before it is read does not count. A directory deeper than `MAX_DEPTH` counts without its
  content, so that few descriptors are open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Protocol

from distributed_grid.agent.execution.cpu_control import RunningTree
from distributed_grid.agent.files.job_dir import STDERR, STDOUT
from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.nodes import Usage
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.scheduling.offers.pause import disk_reserve, is_disk_full
from distributed_grid.supervision import start_logged

MAX_DEPTH = 40
MAX_LINKED = 50_000
ENTRY_BYTES = 512
"""A file without content needs room, too: for its name and its inode."""
BLOCK_BYTES = 512
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _OpenDirectory:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.entries: Iterator[os.DirEntry[str]] = os.scandir(fd)

    def close(self) -> None:
        self.entries.close()  # type: ignore[attr-defined]
        os.close(self.fd)


class TreeSize:
    """Counts one tree again and again; names in `apart`, directly below it, are summed apart from the rest."""

    def __init__(self, path: str, apart: frozenset[str] = frozenset(), *, max_linked: int = MAX_LINKED) -> None:
        self._path = path
        self._apart = apart
        self._max_linked = max_linked
        self._open: list[_OpenDirectory] = []
        self._linked: set[int] = set()
        self._device = 0
        self._bytes = self._apart_bytes = 0
        self.size_bytes = self.apart_bytes = 0  # of the last whole pass
        self.passes = 0

    @property
    def is_under_way(self) -> bool:
        return bool(self._open)

    @property
    def known_bytes(self) -> int:
        """Known size: of the last pass, or of the current one if that has found more already."""
        return max(self.size_bytes, self._bytes)

    @property
    def known_total_bytes(self) -> int:
        return self.known_bytes + max(self.apart_bytes, self._apart_bytes)

    def count(self, entries: int) -> bool:
        """Count this many entries more; True when that ends a pass."""
        if not self._open:
            self._bytes = self._apart_bytes = 0
            self._linked = set()
            with contextlib.suppress(OSError):  # it is gone
                fd = os.open(self._path, _FLAGS)
                self._device = os.fstat(fd).st_dev
                self._enter(fd)
        while self._open and entries > 0:
            entries -= 1
            entry = next(self._open[-1].entries, None)
            if entry is None:
                self._open.pop().close()
            else:
                here = self._open[-1]
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if status.st_dev != self._device:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    self._bytes += ENTRY_BYTES + status.st_blocks * BLOCK_BYTES
                    if len(self._open) < MAX_DEPTH:
                        try:
                            fd = os.open(entry.name, _FLAGS, dir_fd=here.fd)
                        except OSError:
                            continue
                        self._enter(fd)
                    continue
                size = ENTRY_BYTES + status.st_blocks * BLOCK_BYTES
                if status.st_nlink > 1:
                    if status.st_ino in self._linked:
                        size = 0
                    elif len(self._linked) < self._max_linked:
                        self._linked.add(status.st_ino)
                    else:
                        size //= status.st_nlink
                if len(self._open) == 1 and entry.name in self._apart:
                    self._apart_bytes += size
                else:
                    self._bytes += size
        if self._open:
            return False
        self.size_bytes, self.apart_bytes, self.passes = self._bytes, self._apart_bytes, self.passes + 1
        return True

    def close(self) -> None:
        """Close all descriptors; the next call begins a new pass. Safe twice."""
        while self._open:
            self._open.pop().close()

    def _enter(self, fd: int) -> None:
        try:
            self._open.append(_OpenDirectory(fd))
        except OSError:
            os.close(fd)


CHECK_MS, FULL_CHECK_MS = 1000, 250
MIN_REST_MS, MAX_REST_MS = 50, 2000
SLICE_S, SLICE_ENTRIES = 0.02, 200
REST, FULL_REST = 19, 3
"""Rest after a slice in multiples of the slice, normally and while the disk is full."""
PASS_MS, QUIET_PASS_MS = 1000, 30_000
"""From one pass over a tree to the next, and while what is free on the disk does not change."""
CHANGE_BYTES = 1 << 20
FRESH_MS = 3_000  # how long to wait for fresh sizes of all attempts on a full disk
HANGS_S, MAX_HANGING = 10.0, 2
log = logging.getLogger(__name__)


class MeasuredHost(Protocol):
    """The attempts of a machine, with their directories below `root`."""

    @property
    def root(self) -> str: ...

    def running_trees(self) -> Iterable[RunningTree]:
        """Attempts with a running command."""

    async def stop_attempt(
        self,
        attempt_id: str,
        *,
        ending: Ending,
        detail: str = "",
        grace_ms: int | None = None,
        is_disk_overrun: bool = False,
    ) -> None:
        """Stop the whole tree; the first `kind` stays."""


class Pauses(Protocol):
    """Pauses attempts for the sake of their node."""

    def pause_for_node(self, attempt_id: str, fence: int, reason: str) -> None:
        """Pause an attempt for a while; the caller repeats it as long as the pause is to last."""

    def resume(self, attempt_id: str) -> None:
        """Resume it. Safe twice."""


class _Watched:
    """Files of one attempt, as counted so far."""

    def __init__(self, root: str, tree: RunningTree, *, is_adopted: bool) -> None:
        self.tree = tree
        self.size = TreeSize(f"{root}/{tree.attempt_id}", frozenset((STDOUT, STDERR)))
        self.is_adopted = is_adopted
        self.base_bytes = 0  # size from which written bytes are counted
        self.began_ms = 0  # the pass under way, or the last one
        self.next_pass_ms = 0
        self.free_bytes = 0  # on the disk, when that pass began
        self.paused_until = 0
        self.paused_ms = self.reported_ms = 0
        self.counting: asyncio.Task[None] | None = None

    @property
    def is_counting(self) -> bool:
        """True while a thread counts its files; between checks that means that its file system hangs."""
        return self.counting is not None and not self.counting.done()

    @property
    def written_bytes(self) -> int:
        """Bytes written since the last new count; of an adopted attempt, since its adoption."""
        if self.is_adopted and not self.size.passes:
            return 0
        return self.size.known_total_bytes - self.base_bytes

    def count_anew(self) -> None:
        self.base_bytes = self.size.known_total_bytes


class DiskGuard:
    """Watches the disk of the attempts of a host; `check` is one step."""

    def __init__(self, host: MeasuredHost, pauses: Pauses) -> None:
        self._host = host
        self._pauses = pauses
        self._watched: dict[str, _Watched] = {}
        self._hanging: set[asyncio.Task[None]] = set()
        self._is_new = True
        self._full_since = 0
        self._free_bytes = self._disk_bytes = 0

    async def watch(self, sleep_ms: Callable[[int], Awaitable[None]]) -> None:
        """Check without end."""
        try:
            while True:
                rest_ms = CHECK_MS
                try:
                    rest_ms = await self.check()
                except Exception as failure:  # the outermost loop: the next check may well succeed
                    log.warning("watching the disk failed", exc_info=failure)
                await sleep_ms(rest_ms)
        finally:
            self._forget(set())

    async def check(self) -> int:
        """Count a few files, and act on the sizes; milliseconds until the next check."""
        trees = {tree.attempt_id: tree for tree in self._host.running_trees()}
        self._forget(trees.keys())
        for attempt_id, tree in trees.items():
            if attempt_id in self._watched:
                self._watched[attempt_id].tree = tree
            else:
                self._watched[attempt_id] = _Watched(self._host.root, tree, is_adopted=self._is_new)
        self._is_new = False
        if not self._watched:
            self._full_since = 0
            return CHECK_MS
        disk = os.statvfs(self._host.root)
        self._free_bytes, self._disk_bytes = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        usage = Usage(disk_free_bytes=self._free_bytes, disk_bytes=self._disk_bytes)
        if not is_disk_full(usage, was_full=bool(self._full_since)):
            self._full_since = 0
        elif not self._full_since:
            self._full_since = boot_ms()
        # Count files of those whose turn it is.
        began_s = time.monotonic()
        for watched in sorted(self._watched.values(), key=lambda watched: watched.began_ms):
            if time.monotonic() - began_s >= SLICE_S or len(self._hanging) >= MAX_HANGING:
                break
            if self._is_due(watched):
                await self._count(watched, began_s + SLICE_S)
        self._hanging = {task for task in self._hanging if not task.done()}
        taken_ms = round(1000 * (time.monotonic() - began_s))
        for watched in list(self._watched.values()):
            if watched.tree.stopping:
                continue
            # Above its limit an attempt is paused, and ended after its grace; below the limit it is resumed.
            spec, now = watched.tree.spec, boot_ms()
            held, limit = watched.size.known_bytes, spec.max_files_bytes
            is_fresh = watched.began_ms > watched.paused_ms and not watched.size.is_under_way
            if not limit or held <= limit:
                if watched.paused_until and is_fresh:
                    watched.paused_until = 0
                    self._pauses.resume(spec.attempt_id)
                continue
            reason = f"its files on the node take {_gigabytes(held)} (limit {_gigabytes(limit)}, max_files_gb)"
            if not watched.paused_until:
                watched.paused_ms, watched.paused_until = now, now + max(spec.grace_ms, 1)
                log.warning("%s is paused, and ended after %g s: %s", spec.attempt_id, spec.grace_ms / 1000, reason)
            if now < watched.paused_until and now >= watched.reported_ms + CHECK_MS:
                watched.reported_ms = now
                self._pauses.pause_for_node(spec.attempt_id, watched.tree.fence, reason)
            elif now >= watched.paused_until and is_fresh:
                await self._host.stop_attempt(
                    spec.attempt_id, ending=Ending.OVER_LIMIT, detail=reason, grace_ms=0, is_disk_overrun=True
                )
        await self._check_disk()
        if any(watched.size.is_under_way for watched in self._watched.values()):
            return min(max(MIN_REST_MS, taken_ms * (FULL_REST if self._full_since else REST)), MAX_REST_MS)
        return FULL_CHECK_MS if self._full_since else CHECK_MS

    def _forget(self, running: Iterable[str]) -> None:
        for attempt_id in self._watched.keys() - set(running):
            watched = self._watched.pop(attempt_id)
            if not watched.is_counting:
                watched.size.close()

    def _is_due(self, watched: _Watched) -> bool:
        now = boot_ms()
        if watched.is_counting or watched.size.is_under_way:
            return not watched.is_counting
        if self._full_since:
            return watched.began_ms < self._full_since or now >= watched.next_pass_ms
        changed = abs(self._free_bytes - watched.free_bytes) >= CHANGE_BYTES or watched.paused_until
        return now >= watched.next_pass_ms + (0 if changed else QUIET_PASS_MS)

    async def _count(self, watched: _Watched, until: float) -> None:
        if not watched.size.is_under_way:
            watched.began_ms, watched.free_bytes = boot_ms(), self._free_bytes
        passes = watched.size.passes

        def count() -> None:
            while not watched.size.count(SLICE_ENTRIES) and time.monotonic() < until:
                pass

        task = watched.counting = start_logged(asyncio.to_thread(count), "counting the files of an attempt")
        await asyncio.wait((task,), timeout=HANGS_S)
        if not task.done():
            self._hanging.add(task)
            log.warning("the files of %s cannot be counted: its file system hangs", watched.tree.attempt_id)
            return
        if watched.size.passes > passes:
            if watched.is_adopted and not passes:
                watched.count_anew()
            watched.next_pass_ms = boot_ms() + PASS_MS

    async def _check_disk(self) -> None:
        """On a full disk, end the attempt that has written most."""
        if not self._full_since:
            return
        running = [watched for watched in self._watched.values() if not watched.is_counting]
        is_fresh = all(watched.began_ms >= self._full_since and not watched.size.is_under_way for watched in running)
        if not is_fresh and boot_ms() < self._full_since + FRESH_MS:
            return
        reserve = disk_reserve(self._disk_bytes)
        if any(
            watched.tree.stopping and watched.written_bytes >= reserve for watched in running
        ):  # its end comes first
            return
        written = {watched.tree.attempt_id: watched.written_bytes for watched in running if not watched.tree.stopping}
        attempt_id = largest_writer(written, reserve)
        if attempt_id is None:
            return
        reason = (
            f"the disk of its node is full ({_gigabytes(self._free_bytes)} left), and it has written most there: "
            f"{_gigabytes(written[attempt_id])}"
        )
        log.warning("%s is ended: %s", attempt_id, reason)
        await self._host.stop_attempt(
            attempt_id, ending=Ending.OVER_LIMIT, detail=reason, grace_ms=0, is_disk_overrun=True
        )
        for other in running:
            other.count_anew()


def largest_writer(written_bytes: Mapping[str, int], reserve_bytes: int) -> str | None:
    """Attempt to end on a full disk: the one that has written most, if that is at least the reserve of the disk; else
    None."""
    writers = [(-size, attempt_id) for attempt_id, size in written_bytes.items() if size >= max(reserve_bytes, 1)]
    return min(writers)[1] if writers else None


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.3g} GB"
