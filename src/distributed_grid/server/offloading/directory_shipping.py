"""Shipping of directories into the control plane's content store: what is there already is not sent again.

A directory that is still written to is shipped as far as it holds still: what changes meanwhile is left out, and is
part of the next difference. One that stands still is shipped whole, or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import Struct

from distributed_grid.adapters.workdir import manifest as manifests
from distributed_grid.adapters.workdir.content_store import ContentStore
from distributed_grid.adapters.workdir.directory_walker import leads_outside
from distributed_grid.adapters.workdir.manifest import Manifest, ManifestEntry, manifest_of
from distributed_grid.adapters.workdir.paths import display_path, to_bytes
from distributed_grid.control.agent_files import AttemptOutputFile, in_work
from distributed_grid.errors import BadInput, NotFound, ProtocolError

CHUNK_BYTES = 4 * 1024 * 1024
FILES_AT_ONCE = 8
Read = Callable[[bytes, int, int], Coroutine[Any, Any, bytes]]
"""Reads a file of the directory: its name, from where on, and how much at most."""


class ShippedTree(Struct, frozen=True):
    """A directory that is in the store; `new_bytes` were sent, `changing` files were left out."""

    manifest: Manifest
    digest: str
    new_bytes: int
    changing: int = 0


class _ChangedMeanwhile(Exception):
    """A file is not what it was when it was listed."""


async def ship_tree(store: ContentStore, found: AttemptOutputFile, read: Read, *, still: bool) -> ShippedTree:
    """Store what a directory holds, and its manifest. With `still` nothing may change meanwhile: NotFound where it
    does. BadInput where it is too large, or has a link that leads outside."""
    tree = manifest_of(found.entries)
    _refuse_links_outside(tree)
    manifests.check(tree, limit_bytes=manifests.LIMIT_BYTES, limit_files=manifests.LIMIT_FILES)
    missing = set(await asyncio.to_thread(store.missing, tree.contents()))
    wanted = {entry.digest: entry for entry in tree.entries if entry.digest in missing}
    changed: set[str] = set()
    slots = asyncio.Semaphore(FILES_AT_ONCE)

    async def fetch(entry: ManifestEntry) -> None:
        async with slots:
            try:
                await _fetch(store, entry, read)
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
    return ShippedTree(kept, digest, new_bytes, len(tree.entries) - len(kept.entries))


async def _fetch(store: ContentStore, entry: ManifestEntry, read: Read) -> None:
    """Bring one file into the store; what arrives is checked against its digest."""
    with store.writer(digest=entry.digest, size=entry.size) as writer:
        at = 0
        while at < entry.size:
            data = await read(in_work(entry), at, min(CHUNK_BYTES, entry.size - at))
            if not data:
                raise _ChangedMeanwhile("it became shorter")
            await asyncio.to_thread(writer.write, data)
            at += len(data)
        try:
            await asyncio.to_thread(writer.finish)
        except ProtocolError:
            raise _ChangedMeanwhile("its content is another") from None


def _refuse_links_outside(tree: Manifest) -> None:
    links = {to_bytes(entry.path): to_bytes(entry.target) for entry in tree.entries if entry.kind == "link"}
    for path, target in links.items():
        if leads_outside(path, links):
            shown = f"{display_path(path)} -> {display_path(target)}"
            raise BadInput(f"the link {shown} leads outside the working directory, which cannot be shipped with it")


def stored_manifest(store: ContentStore, digest: str) -> Manifest:
    """A manifest that was stored before; ContentMissing where it is gone."""
    with store.open(digest) as file:
        return manifests.decode(file.read())
