"""Processes that each have one thing in their way: `python -I -S obstacle_actors.py NAME READY [ARGUMENT …]`.

Each writes its pid to READY when it is what it is to be, and then waits to be killed. Standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import socket
import sys
from typing import Any

KEPT: list[Any] = []
"""What must stay open."""


def plain(*arguments: str) -> None:
    pass


def busy() -> None:
    while os.times().user + os.times().system < 0.3:
        pass


def listens() -> None:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    KEPT.append(server)


def listens_unix() -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind("server.sock")
    server.listen()
    KEPT.append(server)


def connects(port: str) -> None:
    KEPT.append(socket.create_connection(("127.0.0.1", int(port))))


def connects_unix(path: str) -> None:
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    KEPT.append(client)


def talks_to_itself() -> None:
    """Sockets and pipes to a child of its own, shared memory without a name, and a file that is deleted."""
    KEPT.extend(socket.socketpair())
    reader, writer = os.pipe()
    KEPT.append(mmap.mmap(-1, 4096))
    file = open("/tmp/obstacle-deleted-%d" % os.getpid(), "wb")  # noqa: SIM115, UP031
    os.unlink(file.name)
    KEPT.append(file)
    if os.fork() == 0:
        os.dup2(reader, 0)
        signal.pause()
    KEPT.extend((reader, writer))


def flocks() -> None:
    file = open("own.lock", "w")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    KEPT.append(file)


def locks_range() -> None:
    file = open("own.db", "w")  # noqa: SIM115
    fcntl.lockf(file, fcntl.LOCK_EX)
    KEPT.append(file)


def writes_outside(path: str) -> None:
    KEPT.append(open(path, "a"))  # noqa: SIM115


def shares_memory(path: str) -> None:
    with open(path, "w+b") as file:
        file.truncate(4096)
        KEPT.append(mmap.mmap(file.fileno(), 4096))
    os.closerange(3, 64)  # the mapping stays


def shares_system_v() -> None:
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(0, 4096, 0o1600)
    libc.shmat(segment, None, 0)
    libc.shmctl(segment, 0, None)


def traced() -> None:
    reader, writer = os.pipe()
    if os.fork() == 0:
        ctypes.CDLL(None).ptrace(0, 0, 0, 0)
        os.write(writer, b"!")
        signal.pause()
    os.read(reader, 1)


def leaves_session() -> None:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.write(writer, b"!")
        signal.pause()
    os.read(reader, 1)


def other_namespace() -> None:
    if ctypes.CDLL(None).unshare(0x04000000 if os.getuid() == 0 else 0x10000000):
        raise OSError("no namespace")


def other_group() -> None:
    os.setegid(65534)


def reads_outside(path: str, *others: str) -> None:
    KEPT.append(open(path))  # noqa: SIM115


def reads_secret() -> None:
    with open(".env", "w") as file:
        file.write("TOKEN=1")
    KEPT.append(open(".env"))  # noqa: SIM115


def poses_as(*argv: str) -> None:
    """Run again with another command line."""
    ready = sys.argv[2]
    script = os.path.abspath(__file__)
    os.execv(sys.executable, [argv[0], "-I", "-S", script, "plain", ready, *argv[1:]])


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[3:])
    with open(sys.argv[2] + ".new", "w") as ready_file:
        ready_file.write(str(os.getpid()))
    os.rename(sys.argv[2] + ".new", sys.argv[2])
    while True:
        signal.pause()
