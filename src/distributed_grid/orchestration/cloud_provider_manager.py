"""`CloudProviderManager`: workers of providers for programs, with plain methods that are safe inside a running loop.

The control plane owns the workers: what is started here is in the one ledger, counts against the one budget, and is
seen by `grid workers list`. A provider is what the config of the control plane names under `providers`; `add_provider`
checks that it can be used. `CloudProviderBase` is what one's own provider derives from.
"""

from __future__ import annotations

import importlib
import secrets
import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed_grid.client.client import Client
from distributed_grid.client.conversation import ClientConfig, JsonObject
from distributed_grid.client.pages import every_page
from distributed_grid.config import ClusterConfig
from distributed_grid.control.view_types import WorkerOfferRow, WorkerRow
from distributed_grid.errors import BadInput
from distributed_grid.ports import CloudProviderBase
from distributed_grid.state_dir import StateDir

if TYPE_CHECKING:
    from distributed_grid.adapters.clouds.aws import AWSCloudProvider
    from distributed_grid.adapters.clouds.docker_local import DockerLocalProvider
    from distributed_grid.adapters.clouds.gcp import GCPCloudProvider
    from distributed_grid.adapters.clouds.slurm import SlurmProvider

__all__ = [
    "AWSCloudProvider",
    "CloudProviderBase",
    "CloudProviderManager",
    "DockerLocalProvider",
    "GCPCloudProvider",
    "SlurmProvider",
]

_PROVIDERS = {
    "AWSCloudProvider": "distributed_grid.adapters.clouds.aws",
    "DockerLocalProvider": "distributed_grid.adapters.clouds.docker_local",
    "GCPCloudProvider": "distributed_grid.adapters.clouds.gcp",
    "SlurmProvider": "distributed_grid.adapters.clouds.slurm",
}
MB_PER_GB = 1024


def __getattr__(name: str) -> Any:
    """The providers, each loaded only where it is used."""
    if name not in _PROVIDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PROVIDERS[name]), name)


class CloudProviderManager:
    """Starts and ends workers through the control plane, which it starts where none runs."""

    def __init__(self, config: ClusterConfig | str | None = None, *, state_dir: str | None = None) -> None:
        place = StateDir(state_dir)
        path = config.file_for(place.root / "configs") if isinstance(config, ClusterConfig) else config
        self._client = Client(place, ClientConfig(path, explicit=path is not None))
        self._lock = threading.Lock()

    def add_provider(self, name: str) -> list[WorkerOfferRow]:
        """Check that the control plane can use a provider of its config or of an installed package; what it offers.

        Nothing is stored: the config says which providers there are. BadInput where it names no such provider.
        """
        return self.get_available_resources(name)

    def create_worker(
        self, provider: str, resources: Mapping[str, Any] | None = None, worker_type: str = "cpu"
    ) -> WorkerRow:
        """Start a worker with at least these resources, as `{"cpu_cores", "memory_mb", "gpu"}` or nested as a worker
        reports them; Refused beyond the budget. It joins by itself: `get_worker_status` says when."""
        needs = worker_needs(resources or {})
        made = self._call(
            "create_workers",
            worker_ids=[f"worker-{secrets.token_hex(6)}"],
            provider=provider,
            worker_type=worker_type,
            **needs,
        )
        row: WorkerRow = made["workers"][0]
        return row

    def terminate_worker(
        self, provider: str, worker_id: str, *, force: bool = False, discard_results: bool = False
    ) -> WorkerRow:
        """End a worker; one that is gone is left so. Refused while it has leases, unless forced; then refused while it
        has results that were never fetched, unless these are discarded."""
        options = {"force": force, "discard_results": discard_results}
        ended = self._call("terminate_workers", worker_ids=[worker_id], provider=provider, **options)
        row: WorkerRow = ended["workers"][0]
        return row

    def get_worker_status(self, provider: str, worker_id: str) -> WorkerRow:
        """How a worker stands, gone ones included; NotFound where the provider never had it."""
        row: WorkerRow = self._call("get_worker", worker_id=worker_id, provider=provider)["worker"]
        return row

    def get_available_resources(self, provider: str) -> list[WorkerOfferRow]:
        """What a provider can start, with prices, the preferred first."""
        rows: list[WorkerOfferRow] = self._call("list_worker_offers", provider=provider)["offers"]
        return rows

    def list_workers(self, provider: str = "", *, include_gone: bool = False) -> list[WorkerRow]:
        """The workers that are not proven gone, of one provider or of all."""
        pages = every_page(partial(self._call, "list_workers"), provider=provider, all=include_gone)
        return [row for page in pages for row in page["workers"]]

    def close(self) -> None:
        """Disconnect; a second time is harmless."""
        with self._lock:
            self._client.close()

    def __enter__(self) -> CloudProviderManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, op: str, **arguments: Any) -> JsonObject:
        with self._lock:
            return self._client.call(op, **arguments)


def worker_needs(resources: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request for a worker, from flat requirements or from the nested shape of a worker's report."""
    cpu, memory, gpu = (resources.get(kind) for kind in ("cpu", "memory", "gpu"))
    known = {"cpu", "memory", "gpu", "cpu_cores", "memory_mb", "memory_gb", "gpu_memory_mb", "gpus", "gpu_count"}
    if unknown := resources.keys() - known:
        raise BadInput(f"unknown resources: {', '.join(sorted(unknown))}; use cpu_cores, memory_mb, gpus")
    cores = cpu.get("cores", 0) if isinstance(cpu, Mapping) else resources.get("cpu_cores", cpu or 0)
    if isinstance(memory, Mapping):
        gigabytes = memory.get("total_mb", 0) / MB_PER_GB
    else:
        gigabytes = resources.get("memory_gb", memory or 0) or resources.get("memory_mb", 0) / MB_PER_GB
    flat = resources.get("gpus", resources.get("gpu_count", gpu or 0))
    devices = gpu.get("devices", 0) if isinstance(gpu, Mapping) else flat
    if not devices and resources.get("gpu_memory_mb"):
        devices = 1
    try:
        return {"cpu": float(cores), "memory_gb": float(gigabytes), "gpu": int(devices)}
    except (TypeError, ValueError):
        raise BadInput("amounts of resources are numbers") from None
