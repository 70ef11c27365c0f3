"""The script of a node that is this very machine: the same conversation, without SSH."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from distributed_grid.adapters.node.errors import NodeOperationFailed
from distributed_grid.adapters.node.messages import Target
from distributed_grid.adapters.node.script_session import (
    ASK_SECONDS,
    LONGEST_ANSWER,
    Say,
    ScriptSession,
    answer_in,
    request_of,
)

BOOT = "import sys; f = sys.stdin.buffer; exec(f.read(int(f.readline())))"


class LocalScriptSession(ScriptSession):
    """A conversation with the script on this machine."""

    def __init__(self, process: asyncio.subprocess.Process, target: Target) -> None:
        self._process = process
        self._target = target

    async def ask(
        self, do: str, *, say: Say = lambda step: None, blobs: Sequence[bytes] = (), **request: Any
    ) -> dict[str, Any]:
        """The answer to one request; raises Failed with the script's own words."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(request_of(do, self._target.grid, self._target.name, request))
        for blob in blobs:
            self._process.stdin.write(blob)
            with contextlib.suppress(ConnectionError):  # it has ended, and what it said last tells why
                await self._process.stdin.drain()
        try:
            async with asyncio.timeout(ASK_SECONDS):
                while line := await self._process.stdout.readline():
                    answer = answer_in(line, say)
                    if answer is not None:
                        return answer
        except TimeoutError:
            raise NodeOperationFailed(f"it did not finish within {ASK_SECONDS:g} s ({do})") from None
        raise NodeOperationFailed(f"the script ended without an answer ({do})")


@asynccontextmanager
async def talking_here(target: Target, script: bytes) -> AsyncIterator[LocalScriptSession]:
    """The script, running for as long as this lasts."""
    process = await asyncio.create_subprocess_exec(
        *(target.python or sys.executable, "-I", "-c", BOOT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd="/",
        limit=LONGEST_ANSWER,
    )
    assert process.stdin is not None
    process.stdin.write(b"%d\n" % len(script) + script)
    try:
        yield LocalScriptSession(process, target)
    finally:
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
