"""A TCP relay on which everything arrives late: this kernel cannot delay packets by itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading

CHUNK = 64 * 1024


class Relay:
    """Listens on a free port and passes both ways what it hears, each piece `delay_ms` after it came."""

    def __init__(self, host: str, port: int, *, listen_on: str, delay_ms: float) -> None:
        self.address = listen_on
        self.port = 0
        self.delay_ms = delay_ms
        self._there = (host, port)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name=f"relay to {host}:{port}", daemon=True)
        self._thread.start()
        if not self._ready.wait(5):
            raise TimeoutError(f"the relay to {host}:{port} did not start")

    def close(self) -> None:
        """Close every connection through it. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(5)

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, self.address, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            far_reader, far_writer = await asyncio.open_connection(*self._there)
            with contextlib.closing(far_writer):
                await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read at once and write late, so that the delay does not become a limit on the bandwidth."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1024)

        async def listen() -> None:
            while True:
                piece = await reader.read(CHUNK)
                await pieces.put((self._loop.time() + self.delay_ms / 1000, piece))
                if not piece:
                    return

        listening = asyncio.create_task(listen())
        try:
            while True:
                due, piece = await pieces.get()
                await asyncio.sleep(due - self._loop.time())
                if not piece:
                    break
                writer.write(piece)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        finally:
            listening.cancel()
