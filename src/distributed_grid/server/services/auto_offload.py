"""Requests about automatic offloading: its state, its switch, and its last decisions about nodes and jobs."""

from __future__ import annotations

from collections.abc import Callable

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.offloading import AutoOffloadStatus, AutoOffloadView
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import AutoOffloadSet
from distributed_grid.domain.ledger import Ledger
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.endpoints import ADMIN, READ, endpoint, get, post
from distributed_grid.server.offloading.auto_offload import AutoOffloader


class AutoOffloadService:
    """Answers the requests about automatic offloading."""

    def __init__(self, grid: Grid, viewer: Callable[[], Viewer], offloader: AutoOffloader) -> None:
        self._grid = grid
        self._viewer = viewer
        self._offloader = offloader

    @endpoint(ADMIN, post("/auto-offload", "moves"), act="switch automatic offloading")
    async def set(self, op: requests.SetAutoOffload, caller: Caller) -> AutoOffloadStatus:
        """Switch it on or off, or let the config decide again; the nodes are evaluated at once."""
        enabled = {"enable": True, "disable": False, "reset": None}[op.action]
        await self._grid.handle(AutoOffloadSet(enabled, caller.user))
        self._offloader.evaluate_soon()
        return await self.status(requests.GetAutoOffload(), caller)

    @endpoint(READ, get("/auto-offload", "moves"))
    async def status(self, op: requests.GetAutoOffload, caller: Caller) -> AutoOffloadStatus:
        """State of automatic offloading, and its last decision for each node."""
        viewer, offloader = self._viewer().for_reader(caller.reader), self._offloader

        def read(ledger: Ledger, now: int) -> AutoOffloadView:
            return AutoOffloadView.of(viewer, ledger, offloader.offload, shares=offloader.rules is not None)

        return AutoOffloadStatus(await self._grid.read(read))
