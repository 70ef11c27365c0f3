"""Ports for servers of tests: free now, and not taken by somebody's connection meanwhile."""

from __future__ import annotations

import random
import socket

FIRST, LAST = 21_000, 32_000
"""Below what the kernel gives to connections (`ip_local_port_range`), above what Ray's workers get in a lab."""
_chosen: set[int] = set()
_random = random.Random()  # other workers of the same run choose, too


def free_port() -> int:
    """A port that nobody listens on, on any address, and that was not given out before."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Several of them, no two the same."""
    found: list[int] = []
    while len(found) < count:
        port = _random.randrange(FIRST, LAST)
        if port not in _chosen and _is_free(port):
            _chosen.add(port)
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
