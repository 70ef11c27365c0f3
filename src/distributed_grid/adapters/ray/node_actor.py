"""The Ray actor that is pinned to one node, and serves there like an SSH server elsewhere.

It travels by value, as one class in one file, and needs nothing on the node but Ray and the standard library. It has
streams of bytes, of a process or of a connection, and decides nothing. Nothing piles up: a stream is read when a reader
waits for more, and a write returns when it has gone through. It has one holder at a time; a new one closes all streams
of the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from typing import Any

CHUNK_BYTES = 256 * 1024
POLL_SECONDS = 20.0
QUIET_SECONDS = 60.0
MAX_STDERR_BYTES = 64 * 1024
HIDDEN_VARIABLES = ("RAY_", "CUDA_VISIBLE", "NVIDIA_VISIBLE", "OMP_NUM", "MKL_NUM", "OPENBLAS_NUM", "PYTHON", "GRPC_")
BOOT = (
    "import os, sys\n"
    "try:\n    os.setpriority(os.PRIO_PROCESS, 0, 0)\nexcept OSError:\n    pass\n"  # Ray's workers are nice to others
    "try:\n    open('/proc/self/oom_score_adj', 'w').write('0')\nexcept OSError:\n    pass\n"  # and die first
    "f = sys.stdin.buffer\n"
    "exec(f.read(int(f.readline())))\n"
)


class NodeActor:
    """Runs scripts and listens on its node, for one holder."""

    def __init__(self, build: str) -> None:
        self._build = build
        self._grid = ""
        self._holder = ""
        self._heard = 0.0
        self._streams: dict[int, Any] = {}
        self._last = 0
        self._listener: Any = None
        self._arrived: asyncio.Queue[int] = asyncio.Queue()

    async def acquire(self, grid: str, holder: str) -> dict[str, str]:
        """Serve this holder from now on; the identity of the actor. An actor of another grid answers so, and stays with
        it."""
        if self._grid not in ("", grid) and time.monotonic() - self._heard < QUIET_SECONDS:
            return {"build": self._build, "grid": self._grid}
        if holder != self._holder:
            self._stop_listening()
            for _, target, process in self._streams.values():
                target.close()
                if process is not None and process.returncode is None:
                    process.kill()
            self._streams = {}
        self._grid, self._holder, self._heard = grid, holder, time.monotonic()
        return {"build": self._build, "grid": grid, "hostname": socket.gethostname(), "pid": str(os.getpid())}

    async def open(self, holder: str, script: bytes) -> int:
        """Run this script with the interpreter of this very process; the stream of its input and output."""
        self._check_holder(holder)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-c",
            BOOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
            env={name: value for name, value in os.environ.items() if not name.startswith(HIDDEN_VARIABLES)},
            limit=CHUNK_BYTES,
        )
        number = self._add_stream((process.stdout, process.stdin, process))
        await self.write(holder, number, b"%d\n" % len(script) + script)
        return number

    async def listen(self, holder: str, path: str) -> None:
        """Take connections on this Unix socket, which only this user can use; an earlier one is closed."""
        self._check_holder(holder)
        self._stop_listening()
        listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.setblocking(False)
        self._listener = await asyncio.start_unix_server(self._on_connection, sock=listener, limit=CHUNK_BYTES)

    async def accept(self, holder: str) -> int:
        """The stream of the next connection; 0 where none has come for a while."""
        self._check_holder(holder)
        arrived = self._arrived
        try:
            return await asyncio.wait_for(arrived.get(), POLL_SECONDS)
        except TimeoutError:
            return 0

    async def read(self, holder: str, number: int) -> bytes | None:
        """New bytes of a stream, as soon as there are any; empty at its end, None after a while without any."""
        self._check_holder(holder)
        if number not in self._streams:
            return b""
        try:
            data: bytes = await asyncio.wait_for(self._streams[number][0].read(CHUNK_BYTES), POLL_SECONDS)
        except TimeoutError:
            return None
        except OSError:
            return b""
        return data

    async def write(self, holder: str, number: int, data: bytes) -> bool:
        """Send on a stream, and return when there is room for more; True if the other side still takes it."""
        self._check_holder(holder)
        if number not in self._streams:
            return False
        target = self._streams[number][1]
        try:
            target.write(data)
            await target.drain()
        except OSError:
            return False
        return True

    async def close(self, holder: str, number: int) -> str:
        """End a stream; the standard error of its process. Closing a missing stream is harmless."""
        self._check_holder(holder)
        _, target, process = self._streams.pop(number, (None, None, None))
        if target is not None:
            target.close()
        if process is None:
            return ""
        with contextlib.suppress(TimeoutError):
            output = await asyncio.wait_for(process.stderr.read(MAX_STDERR_BYTES), 2.0)
            await asyncio.wait_for(process.wait(), 2.0)
            return str(output.decode(errors="replace"))
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return ""

    def _check_holder(self, holder: str) -> None:
        if holder != self._holder:
            raise ConnectionAbortedError("this actor has another holder now")
        self._heard = time.monotonic()

    def _add_stream(self, stream: Any) -> int:
        self._last += 1
        self._streams[self._last] = stream
        return self._last

    async def _on_connection(self, reader: Any, writer: Any) -> None:
        self._arrived.put_nowait(self._add_stream((reader, writer, None)))

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._arrived = asyncio.Queue()
