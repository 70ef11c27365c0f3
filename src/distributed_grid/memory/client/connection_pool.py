"""Connections to memory servers, kept for the next one who needs them; each is one thread's at a time.

Rule 1. Programs of the server's own machine use its Unix socket, and those of others the network; which it is shows
        when the socket is there, answers, and belongs to the life of the memory that is looked for.
Rule 2. A connection on which something went wrong is not used again, and the server is told to forget it before
        anything else is said: a write that was tried again must not be done once more, later, over newer bytes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Final

from distributed_grid.memory.client.connection import ConnectionBroken, ServerConnection, StatusError
from distributed_grid.memory.client.locations import CopyLocation
from distributed_grid.memory.protocol.frames import MOST_HANDLES, FrameStatus

CONNECT_SECONDS: Final = 5.0
MOST_IDLE: Final = 8
LOOK_AFTER_SECONDS: Final = 1.0


class ConnectionPool:
    """The connections of one program."""

    def __init__(self) -> None:
        self._idle: dict[str, list[ServerConnection]] = {}
        self._not_local: set[str] = set()
        self._severed: dict[str, list[bytes]] = {}
        self._calling_off = threading.Lock()
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    @contextlib.contextmanager
    def channel(self, place: CopyLocation) -> Iterator[ServerConnection]:
        """A connection to the server of this copy, for this thread. Raises `ConnectionBroken` where there is none."""
        channel = self.take(place)
        try:
            yield channel
        except StatusError as answer:
            self.answered(answer, place, channel)
            raise
        except BaseException:
            self.broke(place, channel)
            raise
        else:
            self.give(place, channel)

    def broke(self, place: CopyLocation, channel: ServerConnection) -> None:
        """Do away with a connection; what may still be under way on it is called off with the next one."""
        channel.close()
        if channel.wire_sent:
            with self._lock:
                self._severed.setdefault(place.line, []).append(channel.nonce)

    def answered(self, answer: StatusError, place: CopyLocation, channel: ServerConnection) -> None:
        """Give a connection back on which a no was heard: it is as good as before."""
        if channel.is_local and answer.status is FrameStatus.GONE_LIFE:
            self._not_local.add(place.line)  # somebody else's socket by the same name
            channel.close()
        else:
            self.give(place, channel)

    def descriptor(self, place: CopyLocation) -> int:
        """A read-only descriptor of the copy at this place; -1 where its server is not on this machine."""
        with self.channel(place) as channel:
            return channel.mapped(channel.open(place.ticket)) if channel.is_local else -1

    def take(self, place: CopyLocation) -> ServerConnection:
        """A connection, this thread's until it gives it back or closes it."""
        if self._pid != os.getpid():
            self._forked()
        channel = self._rested(place.line) or self._connect(place)
        if place.line in self._severed:
            self._call_off(place.line, channel)
        return channel

    def _forked(self) -> None:
        """A child must not speak on its parent's connections; it begins with none."""
        self._pid = os.getpid()
        self._lock, self._calling_off = threading.Lock(), threading.Lock()
        idle, self._idle, self._severed = self._idle, {}, {}
        for channels in idle.values():
            for channel in channels:
                channel.close()

    def _rested(self, line: str) -> ServerConnection | None:
        now = time.monotonic()
        while True:
            try:
                channel = self._idle[line].pop()  # one step, so two threads never get the same
            except (KeyError, IndexError):
                return None
            rested = now - channel.used_at > LOOK_AFTER_SECONDS
            if len(channel.opened) < MOST_HANDLES - 1 and not (rested and not channel.is_usable):
                return channel
            channel.close()

    def _call_off(self, line: str, channel: ServerConnection) -> None:
        with self._calling_off:  # who comes meanwhile waits until it is done
            for nonce in list(self._severed.get(line, ())):
                try:
                    channel.sever(nonce)
                except BaseException:
                    channel.close()
                    raise
                with self._lock:
                    self._severed[line].remove(nonce)
            with self._lock:
                if not self._severed.get(line, True):
                    del self._severed[line]

    def _connect(self, place: CopyLocation) -> ServerConnection:
        endpoint = place.endpoint
        if endpoint.path and place.line not in self._not_local and os.path.exists(endpoint.path):
            with contextlib.suppress(ConnectionBroken):
                return ServerConnection.local(endpoint.path, seconds=CONNECT_SECONDS)
        return ServerConnection.to(endpoint, seconds=CONNECT_SECONDS)

    def give(self, place: CopyLocation, channel: ServerConnection) -> None:
        """Keep a connection for the next one."""
        channel.used_at = time.monotonic()
        idle = self._idle.get(place.line)
        if idle is None:
            with self._lock:
                idle = self._idle.setdefault(place.line, [])
        if len(idle) < MOST_IDLE and not self._closed:
            idle.append(channel)
        else:
            channel.close()

    def close(self) -> None:
        """Close what is idle, and what will be; safe twice."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for channels in idle.values():
            for channel in channels:
                channel.close()
