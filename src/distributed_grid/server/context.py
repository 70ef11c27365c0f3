"""What those who answer requests need to know of the daemon around them."""

from __future__ import annotations

from typing import Any, Protocol

from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.api import requests
from distributed_grid.control.attempt_files import AttemptFiles
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import Viewer
from distributed_grid.monitoring.monitor import Monitor
from distributed_grid.server.access.admission import Admission
from distributed_grid.server.cluster import ClusterService
from distributed_grid.server.ray.attachment import RayAttachment
from distributed_grid.server.services.boost_file_sync import BoostFileSync


class DaemonContext(Protocol):
    """The daemon, as its doors see it."""

    @property
    def grid(self) -> Grid: ...
    @property
    def viewer(self) -> Viewer: ...
    @property
    def cluster(self) -> ClusterService: ...
    @property
    def attaching(self) -> RayAttachment: ...
    @property
    def ray(self) -> RayEngine: ...
    @property
    def monitor(self) -> Monitor: ...
    @property
    def admission(self) -> Admission: ...
    async def listen(self, op: requests.KeepRunning) -> None:
        """Listen where the message says, from now on and after a crash; nothing where it does not say."""

    def served(self) -> None:
        """Somebody was served just now, so nobody is idle."""

    def info(self) -> dict[str, Any]: ...
    def config_view(self) -> dict[str, Any]: ...
    @property
    def sharing_enabled(self) -> bool: ...
    @property
    def custom_resources(self) -> frozenset[str]: ...
    async def ray_environment(self, node: str) -> dict[str, str]:
        """The variables with which a Ray program on a node finds its cluster and our namespace there."""

    @property
    def boosts_kept(self) -> BoostFileSync:
        """The file that tells of boosts beside the ledger."""

    @property
    def files(self) -> AttemptFiles: ...
    async def greet(self, hello: requests.ClientHello) -> bool:
        """Whether this daemon hands over to another; raises where the client cannot be served."""

    def stay(self, wanted: bool) -> None:
        """Go away when idle, or not; a successor after a crash or a hand-over does the same."""

    @property
    def is_leaving(self) -> bool:
        """Whether connections end because the daemon does, so that clients will come back."""

    def end(self) -> None:
        """Begin to stop."""
