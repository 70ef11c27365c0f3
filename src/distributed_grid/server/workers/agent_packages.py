"""Packages of the agent for rented machines: the wheels for one kind of machine as one archive, packed once.

A machine that has only Python fetches its package over the port at which it joins, so it needs no package index. The
same kind of machine gets the same bytes. Packing takes a thread; the same package is never packed twice at a time, and
after a failure not again for a while. The packer is imported on first use: most grids rent nothing.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from distributed_grid.adapters.node.node_messages import NodeFacts, NodeOperationFailed
from distributed_grid.api.requests import FetchAgentPackage
from distributed_grid.errors import GridError, Refused, Unreachable

if TYPE_CHECKING:
    from distributed_grid.adapters.node.installation import InstallSources, Wheel

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 30)
MAX_KINDS = 8  # packages in memory, of a few megabytes each
PAUSE_SECONDS = 60.0  # after a failure
CHUNK_BYTES = 256 * 1024
_DATA_FOLDER = re.compile(r"^[^/]+\.data/(purelib|platlib)/")


class AgentPackage(Struct, frozen=True):
    """An archive of files for a directory of Python packages, and its digest."""

    data: bytes
    sha256: bytes

    @property
    def digest_header(self) -> str:
        """The digest in the form of the header `Content-Digest`."""
        return f"sha-256=:{base64.b64encode(self.sha256).decode()}:"


class AgentPackages:
    """Packs the agent for each kind of machine."""

    def __init__(self, cache: Path, *, pause_seconds: float = PAUSE_SECONDS) -> None:
        """`cache` keeps the downloads for machines unlike this one."""
        self._cache = cache
        self._sources: InstallSources | None = None
        self._pause_seconds = pause_seconds
        self._packed: dict[str, AgentPackage] = {}
        self._packing: dict[NodeFacts, asyncio.Task[AgentPackage]] = {}
        self._failed: dict[NodeFacts, tuple[float, GridError]] = {}

    async def package(self, op: FetchAgentPackage) -> AgentPackage:
        """The package for a machine. Refused if there is none, Unreachable if there may be one later."""
        facts = machine_facts(op)
        now = asyncio.get_running_loop().time()
        failed_at, failure = self._failed.get(facts, (float("-inf"), None))
        if failure is not None and now - failed_at < self._pause_seconds:
            raise failure
        task = self._packing.get(facts)
        if task is None:
            task = self._packing[facts] = asyncio.create_task(self._pack(facts))
            task.add_done_callback(lambda done: self._ended(facts, done))
        return await asyncio.shield(task)  # a client that hangs up does not stop it for others

    async def close(self) -> None:
        """Stop packing. Safe to call twice."""
        tasks = list(self._packing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pack(self, facts: NodeFacts) -> AgentPackage:
        from distributed_grid.adapters.node.installation import InstallSources

        if self._sources is None:
            self._sources = InstallSources(self._cache)
        try:
            wheels = await self._sources.agent_wheels(facts)
        except NodeOperationFailed as failure:
            message = f"there is no agent for this machine: {failure}"
            raise (Refused(message) if failure.final else Unreachable(message)) from failure
        except OSError as failure:
            raise Unreachable(f"the agent cannot be packed: {failure.strerror}") from failure
        return await asyncio.to_thread(self._merged, facts, wheels)

    def _merged(self, facts: NodeFacts, wheels: Sequence[Wheel]) -> AgentPackage:
        """The archive of these wheels; a known one if it was made of the same wheels."""
        key = repr((facts.python, [wheel.sha256 for wheel in wheels]))
        name = hashlib.sha256(key.encode()).hexdigest()
        known = self._packed.get(name)
        if known is not None:
            return known
        data = merge_wheels(wheels)
        package = AgentPackage(data, hashlib.sha256(data).digest())
        while len(self._packed) >= MAX_KINDS:
            self._packed.pop(next(iter(self._packed)), None)
        self._packed[name] = package
        return package

    def _ended(self, facts: NodeFacts, task: asyncio.Task[AgentPackage]) -> None:
        self._packing.pop(facts, None)
        self._failed.pop(facts, None)
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, GridError):
            while len(self._failed) >= MAX_KINDS:
                self._failed.pop(next(iter(self._failed)))
            self._failed[facts] = (asyncio.get_running_loop().time(), failure)


def machine_facts(op: FetchAgentPackage) -> NodeFacts:
    """The facts by which wheels fit a machine. Refused if no version of the agent runs there."""
    from distributed_grid.adapters.node.installation import python_minor

    minor = python_minor(NodeFacts(op.python, op.machine, op.libc, op.libc_version))
    if not OLDEST_PYTHON <= minor <= NEWEST_PYTHON:
        needed = "{}.{}".format(*OLDEST_PYTHON)
        raise Refused(f"the machine has Python {op.python}, and the agent needs Python {needed} or later")
    return NodeFacts("{}.{}".format(*minor), op.machine, op.libc, op.libc_version)


def merge_wheels(wheels: Sequence[Wheel]) -> bytes:
    """The installed files of wheels in one zip; the same wheels make the same bytes."""
    from distributed_grid.adapters.node.installation import zip_files

    files: dict[str, bytes] = {}
    for wheel in wheels:
        with zipfile.ZipFile(io.BytesIO(wheel.data)) as archive:
            for name in archive.namelist():
                inside = _DATA_FOLDER.sub("", name)
                if not name.endswith("/") and ".data/" not in inside.split("/", 1)[0] + "/":
                    files[inside] = archive.read(name)
    return zip_files(files)
