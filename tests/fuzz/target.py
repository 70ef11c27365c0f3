"""Targets of fuzzing: their interface, their tally, and an exchange of bytes that notices a hang."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

HANG_SECONDS = 30.0
READ_BYTES = 256 * 1024
FRAGMENTS = 40


class Hang(AssertionError):
    """The other end neither answered nor closed the connection in time."""


@dataclass
class Tally:
    """Frames sent to a target, and their outcomes. A frame counts once the target has handled it."""

    frames: int = 0
    connections: int = 0
    results: Counter[str] = field(default_factory=Counter)

    def batches(self, frames: int, size: int) -> Iterator[int]:
        """How many frames to send at a time, one connection after another, until so many more have been handled."""
        goal = self.frames + frames
        while self.frames < goal:
            yield min(size, goal - self.frames)


class Target(Protocol):
    """One interface of a process."""

    name: str

    def run(self, frames: int, rng: Random, tally: Tally) -> None:
        """Send so many mutated frames, as the random numbers say."""

    def check(self) -> None:
        """One honest exchange; raises where it is not answered as it should be."""


def exchange(
    sock: socket.socket, data: bytes, is_enough: Callable[[bytes], bool], *, pieces: list[int] | None = None
) -> bool:
    """Send bytes while receiving, until `is_enough` of what came; whether the other end closed the connection.

    `pieces` are the lengths of the fragments that go out one by one, slowly, before the rest.
    """
    deadline = time.monotonic() + HANG_SECONDS
    waiting = memoryview(data)
    sock.setblocking(False)
    try:
        for length in pieces or ():
            waiting = waiting[length - len(_send_some(sock, waiting[:length])) :]
            time.sleep(0.001)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Hang(f"no answer and no end within {HANG_SECONDS:g} s")
            has_more = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
            readable, writable, _ = select.select([sock], [sock] if waiting else [], [], 0 if has_more else left)
            if writable:
                waiting = _send_some(sock, waiting)
            if readable or has_more:
                chunk = _receive_some(sock)
                if chunk is None:
                    continue
                if not chunk:
                    return True
                if is_enough(chunk):
                    return False
    finally:
        sock.settimeout(HANG_SECONDS)


def _send_some(sock: socket.socket, waiting: memoryview) -> memoryview:
    """Rest to send; empty if the other end accepts no more."""
    try:
        return waiting[sock.send(waiting) :]
    except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
        return waiting
    except ConnectionError:
        return waiting[:0]


def _receive_some(sock: socket.socket) -> bytes | None:
    """Received bytes: None for a part of a TLS record, empty at the end. A reset is reported once, before earlier
    bytes."""
    for _ in range(2):
        try:
            return sock.recv(READ_BYTES)
        except ssl.SSLWantReadError:
            return None
        except (ConnectionError, ssl.SSLError):
            continue
    return b""


def finish(sock: socket.socket, data: bytes, take: Callable[[bytes], bool] = lambda chunk: False) -> None:
    """Send the last bytes and nothing more, and receive until the other end closes."""
    with contextlib.suppress(OSError):
        sock.sendall(data)
        socket.socket.shutdown(sock, socket.SHUT_WR)  # the connection's: answers in TLS are still read
    exchange(sock, b"", take)


def fragments(rng: Random) -> list[int] | None:
    """For one connection of a hundred: lengths of slow fragments."""
    return [rng.randrange(1, 9) for _ in range(FRAGMENTS)] if rng.random() < 0.01 else None
