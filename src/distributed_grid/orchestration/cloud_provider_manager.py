"""`CloudProviderManager`: workers of providers for programs, with plain methods that are safe inside a running loop.

The control plane owns the workers: those started here are rows of the one ledger, count against the one budget, and
appear in `grid workers list`. Providers are named under `providers` in the config of the control plane; `add_provider`
checks that one can be used. A provider of your own derives from `CloudProviderBase`.
"""

from __future__ import annotations

import importlib
import secrets
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distributed_grid.client.client import Client
from distributed_grid.client.conversation import ClientConfig, JsonObject, as_object, as_objects
from distributed_grid.client.pages import every_page
from distributed_grid.config import ClusterConfig
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
    """The providers, each loaded on its first use."""
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

    def add_provider(self, name: str) -> list[JsonObject]:
        """Check that the control plane can use a provider of its config or of an installed package; its offers.

        Nothing is stored: the config lists the providers. BadInput where it names no such provider.
        """
        return self.get_available_resources(name)

    def create_worker(
        self, provider: str, resources: Mapping[str, Any] | None = None, worker_type: str = "cpu"
    ) -> JsonObject:
        """Start a worker with at least these resources, as `{"cpu_cores", "memory_mb", "gpu"}` or nested as a worker
        reports them; Refused beyond the budget. It joins by itself, see `get_worker_status`."""
        needs = worker_needs(resources or {})
        with self._lock:
            created = self._client.create_workers(
                worker_ids=[f"worker-{secrets.token_hex(6)}"], provider=provider, worker_type=worker_type, **needs
            )
        return as_object(created.workers[0])

    def terminate_worker(
        self, provider: str, worker_id: str, *, force: bool = False, discard_results: bool = False
    ) -> JsonObject:
        """End a worker; harmless for a gone one. Refused while it has leases, unless forced; then refused while it has
        results that were never fetched, unless these are discarded."""
        with self._lock:
            ended = self._client.terminate_workers(
                worker_ids=[worker_id], provider=provider, force=force, discard_results=discard_results
            )
        return as_object(ended.workers[0])

    def get_worker_status(self, provider: str, worker_id: str) -> JsonObject:
        """State of a worker, also of a gone one; NotFound where the provider never had it."""
        with self._lock:
            return as_object(self._client.get_worker(worker_id=worker_id, provider=provider).worker)

    def get_available_resources(self, provider: str) -> list[JsonObject]:
        """Kinds of workers that a provider can start, with prices, the preferred first."""
        with self._lock:
            return as_objects(self._client.list_worker_offers(provider=provider).offers)

    def list_workers(self, provider: str = "", *, include_gone: bool = False) -> list[JsonObject]:
        """The workers that are not proven gone, of one provider or of all."""
        with self._lock:
            pages = every_page(self._client.list_workers, provider=provider, all=include_gone)
            return as_objects([worker for page in pages for worker in page.workers])

    def close(self) -> None:
        """Disconnect; a second time is harmless."""
        with self._lock:
            self._client.close()

    def __enter__(self) -> CloudProviderManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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
