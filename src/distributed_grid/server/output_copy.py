"""Copies of the output of attempts, made before the files on their machine are removed, and the account of them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Protocol

from msgspec import Struct, field

from distributed_grid.agent.files.job_dir import record_dropped_output
from distributed_grid.errors import NotFound

CHUNK_BYTES = 1024 * 1024
KEPT_LIMIT_TEXT = "too much was brought home of this worker already"


def dropped_message(stream: str, dropped: int) -> str:
    """The line in place of output that its node has dropped."""
    return f"{dropped} bytes of its {stream} were dropped: a node keeps the newest output (max_output_gb)"


class OutputReader(Protocol):
    """Reads the output of attempts of a node."""

    async def read(self, node: str, lease_id: str, name: bytes, offset: int, most: int) -> tuple[int, bytes]:
        """Where, and what there is of a file from an offset on, at most so much; empty at its end. Unreachable while
        nobody answers, NotFound for what cannot be read."""


class Haul(Struct):
    """Files brought home so far, and those that are lost; `room_bytes` is how much more may come."""

    room_bytes: int
    files: int = 0
    bytes: int = 0
    lost: list[str] = field(default_factory=list)
    limit_text: str = KEPT_LIMIT_TEXT

    def admits(self, name: str, size: int) -> bool:
        """Whether a file may still come; one that may not is lost."""
        if size <= self.room_bytes:
            return True
        self.lost.append(f"{name}: {self.limit_text}")
        return False

    def add(self, size: int) -> None:
        self.files += 1
        self.bytes += size
        self.room_bytes -= size


async def copy_output(reader: OutputReader, node: str, lease_id: str, path: Path, haul: Haul) -> None:
    """Append what is missing of the output; its end is where the node has no more."""
    name = path.name
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        while True:
            if not haul.admits(f"{lease_id}: {name}", CHUNK_BYTES):
                return
            try:
                start, data = await reader.read(node, lease_id, name.encode(), size, CHUNK_BYTES)
            except NotFound as missing:
                haul.lost.append(f"{lease_id}: {missing}")
                return
            if not data:
                break
            if start > size:  # the node has dropped what was before
                jobs = str(path.parent.parent)
                await asyncio.to_thread(record_dropped_output, jobs, lease_id, name, start)
                await asyncio.to_thread(os.ftruncate, fd, start)
                size = start
            await asyncio.to_thread(os.write, fd, data)
            size += len(data)
            haul.bytes += len(data)
            haul.room_bytes -= len(data)
        haul.files += size > 0
        if size:
            await asyncio.to_thread(os.fsync, fd)
    finally:
        os.close(fd)
