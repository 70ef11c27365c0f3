"""Requests about automatic offloading: how it stands, what its last look decided and why, and switching it."""

from __future__ import annotations

from collections.abc import Callable

from distributed_grid.api import requests
from distributed_grid.control.auto_offload_views import auto_offload_view
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View, Viewer
from distributed_grid.domain.events import AutoOffloadSet
from distributed_grid.server.access.tokens import Caller, Forbidden
from distributed_grid.server.offloading.auto_offload import AutoOffloader


class AutoOffloadService:
    """Answers the requests about automatic offloading."""

    def __init__(self, grid: Grid, viewer: Callable[[], Viewer], offloader: AutoOffloader) -> None:
        self._grid = grid
        self._viewer = viewer
        self._offloader = offloader

    async def set(self, op: requests.SetAutoOffload, caller: Caller) -> View:
        """Switch it on or off, or let the config decide again; it looks at the nodes at once."""
        if not caller.admin:
            raise Forbidden(f"{caller.user} may not switch automatic offloading")
        enabled = {"enable": True, "disable": False, "reset": None}[op.action]
        await self._grid.handle(AutoOffloadSet(enabled, caller.user))
        self._offloader.look_soon()
        return await self.status()

    async def status(self) -> View:
        """Whether work moves by itself, by whose word, and what the last look decided for each node."""
        viewer, offloader = self._viewer(), self._offloader
        shares = offloader.rules is not None
        view = await self._grid.read(
            lambda ledger, now: auto_offload_view(viewer, ledger, offloader.offload, shares=shares)
        )
        return {"auto_offload": view}
