"""Session of façades with plain methods: a client of the control plane for each thread that calls, and nothing else."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Self

from distributed_grid.client.async_client import AsyncClient, locate_grid
from distributed_grid.client.client import Client

if TYPE_CHECKING:
    from distributed_grid.config import ClusterConfig


class BlockingSession:
    """Calls the control plane from any thread, starting one where none runs; a long call delays no other thread's."""

    def __init__(
        self, cluster_config: ClusterConfig | None = None, *, state_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self._place = locate_grid(cluster_config, state_dir)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._clients: list[Client] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One request, one answer; sent again when the control plane went away before it answered."""
        client: Client | None = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = Client(*self._place)
            with self._lock:
                self._clients.append(client)
        return client.call(op, **arguments)

    def async_client(self) -> AsyncClient:
        """A client of the same control plane for an event loop."""
        return AsyncClient(*self._place)

    def close(self) -> None:
        """Disconnect; a later call connects again. Safe to call twice."""
        with self._lock:
            clients, self._clients, self._local = self._clients, [], threading.local()
        for client in clients:
            client.close()
