"""Files of attempts: read by the control plane over streams with credit, removed after a month of their machine's age.

Nothing outside an attempt's own directory can be named, not even through a link.

Working directories of jobs are laid out from content by digest: missing content comes from the control plane, or from
its stores on its own machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from distributed_grid import wire
from distributed_grid.adapters.clock import sealed, unsealed
from distributed_grid.agent.files import job_dir
from distributed_grid.errors import GridError, Unreachable
from distributed_grid.posix.private_files import open_regular, write_private
from distributed_grid.supervision import start_logged
from distributed_grid.trees import file_selection, manifest, tree_writer
from distributed_grid.trees.content_store import ContentMissing, ContentStore, ContentStores
from distributed_grid.trees.paths import DIRECTORY_FLAGS, display_path, open_inside
from distributed_grid.trees.secret_files import SecretFilter, is_secret, is_withheld
from distributed_grid.trees.tree_listing import MAX_TREE_BYTES, MAX_TREE_FILES, TreeDigests, TreeListing, list_tree

MAX_STREAMS, MAX_LISTINGS = 256, 16
MAX_DIGESTED = 16
MANIFEST_SECONDS = 20.0
"""Time to get the list of the files that were shipped, before all files are listed without it."""
KEEP_MS = 30 * 86_400_000
DIRECTORY_GONE = "its directory is not there any more"
"""Problem of a listing whose attempt has left no directory, or none any more."""
OUTPUT = (job_dir.STDOUT.encode(), job_dir.STDERR.encode())
DIRECTORIES = (job_dir.WORK.encode(), job_dir.CHECKPOINT_DIR.encode())


class HeldDirectory(Protocol):
    """A directory that stays open while this is held."""

    @property
    def fd(self) -> int: ...


class _Stream:
    def __init__(self, order: wire.ReadFile, fd: int, offset: int, credit: int) -> None:
        self.order = order
        self.fd = fd
        self.at = offset
        self.is_begun = False
        self.credit = credit
        self.task: asyncio.Task[None] | None = None


class AttemptFileReader:
    """Streams on which output and working directories are read; none sends more than it has credit for.

    Reading and listing take place in threads: a disk may be slow, and a directory large.
    """

    def __init__(
        self,
        root: Path,
        send: Callable[[wire.FileChunk | wire.FileListing], None],
        moved_from: Callable[[str], HeldDirectory | None] = lambda move_id: None,
        read_tree: Callable[[str], Awaitable[manifest.Manifest]] | None = None,
    ) -> None:
        """`moved_from` finds the directory that the original of an open move runs in, `read_tree` the manifest of a
        tree that was shipped."""
        self._root = str(root.absolute())
        self._send = send
        self._moved_from = moved_from
        self._read_tree = read_tree
        self._streams: dict[int, _Stream] = {}
        self._listings: dict[int, asyncio.Task[None]] = {}
        self._digests: dict[str, TreeDigests] = {}

    def received(self, order: wire.ReadFile | wire.ReadCredit | wire.CloseStream | wire.ListFiles) -> None:
        """Begin, continue or end a stream; failures are sent as the answer."""
        if isinstance(order, wire.CloseStream):
            self._end(order.stream)
        elif isinstance(order, wire.ReadCredit):
            if order.stream in self._streams:
                self._streams[order.stream].credit += order.credit
                self._continue(order.stream)
        elif isinstance(order, wire.ListFiles):
            if len(self._listings) >= MAX_LISTINGS:
                self._send(
                    wire.FileListing(stream=order.stream, problem="too many directories are being listed at once")
                )
                return
            self._listings[order.stream] = start_logged(self._send_listing(order), "listing of files")
        else:
            try:
                directory = self._moved_from(order.lease_id)
                if directory is None:
                    fd = open_file(self._root, order.lease_id, order.name)
                else:
                    first, _, rest = order.name.partition(b"/")
                    if first != job_dir.WORK.encode() or not rest:
                        raise ValueError("not a file of a working directory")
                    if is_secret(rest, is_directory=False) and is_withheld(f"/proc/self/fd/{directory.fd}", rest):
                        raise ValueError("looks like a secret")
                    fd = open_inside(directory.fd, rest)
            except FileNotFoundError:
                problem = "" if order.name in OUTPUT else wire.clipped(f"there is no {display_path(order.name)}")
                self._send(wire.FileChunk(order.stream, b"", problem))
                return
            except (OSError, ValueError) as failure:
                self._send(
                    wire.FileChunk(
                        order.stream, b"", wire.clipped(f"{display_path(order.name)} cannot be read: {failure}")
                    )
                )
                return
            if len(self._streams) >= MAX_STREAMS:
                os.close(fd)
                self._send(wire.FileChunk(order.stream, b"", "too many files are being read at once"))
                return
            self._end(order.stream)
            start = max(os.fstat(fd).st_size - order.offset, 0) if order.from_end else order.offset
            self._streams[order.stream] = _Stream(order, fd, start, order.credit)
            self._continue(order.stream)

    def close(self) -> None:
        for stream in [*self._streams, *self._listings]:
            self._end(stream)

    def _continue(self, number: int) -> None:
        stream = self._streams[number]
        if stream.task is None or stream.task.done():
            stream.task = start_logged(self._read(number, stream), "reading of a file")

    async def _read(self, number: int, stream: _Stream) -> None:
        problem = ""
        while stream.credit > 0 and self._streams.get(number) is stream:
            offset, most, order = stream.at, min(stream.credit, wire.MAX_CHUNK_BYTES), stream.order
            try:
                offset, data = await asyncio.to_thread(
                    read_at, self._root, order.lease_id, order.name, stream.fd, most, stream.at
                )
                if stream.is_begun and offset > stream.at:  # dropped meanwhile: the next read begins behind the hole
                    offset, data = stream.at, b""
            except (OSError, OverflowError) as failure:
                data, problem = b"", wire.clipped(f"it cannot be read: {failure}")
            if self._streams.get(number) is not stream:
                break
            stream.credit -= len(data)
            self._send(wire.FileChunk(number, data, problem, at=offset))
            stream.at, stream.is_begun = offset + len(data), True
            if not data:
                self._streams.pop(number)
        if self._streams.get(number) is not stream:
            os.close(stream.fd)

    def _end(self, number: int) -> None:
        """Close the descriptor, here or in its current reader."""
        ended = self._streams.pop(number, None)
        if ended is not None and (ended.task is None or ended.task.done()):
            os.close(ended.fd)
        listing = self._listings.pop(number, None)
        if listing is not None:
            listing.cancel()

    async def _send_listing(self, order: wire.ListFiles) -> None:
        shipped = manifest.Manifest()  # the tree that the attempt began with; unknown, every file is listed
        if order.shipped and self._read_tree is not None:
            with contextlib.suppress(GridError, OSError, TimeoutError):
                async with asyncio.timeout(MANIFEST_SECONDS):
                    shipped = await self._read_tree(order.shipped)
        listing = await asyncio.to_thread(self._listing, order, shipped)
        if self._listings.pop(order.stream, None) is not None:
            for page in listing:
                self._send(page)

    def _listing(self, order: wire.ListFiles, shipped: manifest.Manifest) -> list[wire.FileListing]:
        listing: file_selection.SelectedFiles | TreeListing
        changed: file_selection.ChangedFiles | None = None
        directory = self._moved_from(order.lease_id)  # held until it is listed
        try:
            if order.checkpoint:
                listing = list_checkpoint(self._root, order.lease_id)
            else:
                work = directory.fd if directory is not None else work_dir(self._root, order.lease_id)
                if order.tree:
                    digests = self._digests.pop(order.lease_id, None) or TreeDigests()
                    self._digests[order.lease_id] = digests
                    while len(self._digests) > MAX_DIGESTED:
                        del self._digests[next(iter(self._digests))]
                    secrets = None  # the private directory of an attempt has no filter
                    if directory is not None:
                        secrets = SecretFilter(os.readlink(b"/proc/self/fd/%d" % directory.fd))
                    listing = digests.list_tree(work, secrets=secrets)
                else:
                    listing = file_selection.select_files(work, order.patterns)
                    changed = file_selection.changed_files(work, listing.entries, shipped)
        except FileNotFoundError:
            return [wire.FileListing(stream=order.stream, problem=DIRECTORY_GONE)]
        except (GridError, OSError, ValueError, RecursionError) as failure:
            return [wire.FileListing(stream=order.stream, problem=wire.clipped(str(failure)))]
        skipped = [
            f"{display_path(skip.path)}: {skip.reason}"[: wire.MAX_SKIPPED_CHARS] for skip in listing.skipped[:1000]
        ]
        entries = listing.entries if changed is None else changed.entries
        unchanged = 0 if changed is None else changed.unchanged
        files = manifest.encode_listing_pages(entries, wire.MAX_LISTING_BYTES)
        files += [b""] * (len(wire.pages(len(skipped), wire.MAX_SKIPPED)) - len(files))
        return [
            wire.FileListing(
                stream=order.stream,
                files=listed,
                skipped=tuple(skipped[page]),
                more=page.stop < wire.MAX_SKIPPED * len(files),
                unchanged=0 if page.start else unchanged,
            )
            for listed, page in zip(files, wire.pages(wire.MAX_SKIPPED * len(files), wire.MAX_SKIPPED), strict=True)
        ]


def open_file(root: str, lease_id: str, name: bytes) -> int:
    """A descriptor of a file of an attempt: `stdout`, `stderr`, `work/…` or `checkpoints/…`; ValueError for any other
    name."""
    folder = job_dir.open_job_folder(root, lease_id)
    try:
        if name in OUTPUT:
            return open_regular(name.decode(), os.O_RDONLY, folder)
        first, _, rest = name.partition(b"/")
        if first not in DIRECTORIES or not rest:
            raise ValueError("not a file of an attempt")
        directory = os.open(first, DIRECTORY_FLAGS, dir_fd=folder)
        try:
            return open_inside(directory, rest)
        finally:
            os.close(directory)
    finally:
        os.close(folder)


def read_at(root: str, lease_id: str, name: bytes, fd: int, most: int, start: int) -> tuple[int, bytes]:
    """Offset and content of an open file from `start` on. Dropped output is skipped: the hole is made
    after it is recorded, so the record is compared after the bytes are read."""
    while True:
        data = os.pread(fd, most, start)
        if name not in OUTPUT or not data:
            return start, data
        status = os.fstat(fd)
        if status.st_blocks * 512 >= status.st_size:  # it has no hole
            return start, data
        dropped = job_dir.dropped_output(root, lease_id, name.decode())
        if start >= dropped:
            return start, data
        start = dropped


def work_dir(root: str, lease_id: str) -> Path:
    """Working directory of an attempt; raises `FileNotFoundError` if it is missing or a link."""
    os.close(job_dir.open_attempt_directory(root, lease_id, job_dir.WORK))
    return Path(root, lease_id, job_dir.WORK)


def list_checkpoint(root: str, lease_id: str) -> TreeListing:
    """The whole checkpoint directory of an attempt; `BadInput` if it is too large to be shipped."""
    folder = job_dir.open_attempt_directory(root, lease_id, job_dir.CHECKPOINT_DIR)
    try:
        return list_tree(folder, f"{root}/{lease_id}/{job_dir.CHECKPOINT_DIR}")
    finally:
        os.close(folder)


def remove_expired(root: Path, *, age_ms: int, keep_ms: int = KEEP_MS) -> int:
    """Remove attempts that ended longer ago than `keep_ms`, never live or unacknowledged ones; returns their number.

    `age_ms` is that of an `AgeClock`. When the end of an attempt is first seen its age is written beside it, and counts
    from then on: times of files are those of a wall clock, which may have been wrong. An age that cannot be read, or is
    in the future, is written anew.
    """
    removed = 0
    for control in list((root / job_dir.CONTROL).iterdir()) if (root / job_dir.CONTROL).is_dir() else []:
        if not job_dir.is_safe_name(control.name) or (root / job_dir.LIVE / control.name).exists():
            continue
        if not os.path.lexists(control / job_dir.EXIT):
            continue
        try:
            content = unsealed((control / job_dir.AGE).read_bytes())
        except OSError:
            content = None
        seen_ms = int(content) if content is not None and content.isdigit() else None
        if seen_ms is None or seen_ms > age_ms:
            with contextlib.suppress(OSError):  # a full disk: it is seen again
                write_private(control / job_dir.AGE, sealed(str(age_ms).encode()), durable=False)
        elif age_ms - seen_ms > keep_ms:
            for folder in (root / control.name, control):  # in this order: remains are found again
                shutil.rmtree(folder, ignore_errors=True)
            removed += 1
    return removed


KEEP_BYTES = 4 * 1024**3
CHUNK_SECONDS = 30.0
RETRY_SECONDS = 1.0
MAX_FETCHES = 8
"""Streams at a time: one job with a lot to fetch keeps no other waiting."""


class StoredWorkDirs:
    """Lays out directory trees on the control plane's own machine, from its stores."""

    is_local = True

    def __init__(self, stores: ContentStores) -> None:
        self._stores = stores

    async def lay_out(self, digest: str, target: Path) -> None:
        await asyncio.to_thread(
            lambda: tree_writer.materialize(self._tree(digest), self._stores.holder(digest), target)
        )

    async def read_tree(self, digest: str) -> manifest.Manifest:
        return await asyncio.to_thread(self._tree, digest)

    def _tree(self, digest: str) -> manifest.Manifest:
        with self._stores.holder(digest).open(digest) as file:
            return _decode_tree(file.read(), digest)

    def received(self, chunk: wire.FetchedChunk) -> None:
        """Drops it: nothing is requested."""

    def unlinked(self) -> None:
        """Nothing is on its way."""


class FetchedWorkDirs:
    """Fetches and lays out directory trees; a broken link delays a fetch, it does not fail it."""

    is_local = False

    def __init__(self, folder: Path, send: Callable[[wire.FetchContent | wire.FetchCredit], None]) -> None:
        self._folder = folder
        self._send = send
        self._numbers = itertools.count(1)
        self._streams: dict[int, asyncio.Queue[wire.FetchedChunk | None]] = {}
        self._store: ContentStore | None = None
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._fetching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def received(self, chunk: wire.FetchedChunk) -> None:
        """Chunk of a stream; chunks of unknown streams are dropped."""
        waiting = self._streams.get(chunk.stream)
        if waiting is not None:
            waiting.put_nowait(chunk)

    def unlinked(self) -> None:
        for waiting in self._streams.values():
            waiting.put_nowait(None)

    async def lay_out(self, digest: str, target: Path) -> None:
        """Lay out the tree of this digest in a directory, fetching what is missing; repeated, it changes nothing."""
        store = self._store = self._store or ContentStore(self._folder)
        tree = await self._tree(store, digest)
        blobs = tree.contents()
        for missing in store.missing(blobs):
            lock = self._fetching.setdefault(missing, asyncio.Lock())
            async with lock:  # two jobs with the same files fetch them once
                if not store.has(missing, blobs[missing]):
                    await self._fetch_with_retry(store, missing, blobs[missing])
        await asyncio.to_thread(tree_writer.materialize, tree, store, target)
        await asyncio.to_thread(store.trim, KEEP_BYTES)

    async def read_tree(self, digest: str) -> manifest.Manifest:
        """List of files of this digest, from here or fetched."""
        store = self._store = self._store or ContentStore(self._folder)
        return await self._tree(store, digest)

    async def _tree(self, store: ContentStore, digest: str) -> manifest.Manifest:
        """The manifest of this digest, from here or fetched."""
        for _ in range(2):
            try:
                with store.open(digest) as file:
                    content = file.read()
            except ContentMissing:
                content = b""
            if hashlib.sha256(content).hexdigest() == digest:
                return _decode_tree(content, digest)
            await self._fetch_with_retry(store, digest, manifest.MAX_ENCODED_BYTES)
        raise _damaged(digest)

    async def _fetch_with_retry(self, store: ContentStore, digest: str, max_bytes: int) -> None:
        while True:
            try:
                async with self._fetches:
                    await self._fetch(store, digest, max_bytes)
                return
            except Unreachable:
                await asyncio.sleep(RETRY_SECONDS)

    async def _fetch(self, store: ContentStore, digest: str, max_bytes: int) -> None:
        stream = next(self._numbers)
        chunks: asyncio.Queue[wire.FetchedChunk | None] = asyncio.Queue()
        self._streams[stream] = chunks
        self._send(wire.FetchContent(stream, digest, wire.STREAM_CREDIT_BYTES))
        received = uncredited = 0
        try:
            with store.writer(digest=digest) as writer:
                while True:
                    try:
                        async with asyncio.timeout(CHUNK_SECONDS):
                            chunk = await chunks.get()
                    except TimeoutError:
                        raise Unreachable("the control plane does not send") from None
                    if chunk is None:
                        raise Unreachable("the link broke")
                    if chunk.problem:
                        raise GridError(chunk.problem)
                    if not chunk.data:
                        writer.finish()
                        return
                    received += len(chunk.data)
                    uncredited += len(chunk.data)
                    if received > max_bytes:
                        raise GridError("more was sent than was promised")
                    writer.write(chunk.data)
                    if uncredited >= wire.STREAM_CREDIT_BYTES // 2:
                        self._send(wire.FetchCredit(stream, uncredited))
                        uncredited = 0
        finally:
            del self._streams[stream]
            self._send(wire.FetchCredit(stream, 0))


def _decode_tree(content: bytes, digest: str) -> manifest.Manifest:
    if hashlib.sha256(content).hexdigest() != digest:
        raise _damaged(digest)
    return manifest.decode(content, limit_bytes=MAX_TREE_BYTES, limit_files=MAX_TREE_FILES)


def _damaged(digest: str) -> GridError:
    return GridError(f"the list of files {digest[:12]} is damaged")
