"""How a façade finds its grid: the files of a state directory, and the config it insists on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from distributed_grid.client.async_client import AsyncClient
from distributed_grid.client.client import ClientConfig
from distributed_grid.state_dir import StateDir

if TYPE_CHECKING:  # programs on nodes have nothing that reads a config
    from distributed_grid.config import ClusterConfig


def way_to(config: ClusterConfig | None, state_dir: str | os.PathLike[str] | None) -> tuple[StateDir, ClientConfig]:
    """Where the control plane of this config is reached; without a config it is whichever one runs."""
    places = StateDir(state_dir)
    path = config.file_for(places.state_dir / "configs") if config is not None else None
    return places, ClientConfig(path, explicit=path is not None)


class GridSession:
    """What holds the way to the control plane and nothing else; in an `async with` it is started and stopped."""

    def __init__(
        self,
        cluster_config: ClusterConfig | None = None,
        ssh_manager: object | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """`ssh_manager` may be left out: the control plane holds the SSH connections."""
        self.config = cluster_config
        self._places, self._wanted = way_to(cluster_config, state_dir)
        self._client = AsyncClient(self._places, self._wanted)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Attach to the control plane, starting one where none runs. Safe to call twice."""
        await self._client.start()

    async def stop(self) -> None:
        """Let go of the grid; what was borrowed stays borrowed until it is given back or its time is over."""
