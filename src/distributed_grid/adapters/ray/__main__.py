"""`python -m distributed_grid.adapters.ray`: what the control plane starts; nobody types this."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

from distributed_grid.adapters.ray.driver import serve


def main() -> None:
    """Serve on the socket whose descriptor is the only argument, or on `stdio`, until it closes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve_and_go(sys.argv[1]))


async def _serve_and_go(end: str) -> None:
    """Be gone at once when the control plane is: Ray's own way of leaving may take its time."""
    await serve(*await (_standard_streams() if end == "stdio" else _socket(int(end))))
    logging.shutdown()
    os._exit(0)


async def _socket(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    end = socket.socket(fileno=descriptor)
    end.setblocking(False)
    os.set_inheritable(descriptor, False)
    return await asyncio.open_unix_connection(sock=end)


async def _standard_streams() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Standard input and output, which nobody else writes to any more: whatever Ray prints goes the other way."""
    loop = asyncio.get_running_loop()
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb", buffering=0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, out)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


if __name__ == "__main__":
    main()
