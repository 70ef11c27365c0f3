"""The node script over SSH: a `ScriptSession` on the channel of an SSH connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncssh

from distributed_grid.adapters.node.errors import NodeOperationFailed
from distributed_grid.adapters.node.messages import Target
from distributed_grid.adapters.node.script_session import (
    ASK_SECONDS,
    CHUNK,
    COMMAND,
    NO_PYTHON,
    NOT_THIS_PYTHON,
    OPEN_SECONDS,
    SCRIPT,
    FileScriptSession,
    Say,
    answer_in,
    interpreters,
    request_of,
)


class ScriptProcess(FileScriptSession):
    """A conversation with the script on a node, by SSH."""

    def __init__(self, process: asyncssh.SSHClientProcess[bytes], target: Target) -> None:
        self._process = process
        self._target = target

    async def ask(
        self, do: str, *, say: Say = lambda step: None, blobs: Sequence[bytes] = (), **request: Any
    ) -> dict[str, Any]:
        body = request_of(do, self._target.grid, self._target.name, request)
        try:
            async with asyncio.timeout(ASK_SECONDS):
                self._write(body, *blobs)
                return await self._hear(say)
        except TimeoutError:
            raise NodeOperationFailed(f"it did not finish within {ASK_SECONDS:g} s ({do})") from None

    async def ask_with_files(
        self, do: str, files: Sequence[Path], *, say: Say, seconds: float, request: dict[str, Any]
    ) -> dict[str, Any]:
        """The answer to a request that large files go with, sent piece by piece; how far that is gets told."""
        total, sent, told = sum(file.stat().st_size for file in files), 0, -1
        try:
            async with asyncio.timeout(seconds):
                self._write(request_of(do, self._target.grid, self._target.name, request))
                for file in files:
                    with file.open("rb") as source:
                        while chunk := source.read(CHUNK):
                            self._write(chunk)
                            await self._drained()
                            sent += len(chunk)
                            if (tenth := 10 * sent // total) != told:
                                told = tenth
                                say(f"sending {total / 1e6:.0f} MB of wheels: {10 * tenth} %")
                return await self._hear(say)
        except TimeoutError:
            raise NodeOperationFailed(f"it did not finish within {seconds:g} s ({do})") from None

    async def _drained(self) -> None:
        with contextlib.suppress(OSError):  # it has ended, and what it said last tells why
            await self._process.stdin.drain()

    def streams(self) -> tuple[Any, Any]:
        """What comes from the program that the script has become, and where to write to it."""
        return self._process.stdout, self._process.stdin

    def close(self) -> None:
        """End the conversation; the script ends with it. Safe to call twice."""
        self._process.close()

    def write_script(self, script: bytes) -> None:
        """Say which interpreter to use, and hand over the script."""
        wanted = self._target.python
        if "\n" in wanted:
            raise NodeOperationFailed("the name of an interpreter has no line breaks")
        head = f"{wanted}\n{' '.join(interpreters())}\n{len(script)}\n"
        self._write(head.encode(), script)

    def _write(self, *parts: bytes) -> None:
        try:
            for part in parts:
                self._process.stdin.write(part)
        except (BrokenPipeError, ConnectionError):
            pass  # it has ended, and what it said last tells why

    async def _hear(self, say: Say) -> dict[str, Any]:
        while True:
            try:
                line = await self._process.stdout.readline()
            except (OSError, ValueError) as failure:
                raise NodeOperationFailed(f"the connection was lost: {failure}", final=False) from failure
            if not line:
                raise NodeOperationFailed(await self._last_words())
            answer = answer_in(line, say)
            if answer is not None:
                return answer

    async def _last_words(self) -> str:
        """Why the script is over without an answer."""
        said = (await self._process.stderr.read(64 * 1024)).decode(errors="replace").strip().splitlines()
        done = await self._process.wait()
        if done.exit_status == NO_PYTHON:
            return "it has no Python; install Python 3.11 or newer there, or set `python:` for this node"
        if done.exit_status == NOT_THIS_PYTHON:
            return f"it has no {self._target.python} (`python:` of this node)"
        if done.exit_status is None:
            return "the connection was lost while it worked"
        return f"its shell ended with {done.exit_status}" + (f": {said[-1][:300]}" if said else "")


async def open_session(
    connection: asyncssh.SSHClientConnection, target: Target, script: bytes | None = None
) -> ScriptProcess:
    """The script of a node, running until it is closed; `script` is another one than usual."""
    try:
        async with asyncio.timeout(OPEN_SECONDS):
            process = await connection.create_process(COMMAND, encoding=None, request_pty=False, env={}, send_env=())
    except TimeoutError:
        raise NodeOperationFailed(f"its shell did not start within {OPEN_SECONDS:g} s", final=False) from None
    except (asyncssh.Error, OSError) as failure:
        raise NodeOperationFailed(f"its shell could not be started: {failure}", final=False) from failure
    talk = ScriptProcess(process, target)
    talk.write_script(script or SCRIPT.read_bytes())
    return talk


@asynccontextmanager
async def session(
    connection: asyncssh.SSHClientConnection, target: Target, script: bytes | None = None
) -> AsyncIterator[ScriptProcess]:
    """The script of a node, running for as long as this lasts."""
    talk = await open_session(connection, target, script)
    try:
        yield talk
    finally:
        talk.close()
