"""Ports of the grid's own Ray.

Between machines they are those of the config, for firewalls and for people who type them. On simulated nodes several
Rays share one machine, with another clone's perhaps: there a default port of the head that is taken is replaced by the
next free one, once when the cluster is started, and everything that nobody types gets whatever port is free. Until Ray
listens there, and while it is started anew, a name in the kernel's table of Unix sockets keeps other clones from
choosing the same port.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Collection
from pathlib import Path

from msgspec.structs import replace

from distributed_grid.config import ClusterConfig
from distributed_grid.config.sections import Ray
from distributed_grid.errors import Refused
from distributed_grid.posix.private_files import write_private

HEAD_PORTS = ("port", "client_port", "dashboard_port")
MAX_TRIES = 100
DEFAULTS = Ray()


class RayPorts:
    """The `ray` section with the ports that are really used; what was chosen is kept in a file."""

    def __init__(self, config: ClusterConfig, path: Path) -> None:
        self._config = config
        self._path = path
        self._reserved: dict[int, socket.socket] = {}

    @property
    def settings(self) -> Ray:
        """The section, with what was chosen for this machine instead of the defaults."""
        ray = self._config.ray
        if not self._config.is_simulated(self._config.head):
            return ray
        chosen = {name: port for name, port in self._read().items() if _is_default(ray, name)}
        return replace(ray, **chosen)

    def choose(self) -> bool:
        """Choose the head's ports for a cluster that is about to be started; those that the config names stay.

        False where they are the same as before.
        """
        ray, before = self._config.ray, self.settings
        if self._config.is_simulated(self._config.head):
            names = [name for name in HEAD_PORTS if _is_default(ray, name)]
            chosen = {name: next_free_port(getattr(ray, name), self._reserve) for name in names}
            self.release(besides=chosen.values())
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self._path, json.dumps(chosen).encode())
        return self.settings != before

    def reserve(self) -> None:
        """Keep other clones from choosing these ports, as far as none has them already."""
        if self._config.is_simulated(self._config.head):
            for port in self._read().values():
                self._reserve(port)

    def release(self, besides: Collection[int] = ()) -> None:
        """Let others choose the ports. Safe to call twice."""
        for port in [port for port in self._reserved if port not in besides]:
            self._reserved.pop(port).close()

    def _reserve(self, port: int) -> bool:
        """Whether no other clone has chosen a port: the name is free again when this process ends."""
        if port not in self._reserved:
            held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                held.bind(f"\0distributed-grid-ray-port-{port}")
            except OSError:
                held.close()
                return False
            self._reserved[port] = held
        return True

    def _read(self) -> dict[str, int]:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._path.read_bytes())
            return {name: int(found[name]) for name in HEAD_PORTS if name in found}
        return {}


def _is_default(ray: Ray, name: str) -> bool:
    return bool(getattr(ray, name) == getattr(DEFAULTS, name))


def next_free_port(first: int, reserve: Callable[[int], bool] = lambda port: True) -> int:
    """The first port from here on that nobody listens on, at any address of this machine, and that can be reserved."""
    for port in range(first, first + MAX_TRIES):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that ended do not count
            probe.bind(("", port))
            if reserve(port):
                return port
    raise Refused(f"no port from {first} to {first + MAX_TRIES - 1} is free on this machine")


def worker_ports(ray: Ray, place: int, nodes: int) -> tuple[int, int]:
    """The range of the workers of one of several nodes on a machine; 0 is whatever is free."""
    if _is_default(ray, "min_worker_port") and _is_default(ray, "max_worker_port"):
        return 0, 0
    each = (ray.max_worker_port - ray.min_worker_port + 1) // nodes
    if each < 1:
        raise Refused(f"ray.min_worker_port to ray.max_worker_port are too few ports for {nodes} nodes on one machine")
    first = ray.min_worker_port + place * each
    return first, first + each - 1
