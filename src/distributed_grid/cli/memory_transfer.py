"""Transfers of files in and out of the memory pool: buffer by buffer, with a progress line.

Whatever ends a transfer early, its unfinished file or block is removed: by this process or, if it is killed, by the
block's short time. A target file has its old content, or all of the new.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from distributed_grid.cli.output import ProgressLine, format_size, printable, progress_bar
from distributed_grid.cli.signals import handled_signals
from distributed_grid.client.job_payload import require_utf8
from distributed_grid.client.memory.directory import EMPTY_META, BlockDirectoryClient, length_of
from distributed_grid.client.memory.pool import MemoryPool, check_name
from distributed_grid.errors import BadInput, GridError, NotFound, Refused

if TYPE_CHECKING:
    from distributed_grid.api.answers.memory import BlockRow

BUFFER_BYTES = 8 << 20


def store_file(directory: BlockDirectoryClient, key: str, path: str, *, node: str, copies: int, ttl: float) -> BlockRow:
    """Store a file's content under a key; its block."""
    require_utf8(check_name(key))
    with (
        _cleanup_on_signals(),
        _source(path) as (file, size),
        MemoryPool(directory) as pool,
        pool.staged(size or 1, node, copies=copies) as stage,
        ProgressBar(f"storing {key}", size) as bar,
    ):
        buffer, offset = memoryview(bytearray(min(BUFFER_BYTES, size))), 0
        while offset < size:
            with _file_errors("read", path):
                count = file.readinto(buffer[: min(BUFFER_BYTES, size - offset)])  # type: ignore[attr-defined]
            if not count:
                raise GridError(f"{path} became shorter while it was read; nothing was stored")
            stage.write(buffer[:count], offset)
            offset += count
            bar.update(offset)
        return stage.name(key, ttl_seconds=ttl, meta="" if size else EMPTY_META)


def retrieve_file(directory: BlockDirectoryClient, name: str, path: str) -> tuple[BlockRow, int]:
    """Write a block to a file, which is replaced when all of it is there; the block, and how many bytes it had."""
    with _cleanup_on_signals(), MemoryPool(directory) as pool:
        block = find_by_name_or_id(pool, name)
        with _target(path) as file:
            _copy(pool, block, file, name)
    return block, length_of(block)


def retrieve_to_stdout(directory: BlockDirectoryClient, name: str) -> None:
    with _cleanup_on_signals(), MemoryPool(directory) as pool:
        _copy(pool, find_by_name_or_id(pool, name), sys.stdout.buffer, name)
        sys.stdout.buffer.flush()


def check_output(output: str, *, json: bool) -> bool:
    """Whether the output is a file; BadInput where it can be neither that nor the standard output."""
    if output and output != "-":
        if Path(output).is_dir():
            raise BadInput(f"{output} is a directory; name a file")
        return True
    if json:
        raise BadInput("--json needs a file for the content: -o FILE")
    if not output and sys.stdout.isatty():
        raise BadInput("the content would go to the terminal; name a file with -o FILE, or say -o - if you want that")
    return False


def find_by_name_or_id(pool: MemoryPool, name: str) -> BlockRow:
    """The block with this name; else with this id, or a unique prefix of it."""
    require_utf8(check_name(name))
    try:
        return pool.look_up(name=name)
    except NotFound:
        return pool.look_up(name)


def _copy(pool: MemoryPool, block: BlockRow, file: IO[bytes], name: str) -> None:
    size, buffer = length_of(block), memoryview(bytearray(min(BUFFER_BYTES, length_of(block))))
    with ProgressBar(f"retrieving {name}", size) as bar:
        for offset in range(0, size, BUFFER_BYTES):
            piece = buffer[: min(BUFFER_BYTES, size - offset)]
            try:
                pool.read_into(block.block_id, piece, offset)
            except NotFound:
                raise Refused(f"{name} was freed or replaced while it was read; try again") from None
            with _file_errors("write", getattr(file, "name", "")):
                file.write(piece)
            bar.update(offset + len(piece))


@contextlib.contextmanager
def _source(path: str) -> Iterator[tuple[IO[bytes], int]]:
    """A file to read, and its remaining size. A source without a size (a pipe) is spooled to a temporary file first."""
    with contextlib.ExitStack() as opened:
        with _file_errors("read", path):
            file = sys.stdin.buffer if path == "-" else opened.enter_context(Path(path).open("rb", buffering=0))
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode):
                size = max(status.st_size - file.tell(), 0)
            else:
                spool = opened.enter_context(tempfile.TemporaryFile("w+b"))
                size = 0
                with ProgressBar("reading", 0) as bar:
                    while piece := file.read(BUFFER_BYTES):
                        size += len(piece)
                        with _file_errors("write", "what comes through the pipe to a temporary file"):
                            spool.write(piece)
                        bar.update(size)
                spool.seek(0)
                file = spool
        yield file, size


@contextlib.contextmanager
def _target(path: str) -> Iterator[IO[bytes]]:
    """A file that replaces another once it is written completely; a device or pipe is written directly."""
    real = Path(path).resolve()
    is_plain = real.is_file() or not real.exists()
    part = real.with_name(f".{real.name[:100]}.{uuid.uuid4().hex[:8]}.part") if is_plain else real
    try:  # around the opening, too: a signal may come right after it
        with _file_errors("write", path):
            file = part.open("xb" if is_plain else "wb")
        with file:
            if real.exists() and is_plain:
                os.fchmod(file.fileno(), stat.S_IMODE(real.stat().st_mode))
            yield file
            with _file_errors("write", path):
                file.flush()
        if is_plain:
            with _file_errors("write", path):
                part.replace(real)
    except BaseException:
        if is_plain:
            part.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _file_errors(verb: str, path: str) -> Iterator[None]:
    """Turn an OSError of this file into a GridError; BrokenPipeError stays one."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as failure:
        raise GridError(f"cannot {verb} {path}: {failure.strerror or failure}") from failure


@contextlib.contextmanager
def _cleanup_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that unfinished files and blocks are removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with handled_signals(stop, signal.SIGTERM, signal.SIGHUP):
        yield


class ProgressBar:
    """Progress line of a transfer: bytes done, and the rate."""

    def __init__(self, what: str, size: int) -> None:
        self._what = what
        self._size = size
        self._began = time.monotonic()
        self._line = ProgressLine()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: Any) -> None:
        self._line.clear()

    def update(self, done: int) -> None:
        self._line.draw(lambda: self.line(done, time.monotonic() - self._began))

    def line(self, done: int, seconds: float) -> str:
        rate = format_size(round(done / max(seconds, 1e-3)))
        if not self._size:
            return printable(f"{self._what}: {format_size(done)}, {rate}/s")
        bar = progress_bar(done, self._size)
        return printable(f"{self._what}: {bar} {format_size(done)} of {format_size(self._size)}, {rate}/s")
