"""Objects that a job may leave in place of a file."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from distributed_grid.posix.sockets import short_path

KINDS = ("pipe", "link", "dangling link", "directory", "full directory", "socket", "device", "huge file")


def put(kind: str, path: Path) -> None:
    """Have this in place of the file, if this user may make it."""
    if path.is_symlink() or path.exists():
        path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "directory":
        path.mkdir()
    elif kind == "full directory":
        (path / "inner").mkdir(parents=True)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as sock, short_path(path) as name:
            sock.bind(name)
    elif kind == "device" and os.geteuid() == 0:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # as /dev/zero
    elif kind == "huge file":
        path.touch()
        os.truncate(path, 1 << 40)
