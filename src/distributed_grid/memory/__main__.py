"""`python -m distributed_grid.memory CONTROL LOCK`: a memory server, configured over the control socket."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import sys

from distributed_grid.log_rate_limit import configure_logging
from distributed_grid.memory.server.server import start_server


def main() -> None:
    """Serve until there is nothing left to hold. LOCK stays locked until this process is gone."""
    os.chdir("/")
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(name, signal.SIG_IGN)
    configure_logging(logging.StreamHandler())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for fd in map(int, sys.argv[1:3]):
        os.set_inheritable(fd, False)
    server = start_server(socket.socket(fileno=int(sys.argv[1])))
    if server is not None:
        server.run()
    logging.shutdown()
    os._exit(0 if server is not None else 1)  # replication threads do not keep it running


if __name__ == "__main__":
    main()
