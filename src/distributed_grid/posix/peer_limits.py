"""Limit of connections per peer, so that one peer cannot take all that a listener has."""

from __future__ import annotations

import socket
from typing import Any

MAX_REFUSALS = 8
"""So many connections beyond its limit a peer may have at once, each of which is told why and closed."""


class PeerLimits:
    """The open connections of each peer, by descriptor."""

    def __init__(self, max_per_peer: int) -> None:
        self.max_per_peer = max_per_peer
        self._peers: dict[int, str] = {}
        self._counts: dict[str, int] = {}

    def add(self, descriptor: int, peer: str) -> bool:
        """Count a connection; False where its peer has so many that it is not even told why."""
        if self._counts.get(peer, 0) >= self.max_per_peer + MAX_REFUSALS:
            return False
        self._peers[descriptor] = peer
        self._counts[peer] = self._counts.get(peer, 0) + 1
        return True

    def remove(self, descriptor: int) -> None:
        """Do not count a connection any more: it is closed, or authenticated. Harmless twice."""
        peer = self._peers.pop(descriptor, None)
        if peer is not None:
            self._counts[peer] -= 1
            if not self._counts[peer]:
                del self._counts[peer]

    def exceeded_by(self, peer: str) -> bool:
        """Whether a peer has more connections than it may."""
        return self._counts.get(peer, 0) > self.max_per_peer


class LimitedListener(socket.socket):
    """A listening socket that counts what it accepts until that is closed."""

    limits: PeerLimits

    @classmethod
    def of(cls, listener: socket.socket, max_per_peer: int) -> LimitedListener:
        """The same listening socket, with a limit."""
        limited = cls(fileno=listener.detach())
        limited.setblocking(False)
        limited.limits = PeerLimits(max_per_peer)
        return limited

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. One of a peer that has far too many is closed (ConnectionAbortedError)."""
        connection, address = super().accept()
        if not self.limits.add(connection.fileno(), address[0]):
            connection.close()
            raise ConnectionAbortedError
        return _CountedSocket(self.limits, connection.detach()), address


class _CountedSocket(socket.socket):
    def __init__(self, limits: PeerLimits, descriptor: int) -> None:
        super().__init__(fileno=descriptor)
        self._limits = limits

    def close(self) -> None:
        descriptor = self.fileno()
        super().close()
        self._limits.remove(descriptor)
