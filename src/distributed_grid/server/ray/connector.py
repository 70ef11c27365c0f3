"""The way to the Ray that this grid has started: the engine is connected with it for as long as it is wanted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.adapters.ray.messages import Connect
from distributed_grid.config import ClusterConfig
from distributed_grid.control.grid import Grid
from distributed_grid.domain.engines import SSH, EngineRow
from distributed_grid.errors import GridError
from distributed_grid.server.ray.cluster import RayCluster
from distributed_grid.server.ray.reconciler import NAME, EngineReconciler
from distributed_grid.state_dir import StateDir

LOOK_SECONDS, CONNECT_SECONDS = 0.5, 45.0
log = logging.getLogger(__name__)


class RayConnector:
    """Connects the engine with the cluster that the grid keeps by SSH, and lets it go when that is stopped."""

    def __init__(
        self,
        grid: Grid,
        config: ClusterConfig,
        places: StateDir,
        *,
        engine: RayEngine,
        desk: EngineReconciler,
        cluster: RayCluster,
        grid_id: Callable[[], str],
    ) -> None:
        self._grid = grid
        self._config = config
        self._wheels = str(places.root / "wheels")
        self._engine = engine
        self._desk = desk
        self._cluster = cluster
        self._grid_id = grid_id
        self._socket = str(places.host_dir / "links" / "ray-driver")
        self._used: tuple[str, tuple[str, ...]] | None = None
        cluster.on_running = self.until_connected

    async def keep(self) -> None:
        """Be connected whenever there is something to be connected with, for ever."""
        while True:
            try:
                await self._look()
            except GridError as failure:
                log.warning("no way to Ray: %s", failure)
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def row(self) -> EngineRow | None:
        row = self._grid.ledger.engines.get(NAME)
        return row if row is not None and row.mode == SSH else None

    async def _look(self) -> None:
        row = self.row
        if row is None:
            if self._used is not None:
                self._used = None
                self._cluster.reach.stop_driving()
                await self._engine.stop()
            return
        if self._used == (row.address, row.nodes) or not row.session:
            return  # known already, or not started yet
        environ, through = await self._cluster.reach.drive(self._socket)
        environ.pop("RAY_ADDRESS", None)
        hold = self._config.hold_seconds
        settings = Connect(row.address, self._grid_id(), row.namespace, hold, environ, self._wheels)
        self._engine.connect(settings, through)
        self._used = (row.address, row.nodes)

    async def until_connected(self) -> str:
        """Return when Ray's nodes are known to be the grid's; what keeps it from that, where that takes too long."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                while self._engine.connected is None:
                    await asyncio.sleep(LOOK_SECONDS / 5)
                await self._desk.compare(full=True)
        except TimeoutError:
            return f"the control plane is not connected with Ray yet: {self._engine.problem or 'no way there'}"
        except GridError as failure:
            return f"the control plane is not connected with Ray yet: {failure}"
        return ""
