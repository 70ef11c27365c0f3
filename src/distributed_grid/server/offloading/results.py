"""Results of the job that took a process's place: what differs from the directory it began with, and its output.

What the original wrote to files by its descriptors 1 and 2 is what the job has written to its own: it replaces such a
file, or is appended to what was there where the original appended. Both into one file: first all of 1, then all of 2.
"""

from __future__ import annotations

import asyncio
import os

from distributed_grid.adapters.workdir import manifest as manifests
from distributed_grid.adapters.workdir.content_store import ContentMissing, ContentStore
from distributed_grid.adapters.workdir.directory_walker import leads_outside
from distributed_grid.adapters.workdir.manifest import EXECUTABLE, PLAIN, Manifest, ManifestEntry, manifest_of
from distributed_grid.adapters.workdir.paths import split_path, to_bytes, to_text
from distributed_grid.agent.files.job_dir import STDERR, STDOUT
from distributed_grid.control.agent_files import AttemptFiles, AttemptOutputFile
from distributed_grid.domain.jobs import Attempt
from distributed_grid.domain.moves import Move, MovedProcess
from distributed_grid.domain.processes import StreamKind
from distributed_grid.errors import BadInput, NotFound, ProtocolError
from distributed_grid.server.offloading.directory_shipping import CHUNK_BYTES, ship_tree, stored_manifest

MAX_OUTPUT_BYTES = manifests.LIMIT_BYTES
STREAM_NAMES = {1: STDOUT.encode(), 2: STDERR.encode()}


class ResultCollector:
    """Brings the results of moved processes into the content store."""

    def __init__(self, store: ContentStore, files: AttemptFiles) -> None:
        self._store = store
        self._files = files

    async def collect(self, move: Move) -> tuple[str, str]:
        """The manifest of what the job has written (empty: nothing), and what of it is lost. Unreachable where it has
        to be tried again."""
        attempt = Attempt(0, move.ran_as, move.ran_on, 0, 0)
        problems: list[str] = []
        began = await asyncio.to_thread(self._stored, move.final)
        try:
            found = await self._files.find_tree(attempt)
        except NotFound as missing:  # it never ran there, or its directory is gone
            found = AttemptOutputFile((), ())
            problems.append(str(missing))
        changed = await self._changed(attempt, found, began, problems)
        for path, digest, size in await self._outputs(attempt, move, began, problems):
            old = next((entry for entry in began.entries if entry.path == path), None)
            mode = old.mode if old is not None else PLAIN
            if old is None or old.digest != digest:
                changed[path] = ManifestEntry(path, "file", size, mode, digest)
        if not changed:
            return "", "; ".join(problems)
        tree = manifest_of((*_parents(changed), *changed.values()))
        return await asyncio.to_thread(self._store.add, manifests.encode(tree)), "; ".join(problems)

    def _stored(self, digest: str) -> Manifest:
        try:
            return stored_manifest(self._store, digest)
        except ContentMissing:  # then everything counts as written by the job; at the source nothing is overwritten
            return Manifest()

    async def _changed(
        self, attempt: Attempt, found: AttemptOutputFile, began: Manifest, problems: list[str]
    ) -> dict[str, ManifestEntry]:
        """What the job has made or changed, by its path; the contents are in the store."""
        before = {entry.path: entry for entry in began.entries}
        links = {to_bytes(one.path): to_bytes(one.target) for one in found.entries if one.kind == "link"}
        new = [one for one in found.entries if before.get(one.path) != one]
        outside = [one for one in new if one.kind == "link" and leads_outside(to_bytes(one.path), links)]
        problems += [f"the link {one.path!a} leads outside its directory" for one in outside]
        kept = {one.path: one for one in new if one not in outside}
        wanted = manifest_of((*_parents(kept), *kept.values()))

        async def read(name: bytes, at: int, most: int) -> bytes:
            return (await self._files.read(attempt, name, at, most))[1]

        try:
            await ship_tree(self._store, AttemptOutputFile(wanted.entries, ()), read, still=True)
        except BadInput as too_much:
            problems.append(str(too_much))
            return {}
        return kept

    async def _outputs(
        self, attempt: Attempt, move: Move, began: Manifest, problems: list[str]
    ) -> list[tuple[str, str, int]]:
        """The files that the original's output went to, each with the digest and size of what belongs there now."""
        assert move.process is not None
        found = []
        for path, numbers in stream_files(move.process).items():
            appends = any(move.process.streams[number].appends for number in numbers)
            old = next((one for one in began.entries if one.path == path and one.kind == "file"), None)
            try:
                digest, size = await self._write_output(attempt, numbers, old if appends else None)
            except (BadInput, NotFound) as failure:
                problems.append(f"{path!a}: {failure}")
                continue
            found.append((path, digest, size))
        return found

    async def _write_output(
        self, attempt: Attempt, numbers: list[int], before: ManifestEntry | None
    ) -> tuple[str, int]:
        size = 0
        with self._store.writer() as writer:
            if before is not None:
                with self._store.open(before.digest) as file:
                    while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                        await asyncio.to_thread(writer.write, data)
                        size += len(data)
            for number in numbers:
                at = 0
                while True:
                    _, data = await self._files.read(attempt, STREAM_NAMES[number], at, CHUNK_BYTES)
                    if not data:
                        break
                    at += len(data)
                    size += len(data)
                    if size > MAX_OUTPUT_BYTES:
                        raise BadInput(f"its output is larger than {MAX_OUTPUT_BYTES >> 20} MB; see: grid jobs logs")
                    await asyncio.to_thread(writer.write, data)
            return await asyncio.to_thread(writer.finish), size


def stream_files(process: MovedProcess) -> dict[str, list[int]]:
    """The files below its working directory that a process writes its output to, with the descriptors of each."""
    found: dict[str, list[int]] = {}
    for number, stream in enumerate(process.streams):
        if number not in STREAM_NAMES or stream.kind is not StreamKind.FILE:
            continue
        path = os.path.relpath(stream.path, process.cwd)
        try:
            split_path(to_bytes(path))
        except ProtocolError:  # not below it
            continue
        found.setdefault(path, []).append(number)
    return found


def _parents(entries: dict[str, ManifestEntry]) -> list[ManifestEntry]:
    """The directories that files are in and that are not listed themselves."""
    found: dict[str, ManifestEntry] = {}
    for path in entries:
        names = to_bytes(path).split(b"/")
        for depth in range(1, len(names)):
            parent = to_text(b"/".join(names[:depth]))
            if parent not in entries:
                found[parent] = ManifestEntry(parent, "dir", 0, EXECUTABLE)
    return [*found.values()]
