"""Talking to the script on a node: one constant command, everything else is data on its standard input.

Rule 1: no command line is ever built from anything that somebody configured.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_grid.adapters.shells.failures import Failed
from distributed_grid.adapters.shells.messages import Target

if TYPE_CHECKING:
    import asyncssh

ASK_SECONDS = 120.0
OPEN_SECONDS = 15.0
LONGEST_ANSWER = 1024 * 1024
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


class Session:
    """A conversation with the script on a node."""

    def __init__(self, process: asyncssh.SSHClientProcess[bytes], target: Target) -> None:
        self._process = process
        self._target = target

    async def ask(
        self, do: str, *, say: Say = lambda step: None, blobs: Sequence[bytes] = (), **request: Any
    ) -> dict[str, Any]:
        """The answer to one request; raises Failed with the node's own words."""
        body = json.dumps({"do": do, "grid": self._target.grid, "node": self._target.name, **request}).encode()
        try:
            async with asyncio.timeout(ASK_SECONDS):
                self._write(b"%d\n" % len(body), body, *blobs)
                return await self._hear(say)
        except TimeoutError:
            raise Failed(f"it did not finish within {ASK_SECONDS:g} s ({do})") from None

    def close(self) -> None:
        """End the conversation; the script ends with it. Safe to call twice."""
        self._process.close()

    def write_script(self) -> None:
        """Say which interpreter to use, and hand over the script."""
        wanted = self._target.python
        if "\n" in wanted:
            raise Failed("the name of an interpreter has no line breaks")
        script = SCRIPT.read_bytes()
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
            if not line.startswith(MARK) or len(line) > LONGEST_ANSWER:
                continue  # what a login script prints
            message: dict[str, Any] = json.loads(line[len(MARK) :])
            if "done" in message:
                answer: dict[str, Any] = message["done"]
                return answer
            if "failed" in message:
                raise Failed(str(message["failed"]))
            say(str(message.get("step", "")))

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


async def open_session(connection: asyncssh.SSHClientConnection, target: Target) -> Session:
    """The script of a node, running until it is closed."""
    import asyncssh

    try:
        async with asyncio.timeout(OPEN_SECONDS):
            process = await connection.create_process(COMMAND, encoding=None, request_pty=False, env={}, send_env=())
    except TimeoutError:
        raise Failed(f"its shell did not start within {OPEN_SECONDS:g} s", final=False) from None
    except (asyncssh.Error, OSError) as failure:
        raise Failed(f"its shell could not be started: {failure}", final=False) from failure
    talk = Session(process, target)
    talk.write_script()
    return talk


@asynccontextmanager
async def session(connection: asyncssh.SSHClientConnection, target: Target) -> AsyncIterator[Session]:
    """The script of a node, running for as long as this lasts."""
    talk = await open_session(connection, target)
    try:
        yield talk
    finally:
        talk.close()
