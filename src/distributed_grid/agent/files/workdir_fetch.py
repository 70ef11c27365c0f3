"""Working directories on a node: fetched by content from the control plane, only what is not here already."""

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
PIECE_SECONDS = 30.0
RETRY_SECONDS = 1.0


class FetchedWorkDirs:
    """Lays out trees whose content it asks the control plane for; a broken link delays, it does not fail."""

    def __init__(self, folder: Path, ask: Callable[[FetchContent | FetchCredit], None]) -> None:
        self._folder = folder
        self._ask = ask
        self._numbers = itertools.count(1)
        self._pieces: dict[int, asyncio.Queue[FetchedChunk | None]] = {}
        self._store: ContentStore | None = None
        self._alone = asyncio.Lock()

    def received(self, piece: FetchedChunk) -> None:
        """Bytes that were asked for; what nobody asked for is dropped."""
        waiting = self._pieces.get(piece.stream)
        if waiting is not None:
            waiting.put_nowait(piece)

    def unlinked(self) -> None:
        """The link is gone, and with it every stream."""
        for waiting in self._pieces.values():
            waiting.put_nowait(None)

    async def lay_out(self, digest: str, target: Path) -> None:
        """Lay out the tree of this digest in a directory, fetching what is missing; repeated, it changes nothing."""
        store = self._store = self._store or ContentStore(self._folder)
        async with self._alone:  # two jobs with the same files fetch them once
            tree = await self._tree(store, digest)
            blobs = tree.contents()
            for missing in store.missing(blobs):
                await self._bring(store, missing, blobs[missing])
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
            await self._bring(store, digest, manifest.MAX_ENCODED_BYTES)
        raise GridError(f"the list of files {digest[:12]} is damaged")

    async def _bring(self, store: ContentStore, digest: str, most: int) -> None:
        while True:
            try:
                await self._fetch(store, digest, most)
                return
            except Unreachable:
                await asyncio.sleep(RETRY_SECONDS)

    async def _fetch(self, store: ContentStore, digest: str, most: int) -> None:
        stream = next(self._numbers)
        pieces: asyncio.Queue[FetchedChunk | None] = asyncio.Queue()
        self._pieces[stream] = pieces
        self._ask(FetchContent(stream, digest, STREAM_CREDIT_BYTES))
        taken = used = 0
        try:
            with store.writer(digest=digest) as writer:
                while True:
                    try:
                        piece = await asyncio.wait_for(pieces.get(), PIECE_SECONDS)
                    except TimeoutError:
                        raise Unreachable("the control plane does not send") from None
                    if piece is None:
                        raise Unreachable("the link broke")
                    if piece.problem:
                        raise GridError(piece.problem)
                    if not piece.data:
                        writer.finish()
                        return
                    taken += len(piece.data)
                    used += len(piece.data)
                    if taken > most:
                        raise GridError("more was sent than was promised")
                    writer.write(piece.data)
                    if used >= STREAM_CREDIT_BYTES // 2:
                        self._ask(FetchCredit(stream, used))
                        used = 0
        finally:
            del self._pieces[stream]
            self._ask(FetchCredit(stream, 0))
