"""`python -m distributed_grid.adapters.ssh`: what the control plane starts; nobody types this."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

from distributed_grid.adapters.ssh.worker import serve


def main() -> None:
    """Serve on the socket whose descriptor is the only argument, until it closes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    end.setblocking(False)
    os.set_inheritable(end.fileno(), False)
    asyncio.run(_serve_and_go(end))


async def _serve_and_go(end: socket.socket) -> None:
    """Be gone at once when the control plane is: what is half done is done again by the next one."""
    await serve(end)
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
