"""Directories of jobs, laid out from content by digest: fetched from the control plane, of which only what is missing
is sent, or, on its own machine, taken from its stores."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

from distributed_grid.errors import GridError, Unreachable
from distributed_grid.trees import manifest, tree_writer
from distributed_grid.trees.content_store import ContentMissing, ContentStore, ContentStores
from distributed_grid.trees.tree_listing import MAX_TREE_BYTES, MAX_TREE_FILES
from distributed_grid.wire import STREAM_CREDIT_BYTES, FetchContent, FetchCredit, FetchedChunk

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
        """Lay out the tree of this digest in a directory; repeated, it changes nothing."""
        await asyncio.to_thread(self._lay_out, digest, target)

    async def read_tree(self, digest: str) -> manifest.Manifest:
        """The list of files of this digest."""
        return await asyncio.to_thread(self._tree, digest)

    def _lay_out(self, digest: str, target: Path) -> None:
        tree_writer.materialize(self._tree(digest), self._stores.holder(digest), target)

    def _tree(self, digest: str) -> manifest.Manifest:
        with self._stores.holder(digest).open(digest) as file:
            return _decode_tree(file.read(), digest)

    def received(self, chunk: FetchedChunk) -> None:
        """Nothing is asked for."""

    def unlinked(self) -> None:
        """Nothing is on its way."""


class FetchedWorkDirs:
    """Fetches and lays out directory trees; a broken link delays a fetch, it does not fail it."""

    is_local = False

    def __init__(self, folder: Path, send: Callable[[FetchContent | FetchCredit], None]) -> None:
        self._folder = folder
        self._send = send
        self._numbers = itertools.count(1)
        self._streams: dict[int, asyncio.Queue[FetchedChunk | None]] = {}
        self._store: ContentStore | None = None
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._fetching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def received(self, chunk: FetchedChunk) -> None:
        """A chunk of a stream; chunks of unknown streams are dropped."""
        waiting = self._streams.get(chunk.stream)
        if waiting is not None:
            waiting.put_nowait(chunk)

    def unlinked(self) -> None:
        """The link is gone, and with it every stream."""
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
        """The list of files of this digest, from here or fetched."""
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
        chunks: asyncio.Queue[FetchedChunk | None] = asyncio.Queue()
        self._streams[stream] = chunks
        self._send(FetchContent(stream, digest, STREAM_CREDIT_BYTES))
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
                    if uncredited >= STREAM_CREDIT_BYTES // 2:
                        self._send(FetchCredit(stream, uncredited))
                        uncredited = 0
        finally:
            del self._streams[stream]
            self._send(FetchCredit(stream, 0))


def _decode_tree(content: bytes, digest: str) -> manifest.Manifest:
    if hashlib.sha256(content).hexdigest() != digest:
        raise _damaged(digest)
    return manifest.decode(content, limit_bytes=MAX_TREE_BYTES, limit_files=MAX_TREE_FILES)


def _damaged(digest: str) -> GridError:
    return GridError(f"the list of files {digest[:12]} is damaged")
