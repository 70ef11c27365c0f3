"""Sessions with the script on a node: requests on its standard input, steps and answers on its standard output.

No command line is ever built from configured text: all of that is data in a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.node.node_messages import NodeOperationFailed
from distributed_grid.posix.environment import child_environment

ASK_SECONDS, EXIT_SECONDS = 120.0, 2.0
MAX_ANSWER_BYTES = 1024 * 1024
CHUNK_BYTES = 256 * 1024
MARK = b"\x1eGRID "
BOOT = "import sys; f = sys.stdin.buffer; exec(f.read(int(f.readline())))"
"""First code of the interpreter on the node: it reads the script, after its length, and the script reads the rest."""
SCRIPT = Path(__file__).with_name("node_script.py")
RAY_OPERATIONS = ("ray-inspect", "ray-start", "ray-stop", "ray-install", "resolve-address")
"""Additional operations of `ray_script`."""
_LOAD = """import sys, types
def load(name, source):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module
"""


@functools.cache
def ray_script() -> bytes:
    """`node_script_ray.py` as one text, which begins by loading `node_script.py` under the name that it imports.

    It cannot be run from the installed package: Ray is inspected before anything is installed, and an older version
    may be there.
    """
    package = __name__.rpartition(".")[0]
    first, second = (
        f"load({f'{package}.{path.stem}'!r}, {path.read_text()!r})"
        for path in (SCRIPT, SCRIPT.with_name("node_script_ray.py"))
    )
    return f"{_LOAD}script = {first}\n{second}\nscript.main()\n".encode()


class ScriptSession(ABC):
    """A session with the script that runs on one node for one grid."""

    def __init__(self, grid: str, node: str) -> None:
        self._grid, self._node = grid, node

    async def ask(
        self, operation: str, *, say: Say = lambda step: None, blobs: Sequence[bytes] = (), **request: Any
    ) -> dict[str, Any]:
        """Answer to one request and its blobs; raises NodeOperationFailed with the node's reason."""
        return await self._exchange(operation, request, blobs, say, ASK_SECONDS)

    async def ask_with_files(
        self, operation: str, files: Sequence[Path], *, say: Say, seconds: float, request: dict[str, Any]
    ) -> dict[str, Any]:
        """Answer to a request with large files, sent piece by piece; `say` gets the progress."""
        return await self._exchange(operation, request, _file_chunks(files, say), say, seconds)

    async def _exchange(
        self, operation: str, request: dict[str, Any], blobs: Iterable[bytes], say: Say, seconds: float
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                if await self._write(encode_request(operation, self._grid, self._node, request)):
                    for blob in blobs:
                        if not await self._write(blob):
                            break  # it has ended; its last line has the reason
                while True:
                    answer = parse_answer(await self._read_line(), say)
                    if answer is not None:
                        return answer
        except TimeoutError:
            raise NodeOperationFailed(f"it did not finish within {seconds:g} s ({operation})") from None

    @abstractmethod
    async def _write(self, data: bytes) -> bool:
        """Send to the script, and return when there is room for more; True if it still reads."""

    @abstractmethod
    async def _read_line(self) -> bytes:
        """Next line of the script; raises NodeOperationFailed with its last output when it has ended."""


def _file_chunks(files: Sequence[Path], say: Say) -> Iterator[bytes]:
    total, sent, shown = sum(file.stat().st_size for file in files), 0, -1
    for file in files:
        with file.open("rb") as source:
            while chunk := source.read(CHUNK_BYTES):
                yield chunk
                sent += len(chunk)
                if (tenth := 10 * sent // total) != shown:
                    shown = tenth
                    say(f"sending {total / 1e6:.0f} MB of wheels: {10 * tenth} %")


def encode_request(operation: str, grid: str, node: str, request: dict[str, Any]) -> bytes:
    body = json.dumps({"operation": operation, "grid": grid, "node": node, **request}).encode()
    return b"%d\n" % len(body) + body


def parse_answer(line: bytes, say: Say) -> dict[str, Any] | None:
    """The script's answer in a line; None for a step, which goes to `say`, and for login noise."""
    if not line.startswith(MARK) or len(line) > MAX_ANSWER_BYTES:
        return None
    message: dict[str, Any] = json.loads(line[len(MARK) :])
    if "done" in message:
        answer: dict[str, Any] = message["done"]
        return answer
    if "failed" in message:
        raise NodeOperationFailed(str(message["failed"]))
    say(str(message.get("step", "")))
    return None


class LocalScriptSession(ScriptSession):
    def __init__(self, process: asyncio.subprocess.Process, grid: str, node: str) -> None:
        super().__init__(grid, node)
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout

    async def _write(self, data: bytes) -> bool:
        try:
            self._input.write(data)
            await self._input.drain()
        except ConnectionError:
            return False
        return True

    async def _read_line(self) -> bytes:
        line = await self._output.readline()
        if not line:
            raise NodeOperationFailed("the script ended without an answer")
        return line


@asynccontextmanager
async def local_session(grid: str, node: str, python: str, script: bytes) -> AsyncIterator[LocalScriptSession]:
    """A script on this machine, running for as long as this lasts."""
    process = await asyncio.create_subprocess_exec(
        *(python or sys.executable, "-I", "-c", BOOT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd="/",
        env=child_environment(),
        limit=MAX_ANSWER_BYTES,
    )
    assert process.stdin is not None
    process.stdin.write(b"%d\n" % len(script) + script)
    try:
        yield LocalScriptSession(process, grid, node)
    finally:
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
