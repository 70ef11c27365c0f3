"""Working directories of jobs, fetched by content digest from the control plane; only what is missing is sent."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path

from distributed_grid.adapters.workdir import manifest, tree_writer
from distributed_grid.adapters.workdir.content_store import ContentMissing, ContentStore
from distributed_grid.errors import GridError, Unreachable
from distributed_grid.wire import STREAM_CREDIT_BYTES, FetchContent, FetchCredit, FetchedChunk

KEEP_BYTES = 4 * 1024**3
CHUNK_SECONDS = 30.0
RETRY_SECONDS = 1.0


class FetchedWorkDirs:
    """Fetches and lays out directory trees; a broken link delays a fetch, it does not fail it."""

    def __init__(self, folder: Path, send: Callable[[FetchContent | FetchCredit], None]) -> None:
        self._folder = folder
        self._send = send
        self._numbers = itertools.count(1)
        self._streams: dict[int, asyncio.Queue[FetchedChunk | None]] = {}
        self._store: ContentStore | None = None
        self._fetching = asyncio.Lock()

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
        async with self._fetching:  # two jobs with the same files fetch them once
            tree = await self._tree(store, digest)
            blobs = tree.contents()
            for missing in store.missing(blobs):
                await self._fetch_with_retry(store, missing, blobs[missing])
        await asyncio.to_thread(tree_writer.materialize, tree, store, target)
        await asyncio.to_thread(store.trim, KEEP_BYTES)

    async def _tree(self, store: ContentStore, digest: str) -> manifest.Manifest:
        """The manifest of this digest, from here or fetched."""
        for _ in range(2):
            try:
                with store.open(digest) as file:
                    content = file.read()
            except ContentMissing:
                content = b""
            if hashlib.sha256(content).hexdigest() == digest:
                return manifest.decode(content)
            await self._fetch_with_retry(store, digest, manifest.MAX_ENCODED_BYTES)
        raise GridError(f"the list of files {digest[:12]} is damaged")

    async def _fetch_with_retry(self, store: ContentStore, digest: str, max_bytes: int) -> None:
        while True:
            try:
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
                        chunk = await asyncio.wait_for(chunks.get(), CHUNK_SECONDS)
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
