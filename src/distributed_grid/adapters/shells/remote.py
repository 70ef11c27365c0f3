"""Talking to the script on a node: one constant command, everything else is data on its standard input.

Rule 1: no command line is ever built from anything that somebody configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distributed_grid.adapters.shells.failures import Failed
from distributed_grid.adapters.shells.messages import Target

if TYPE_CHECKING:
    import asyncssh

ASK_SECONDS = 120.0
OPEN_SECONDS = 15.0
LONGEST_ANSWER = 1024 * 1024
CHUNK = 256 * 1024
MARK = b"\x1eGRID "
NO_PYTHON, NOT_THIS_PYTHON = 97, 98
# The first line of the input is the interpreter that the config names (or nothing), the second those to look for.
# No newline and no `!`, so that it passes every login shell unharmed.
COMMAND = (
    "exec /bin/sh -c '"
    "IFS= read -r wanted; IFS= read -r names; "
    'boot="import sys; f = sys.stdin.buffer; exec(f.read(int(f.readline())))"; '
    'case $wanted in "~/"*) wanted=$HOME/${wanted#??};; esac; '
    'if [ -n "$wanted" ]; then command -v "$wanted" >/dev/null || exit 98; exec "$wanted" -I -c "$boot"; fi; '
    "PATH=$PATH:/usr/local/bin:$HOME/.local/bin; "
    'for name in $names; do if "$name" -I -c "" </dev/null >/dev/null 2>&1; then exec "$name" -I -c "$boot"; fi; done; '
    "command -v python3 >/dev/null || exit 97; "
    'exec python3 -I -c "$boot"'
    "'"
)
SCRIPT = Path(__file__).with_name("on_node.py")
Say = Callable[[str], None]


def interpreters() -> list[str]:
    """The interpreters to look for, ours first: what is installed here then fits there."""
    names = [f"python{major}.{minor}" for major, minor in ((3, 13), (3, 12), (3, 11))]
    ours = "python{}.{}".format(*sys.version_info[:2])
    return [ours, *(name for name in names if name != ours)]


class Talk(Protocol):
    """A conversation with the script on a node, by whichever way."""

    async def ask(
        self, do: str, *, say: Say = lambda step: None, blobs: Sequence[bytes] = (), **request: Any
    ) -> dict[str, Any]:
        """The answer to one request; raises Failed with the node's own words."""


class Session(Talk):
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
            raise Failed(f"it did not finish within {ASK_SECONDS:g} s ({do})") from None

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
            raise Failed(f"it did not finish within {seconds:g} s ({do})") from None

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
            raise Failed("the name of an interpreter has no line breaks")
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
                raise Failed(f"the connection was lost: {failure}", final=False) from failure
            if not line:
                raise Failed(await self._last_words())
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


def request_of(do: str, grid: str, node: str, request: dict[str, Any]) -> bytes:
    """A request as the script reads it."""
    body = json.dumps({"do": do, "grid": grid, "node": node, **request}).encode()
    return b"%d\n" % len(body) + body


def answer_in(line: bytes, say: Say) -> dict[str, Any] | None:
    """The script's answer in a line it wrote; None where that is a step, which is told, or only login noise."""
    if not line.startswith(MARK) or len(line) > LONGEST_ANSWER:
        return None
    message: dict[str, Any] = json.loads(line[len(MARK) :])
    if "done" in message:
        answer: dict[str, Any] = message["done"]
        return answer
    if "failed" in message:
        raise Failed(str(message["failed"]))
    say(str(message.get("step", "")))
    return None


async def open_session(
    connection: asyncssh.SSHClientConnection, target: Target, script: bytes | None = None
) -> Session:
    """The script of a node, running until it is closed; `script` is another one than usual."""
    import asyncssh

    try:
        async with asyncio.timeout(OPEN_SECONDS):
            process = await connection.create_process(COMMAND, encoding=None, request_pty=False, env={}, send_env=())
    except TimeoutError:
        raise Failed(f"its shell did not start within {OPEN_SECONDS:g} s", final=False) from None
    except (asyncssh.Error, OSError) as failure:
        raise Failed(f"its shell could not be started: {failure}", final=False) from failure
    talk = Session(process, target)
    talk.write_script(script or SCRIPT.read_bytes())
    return talk


@asynccontextmanager
async def session(
    connection: asyncssh.SSHClientConnection, target: Target, script: bytes | None = None
) -> AsyncIterator[Session]:
    """The script of a node, running for as long as this lasts."""
    talk = await open_session(connection, target, script)
    try:
        yield talk
    finally:
        talk.close()
