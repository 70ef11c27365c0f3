"""Child processes of the control plane that speak on a socket pair: one for SSH, one for Ray."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LINE_BYTES = 64 * 1024
LEAVE_SECONDS = 3.0


@asynccontextmanager
async def child(
    module: str, *, limit: int = LINE_BYTES
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """The line to `python -m module DESCRIPTOR`, for as long as this lasts; closing it is what ends the child.

    A line that is read may be `limit` bytes long. A child that does not go is killed. Raises OSError where it cannot
    be started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(theirs.fileno()),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            cwd="/",
            start_new_session=True,
        )
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=limit)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ProcessLookupError):
            await _reaped(process)


async def _reaped(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
