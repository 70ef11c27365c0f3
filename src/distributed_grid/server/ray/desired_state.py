"""What the ledger has about the grid's own Ray: that it is wanted, where its head is, on which nodes it runs."""

from __future__ import annotations

from typing import Any

from distributed_grid.control.grid import Grid
from distributed_grid.domain.engines import SSH, EngineRow
from distributed_grid.domain.events import EngineGivenUp, EngineWanted
from distributed_grid.server.ray.addresses import bracketed
from distributed_grid.server.ray.reconciler import NAME


class DesiredRayCluster:
    """Reads and writes the one row; holds nothing itself."""

    def __init__(self, grid: Grid, port: int) -> None:
        self._grid = grid
        self._port = port

    async def row(self) -> EngineRow | None:
        """What the ledger has about the Ray that this grid started."""

        def found(ledger: Any, now: int) -> EngineRow | None:
            row: EngineRow | None = ledger.engines.get(NAME)
            return row if row is not None and row.mode == SSH else None

        return await self._grid.read(found)

    async def nodes(self) -> tuple[str, ...]:
        """Where it is to run; nowhere while it is not wanted."""
        row = await self.row()
        return row.nodes if row is not None else ()

    async def want(self, head: str, session: str, nodes: tuple[str, ...]) -> None:
        """Have it wanted on these nodes, with its head at this address."""
        address = f"{bracketed(head)}:{self._port}"
        await self._grid.handle(EngineWanted(NAME, SSH, address, session=session, nodes=nodes))

    async def want_less(self, row: EngineRow, nodes: tuple[str, ...]) -> None:
        """Have it wanted as before, on these of its nodes only."""
        await self._grid.handle(EngineWanted(NAME, SSH, row.address, row.namespace, row.session, nodes))

    async def give_up(self, reason: str) -> None:
        """Have it wanted nowhere any more."""
        await self._grid.handle(EngineGivenUp(NAME, reason))
