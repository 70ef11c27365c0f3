"""The sockets at which a memory server is reached, and who may come in by those of this machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from distributed_grid.posix.unix_sockets import short_path


def tcp_listening(host: str, port: int) -> socket.socket:
    """A socket at this address; at any port where this one is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for wanted in dict.fromkeys((port, 0)):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, wanted))
            sock.listen(256)
        except OSError:
            sock.close()
            if wanted == 0:
                raise
        else:
            return sock
    raise AssertionError  # the loop returns or raises


def unix_listening(path: Path, kind: int) -> socket.socket:
    """A socket for this user; whoever was there before is gone, for we have the lock."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, kind)
    before = os.umask(0o177)
    try:
        with short_path(path) as name:
            sock.bind(name)
    finally:
        os.umask(before)
    sock.listen(256)
    return sock
